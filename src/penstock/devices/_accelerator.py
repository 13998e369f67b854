"""The backend of any accelerator, through the names that PyTorch has for all of them.

It uses `torch.Stream`, `torch.Event` and `torch.accelerator`, and for random states the module of the device type
(`torch.get_device_module`). So tests with a simulated device run the same code as CUDA.
"""

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from penstock.devices._backend import Allocator, Backend, Peaks, Stream, StreamEvent, Streams


class AcceleratorStreams(Streams):
    """The streams of a device."""

    def __init__(self, device: torch.device):
        self._device = device

    def current(self) -> torch.Stream:
        if self._device.index is None:
            return torch.accelerator.current_stream(self._device)
        stream: torch.Stream = torch._C._accelerator_getStream(self._device.index)  # asked for at every operator
        return stream

    def create(self) -> torch.Stream:
        return torch.Stream(self._device)

    def record(self, stream: Stream, *, is_timed: bool = True) -> torch.Event:
        event = torch.Event(self._device, enable_timing=is_timed, blocking=True)  # a waiting thread frees its core
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: StreamEvent) -> None:
        stream.wait_event(event)

    def is_done(self, event: StreamEvent) -> bool:
        return bool(event.query())

    def synchronize(self, event: StreamEvent) -> None:
        event.synchronize()

    def elapsed_s(self, start: StreamEvent, end: StreamEvent) -> float:
        return float(start.elapsed_time(end)) / 1e3

    def copy(self, stream: Stream, destination: torch.Tensor, source: torch.Tensor) -> None:
        with stream:
            destination.copy_(source, non_blocking=True)

    def allocate(
        self, size_bytes: int, *, stream: Stream = None, into: torch.UntypedStorage | None = None
    ) -> torch.UntypedStorage:
        with contextlib.nullcontext() if stream is None else stream:
            if into is None:
                return torch.empty(size_bytes, dtype=torch.uint8, device=self._device).untyped_storage()
            into.resize_(size_bytes)
        return into

    def share(self, storage: torch.UntypedStorage, stream: Stream) -> None:
        torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage).record_stream(stream)  # type: ignore[call-overload]


class AcceleratorAllocator(Allocator):
    """The caching allocator's counters."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device

    def allocated_bytes(self) -> int:
        return int(torch.accelerator.memory_allocated(self._device))

    def reserved_bytes(self) -> int:
        return int(torch.accelerator.memory_reserved(self._device))

    def peaks(self) -> Peaks:
        """Return the peaks.

        `torch.accelerator.memory_stats` has them too, but is slower: it names and sorts all numbers.
        """
        if not torch._C._accelerator_isAllocatorInitialized():  # type: ignore[attr-defined]
            return Peaks(0, 0, 0)
        index = torch.accelerator.current_device_index() if self._device.index is None else self._device.index
        stats = torch._C._accelerator_getDeviceStats(index)  # type: ignore[attr-defined]
        allocated_bytes, reserved_bytes = (
            int(stats[f"{name}_bytes"]["all"]["peak"]) for name in ("allocated", "reserved")
        )
        requested = stats.get("requested_bytes")
        return Peaks(allocated_bytes, int(requested["all"]["peak"]) if requested else allocated_bytes, reserved_bytes)

    def _reset_peaks(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self._device)


class Accelerator(Backend):
    """A device that the host runs ahead of, with memory of its own."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.streams: AcceleratorStreams = AcceleratorStreams(device)
        self.allocator: AcceleratorAllocator = AcceleratorAllocator(device)
        self._module = torch.get_device_module(device)

    def finish(self) -> None:
        torch.accelerator.synchronize(self.device)

    def finish_current(self) -> None:
        self.streams.current().synchronize()

    def is_on_default_stream(self) -> bool:
        return bool(self.streams.current().stream_id == self._default_stream_id)  # the objects may differ in type

    @functools.cached_property
    def _default_stream_id(self) -> int:
        """The identity of the stream that work goes to if nobody has chosen one."""
        if hasattr(self._module, "default_stream"):
            return int(self._module.default_stream(self.device).stream_id)
        identities: list[int] = []  # Intel's devices do not name it, but every thread begins with it
        thread = threading.Thread(target=lambda: identities.append(int(self.streams.current().stream_id)))
        thread.start()
        thread.join()
        return identities[0]

    def seconds(self, run: Callable[[], Any]) -> float:
        start = self.streams.record(self.streams.current())
        run()
        end = self.streams.record(self.streams.current())
        self.streams.synchronize(end)
        return self.streams.elapsed_s(start, end)

    @property
    def name(self) -> str:
        return str(self._module.get_device_name(self.device))

    def memory_bytes(self) -> tuple[int, int]:
        free_bytes, total_bytes = torch.accelerator.get_memory_info(self.device)
        return int(free_bytes), int(total_bytes)

    def use(self, *, num_threads: int) -> None:  # noqa: ARG002  # its operators have no threads of the host's
        torch.accelerator.set_device_index(self.device)

    def warm_up(self) -> int:
        """Allocate the workspaces of matrix products now, and return their bytes.

        They take 32 MiB for each thread and stream on an H100 (`CUBLAS_WORKSPACE_CONFIG`).
        """
        before_bytes = self.allocator.allocated_bytes()
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            matrix = torch.ones(16, 16, device=self.device, dtype=dtype)
            torch.addmm(matrix[0], matrix, matrix)
            del matrix
        self.finish_current()
        return max(0, self.allocator.allocated_bytes() - before_bytes)

    def random_state(self) -> torch.Tensor:
        state: torch.Tensor = self._module.get_rng_state(self.device)
        return state

    def set_random_state(self, state: torch.Tensor) -> None:
        self._module.set_rng_state(state, self.device)

    def pinned_memory(self, size_bytes: int) -> torch.Tensor | None:
        """Return pinned memory of PyTorch, which may be larger than ``size_bytes``; ``None`` if there is none."""
        try:
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            return None

    def unpin(self, memory: torch.Tensor) -> None:
        """Do nothing: the memory goes back to PyTorch's cache when its last tensor is freed."""
