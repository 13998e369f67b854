"""The thread of a device: it takes a job, prepares it or runs its next mini-batch, and hands it back.

A job keeps the device for a whole mini-batch. Leaving in the middle would move boundaries and activations without gain,
since a job is on one device at a time anyway. While the last unit computes, the next job is chosen and its first shard
copied in. Within a mini-batch, the next shard is copied in. Shards of earlier units leave meanwhile.
"""

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from penstock.devices import DeviceTimeline, StreamEvent, Streams, backend_of
from penstock.errors import BudgetNotKeptWarning
from penstock.fleet._host_steps import HostSteps
from penstock.fleet._memory import DeviceMemory, Item
from penstock.fleet._meter import UnitMeter
from penstock.fleet._problem import UnitKind
from penstock.fleet._units import MiniBatch
from penstock.fleet._whole import WholeBatch
from penstock.probe import record_memory
from penstock.tiers import HeapKeeper, Waterfall, gate

TOLERANCE = 200
"""Divisor of the budget: an excess of at most the budget divided by it causes no warning."""


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


class Turn(Protocol):
    """The work of a device on one job before the device looks at other jobs again."""

    def first_items(self, worker: "Worker") -> list[Item]:
        """Return the items that it needs first, as far as known."""

    def run(self, worker: "Worker") -> None:
        """Carry out the turn."""


class Expected(Protocol):
    """Expected memory and time of units, as measured by pilots."""

    def transient_bytes(self, index: int) -> int:
        """Return the peak bytes in addition to the items that the unit needs."""

    def remaining_bytes(self, index: int) -> int:
        """Return the part of these bytes that remains after the unit."""

    def recompute_s(self, index: int) -> float:
        """Return the seconds in which it runs forward again."""


@dataclass(slots=True)
class Busy:
    """Use of a device's time, in seconds."""

    compute_s: float = 0.0
    recompute_s: float = 0.0
    stall_s: float = 0.0
    num_units: int = 0
    since_s: float = field(default_factory=time.time)


_this_thread = threading.local()


def trains_jobs() -> bool:
    """Whether this thread belongs to a device, so that the caller runs inside a job."""
    return getattr(_this_thread, "is_worker", False)


