"""The thread of a device: it takes a job, prepares it or runs its next mini-batch, and hands it back.

A job keeps the device for a whole mini-batch. Leaving in the middle would move boundaries and activations without gain,
since a job is on one device at a time anyway. While the last unit computes, the next job is chosen and its first shard
copied in. Within a mini-batch, the next shard is copied in. Shards of earlier units leave meanwhile.
"""

import threading
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from penstock.errors import BudgetNotKeptWarning
from penstock.fleet._host_steps import HostSteps
from penstock.fleet._memory import DeviceMemory, Item
from penstock.fleet._meter import UnitMeter, recorded
from penstock.fleet._problem import UnitKind
from penstock.fleet._uncut import UncutBatch
from penstock.fleet._unit_log import Span, UnitLog
from penstock.fleet._units import Between, MiniBatch
from penstock.fleet._whole import WholeBatch
from penstock.tiers import HeapKeeper, Waterfall, gate

TOLERANCE = 200
"""Divisor of the budget: an excess of at most the budget divided by it causes no warning."""


class Turn(Protocol):
    """The work of a device on one job before the device looks at other jobs again."""

    def first_items(self, worker: "Worker") -> list[Item]:
        """Return the items that it needs first, as far as known."""

    def run(self, worker: "Worker") -> None:
        """Carry out the turn."""


class Turns(Protocol):
    """A source of turns, which decides what a device does next."""

    def take(self, worker: "Worker") -> Turn | None:
        """Wait for the next turn of an idle device and return it; ``None`` if no more will come."""

    def look_ahead(self, worker: "Worker", current: Any) -> Turn | None:  # any: the owner of a mini-batch
        """Return the turn after the current one, chosen before that ends; ``None`` leaves the choice to `take`."""


class Expected(Protocol):
    """Expected memory and time of units, as measured by pilots."""

    def transient_bytes(self, index: int) -> int:
        """Return the peak bytes in addition to the items that the unit needs."""

    def remaining_bytes(self, index: int) -> int:
        """Return the part of these bytes that remains after the unit."""

    def recompute_s(self, index: int) -> float:
        """Return the seconds in which it runs forward again."""


_this_thread = threading.local()


def trains_jobs() -> bool:
    """Whether this thread belongs to a device, so that the caller runs inside a job."""
    return getattr(_this_thread, "is_worker", False)


class Worker:
    """The thread and memory of a device. ``turns`` gives it turns, and it ends when there are no more."""

    def __init__(
        self,
        index: int,
        device: torch.device,
        waterfall: Waterfall,
        budget_bytes: int,
        *,
        num_threads: int,
        turns: Turns,
        double_buffer: bool,
        verifies: bool,
    ):
        self.index = index
        self.memory = DeviceMemory(device, waterfall, budget_bytes)
        self.memory.host = None if device.type == "cpu" else HostSteps(self.memory)
        self.double_buffer = double_buffer
        """Whether what comes next is copied in while a unit computes."""
        self.log = UnitLog(index, self.memory)
        self.verifier = UnitVerifier(self.memory, is_on=verifies)
        self.turns = turns
        self.following: Turn | None = None
        """The turn after this one, once it is chosen."""
        self.keeper: HeapKeeper | None = None
        """The keeper of the heap, if the device is main memory."""
        self.error: BaseException | None = None
        self._num_threads = num_threads
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._main, name=f"penstock fleet {index}", daemon=True)

    @property
    def device(self) -> torch.device:
        """The device."""
        return self.memory.device

    @property
    def is_alive(self) -> bool:
        """Whether it still takes turns."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start to take turns. Return once it is known what the device's libraries keep for its thread."""
        self._thread.start()
        self._is_ready.wait()

    def join(self) -> None:
        """Wait for the end of all turns."""
        self._thread.join()

    def run_minibatch(self, owner: Any, mini: MiniBatch, expected: "Expected") -> None:  # any: for `look_ahead`
        """Run all units of a mini-batch in order. ``owner`` is the job whose turn it is."""
        units = _WorkerUnits(self, owner, mini, expected)
        try:
            if isinstance(mini, WholeBatch):
                self.verifier.run_whole(mini, units)
            else:
                mini.run_all(units)
            self.memory.backend.finish_current()  # so that all its units have ended and are recorded
            self.log.settle()
        except BaseException:
            self.log.abandon()
            mini.abandon()
            raise

    def _main(self) -> None:
        _this_thread.is_worker = True
        try:
            self.memory.backend.use(num_threads=self._num_threads)
            self.memory.library_bytes = self.memory.backend.warm_up()  # these bytes belong to no unit
            self._is_ready.set()
            while (turn := self.following or self.turns.take(self)) is not None:
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


