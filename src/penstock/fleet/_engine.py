"""The engine: which device runs which job next, and what a job's turn is."""

import math
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from penstock.errors import BudgetError
from penstock.fleet._batch import Structure, flatten
from penstock.fleet._groups import content_key
from penstock.fleet._job import Job
from penstock.fleet._memory import Item
from penstock.fleet._partition import AtomCost, PartitionProblem, merged, partition
from penstock.fleet._pilot import ShardMeasure, measure
from penstock.fleet._problem import UnitKind
from penstock.fleet._program import Captured, Program
from penstock.fleet._schedulers import Progress, Scheduler
from penstock.fleet._stages import Staged
from penstock.fleet._training import Training
from penstock.fleet._units import Behaviour, MiniBatch
from penstock.fleet._worker import Turn, Worker

_MOST_ATOMS = 300
_MOST_CUTS = 8
"""Times a model is cut anew when pilots find more than was estimated."""


class JobState(Enum):
    """Where a job is in its life."""

    PENDING = "pending"
    """Not begun."""
    RUNNING = "running"
    """Begun; on a device or waiting for one."""
    PAUSED = "paused"
    """Held until it is resumed."""
    DONE = "done"
    """Trained to its end."""
    FAILED = "failed"
    """Ended by an error of its own."""
    STOPPED = "stopped"
    """Ended before its end: by a user, or by a stopper."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more happens to it."""
        return self in (JobState.DONE, JobState.FAILED, JobState.STOPPED)


@dataclass(eq=False)
class JobRun:
    """A job in the fleet. Guarded by the engine's lock, but for `training`, which whoever took the job has alone."""

    job: Job
    place: int
    training: Training
    state: JobState = JobState.PENDING
    wanted: JobState | None = None
    """What a user asked for meanwhile: paused, stopped, or running again."""
    error: str | None = None
    trace: str = ""
    """The whole traceback of the error."""
    home: Worker | None = None
    """The device that ran it last and has its items."""
    is_taken: bool = False
    arrival_s: float = 0.0
    seconds_per_step: float = 0.0
    """On one device, units alone; refined as steps are measured."""
    num_steps: int = 0
    """Steps in all, as far as known."""
    measures: list[ShardMeasure] = field(default_factory=list)
    """Of its first shape of batch, per shard."""
    measures_of: dict[Any, list[ShardMeasure]] = field(default_factory=dict)
    """Of all shapes that came."""
    saves: list[bool] = field(default_factory=list)
    is_prepared: bool = False
    last_validation: int = -1
    wants_validation: bool = False
    saved_step: int = -1
    """Step of the last checkpoint."""
    saved_s: float = 0.0
    """When that was."""
    started_s: float = 0.0
    ended_s: float = 0.0
    is_smaller: int = 0
    """Times it was cut smaller because a device ran out of memory."""

    @property
    def remaining_s(self) -> float:
        """Seconds of its units that are left, on one device; infinite before it was measured."""
        if not self.is_prepared:
            return math.inf
        left = max(1, self.num_steps - self.training.position.step)
        return left * self.seconds_per_step


@dataclass(slots=True, kw_only=True)
class Hooks:
    """What the fleet around the engine does at certain moments, on the thread of the device."""

    stepped: Callable[[JobRun, Worker], None]
    """After an optimizer step."""
    validated: Callable[[JobRun, dict[str, float]], bool]
    """After a validation; returns whether the job is to stop."""
    save: Callable[[JobRun, Worker], None]
    """Writes a checkpoint now."""
    wants_save: Callable[[JobRun], bool]
    """Whether one is due."""
    restore: Callable[[JobRun], Callable[[], None] | None]
    """What a checkpoint holds for a job that begins: replaces its tensors, and returns what sets the rest."""
    ended: Callable[[JobRun, Worker], None]
    """When a job is over."""


