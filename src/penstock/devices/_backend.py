"""The interface of a device, the same for every kind."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from penstock.errors import InternalError

Stream = Any  # torch.Stream, or that of a fake
StreamEvent = Any  # torch.Event, or that of a fake


class Streams(Protocol):
    """The queues of one device. Work on a stream runs in order, and concurrently with other streams."""

    def current(self) -> Stream:
        """Return the stream on which the computation runs now. Ask each time, since autograd and users switch it."""

    def create(self) -> Stream:
        """Create a stream, for a lane."""

    def record(self, stream: Stream, *, is_timed: bool = True) -> StreamEvent:
        """Record an event after all work on ``stream`` so far; an event that is not timed costs the device less."""

    def wait(self, stream: Stream, event: StreamEvent) -> None:
        """Make later work on ``stream`` wait for ``event``."""

    def is_done(self, event: StreamEvent) -> bool:
        """Return whether the device has passed ``event``."""

    def synchronize(self, event: StreamEvent) -> None:
        """Block the calling thread until the device has passed ``event``."""

    def elapsed_s(self, start: StreamEvent, end: StreamEvent) -> float:
        """Return the seconds on the device's own clock between two events that it has passed."""

    def copy(self, stream: Stream, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy bytes on ``stream``. Both tensors are ``uint8`` of the same shape, and one of them is in host memory."""

    def allocate(
        self, size_bytes: int, *, stream: Stream = None, into: torch.UntypedStorage | None = None
    ) -> torch.UntypedStorage:
        """Allocate device memory that belongs to ``stream``, or to the current one, for a new storage or ``into`` one
        of 0 bytes.
        """

    def share(self, storage: torch.UntypedStorage, stream: Stream) -> None:
        """Tell the allocator that ``stream`` also uses a storage that was allocated on another stream."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """The highest values of an allocator's counters, each at its own time."""

    allocated_bytes: int
    """Bytes of tensors, as the allocator rounds their sizes."""
    requested_bytes: int
    """Bytes of tensors, as they were requested."""
    reserved_bytes: int
    """Bytes taken from the device, including memory cached for later tensors."""


class Allocator(ABC):
    """An allocator that counts the bytes it hands out.

    Its own peaks have one starting point for the whole process, so resetting it would affect everybody else. `watching`
    gives every caller a starting point of its own.
    """

    def __init__(self) -> None:
        self._watches: list[PeakWatch] = []
        self._lock = threading.RLock()  # a finalizer may end a watch

    @abstractmethod
    def allocated_bytes(self) -> int:
        """Return the bytes that tensors have now, as the allocator rounds their sizes."""

    @abstractmethod
    def reserved_bytes(self) -> int:
        """Return the bytes that it has taken from the device."""

    @abstractmethod
    def peaks(self) -> Peaks:
        """Return the peaks since the last reset, by whichever watch that was. Use `watching` for peaks of your own."""

    @abstractmethod
    def _reset_peaks(self) -> None:
        """Let peaks start from the current values."""

    @contextmanager
    def watching(self) -> Iterator["PeakWatch"]:
        """Record the peaks from here on, independent of other watches."""
        watch = PeakWatch(self)
        with self._lock:
            self._note_and_reset()
            self._watches.append(watch)
        try:
            yield watch
        finally:
            with self._lock:
                self._watches.remove(watch)

    def restart(self, watch: "PeakWatch") -> None:
        """Let one watch start from the current values; the others keep their peaks."""
        with self._lock:
            self._note_and_reset()
            watch.forget()

    def _note_and_reset(self) -> None:
        """Reset the peaks after all watches have noted theirs. The caller holds the lock."""
        for watch in tuple(self._watches):
            watch.note()
        self._reset_peaks()


class PeakWatch:
    """The peaks of an allocator since a starting point. Made by ``Allocator.watching``."""

    def __init__(self, allocator: Allocator):
        self._allocator = allocator
        self._before = Peaks(0, 0, 0)

    def peaks(self) -> Peaks:
        """Return the peaks since the start, or since ``restart``."""
        now, before = self._allocator.peaks(), self._before
        return Peaks(*(max(getattr(now, name), getattr(before, name)) for name in Peaks.__slots__))

    def note(self) -> None:
        """Keep the peaks so far, before the allocator's own peaks are reset."""
        self._before = self.peaks()

    def restart(self) -> None:
        """Start again from the current values."""
        self._allocator.restart(self)

    def forget(self) -> None:
        """Drop the peaks that were kept, after the allocator's own peaks were reset."""
        self._before = Peaks(0, 0, 0)


class Backend(ABC):
    """One device."""

    streams: Streams | None = None
    """Its queues; ``None`` if operators run synchronously."""
    allocator: Allocator | None = None
    """The counters of its memory, if that is separate from the host's; ``None`` if nothing counts it."""

    def __init__(self, device: torch.device):
        self.device = device

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.device}>"

    @abstractmethod
    def finish(self) -> None:
        """Block until the device has done all its work."""

    @abstractmethod
    def finish_current(self) -> None:
        """Block until the work on the current stream is done."""

    @abstractmethod
    def is_on_default_stream(self) -> bool:
        """Return whether the calling thread computes on the default stream."""

    @abstractmethod
    def seconds(self, run: Callable[[], Any]) -> float:
        """Return how long ``run()`` takes by the device's own clock."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The manufacturer's name of the device."""

    @property
    def numa_node(self) -> int | None:
        """The NUMA node near the device; ``None`` if the system does not say or has only one kind of memory."""
        return None

    @abstractmethod
    def memory_bytes(self) -> tuple[int, int]:
        """Return the free and the total bytes of its memory."""

    @abstractmethod
    def use(self, *, num_threads: int) -> None:
        """Let the calling thread compute on the device; on a CPU, with ``num_threads`` threads for each operator."""

    def warm_up(self) -> int:
        """Let libraries allocate the memory that they keep for the calling thread; return its new bytes."""
        return 0

    @abstractmethod
    def random_state(self) -> torch.Tensor:
        """Return the state from which the next random operator draws: ``uint8``, in main memory."""

    @abstractmethod
    def set_random_state(self, state: torch.Tensor) -> None:
        """Make the next random operator draw from ``state``."""

    def pinned_memory(self, size_bytes: int) -> torch.Tensor | None:  # noqa: ARG002
        """Return ``uint8`` host memory from which the device copies by itself; ``None`` if it has or gets none."""
        return None

    def unpin(self, memory: torch.Tensor) -> None:
        """Undo ``pinned_memory``. The memory is freed when its last tensor dies."""
        raise InternalError(f"{self!r} cannot unpin {memory.data_ptr():#x}, since it has pinned nothing")

    def register(self, memory: torch.Tensor) -> bool:  # noqa: ARG002
        """Let the device use host memory in place, at its exact size; return whether that worked."""
        return False

    def unregister(self, address: int) -> None:
        """Undo ``register``."""
        raise InternalError(f"{self!r} cannot unregister {address:#x}, since it has registered nothing")
