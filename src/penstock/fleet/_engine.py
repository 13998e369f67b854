"""The engine: the jobs and devices of a fleet, and the choice of the job that a device takes next."""

import math
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from penstock.errors import InternalError
from penstock.fleet._feed import DataReaders
from penstock.fleet._frozen import FrozenGroups
from penstock.fleet._life import JobRun, JobState
from penstock.fleet._pilot import Pilots
from penstock.fleet._schedulers import JobCandidate, Progress, choose
from penstock.fleet._upkeep import Upkeep
from penstock.fleet._worker import Worker


class Engine:
    """The jobs and devices of a fleet. Workers ask it for turns.

    Everything about the order and the life of jobs is here, under one lock.
    """

    def __init__(
        self,
        scheduler: Callable[[Progress], Any],  # any: what can be compared
        upkeep: Upkeep,
        pilots: Pilots,
        *,
        sharp: bool = True,
    ):
        self.condition = threading.Condition(threading.RLock())
        self.runs: list[JobRun] = []
        self.workers: list[Worker] = []
        self.upkeep, self.pilots = upkeep, pilots
        self.frozen = FrozenGroups()
        self.readers = DataReaders(self.condition)
        self.is_stopping = False
        self.accepts_jobs = False
        """Whether more jobs may be added, so that workers wait instead of ending."""
        self._scheduler = scheduler
        self._sharp = sharp
        self._begun_s = time.perf_counter()

    @property
    def now_s(self) -> float:
        """Seconds since the fleet started."""
        return time.perf_counter() - self._begun_s

    def add(self, run: JobRun) -> None:
        """Add a job to train."""
        with self.condition:
            run.arrival_s = run.since_s = self.now_s
            self.runs.append(run)
            self.condition.notify_all()

    def take(self, worker: Worker) -> JobRun | None:
        """Wait for the next job of an idle device and return it; ``None`` if no more will come."""
        while True:
            with self.condition:
                run = self._choose(worker, own=None)
                if run is not None:
                    return run
                if self.is_stopping or not (self.accepts_jobs or any(not run.state.is_over for run in self.runs)):
                    self.condition.notify_all()
                    return None
                self.condition.wait(timeout=0.01)
            worker.memory.held_bytes()  # frees what has left, or gone to another device

    def look_ahead(self, worker: Worker, current: JobRun) -> JobRun | None:
        """Return the job of the turn after the current one, chosen before that ends.

        ``None`` leaves the choice to `take`.
        """
        with self.condition:
            return self._choose(worker, own=current)

    def give_back(self, run: JobRun, worker: Worker, *, goes_on: bool) -> None:
        """End the turn. Another device may take the job once its bytes are in a lower tier, unless it ``goes_on``."""
        # Only between mini-batches: leaving earlier would move boundaries and activations as well, and gain nothing,
        # because a job is on one device at a time anyway.
        if not goes_on and not run.state.is_over and len(self.workers) > 1:
            for item in run.training.items():
                if item.storages is not None:
                    worker.memory.write(item)
        with self.condition:
            run.is_taken = goes_on
            if not goes_on:
                run.since_s = self.now_s
            self._obey(run)
            self.condition.notify_all()

    def fail(self, run: JobRun, worker: Worker, error: BaseException) -> None:
        """Mark the job as failed. The others continue."""
        run.error = "".join(traceback.format_exception_only(error)).strip()
        self.end(run, worker, JobState.FAILED, "".join(traceback.format_exception(error)))

    def end(self, run: JobRun, worker: Worker, state: JobState, trace: str = "") -> None:
        """End the job and give back its bytes. ``trace`` is the traceback if it failed."""
        self.upkeep.ended(run, state, trace)
        with self.condition:
            self.readers.remove(run.job.name)
            run.state = state
        for item in run.training.items():
            worker.memory.discard(item)
        run.training = run.training.over()
        self.let_frozen_go()

    def let_frozen_go(self) -> None:
        """Give back frozen groups that no job uses any more, each on its own device."""
        with self.condition:
            groups = [group for run in self.runs for group in run.training.groups]
            self.frozen.keep_only({group.item for group in groups if group.kind == "frozen"})

    def _obey(self, run: JobRun) -> None:
        """Carry out what a user requested of a job that no worker has.

        A request to stop is not carried out here, because it takes a turn.
        """
        if run.is_taken or run.state.is_over or run.wanted in (None, JobState.STOPPED):
            return
        wanted, run.wanted = run.wanted, None
        if wanted is JobState.PAUSED:
            run.state = JobState.PAUSED
        elif run.state is JobState.PAUSED:
            run.state = JobState.RUNNING if run.is_prepared else JobState.PENDING

    def _choose(self, worker: Worker, own: JobRun | None) -> JobRun | None:
        if self.is_stopping:
            return None
        lone = next((run for run in self.runs if run.home is worker and run.has_device_alone()), None)
        waiting = {
            run.place: run
            for run in self.runs
            if run is not own and lone in (None, run) and self._may_take(run, worker)
        }
        now_s, fleet_s = self.now_s, self._fleet_s()
        at_hand = None
        if own is not None:
            if not self._sharp:
                waiting = {}
            if own.wanted is None and own.state is JobState.RUNNING and not own.ends_with_turn():
                at_hand = self._candidate(own, own.progress(now_s, fleet_s, at_hand=True))
        chosen = choose(
            [self._candidate(run, run.progress(now_s, fleet_s, at_hand=False)) for run in waiting.values()], at_hand
        )
        if chosen is None:
            return None
        run = waiting.get(chosen.job, own)
        assert run is not None
        if run is not own:
            try:
                self._move(run, worker)
            except InternalError:  # a frozen item has just begun to move
                return None
            run.is_taken, run.since_s = True, now_s
        return run

    def _candidate(self, run: JobRun, progress: Progress) -> JobCandidate:
        is_urgent = run.wanted is JobState.STOPPED or not run.is_prepared  # what the job needs must be known first
        return JobCandidate((0, 0) if is_urgent else (1, self._scheduler(progress)), run.since_s, run.place)

    def _fleet_s(self) -> float:
        """Return the seconds until the fleet can end at the earliest, as far as its jobs are known; for `Progress`."""
        if len(self.workers) == 1:
            return math.inf
        left = (run.remaining_s() for run in self.runs if run.state is JobState.RUNNING and run.is_prepared)
        return sum(left) / len(self.workers)

    def _may_take(self, run: JobRun, worker: Worker) -> bool:
        if run.is_taken or run.state.is_over:
            return False
        self._obey(run)
        if run.wanted is JobState.STOPPED:
            return run.home in (None, worker)
        if run.state not in (JobState.PENDING, JobState.RUNNING) or run.wanted is not None:
            return False
        if run.home is None or run.home is worker or run.has_device_alone():
            return run.home in (None, worker)
        return all(item.is_settled for item in run.training.items()) and all(
            group.item is None or self.frozen.is_on(group.item, worker.index) or group.item.is_settled
            for group in run.training.groups
            if group.kind == "frozen"
        )

    def _move(self, run: JobRun, worker: Worker) -> None:
        """Hand the job's items over to ``worker``. The caller holds the lock."""
        if run.home is not None and run.home is not worker:
            training, memory = run.training, worker.memory
            there = [group for group in training.groups if group.item is not None]
            # Frozen ones first: only they can raise, and then nothing of the job has moved.
            frozen = {
                group: self.frozen.moved(group.item, worker.index, memory)
                for group in there
                if group.kind == "frozen" and group.item is not None
            }
            for group in there:
                assert group.item is not None
                group.item = frozen.get(group) or group.item.borrowed(memory.waterfall)
                if group.twin is not None:
                    group.twin.item = group.twin.item.borrowed(memory.waterfall)
            for packed in (*training.open_step.gradients.values(), *training.states.packed.values()):
                packed.item = packed.item.borrowed(memory.waterfall)
        run.home = worker