class Engine:
    """Jobs and devices. Workers ask it for turns; everything about order and life of jobs is here, under one lock."""

    def __init__(
        self,
        scheduler: Scheduler,
        hooks: Hooks,
        *,
        budget_bytes: int,
        sharp: bool = True,
        recompute: bool | None = None,
        lane_rate: Callable[[], tuple[float, float]],
    ):
        self.condition = threading.Condition(threading.RLock())
        self.runs: list[JobRun] = []
        self.workers: list[Worker] = []
        self.hooks = hooks
        self.budget_bytes = budget_bytes
        self.pilot_lock = threading.Lock()
        self.measures: dict[tuple[Any, ...], ShardMeasure] = {}
        self.frozen: dict[str, dict[int, Item]] = {}
        """Frozen groups by content, and per device."""
        self.recompute = recompute
        self.lane_rate = lane_rate
        self.is_stopping = False
        self.accepts_jobs = False
        """Whether jobs may still come, so that workers wait rather than end."""
        self._scheduler = scheduler
        self._sharp = sharp

    def add(self, run: JobRun) -> None:
        """A job to train."""
        with self.condition:
            run.arrival_s = time.time()
            self.runs.append(run)
            self.condition.notify_all()

    def take(self, worker: Worker) -> Turn | None:
        """The next turn for a device that has nothing; waits for one. ``None`` when there is none to come."""
        while True:
            with self.condition:
                turn = self._choose(worker, own=None)
                if turn is not None:
                    return turn
                if self.is_stopping or not (self.accepts_jobs or any(not run.state.is_over for run in self.runs)):
                    self.condition.notify_all()
                    return None
                self.condition.wait(timeout=0.01)
            worker.memory.waterfall.reap()

    def look_ahead(self, worker: Worker, current: Any) -> Turn | None:  # any: a JobRun
        """The turn after the one at hand, chosen before that has ended; ``None`` leaves it to `take`."""
        with self.condition:
            return self._choose(worker, own=current)

    def give_back(self, run: JobRun, worker: Worker) -> None:
        """The turn has ended; another device may take the job once its bytes are below."""
        goes_on = isinstance(worker.following, JobTurn) and worker.following.run_of is run
        if not goes_on and not run.state.is_over and len(self.workers) > 1:
            for item in run.training.items():
                if item.storages is not None:
                    worker.memory.write(item)
        with self.condition:
            run.is_taken = goes_on
            self._obey(run, worker)
            self.condition.notify_all()

    def fail(self, run: JobRun, worker: Worker, error: BaseException) -> None:
        """The job has failed; the others go on."""
        run.error = "".join(traceback.format_exception_only(error)).strip()
        run.trace = "".join(traceback.format_exception(error))
        self.end(run, worker, JobState.FAILED)

    def end(self, run: JobRun, worker: Worker, state: JobState) -> None:
        """The job is over; its bytes are given back."""
        with self.condition:
            run.state, run.ended_s = state, time.time()
        self.hooks.ended(run, worker)
        for item in run.training.items():
            worker.memory.discard(item)
        run.training.let_go()

    def _obey(self, run: JobRun, worker: Worker) -> None:
        """Carries out what a user wanted, between turns."""
        wanted, run.wanted = run.wanted, None
        if wanted is None or run.state.is_over:
            return
        if wanted is JobState.STOPPED:
            if run.is_prepared:
                self.hooks.save(run, worker)
            self.end(run, worker, JobState.STOPPED)
        elif wanted is JobState.PAUSED:
            run.state = JobState.PAUSED
        elif run.state is JobState.PAUSED:
            run.state = JobState.RUNNING if run.is_prepared else JobState.PENDING

    def _choose(self, worker: Worker, own: JobRun | None) -> Turn | None:
        if self.is_stopping:
            return None
        best: tuple[float, int, JobRun] | None = None
        for order, run in enumerate(self.runs):
            if run is own:
                may_take = run.wanted is None and run.state is JobState.RUNNING
            else:
                may_take = (own is None or self._sharp) and self._may_take(run, worker)
            if not may_take:
                continue
            priority = self._priority(run)
            if run is own and priority == (best[0] if best else priority):
                order = -1  # of equals, the one whose bytes are here
            if best is None or (priority, order) < best[:2]:
                best = (priority, order, run)
        if best is None:
            return None
        run = best[2]
        if run is not own:
            run.is_taken = True
            self._move(run, worker)
        return JobTurn(self, run)

    def _priority(self, run: JobRun) -> float:
        if not run.is_prepared:
            return -math.inf  # what it takes is to be known
        return self._scheduler(
            Progress(
                job=run.place,
                arrival_s=run.arrival_s,
                remaining_s=run.remaining_s,
                num_done=run.training.position.step,
            )
        )

    def _may_take(self, run: JobRun, worker: Worker) -> bool:
        if run.is_taken:
            return False
        if run.wanted is not None and (run.home in (None, worker)):
            run.is_taken = True
            self._obey(run, worker)
            run.is_taken = False
        if run.state not in (JobState.PENDING, JobState.RUNNING) or run.wanted is not None:
            return False
        if run.home is None or run.home is worker:
            return True
        return all(item.is_settled for item in run.training.items())

    def _move(self, run: JobRun, worker: Worker) -> None:
        """Hands the job's items over to ``worker``. Holds the lock."""
        if run.home is not None and run.home is not worker:
            waterfall = worker.memory.waterfall
            for group in run.training.groups:
                if group.item is None:
                    continue
                if group.kind == "frozen":
                    group.item = self._frozen_on(group.item, worker)
                else:
                    group.item = group.item.borrowed(waterfall)
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
        """The first shard's groups."""
        groups = self.run_of.training.groups
        return (
            [one.item for one in groups if 0 in one.shards and one.item is not None] if self.run_of.is_prepared else []
        )

    def run(self, worker: Worker) -> None:
        """Whatever comes next for the job; a fault of its own ends it alone."""
        run, engine = self.run_of, self.engine
        try:
            if run.state.is_over:
                return  # chosen before its last turn had ended
            if not run.is_prepared:
                Preparation(engine, run, worker).run()
            else:
                self._advance(worker)
        except (Exception, torch.OutOfMemoryError) as error:
            self._handle(worker, error)
        finally:
            engine.give_back(run, worker)

    def _advance(self, worker: Worker) -> None:
        run, engine = self.run_of, self.engine
        training = run.training
        if run.wants_validation:
            run.wants_validation = False
            if self._validate(worker):
                engine.hooks.save(run, worker)
                engine.end(run, worker, JobState.STOPPED)
                return
        if training.is_done():
            if (
                training.validation is not None
                and run.last_validation != training.position.step
                and self._validate(worker)
            ):
                engine.hooks.save(run, worker)
                engine.end(run, worker, JobState.STOPPED)
                return
            engine.hooks.save(run, worker)
            engine.end(run, worker, JobState.DONE)
            return
        batch = training.next_batch()
        if batch is None:
            every = training.job.evaluate_every
            run.wants_validation = training.validation is not None and every is None
            return
        self._train(worker, *batch)
        if training.position.micro == 0:
            if engine.hooks.wants_save(run):
                engine.hooks.save(run, worker)
            engine.hooks.stepped(run, worker)

    def _train(self, worker: Worker, leaves: list[torch.Tensor], structure: Structure) -> None:
        run, training = self.run_of, self.run_of.training
        measures = self._measures_for(worker, leaves, structure)
        program = training.program(leaves, structure)
        mini = MiniBatch(
            training,
            worker.memory,
            program,
            leaves,
            structure,
            run.saves,
            is_random=[one.is_random for one in measures],
        )
        start_s = worker.busy.compute_s
        worker.run_minibatch(
            run,
            mini,
            lambda index: _transient(mini, index, measures, run.saves),
            lambda index: _again(mini, index, measures, run.saves),
        )
        loss = mini.results[0].item()
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss} at step {training.position.step}, batch {training.position.batch}"
            )
        stepped = mini.steps
        training.finish_batch(loss, leaves, stepped=stepped)
        taken_s = (worker.busy.compute_s - start_s) * training.job.accumulate
        run.seconds_per_step += (taken_s - run.seconds_per_step) * 0.2
        every = training.job.evaluate_every
        if stepped and training.validation is not None and every and training.position.step % every == 0:
            run.wants_validation = True

    def _measures_for(self, worker: Worker, leaves: list[torch.Tensor], structure: Structure) -> list[ShardMeasure]:
        run, training = self.run_of, self.run_of.training
        if training.knows(structure):
            return run.measures_of[structure.signature]
        program = training.program(leaves, structure)
        Preparation(self.engine, run, worker).place_constants()
        with self.engine.pilot_lock:
            found = measure(training, worker.memory, program, leaves, structure, self.engine.measures)
        run.measures_of[structure.signature] = found
        return found

    def _validate(self, worker: Worker) -> bool:
        """One pass over the validation batches. Returns whether the job is to stop."""
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
        return self.engine.hooks.validated(run, found)

    def _evaluate(self, worker: Worker, batch: Any) -> dict[str, float]:  # any: a batch
        run, training = self.run_of, self.run_of.training
        leaves, structure = flatten(batch)
        if not training.knows(structure, training=False):
            training.program(leaves, structure, training=False)
            Preparation(self.engine, run, worker).place_constants()
        program = training.program(leaves, structure, training=False)
        mini = MiniBatch(
            training, worker.memory, program, leaves, structure, run.saves, behaviour=Behaviour(trains=False)
        )
        most = max(max(one.saving_bytes, one.backward_bytes) for one in run.measures)
        worker.run_minibatch(run, mini, lambda _: most, lambda _: 0.0)
        result = program.rebuild_result(mini.results)
        named = result if isinstance(result, dict) else {"loss" if training.job.metric is None else "metric": result}
        return {str(name): float(value) for name, value in named.items()}

    def _handle(self, worker: Worker, error: BaseException) -> None:
        """Out of memory is answered once by smaller shards, from the last checkpoint; everything else ends the job."""
        run, engine = self.run_of, self.engine
        is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not (is_memory and run.is_prepared and not run.is_smaller):
            engine.fail(run, worker, error)
            return
        for item in run.training.items():
            worker.memory.discard(item)
        run.is_smaller += 1
        with engine.condition:
            run.training, run.is_prepared, run.home = Training(run.job), False, None