class Worker:
    """The thread and memory of a device. ``take`` gives it turns, and it ends when there are no more."""

    def __init__(
        self,
        index: int,
        device: torch.device,
        waterfall: Waterfall,
        budget_bytes: int,
        *,
        num_threads: int,
        take: Callable[["Worker"], Turn | None],
        look_ahead: Callable[["Worker", Any], Turn | None],
        double_buffer: bool,
    ):
        self.index = index
        self.device = device
        self.backend = backend_of(device)
        self.memory = DeviceMemory(device, waterfall, budget_bytes)
        self.memory.host = None if device.type == "cpu" else HostSteps(self.memory)
        self.num_threads = num_threads
        self.busy = Busy()
        self._double_buffer = double_buffer
        self.records: list[UnitRecord] = []
        self.error: BaseException | None = None
        self.measuring = threading.Lock()
        """A lock that is held while a unit's memory is measured, one at a time in the process."""
        self.verifies = False
        """Whether every unit is measured."""
        self.measured_peak_bytes = 0
        """The most that items and a unit took together, as measured."""
        self.keeper: HeapKeeper | None = None
        """The keeper of the heap, if the device is main memory."""
        self.following: Turn | None = None
        """The turn after this one, once it is chosen."""
        self._has_said_above = False
        self._timeline: DeviceTimeline | None = None
        self._spans: deque[tuple[MiniBatch, int, _Span, float]] = deque()
        """Units that may still run on the device, each with the seconds that may be recomputation."""
        self._take, self._look_ahead = take, look_ahead
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._main, name=f"penstock fleet {index}", daemon=True)

    def start(self) -> None:
        """Start to take turns. Return once it is known what the device's libraries keep for its thread."""
        self._thread.start()
        self._is_ready.wait()

    @property
    def is_alive(self) -> bool:
        """Whether it still takes turns."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait for the end of all turns."""
        self._thread.join()

    def run_minibatch(self, owner: Any, mini: MiniBatch, expected: "Expected") -> None:  # any: for `look_ahead`
        """Run all units of a mini-batch in order. ``owner`` is the job whose turn it is."""
        self._owner = owner
        try:
            if isinstance(mini, WholeBatch):
                self._run_whole(mini, expected)
            else:
                mini.run_all(_WorkerUnits(self, mini, expected))
            self.backend.finish_current()  # so that all its units have ended and are recorded
            self.settle()
        except BaseException:
            self._spans.clear()
            mini.abandon()
            raise

    def _run_whole(self, mini: WholeBatch, expected: "Expected") -> None:
        if self.verifies:
            mini.meter = UnitMeter(self.memory)
        with self.measuring if mini.meter is not None else nullcontext(), gate.computing():
            mini.run_all(_WorkerUnits(self, mini, expected))
            totals = mini.meter.totals if mini.meter is not None else {}
            self.measured_peak_bytes = max(self.measured_peak_bytes, *totals.values(), 0)

    def compute(self, mini: MiniBatch, index: int) -> None:
        """Run one unit that is a call of its own."""
        if not self.verifies or isinstance(mini, WholeBatch):
            with gate.computing():
                mini.run(index)
            return
        held_bytes = self.memory.held_bytes()
        with self.measuring, gate.computing(), record_memory(self.device, this_thread_only=True) as recording:
            mini.run(index)
        most = held_bytes + recording.report.activation_bytes
        self.measured_peak_bytes = max(self.measured_peak_bytes, most)
        if most > self.memory.budget_bytes + self.memory.budget_bytes // TOLERANCE and not self._has_said_above:
            self._has_said_above = True
            task, work = mini.tasks[index], mini.work
            warnings.warn(
                f"job {work.training.job.name!r}: {task.kind.value} of the shard "
                f"{work.program.shards[task.shard].label} took {most} bytes together with everything else on the "
                f"device, above the budget of {self.memory.budget_bytes} bytes; the pilot run measured less. Training "
                "goes on above the budget, and this warning is shown once. Give a larger budget, or smaller batches: "
                "Job(accumulate=4, ...)",
                BudgetNotKeptWarning,
                stacklevel=2,
            )

    def bring_in(self, mini: MiniBatch, index: int, transient_bytes: int) -> list[Item]:
        """Bring the items of unit ``index`` to the device, make room for its own bytes, and return the items."""
        memory, needs = self.memory, mini.needs(index)
        mini.plan_uses(index)
        for item in needs:
            if item.held_bytes():  # takes back what is on its way out
                memory.prefetch(item)
        missing = sum(item.size_bytes - item.held_bytes() for item in needs)
        label = (
            f"job {mini.work.training.job.name!r}: {mini.tasks[index].kind.value} of shard {mini.tasks[index].shard}"
        )
        memory.make_room(missing + transient_bytes, needs, label)
        for item in needs:
            memory.prefetch(item)
        for item in needs:
            memory.get(item)
            if mini.tasks[index].kind is not UnitKind.FORWARD:  # gradients are summed, parameters stepped
                memory.before_write(item)
        return needs

    def look_at_next(self, mini: MiniBatch, index: int, needs: Sequence[Item], expected: "Expected") -> None:
        """Copy in what comes next as far as it fits, and let what would be in its way begin to leave."""
        memory, now_bytes = self.memory, expected.transient_bytes(index)
        if index == len(mini.tasks) - 1 and self.following is None:  # a validation has several mini-batches
            self.following = self._look_ahead(self, self._owner)
        if not self._double_buffer:
            return
        upcoming, after, next_bytes = self._upcoming(mini, index, expected)
        used = [*needs, *upcoming]
        for item in upcoming:
            missing = item.size_bytes - item.held_bytes()
            if missing and memory.may_take(missing + now_bytes, used):
                memory.prefetch(item)
        missing = sum(item.size_bytes - item.held_bytes() for item in [*upcoming, *after])
        memory.begin_to_leave(max(now_bytes, expected.remaining_bytes(index) + next_bytes) + missing, used)

    def _upcoming(self, mini: MiniBatch, index: int, expected: "Expected") -> tuple[list[Item], list[Item], int]:
        """Return what the next unit and the one after it need, and the next one's own bytes."""
        if index + 1 < len(mini.tasks):
            after = mini.needs(index + 2) if index + 2 < len(mini.tasks) else []
            return mini.needs(index + 1), after, expected.transient_bytes(index + 1)
        items = self.following.first_items(self) if self.following is not None else []
        return items, [], 0

    def span(self) -> "_Span":
        """Return the span of a unit that begins now."""
        streams = self.backend.streams
        if streams is None:
            return _HostSpan(self.memory)
        if self._timeline is None:
            self._timeline = DeviceTimeline(streams)
        return _DeviceSpan(streams, self._timeline)

    def note(self, mini: MiniBatch, index: int, span: "_Span", recompute_s: float) -> None:
        """Note that a unit has ended, or that its last operator was sent to the device."""
        self._spans.append((mini, index, span, recompute_s))
        self.settle()

    def settle(self) -> None:
        """Record the units that have ended."""
        while self._spans and self._spans[0][2].is_over():
            mini, index, span, recompute_s = self._spans.popleft()
            start_s, waited_s, compute_s = span.seconds()
            is_backward = mini.tasks[index].kind is UnitKind.BACKWARD
            self._note(mini, index, start_s, waited_s, compute_s, min(recompute_s, compute_s) if is_backward else 0.0)

    def _note(
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
                device=self.index,
                start_s=start_s,
                end_s=start_s + waited_s + compute_s,
                stall_s=waited_s,
                recompute_s=again_s,
            )
        )

    def _main(self) -> None:
        _this_thread.is_worker = True
        try:
            self.backend.use(num_threads=self.num_threads)
            self.memory.library_bytes = self.backend.warm_up()  # these bytes belong to no unit
            self._is_ready.set()
            while (turn := self.following or self._take(self)) is not None:
                self.following = None
                turn.run(self)
                if self.keeper is not None:
                    self.keeper.look()
        except BaseException as error:
            self.error = error
        finally:
            self._is_ready.set()
            self.following = None
            if self.memory.host is not None:
                self.memory.host.close()


class _Span(Protocol):
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


class _WorkerUnits:
    """The units of a mini-batch as they come, on a worker."""

    def __init__(self, worker: Worker, mini: MiniBatch, expected: Expected):
        self._worker, self._mini, self._expected = worker, mini, expected
        self._span: _Span

    def begin(self, index: int) -> int:
        worker, mini, expected = self._worker, self._mini, self._expected
        self._span = worker.span()
        transient_bytes = expected.transient_bytes(index)
        needs = worker.bring_in(mini, index, transient_bytes)
        worker.look_at_next(mini, index, needs, expected)
        self._span.computes()
        return transient_bytes

    def compute(self, index: int) -> None:
        self._worker.compute(self._mini, index)

    def end(self, index: int) -> None:
        self._span.ends()
        self._worker.note(self._mini, index, self._span, self._expected.recompute_s(index))
