"""What Penstock asks of a device, under one name for every kind."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch

from penstock.errors import InternalError

Stream = Any  # torch.Stream, or a fake's
StreamEvent = Any  # torch.Event, or a fake's


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
        """Seconds on the device's own clock between two marks that it has passed."""

    def copy(self, stream: Stream, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copies bytes on ``stream``; both are ``uint8`` of one shape, one of them in host memory."""

    def allocate(self, size_bytes: int) -> torch.UntypedStorage:
        """Device memory that belongs to the current stream."""

    def share(self, storage: torch.UntypedStorage, stream: Stream) -> None:
        """Tells the allocator that ``stream``, too, uses a storage that was allocated on another."""


class Allocator(Protocol):
    """An allocator that counts. Bytes are as it rounds them."""

    def allocated_bytes(self) -> int:
        """What tensors have now."""

    def peak_bytes(self) -> int:
        """The most that ``allocated_bytes`` was since ``reset_peaks``."""

    def reserved_bytes(self) -> int:
        """What it has taken from the device, for tensors that are and for such as come."""

    def peak_reserved_bytes(self) -> int:
        """The most that ``reserved_bytes`` was since ``reset_peaks``."""

    def reset_peaks(self) -> None:
        """Lets peaks begin with what is there now."""


class Backend(ABC):
    """One device."""

    streams: Streams | None = None
    """Its queues; ``None`` where operators run when they are called."""
    allocator: Allocator | None = None
    """What counts its memory, which is apart from the host's; ``None`` where nothing does."""

    def __init__(self, device: torch.device):
        self.device = device

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.device}>"

    @abstractmethod
    def finish(self) -> None:
        """Blocks until it has done all that it was given."""

    @abstractmethod
    def finish_current(self) -> None:
        """Blocks until it has done what is on the current stream."""

    @abstractmethod
    def is_on_default_stream(self) -> bool:
        """Whether the calling thread computes where everybody does who chose no stream."""

    @abstractmethod
    def seconds(self, run: Callable[[], Any]) -> float:
        """How long ``run()`` takes by the device's own clock."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What its maker calls it."""

    @abstractmethod
    def memory_bytes(self) -> tuple[int, int]:
        """Bytes of its memory that no process has, and of all of it."""

    @abstractmethod
    def use(self, *, num_threads: int) -> None:
        """Lets the calling thread compute on it; on a CPU, with that many threads to each operator."""

    @abstractmethod
    def random_state(self) -> torch.Tensor:
        """The state from which the next random operator draws: ``uint8``, in main memory."""

    @abstractmethod
    def set_random_state(self, state: torch.Tensor) -> None:
        """Lets the next random operator draw from ``state``."""

    def pinned_memory(self, size_bytes: int) -> torch.Tensor | None:  # noqa: ARG002
        """Host memory from which it copies by itself, ``uint8``; ``None`` where it has none, or is refused it."""
        return None

    def unpin(self, memory: torch.Tensor) -> None:
        """Undo ``pinned_memory``. The memory is freed when its last tensor dies."""
        raise InternalError(f"{self!r} has pinned nothing, so not {memory.data_ptr():#x}")

    def register(self, memory: torch.Tensor) -> bool:  # noqa: ARG002
        """Let it use host memory where that is, at its exact size; return whether it could be."""
        return False

    def unregister(self, address: int) -> None:
        """Undo ``register``."""
        raise InternalError(f"{self!r} has registered nothing, so not {address:#x}")