def _transient(mini: MiniBatch, index: int, measures: Sequence[ShardMeasure], saves: Sequence[bool]) -> int:
    """Bytes that a unit takes beside what it needs."""
    task = mini.tasks[index]
    one = measures[task.shard]
    if task.kind is UnitKind.STEP:
        return one.step_bytes
    if task.kind is UnitKind.FORWARD:
        return one.saving_bytes if saves[task.shard] else one.dropping_bytes
    most = one.backward_bytes if saves[task.shard] else one.again_bytes
    return max(most, one.step_bytes) if mini.steps and not mini.waits_for_all else most


def _again(mini: MiniBatch, index: int, measures: Sequence[ShardMeasure], saves: Sequence[bool]) -> float:
    at = mini.tasks[index].shard
    return 0.0 if saves[at] else measures[at].forward_s


class Preparation:
    """From a job's factories to shards that were measured, in groups that can move."""

    def __init__(self, engine: Engine, run: JobRun, worker: Worker):
        self.engine, self.run_of, self.worker = engine, run, worker

    def run(self) -> None:
        """Builds, cuts, measures; after it the job trains."""
        run, engine = self.run_of, self.engine
        training = run.training
        with engine.condition:
            run.state, run.started_s = JobState.RUNNING, time.time()
            run.home = self.worker
        training.build()
        resume = engine.hooks.restore(run)
        leaves, structure = training.peek()
        captured = training.capture(leaves, structure, training=True)
        training.learn_constants(captured)
        self._cut(captured, leaves, structure)
        training.hollow()
        if resume is not None:
            resume()
        run.num_steps = training.count_steps()
        with engine.condition:
            run.is_prepared = True

    def place_constants(self) -> None:
        """Constants that a new graph brought get a group of their own."""
        training = self.run_of.training
        fresh = {name: tensor for name, tensor in training.originals.items() if name not in training.group_of}
        if fresh:
            training.add_group(fresh)
            self._place()
            training.hollow()

    def _cut(self, captured: Captured | Staged, leaves: list[torch.Tensor], structure: Structure) -> None:
        run, training, memory = self.run_of, self.run_of.training, self.worker.memory
        sizes = {name: tensor.nbytes for name, tensor in training.originals.items()}
        costs, ends = merged(
            [
                AtomCost(
                    tensors={name: sizes[name] for name in atom.tensors},
                    activation_bytes=atom.activation_bytes,
                    crossing_bytes=atom.crossing_bytes,
                    label=atom.label,
                )
                for atom in captured.atoms
            ],
            _MOST_ATOMS,
        )
        factor, share = 1.0, 2.0
        error: BudgetError | None = None
        for _ in range(_MOST_CUTS):
            problem = PartitionProblem(
                atoms=tuple(_scaled(one, factor) for one in costs),
                trained=frozenset(training.optimizer.trained),
                state_share=share,
                budget_bytes=int(self.engine.budget_bytes * 0.7**run.is_smaller),
            )
            try:
                cut = tuple(ends[end] for end in partition(problem))
            except BudgetError as refused:
                raise error or refused from None
            program = training.use(captured, structure, cut)
            self._place()
            try:
                with self.engine.pilot_lock:
                    run.measures = measure(training, memory, program, leaves, structure, self.engine.measures)
                self._check(run.measures, program)
            except BudgetError as refused:
                error = refused
                self._take_away()
                factor *= 1.5
                continue
            break
        else:
            assert error is not None
            raise error
        run.measures_of = {structure.signature: run.measures}
        run.saves = choose_saves(run.measures, memory.budget_bytes, self.engine.lane_rate(), self.engine.recompute)
        run.seconds_per_step = run.job.accumulate * sum(one.forward_s + one.backward_s for one in run.measures)
        run.seconds_per_step += sum(one.step_s for one in run.measures)

    def _check(self, measures: Sequence[ShardMeasure], program: Program) -> None:
        """Raises ``BudgetError`` where a unit takes more than the budget, next shard not counted."""
        for one, shard in zip(measures, program.shards, strict=True):
            most = max(
                one.parameter_bytes + one.state_bytes + max(one.again_bytes, one.step_bytes) + one.boundary_bytes,
                one.parameter_bytes + one.dropping_bytes,
            )
            if most > self.engine.budget_bytes:
                raise BudgetError(
                    f"the shard {shard.label} takes {most} bytes, above the budget of {self.engine.budget_bytes} bytes; "
                    f"a budget of {most} has room for it"
                )

    def _place(self) -> None:
        """Puts groups that are nowhere yet into the device's memory, whence they go below as room is needed."""
        training, memory = self.run_of.training, self.worker.memory
        for group in training.groups:
            if group.item is not None:
                continue
            key = ""
            if group.kind == "frozen":
                key = content_key({name: training.originals[name] for name in group.layouts}, group.layouts)
                with self.engine.condition:
                    places = self.engine.frozen.get(key)
                    if places and (found := self._shared(places)) is not None:
                        group.item = found
                        continue
            memory.make_room(group.size_bytes + 2**16, (), f"shard {group.owner} of job {self.run_of.job.name!r}")
            group.item = memory.add(training.initial_item(group, memory.device))
            if group.kind == "frozen":
                memory.write(group.item)
                with self.engine.condition:
                    self.engine.frozen[key] = {self.worker.index: group.item}

    def _shared(self, places: dict[int, Item]) -> Item | None:
        if self.worker.index in places:
            return places[self.worker.index]
        settled = next((item for item in places.values() if item.is_settled), None)
        if settled is None:
            return None
        places[self.worker.index] = settled.shared(self.worker.memory.waterfall)
        return places[self.worker.index]

    def _take_away(self) -> None:
        training, memory = self.run_of.training, self.worker.memory
        for group in training.groups:
            if group.item is not None and group.kind != "frozen":
                memory.discard(group.item)


