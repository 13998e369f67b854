"""The engine: chooses the job that a device runs next, and defines a job's turn."""

import math
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from penstock.errors import InternalError
from penstock.fleet._batch import Structure, flatten
from penstock.fleet._cut import CutBatch, CutBatches
from penstock.fleet._life import JobRun, JobState
from penstock.fleet._memory import Item
from penstock.fleet._pilot import ShardMeasure, measure
from penstock.fleet._prepare import Preparation
from penstock.fleet._problem import UnitKind
from penstock.fleet._schedulers import JobCandidate, Progress, choose
from penstock.fleet._training import JobTraining
from penstock.fleet._units import MiniBatch
from penstock.fleet._upkeep import Upkeep
from penstock.fleet._ways import Ways
from penstock.fleet._whole import WholeBatch, mini_batch
from penstock.fleet._work import Behaviour, Work
from penstock.fleet._worker import Turn, Worker


class JobBatch(NamedTuple):
    """One batch of a job's data."""

    leaves: list[torch.Tensor]
    structure: Structure
    number: int
    """Its number in the current pass over the data, from 1."""


class Engine:
    """The jobs and devices of a fleet. Workers ask it for turns.

    Everything about the order and the life of jobs is here, under one lock.
    """

    def __init__(
        self,
        scheduler: Callable[[Progress], Any],  # any: what can be compared
        upkeep: Upkeep,
        *,
        budget_bytes: int,
        sharp: bool = True,
        recompute: bool | None = None,
        vertical: bool = True,
        lane_rate: Callable[[], tuple[float, float]],
    ):
        self.condition = threading.Condition(threading.RLock())
        self.runs: list[JobRun] = []
        self.workers: list[Worker] = []
        self.upkeep = upkeep
        self.budget_bytes = budget_bytes
        self.pilot_lock = threading.Lock()
        self.measures: dict[tuple[Any, ...], ShardMeasure] = {}
        self.frozen: dict[str, dict[int, Item]] = {}
        """Frozen groups by content and device."""
        self._read_once: list[tuple[object, str]] = []
        """Data that only one job may read, and the name of that job."""
        self.recompute = recompute
        self.vertical = vertical
        self.lane_rate = lane_rate
        self.is_stopping = False
        self.only_measures = False
        """Whether jobs end as soon as their shards are measured."""
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

    def take(self, worker: Worker) -> Turn | None:
        """Wait for the next turn of an idle device and return it; ``None`` if no more will come."""
        while True:
            with self.condition:
                turn = self._choose(worker, own=None)
                if turn is not None:
                    return turn
                if self.is_stopping or not (self.accepts_jobs or any(not run.state.is_over for run in self.runs)):
                    self.condition.notify_all()
                    return None
                self.condition.wait(timeout=0.01)
            worker.memory.held_bytes()  # frees what has left, or gone to another device

    def look_ahead(self, worker: Worker, current: Any) -> Turn | None:  # any: a JobRun
        """Return the turn after the current one, chosen before that ends; ``None`` leaves the choice to `take`."""
        with self.condition:
            return self._choose(worker, own=current)

    def give_back(self, run: JobRun, worker: Worker) -> None:
        """End the turn. Another device may take the job once its bytes are in a lower tier."""
        goes_on = isinstance(worker.following, JobTurn) and worker.following.run_of is run
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

    def refuse_shared_data(self, run: JobRun) -> None:
        """Raise ``ValueError`` if another job already reads the job's data and only one job can."""
        training = run.training
        for field, data in (("data", training.feed.data), ("validation", training.validation)):
            if not (isinstance(data, Iterator) or getattr(data, "persistent_workers", False)):
                continue  # each job has its own iterator over it
            with self.condition:
                reader = next((name for other, name in self._read_once if other is data), run.job.name)
                self._read_once.append((data, run.job.name))
            if reader != run.job.name:
                raise ValueError(
                    f"job {run.job.name!r}: {field}() returned the {type(data).__name__} that job {reader!r} already "
                    f"reads, and each of its batches can be read only once. Make one per job: {field}=lambda: "
                    "DataLoader(dataset)"
                )

    def fail(self, run: JobRun, worker: Worker, error: BaseException) -> None:
        """Mark the job as failed. The others continue."""
        run.error = "".join(traceback.format_exception_only(error)).strip()
        run.trace = "".join(traceback.format_exception(error))
        self.end(run, worker, JobState.FAILED)

    def end(self, run: JobRun, worker: Worker, state: JobState) -> None:
        """End the job and give back its bytes."""
        self.upkeep.ended(run, state)
        with self.condition:
            self._read_once = [one for one in self._read_once if one[1] != run.job.name]
            run.state, run.ended_s = state, time.time()
        for item in run.training.items():
            worker.memory.discard(item)
        run.training = run.training.over()
        self.let_frozen_go()

    def let_frozen_go(self) -> None:
        """Give back frozen groups that no job uses any more, each on its own device."""
        with self.condition:
            used = {one.item for run in self.runs for one in run.training.groups if one.kind == "frozen"}
            for key, places in list(self.frozen.items()):
                if used.isdisjoint(places.values()):
                    del self.frozen[key]
                    for item in places.values():
                        item.is_stale = True

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

    def _choose(self, worker: Worker, own: JobRun | None) -> Turn | None:
        if self.is_stopping:
            return None
        waiting = {run.place: run for run in self.runs if run is not own and self._may_take(run, worker)}
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
        return JobTurn(self, run)

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
        if run.home is None or run.home is worker:
            return True
        return all(item.is_settled for item in run.training.items()) and all(
            one.item is None or self._is_on(one.item, worker) or one.item.is_settled
            for one in run.training.groups
            if one.kind == "frozen"
        )

    def _is_on(self, item: Item, worker: Worker) -> bool:
        """Whether the device has the frozen item, or another with the same bytes."""
        return any(worker.index in places for places in self.frozen.values() if item in places.values())

    def _move(self, run: JobRun, worker: Worker) -> None:
        """Hand the job's items over to ``worker``. The caller holds the lock."""
        if run.home is not None and run.home is not worker:
            waterfall = worker.memory.waterfall
            groups = [group for group in run.training.groups if group.item is not None]
            frozen = {id(one): self._frozen_on(one.item, worker) for one in groups if one.kind == "frozen" and one.item}
            for group in groups:
                assert group.item is not None
                group.item = frozen.get(id(group)) or group.item.borrowed(waterfall)
                if group.twin is not None:
                    group.twin.item = group.twin.item.borrowed(waterfall)
            for packed in (*run.training.gradients.values(), *run.training.states.values()):
                packed.item = packed.item.borrowed(waterfall)
        run.home = worker

    def _frozen_on(self, item: Item, worker: Worker) -> Item:
        for places in self.frozen.values():
            if item in places.values():
                if worker.index not in places:
                    places[worker.index] = item.shared(worker.memory.waterfall)
                return places[worker.index]
        return item.shared(worker.memory.waterfall)