class UnitVerifier:
    """Computation of units, and measurement of the bytes of all of them if ``is_on``."""

    def __init__(self, memory: DeviceMemory, *, is_on: bool):
        self.peak_bytes = 0
        """The most that items and a unit took together, as measured."""
        self._memory, self._is_on = memory, is_on
        self._has_said_above = False

    def run_whole(self, mini: WholeBatch, between: Between) -> None:
        """Run a mini-batch of a model that is run whole. It is measured if it has a meter."""
        if self._is_on:
            mini.meter = UnitMeter(self._memory)
        with gate.computing():
            mini.run_all(between)
            totals = mini.meter.totals if mini.meter is not None else {}
            self.peak_bytes = max(self.peak_bytes, *totals.values(), 0)

    def compute(self, mini: MiniBatch, index: int) -> None:
        """Run one unit that is a call of its own."""
        if not self._is_on or isinstance(mini, WholeBatch | UncutBatch):
            with gate.computing():
                mini.run(index)
            if self._is_on and isinstance(mini, UncutBatch):
                self.peak_bytes = max(self.peak_bytes, mini.peak_bytes)
            return
        held_bytes = self._memory.held_bytes()
        with gate.computing(), recorded(self._memory.device) as recording:
            mini.run(index)
        most = held_bytes + recording.report.activation_bytes
        self.peak_bytes = max(self.peak_bytes, most)
        if most > self._memory.budget_bytes + self._memory.budget_bytes // TOLERANCE and not self._has_said_above:
            self._has_said_above = True
            task, work = mini.tasks[index], mini.work
            warnings.warn(
                f"job {work.training.job.name!r}: {task.kind.value} of the shard "
                f"{work.program.shards[task.shard].label} took {most} bytes together with everything else on the "
                f"device, above the budget of {self._memory.budget_bytes} bytes; the pilot run measured less. Training "
                "goes on above the budget, and this warning is shown once. Give a larger budget, or smaller batches: "
                "Job(accumulate=4, ...)",
                BudgetNotKeptWarning,
                stacklevel=2,
            )


class _WorkerUnits:
    """The units of a mini-batch as they come, on a worker. ``owner`` is the job whose turn it is."""

    def __init__(self, worker: Worker, owner: Any, mini: MiniBatch, expected: Expected):  # any: for `look_ahead`
        self._worker, self._owner, self._mini, self._expected = worker, owner, mini, expected
        self._span: Span

    def begin(self, index: int) -> int:
        self._span = self._worker.log.span()
        transient_bytes = self._expected.transient_bytes(index)
        needs = self._bring_in(index, transient_bytes)
        self._look_at_next(index, needs)
        self._span.computes()
        return transient_bytes

    def compute(self, index: int) -> None:
        self._worker.verifier.compute(self._mini, index)

    def end(self, index: int) -> None:
        self._span.ends()
        self._worker.log.note(self._mini, index, self._span, self._expected.recompute_s(index))

    def _bring_in(self, index: int, transient_bytes: int) -> list[Item]:
        """Bring the items of unit ``index`` to the device, make room for its own bytes, and return the items."""
        memory, mini = self._worker.memory, self._mini
        needs, task = mini.needs(index), mini.tasks[index]
        mini.plan_uses(index)
        for item in needs:
            if item.held_bytes():  # takes back what is on its way out
                memory.prefetch(item)
        missing = sum(item.size_bytes - item.held_bytes() for item in needs)
        label = f"job {mini.work.training.job.name!r}: {task.kind.value} of shard {task.shard}"
        memory.make_room(missing + transient_bytes, needs, label, may_exceed=isinstance(mini, WholeBatch))
        for item in needs:
            memory.prefetch(item)
        for item in needs:
            memory.get(item)
            if task.kind is not UnitKind.FORWARD:  # gradients are summed, parameters stepped
                item.before_write()
        return needs

    def _look_at_next(self, index: int, needs: Sequence[Item]) -> None:
        """Copy in what comes next as far as it fits, and let what would be in its way begin to leave."""
        worker, memory, expected = self._worker, self._worker.memory, self._expected
        now_bytes = expected.transient_bytes(index)
        if index == len(self._mini.tasks) - 1 and worker.following is None:  # a validation has several mini-batches
            worker.following = worker.turns.look_ahead(worker, self._owner)
        if not worker.double_buffer:
            return
        upcoming, after, next_bytes = self._upcoming(index)
        used = [*needs, *upcoming]
        for item in upcoming:
            missing = item.size_bytes - item.held_bytes()
            if missing and memory.may_take(missing + now_bytes, used):
                memory.prefetch(item)
        missing = sum(item.size_bytes - item.held_bytes() for item in [*upcoming, *after])
        memory.begin_to_leave(max(now_bytes, expected.remaining_bytes(index) + next_bytes) + missing, used)

    def _upcoming(self, index: int) -> tuple[list[Item], list[Item], int]:
        """Return what the next unit and the one after it need, and the next one's own bytes."""
        mini, following = self._mini, self._worker.following
        if index + 1 < len(mini.tasks):
            after = mini.needs(index + 2) if index + 2 < len(mini.tasks) else []
            return mini.needs(index + 1), after, self._expected.transient_bytes(index + 1)
        items = following.first_items(self._worker) if following is not None else []
        return items, [], 0
