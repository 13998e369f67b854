"""Clocks and memory measurements of one cycle, on a host and on an accelerator."""

import contextlib
import ctypes
import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.devices import Allocator, Backend, PeakWatch, StreamEvent, Streams
from penstock.offload._recording import CycleTimes
from penstock.probe import MemoryRecording, held_bytes, record_memory
from penstock.tiers import Waterfall, gate


class HostClock:
    """A clock on a host that is itself the device. Its marks leave out the time waited so far."""

    def __init__(self, waterfall: Waterfall):
        self.memory: list[tuple[float, int]] = []
        self._waterfall = waterfall
        self._computed_s: list[float] = []
        self._clock_s: list[float] = []

    def mark(self) -> None:
        """Note that an event of the cycle happens now."""
        now_s = time.time()
        self._clock_s.append(now_s)
        self._computed_s.append(now_s - self._waterfall.stall_s)

    def times(self, stall_s: float) -> CycleTimes:  # noqa: ARG002  # the marks have the waits taken out
        """Return when the marks were, without the time waited."""
        zero_s = self._computed_s[0]
        computed_s = [second - zero_s for second in self._computed_s]
        return CycleTimes(computed_s=computed_s, clock_s=self._clock_s, step_s=computed_s[-1])


class DeviceClock:
    """A clock on the stream that computes, which may lag behind the host. Waits are taken out in proportion."""

    def __init__(self, streams: Streams, watch: PeakWatch | None):
        self.memory: list[tuple[float, int]] = []
        """The peak between each two marks, with the time of the first of them; empty without ``watch``."""
        self._streams = streams
        self._watch = watch
        self._events: list[StreamEvent] = []
        self._clock_s: list[float] = []

    def mark(self) -> None:
        """Note that the device gets to an event of the cycle when it has done what is queued."""
        self._events.append(self._streams.record(self._streams.current()))
        if self._watch is not None:
            since_s = self._clock_s[-1] if self._clock_s else time.time()
            self.memory.append((since_s, self._watch.peaks().allocated_bytes))
            self._watch.restart()
        self._clock_s.append(time.time())

    def finish(self) -> None:
        """Wait until the device has passed every mark; they may be on several streams."""
        for event in self._events:
            self._streams.synchronize(event)

    def times(self, stall_s: float) -> CycleTimes:
        """Return when the device passed the marks, without ``stall_s`` seconds of waiting."""
        self.finish()
        elapsed_s = [max(0.0, self._streams.elapsed_s(self._events[0], event)) for event in self._events]
        elapsed_s = list(itertools.accumulate(elapsed_s, max))
        computing = max(0.05, 1 - stall_s / elapsed_s[-1]) if elapsed_s[-1] else 1.0
        computed_s = [second * computing for second in elapsed_s]
        return CycleTimes(computed_s=computed_s, clock_s=self._clock_s, step_s=computed_s[-1])


@dataclass(slots=True)
class Standing:
    """The memory that stands on a device when a cycle begins."""

    held_bytes: int
    """Bytes of tensors; on a CPU they are known only of a measured cycle, and when it has ended."""
    in_use_bytes: int
    """Bytes of the process that are not free (CPU only). They cost little to read, and grow when tensors do."""

    @staticmethod
    def on(backend: Backend) -> "Standing":
        """Return what stands there now."""
        if backend.allocator is None:
            return Standing(0, _in_use_bytes())
        return Standing(backend.allocator.allocated_bytes(), 0)

    def has_grown(self, backend: Backend, slack_bytes: int) -> bool:
        """Return whether more than ``slack_bytes`` have come since. On a CPU that is a search if the process grew."""
        now = Standing.on(backend)
        if backend.allocator is None:
            if now.in_use_bytes - self.in_use_bytes <= slack_bytes or gate.others_compute:
                return False
            self.in_use_bytes = now.in_use_bytes  # if it is no tensor's, it is searched for once
            now.held_bytes = held_bytes(backend.device)
        return now.held_bytes - self.held_bytes > slack_bytes


class _InUse(ctypes.Structure):
    """The counts that ``mallinfo2`` of the GNU C library returns."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple(zip(_names, (ctypes.c_size_t,) * len(_names), strict=True))


def _in_use_bytes() -> int:
    """Return the bytes that the process has from malloc; 0 with another C library: measurements find growth, too."""
    count = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if count is None:
        return 0
    count.restype = _InUse
    in_use = count()
    return int(in_use.uordblks + in_use.hblkhd)


class CycleMeter:
    """A measurement of the device memory in one cycle: a recording on a host, the allocator's counts elsewhere."""

    def __init__(self) -> None:
        self.watch: PeakWatch | None = None
        """The allocator's counts since the measurement began (accelerators only)."""
        self._recording: MemoryRecording | None = None
        self._taken: contextlib.ExitStack | None = None

    @property
    def is_running(self) -> bool:
        """Whether a measurement has begun."""
        return self._taken is not None

    def begin(self, allocator: Allocator | None) -> None:
        """Begin to measure, anywhere: with the allocator, or by recording what PyTorch allocates on the CPU."""
        self._taken = contextlib.ExitStack()
        if allocator is None:
            self._recording = self._taken.enter_context(record_memory("cpu"))
        else:
            self.watch = self._taken.enter_context(allocator.watching())

    def peak_bytes(self) -> int:
        """Return the device peak so far; 0 without an allocator."""
        return 0 if self.watch is None else self.watch.peaks().allocated_bytes

    def end(self, seen: Iterable[tuple[float, int]]) -> tuple[list[tuple[float, int]], int | None]:
        """Return the memory timeline and the peak, where they were measured. ``seen``: peaks that a clock has taken."""
        if self._taken is None:
            return [], None
        if self.watch is not None:
            peak_bytes = max([self.peak_bytes(), *(held for _, held in seen)])
            self.abort()
            return [], peak_bytes
        recording = self._recording
        self.abort()
        return ([], None) if recording is None else (list(recording.report.timeline), recording.report.peak_bytes)

    def abort(self) -> None:
        """End a measurement whose result nobody needs."""
        if self._taken is not None:
            self._taken.close()
        self._taken = self._recording = self.watch = None