class JobTurn:
    """A job's next mini-batch, its preparation, or a validation."""

    def __init__(self, engine: Engine, run: JobRun):
        self.engine, self.run_of = engine, run

    def first_items(self, worker: Worker) -> list[Item]:  # noqa: ARG002  # the protocol's
        """Return the items of the first shard's groups."""
        groups = self.run_of.training.groups if self.run_of.is_prepared else []
        return [one.travelling for one in groups if 0 in one.shards and one.travelling is not None]

    def run(self, worker: Worker) -> None:
        """Run what comes next for the job. An error of the job ends only this job."""
        run, engine = self.run_of, self.engine
        try:
            if run.state.is_over:
                return  # this turn was chosen before the job's last turn had ended
            if run.wanted is JobState.STOPPED and not (run.is_prepared and run.training.position.micro):
                if run.is_prepared:
                    engine.upkeep.save(run, worker)
                engine.end(run, worker, JobState.STOPPED)
                return
            if not run.is_prepared:
                Preparation(engine, run, worker).run()
                if engine.only_measures:
                    engine.end(run, worker, JobState.STOPPED)
            else:
                self._advance(worker)
        except Exception as error:
            self._handle(worker, error)
        finally:
            engine.give_back(run, worker)

    def _advance(self, worker: Worker) -> None:
        run, engine = self.run_of, self.engine
        training = run.training
        batch = None
        while batch is None:
            if run.wants_validation:
                run.wants_validation = False
                if self._validate(worker):
                    engine.upkeep.save(run, worker)
                    engine.end(run, worker, JobState.STOPPED)
                    return
            if training.is_done():
                self._finish(worker)
                return
            batch = training.feed.next_batch()
            if batch is None:
                run.wants_validation = training.validation is not None and training.job.evaluate_every is None
        self._train(worker, self._batches_of_turn(JobBatch(*batch, training.position.batch)))
        if training.position.micro == 0:
            engine.upkeep.stepped(run)  # before the checkpoint, so that a process that ends in between loses no line
            if engine.is_stopping or engine.upkeep.wants_save(run):
                engine.upkeep.save(run, worker)
            if training.is_done():
                self._finish(worker)

    def _finish(self, worker: Worker) -> None:
        """Run the last validation, write the last checkpoint and end the job."""
        run, engine, training = self.run_of, self.engine, self.run_of.training
        if training.validation is not None and run.last_validation != training.position.step and self._validate(worker):
            engine.upkeep.save(run, worker)
            engine.end(run, worker, JobState.STOPPED)
            return
        for item in training.drop_unfinished_step():
            worker.memory.discard(item)
        engine.upkeep.save(run, worker)
        engine.end(run, worker, JobState.DONE)

    def _batches_of_turn(self, first: JobBatch) -> list[JobBatch]:
        """Return ``first``, or all batches of its step.

        A pass over the data that ends in the middle of a step also ends the turn.
        """
        run, training = self.run_of, self.run_of.training
        found = [first]
        while run.is_vertical and not training.position.micro and len(found) < training.job.accumulate:
            found[-1] = found[-1]._replace(leaves=[one.clone() for one in found[-1].leaves])  # data may reuse them
            batch = training.feed.next_batch()
            if batch is None:
                run.wants_validation = training.validation is not None and training.job.evaluate_every is None
                break
            found.append(JobBatch(*batch, training.position.batch))
        return found

    def _train(self, worker: Worker, batches: list[JobBatch]) -> None:
        """Train shard by shard if these are all batches of a step and of one shape, otherwise batch by batch."""
        training = self.run_of.training
        signatures = {one.structure.signature for one in batches}
        if (
            len(batches) == training.job.accumulate > 1
            and len(signatures) == 1
            and training.cuts.known(batches[0].structure) is not None
            and self._goes_vertically(worker, batches[0])
        ):
            self._train_on(worker, batches)
        else:
            for batch in batches:
                self._train_on(worker, [batch])

    def _goes_vertically(self, worker: Worker, batch: JobBatch) -> bool:
        """Whether batches of this shape train shard by shard."""
        run, signature = self.run_of, batch.structure.signature
        if signature not in run.vertical_of:
            program = run.training.program(batch.leaves, batch.structure)
            preparation = Preparation(self.engine, run, worker)
            run.vertical_of[signature] = preparation.goes_vertically(program, run.measures_of[signature])
        return run.vertical_of[signature]

    def _train_on(self, worker: Worker, batches: list[JobBatch]) -> None:
        run, training = self.run_of, self.run_of.training
        training.weights.make_hollow_on(worker.device)
        leaves, structure, _ = batches[0]
        measures = self._measures_for(worker, leaves, structure)
        program = training.program(leaves, structure)
        works = [
            Work(training, worker.memory, program, batch.structure, micro=training.position.micro + number)
            for number, batch in enumerate(batches)
        ]
        draws = [one.draws for one in measures]
        start_s = worker.busy.compute_s
        if program.whole is not None:
            mini: MiniBatch = self._train_whole(worker, WholeBatch(works[0], leaves), measures)
        else:
            given = zip(works, batches, strict=True)
            mini = CutBatches([CutBatch(work, batch.leaves, run.saves, draws) for work, batch in given])
            worker.run_minibatch(run, mini, _Measured(mini, measures, run.saves))
        losses = [one[0].item() for one in mini.results]
        for loss, work, batch in zip(losses, works, batches, strict=True):
            if not math.isfinite(loss):
                raise FloatingPointError(f"the loss is {loss} at step {training.position.step}, batch {batch.number}")
            training.finish_batch(loss, batch.leaves, stepped=work.steps)
        stepped = works[-1].steps
        if stepped and training.update == "auto" and worker.memory.host is not None:
            worker.memory.host.decide(training)
        taken_s = (worker.busy.compute_s - start_s) * training.job.accumulate / len(batches)
        run.seconds_per_step += (taken_s - run.seconds_per_step) * 0.2
        every = training.job.evaluate_every
        if stepped and training.validation is not None and every and training.position.step % every == 0:
            run.wants_validation = True

    def _train_whole(self, worker: Worker, mini: WholeBatch, measures: Sequence[ShardMeasure]) -> WholeBatch:
        run = self.run_of
        expected = run.ways.begin(mini, worker.memory, _Measured(mini, measures, run.saves))
        worker.run_minibatch(run, mini, expected)
        run.ways.learn(mini, worker.memory.room_bytes)
        return mini

    def _measures_for(self, worker: Worker, leaves: list[torch.Tensor], structure: Structure) -> list[ShardMeasure]:
        run, training = self.run_of, self.run_of.training
        if training.cuts.known(structure) is not None:
            return run.measures_of[structure.signature]
        program = training.program(leaves, structure)
        Preparation(self.engine, run, worker).place_constants()
        with self.engine.pilot_lock:
            found = measure(training, worker.memory, program, leaves, structure, self.engine.measures)
        run.measures_of[structure.signature] = found
        return found

    def _validate(self, worker: Worker) -> bool:
        """Run one pass over the validation batches, and return whether the job must stop."""
        run, training = self.run_of, self.run_of.training
        assert training.validation is not None
        run.last_validation = training.position.step
        sums: dict[str, float] = {}
        num_batches = 0
        with training.randomness.swapped_in():
            batches = iter(training.validation)
        while True:
            with training.randomness.swapped_in():
                batch = next(batches, None)
            if batch is None:
                break
            for name, value in self._evaluate(worker, batch).items():
                sums[name] = sums.get(name, 0.0) + value
            num_batches += 1
        if not num_batches:
            raise ValueError(f"job {run.job.name!r}: its validation data yields no batch")
        found = {name: value / num_batches for name, value in sums.items()}
        training.validations.append({"step": float(training.position.step), **found})
        return self.engine.upkeep.validated(run, found)

    def _evaluate(self, worker: Worker, batch: Any) -> dict[str, float]:  # any: a batch
        run, training = self.run_of, self.run_of.training
        leaves, structure = flatten(batch)
        if training.cuts.known(structure, training=False) is None:
            training.program(leaves, structure, training=False)
            Preparation(self.engine, run, worker).place_constants()
        program = training.program(leaves, structure, training=False)
        work = Work(training, worker.memory, program, structure, Behaviour(trains=False))
        mini = mini_batch(work, leaves, run.saves)
        larger = max(1.0, sum(one.nbytes for one in leaves) / max(1, run.leaf_bytes))
        worker.run_minibatch(run, mini, _AtMost(mini, run.measures, larger))
        result = program.rebuild_result(mini.results[0])
        named = result if isinstance(result, dict) else {"loss" if training.job.metric is None else "metric": result}
        return {str(name): float(value) for name, value in named.items()}

    def _handle(self, worker: Worker, error: BaseException) -> None:
        """Handle an error of the job.

        The first time that memory runs out, the job restarts with smaller shards from its last checkpoint. Any other
        error ends the job.
        """
        run, engine = self.run_of, self.engine
        is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not (is_memory and run.is_prepared and not run.num_times_smaller):
            engine.fail(run, worker, error)
            return
        for item in run.training.items():
            worker.memory.discard(item)
        run.num_times_smaller, run.ways = run.num_times_smaller + 1, Ways()  # what it learned was about other shards
        run.wants_validation, run.last_validation, run.saved_step = False, -1, -1
        with engine.condition:
            run.training, run.is_prepared, run.home = JobTraining(run.job), False, None


