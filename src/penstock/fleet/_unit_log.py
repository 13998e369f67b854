"""The log of a device's units: when each ran, for how long it waited for bytes, and for how long it computed.

An accelerator runs behind the host, so that a unit's times are known only some time after its last operator was sent.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from penstock.devices import DeviceTimeline, StreamEvent, Streams
from penstock.fleet._memory import DeviceMemory
from penstock.fleet._problem import UnitKind
from penstock.fleet._units import MiniBatch


@dataclass(slots=True, kw_only=True)
class UnitRecord:
    """One unit that ran. Times are seconds of ``time.time()``."""

    job: str
    kind: str
    shard: int
    device: int
    start_s: float
    end_s: float
    stall_s: float
    """Seconds of waiting for bytes before the unit began to compute."""
    recompute_s: float
    """Seconds in which it ran forward again, as measured by pilots."""


@dataclass(slots=True)
class Busy:
    """Use of a device's time, in seconds."""

    compute_s: float = 0.0
    recompute_s: float = 0.0
    stall_s: float = 0.0
    num_units: int = 0
    since_s: float = field(default_factory=time.time)


class UnitLog:
    """The units of one device, ``index``."""

    def __init__(self, index: int, memory: DeviceMemory):
        self.busy = Busy()
        self.records: list[UnitRecord] = []
        self._index, self._memory = index, memory
        self._streams = memory.backend.streams
        self._timeline: DeviceTimeline | None = None
        self._open: deque[tuple[MiniBatch, int, Span, float]] = deque()
        """Units that may still run on the device, each with the seconds that may be recomputation."""

    def span(self) -> "Span":
        """Return the span of a unit that begins now."""
        if self._streams is None:
            return _HostSpan(self._memory)
        if self._timeline is None:
            self._timeline = DeviceTimeline(self._streams)
        return _DeviceSpan(self._streams, self._timeline)

    def note(self, mini: MiniBatch, index: int, span: "Span", recompute_s: float) -> None:
        """Note that a unit has ended, or that its last operator was sent to the device."""
        self._open.append((mini, index, span, recompute_s))
        self.settle()

    def settle(self) -> None:
        """Record the units that have ended."""
        while self._open and self._open[0][2].is_over():
            mini, index, span, recompute_s = self._open.popleft()
            start_s, waited_s, compute_s = span.seconds()
            is_backward = mini.tasks[index].kind is UnitKind.BACKWARD
            self._record(mini, index, start_s, waited_s, compute_s, min(recompute_s, compute_s) if is_backward else 0.0)

    def abandon(self) -> None:
        """Forget the units that have not ended."""
        self._open.clear()

    def _record(
        self, mini: MiniBatch, index: int, start_s: float, waited_s: float, compute_s: float, again_s: float
    ) -> None:
        """Record the unit's seconds of waiting, of computing, and of running forward again."""
        busy, task = self.busy, mini.tasks[index]
        busy.compute_s += compute_s
        busy.stall_s += waited_s
        busy.recompute_s += again_s
        busy.num_units += 1
        self.records.append(
            UnitRecord(
                job=mini.work.training.job.name,
                kind=task.kind.value if mini.work.behaviour.trains else "validation",
                shard=task.shard,
                device=self._index,
                start_s=start_s,
                end_s=start_s + waited_s + compute_s,
                stall_s=waited_s,
                recompute_s=again_s,
            )
        )


class Span(Protocol):
    """The times at which a unit waited and computed."""

    def computes(self) -> None:
        """Mark that what the unit needs is there, or was requested."""

    def ends(self) -> None:
        """Mark that the unit has run its last operator, or sent it to the device."""

    def is_over(self) -> bool:
        """Whether ``seconds`` is known."""

    def seconds(self) -> tuple[float, float, float]:
        """Return when it began, by ``time.time()``, for how long it waited for bytes, and for how long it computed."""


class _HostSpan:
    """The span of a unit that ends when its last operator returns."""

    def __init__(self, memory: DeviceMemory):
        self._memory = memory
        self._start_s, self._stalled_s = time.time(), memory.stall_s
        self._waited_s = self._begin_s = self._compute_s = 0.0

    def computes(self) -> None:
        self._waited_s = self._memory.stall_s - self._stalled_s
        self._begin_s = time.perf_counter()

    def ends(self) -> None:
        self._compute_s = time.perf_counter() - self._begin_s

    def is_over(self) -> bool:
        return True

    def seconds(self) -> tuple[float, float, float]:
        return self._start_s, self._waited_s, self._compute_s


class _DeviceSpan:
    """The span of a unit that the host runs ahead of: marks on the computing stream."""

    def __init__(self, streams: Streams, timeline: DeviceTimeline):
        self._streams, self._timeline = streams, timeline
        self._marks = [self._mark()]

    def computes(self) -> None:
        self._marks.append(self._mark())

    def ends(self) -> None:
        self._marks.append(self._mark())

    def is_over(self) -> bool:
        return self._streams.is_done(self._marks[-1])

    def seconds(self) -> tuple[float, float, float]:
        start, begin, end = self._marks
        waited_s, compute_s = self._streams.elapsed_s(start, begin), self._streams.elapsed_s(begin, end)
        return self._timeline.host_s(start), waited_s, compute_s

    def _mark(self) -> StreamEvent:
        return self._streams.record(self._streams.current())
