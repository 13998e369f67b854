"""CUDA streams and events as the stream mover uses them: a small surface, so that a fake can stand in for it."""

from typing import Any, Protocol

import torch

Stream = Any  # torch.cuda.Stream, or a fake's
StreamEvent = Any  # torch.cuda.Event, or a fake's


class Streams(Protocol):
    """Queues of one device. Work on a stream runs in order, and beside the work of other streams."""

    def current(self) -> Stream:
        """The stream on which the computation runs now; read live, since autograd and users switch it."""

    def create(self) -> Stream:
        """A stream of its own, for a lane."""

    def record(self, stream: Stream) -> StreamEvent:
        """A mark after all that is on ``stream`` so far."""

    def wait(self, stream: Stream, event: StreamEvent) -> None:
        """Lets later work on ``stream`` wait for ``event``."""

    def is_done(self, event: StreamEvent) -> bool:
        """Whether the device has passed ``event``."""

    def synchronize(self, event: StreamEvent) -> None:
        """Blocks the calling thread until the device has passed ``event``."""

    def elapsed_s(self, start: StreamEvent, end: StreamEvent) -> float:
        """Seconds on the device between two marks that it has passed."""

    def copy(self, stream: Stream, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copies bytes on ``stream``; both are ``uint8`` of one shape, one of them in host memory."""

    def allocate(self, size_bytes: int) -> torch.UntypedStorage:
        """Device memory that belongs to the current stream."""

    def share(self, storage: torch.UntypedStorage, stream: Stream) -> None:
        """Tells the allocator that ``stream``, too, uses a storage that was allocated on another."""


class CudaStreams(Streams):
    """The streams of a CUDA device."""

    def __init__(self, device: torch.device):
        self._device = device

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def create(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def is_done(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())

    def synchronize(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def elapsed_s(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1e3

    def copy(self, stream: torch.cuda.Stream, destination: torch.Tensor, source: torch.Tensor) -> None:
        with torch.no_grad(), torch.cuda.stream(stream):
            destination.copy_(source, non_blocking=True)

    def allocate(self, size_bytes: int) -> torch.UntypedStorage:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device).untyped_storage()

    def share(self, storage: torch.UntypedStorage, stream: torch.cuda.Stream) -> None:
        torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage).record_stream(stream)  # type: ignore[call-overload]