class _Measured:
    """Memory and time of training units, from the measures of their shards."""

    def __init__(self, mini: MiniBatch, measures: Sequence[ShardMeasure], saves: Sequence[bool]):
        self._mini, self._measures, self._saves = mini, measures, saves

    def transient_bytes(self, index: int) -> int:
        task = self._mini.tasks[index]
        one, saves = self._measures[task.shard], self._saves[task.shard]
        if task.kind is UnitKind.STEP:  # its gradients are items
            work = self._mini.work
            if work.stays_away(task.shard):
                return 0
            return work.cast_bytes(task.shard) + self._step_bytes(task.shard) - one.stepped_bytes
        if task.kind is UnitKind.FORWARD:
            return one.saving_bytes if saves else one.dropping_bytes
        most = one.backward_bytes if saves else one.again_bytes
        steps = self._mini.work.steps and not self._mini.work.steps_apart
        return max(most, self._step_bytes(task.shard) + one.handed_bytes) if steps else most

    def _step_bytes(self, at: int) -> int:
        """Return the bytes that the optimizer's step takes.

        Some or all of the state that a first step makes exists already.
        """
        return max(self._measures[at].later_step_bytes, self._measures[at].step_bytes - self._mini.work.state_bytes(at))

    def remaining_bytes(self, index: int) -> int:
        task = self._mini.tasks[index]
        one = self._measures[task.shard]
        if task.kind is UnitKind.FORWARD:
            return one.boundary_bytes + (one.activation_bytes if self._saves[task.shard] else 0)
        return 0 if task.kind is UnitKind.STEP else one.handed_bytes

    def recompute_s(self, index: int) -> float:
        at = self._mini.tasks[index].shard
        return 0.0 if self._saves[at] else self._measures[at].forward_s


class _AtMost:
    """Memory of validation units.

    None takes more than training did, except in proportion to batches that are ``larger``.
    """

    def __init__(self, mini: MiniBatch, measures: Sequence[ShardMeasure], larger: float):
        self._mini, self._measures, self._larger = mini, measures, larger

    def transient_bytes(self, index: int) -> int:
        one = self._measures[self._mini.tasks[index].shard]
        return int(self._larger * (one.saving_bytes or one.backward_bytes))  # the last shard has no forward of its own

    def remaining_bytes(self, index: int) -> int:  # noqa: ARG002
        return 0

    def recompute_s(self, index: int) -> float:  # noqa: ARG002
        return 0.0
