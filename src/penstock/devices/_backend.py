"""What Penstock asks of a device, under one name for every kind."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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

    def record(self, stream: Stream, *, is_timed: bool = True) -> StreamEvent:
        """A mark after all that is on ``stream`` so far; one that is not timed costs the device less."""

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


@dataclass(frozen=True, slots=True)
class Peaks:
    """The most that an allocator counted at once, each by itself."""

    allocated_bytes: int
    """Of tensors, as it rounds their sizes."""
    requested_bytes: int
    """Of tensors, as they were asked for."""
    reserved_bytes: int
    """Taken from the device, for tensors that are and for such as come."""


class Allocator(ABC):
    """An allocator that counts.

    Its own peaks have one beginning for the whole process, so whoever set it would take it from all others. `watching`
    gives everybody a beginning of his own.
    """

    def __init__(self) -> None:
        self._watches: list[PeakWatch] = []
        self._lock = threading.RLock()  # a finaliser may end a watch

    @abstractmethod
    def allocated_bytes(self) -> int:
        """What tensors have now, as it rounds their sizes."""

    @abstractmethod
    def reserved_bytes(self) -> int:
        """What it has taken from the device."""

    @abstractmethod
    def _peaks(self) -> Peaks:
        """Since `_reset_peaks`."""

    @abstractmethod
    def _reset_peaks(self) -> None:
        """Lets peaks begin with what is there now."""

    @contextmanager
    def watching(self) -> Iterator["PeakWatch"]:
        """Peaks from here on, whoever else watches."""
        watch = PeakWatch(self)
        with self._lock:
            self._begin_anew()
            self._watches.append(watch)
        try:
            yield watch
        finally:
            with self._lock:
                self._watches.remove(watch)

    def _begin_anew(self) -> None:
        """All who watch keep what they have seen. Holds the lock."""
        for watch in tuple(self._watches):
            watch.note()
        self._reset_peaks()


class PeakWatch:
    """The peaks of an allocator since somebody began to watch. Made by ``Allocator.watching``."""

    def __init__(self, allocator: Allocator):
        self._allocator = allocator
        self._before = Peaks(0, 0, 0)

    def peaks(self) -> Peaks:
        """Since the beginning, or since ``restart``."""
        now, before = self._allocator._peaks(), self._before
        return Peaks(*(max(getattr(now, name), getattr(before, name)) for name in Peaks.__slots__))

    def note(self) -> None:
        """The allocator's own peaks are about to begin anew."""
        self._before = self.peaks()

    def restart(self) -> None:
        """Begins again with what is there now."""
        with self._allocator._lock:
            self._allocator._begin_anew()
            self._before = Peaks(0, 0, 0)


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

    @property
    def numa_node(self) -> int | None:
        """The node of host memory that it is near to; ``None`` where the system does not say, or has but one kind."""
        return None

    @abstractmethod
    def memory_bytes(self) -> tuple[int, int]:
        """Bytes of its memory that no process has, and of all of it."""

    @abstractmethod
    def use(self, *, num_threads: int) -> None:
        """Lets the calling thread compute on it; on a CPU, with that many threads to each operator."""

    def warm_up(self) -> int:
        """Lets its libraries take what memory they keep for the calling thread; bytes of it that are new."""
        return 0

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