def _scaled(cost: AtomCost, factor: float) -> AtomCost:
    return AtomCost(
        tensors=cost.tensors,
        activation_bytes=int(cost.activation_bytes * factor),
        crossing_bytes=cost.crossing_bytes,
        label=cost.label,
    )


def choose_saves(
    measures: Sequence[ShardMeasure], budget_bytes: int, rates: tuple[float, float], recompute: bool | None
) -> list[bool]:
    """Per shard, whether backward finds what forward saved. ``recompute`` settles it for all.

    What is saved costs its way out and in, unless all of the job stays on the device; what is not costs forward again.
    Both lanes run beside the computation, so a mini-batch takes as long as the longest of the three. Shards are taken in
    the order of seconds per byte, and as many recompute as makes the mini-batch shortest.
    """
    last = len(measures) - 1
    can_save = [
        one.parameter_bytes + one.state_bytes + one.activation_bytes + max(one.backward_bytes, one.step_bytes)
        <= budget_bytes
        and one.parameter_bytes + one.saving_bytes <= budget_bytes
        for one in measures
    ]
    saves = [can and recompute is not True for can in can_save]
    saves[last] = True  # forward and backward are one unit
    if recompute is not None:
        return saves
    order = sorted(range(last), key=lambda at: measures[at].forward_s / max(1, measures[at].activation_bytes))
    whole = sum(2 * one.parameter_bytes + one.state_bytes + one.activation_bytes for one in measures)
    if whole + max(one.backward_bytes for one in measures) <= budget_bytes:
        return saves

    def length_s(chosen: Sequence[bool]) -> float:
        compute_s = sum(one.forward_s + one.backward_s + one.step_s for one in measures)
        in_bytes = sum(2 * one.parameter_bytes + one.state_bytes + one.boundary_bytes for one in measures)
        out_bytes = sum(one.parameter_bytes + one.state_bytes + one.boundary_bytes for one in measures)
        for keeps, one in zip(chosen, measures, strict=True):
            compute_s += 0.0 if keeps else one.forward_s
            in_bytes += one.activation_bytes if keeps else 0
            out_bytes += one.activation_bytes if keeps else 0
        return max(compute_s, out_bytes / rates[0], in_bytes / rates[1])

    best, best_s = saves, length_s(saves)
    for at in order:
        saves = [keeps and other != at for other, keeps in enumerate(saves)]
        taken_s = length_s(saves)
        if taken_s < best_s:
            best, best_s = saves, taken_s
    return best
