"""A job's turn on a device: what a worker does between two choices of the engine."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.errors import CaptureError
from penstock.fleet._batch import Structure, flatten
from penstock.fleet._cut import CutBatch, CutBatches
from penstock.fleet._engine import Engine
from penstock.fleet._job import CannotBeCut
from penstock.fleet._life import JobRun, JobState
from penstock.fleet._memory import Item
from penstock.fleet._pilot import ShardMeasure
from penstock.fleet._prepare import Preparation
from penstock.fleet._problem import UnitKind
from penstock.fleet._training import JobTraining
from penstock.fleet._uncut import Uncut
from penstock.fleet._units import MiniBatch
from penstock.fleet._ways import Ways
from penstock.fleet._whole import WholeBatch, mini_batch
from penstock.fleet._work import Behaviour, Work
from penstock.fleet._worker import Turn, Worker


class JobTurns:
    """The turns of a fleet's jobs, in the order in which the engine chooses jobs."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def take(self, worker: Worker) -> Turn | None:
        """Wait for the next turn of an idle device and return it; ``None`` if no more will come."""
        run = self._engine.take(worker)
        return None if run is None else JobTurn(self._engine, run)

    def look_ahead(self, worker: Worker, current: JobRun) -> Turn | None:
        """Return the turn after the current one, chosen before that ends; ``None`` leaves the choice to `take`."""
        run = self._engine.look_ahead(worker, current)
        return None if run is None else JobTurn(self._engine, run)


@dataclass(frozen=True, slots=True)
class JobBatch:
    """One batch of a job's data."""

    leaves: list[torch.Tensor]
    """Its tensors."""
    structure: Structure
    """The rest of it."""
    number: int
    """Its number in the current pass over the data, from 1."""


class JobTurn:
    """A job's next mini-batch, its preparation, or a validation."""

    def __init__(self, engine: Engine, run: JobRun):
        self.engine, self.run_of = engine, run

    def first_items(self, worker: Worker) -> list[Item]:  # noqa: ARG002  # the protocol's
        """Return the items of the first shard's groups."""
        groups = self.run_of.training.groups if self.run_of.is_prepared else ()
        first = [group.travelling for group in groups if 0 in group.shards]
        return [item for item in first if item is not None]

    def run(self, worker: Worker) -> None:
        """Run what comes next for the job. An error of the job ends only this job."""
        run, engine = self.run_of, self.engine
        try:
            if run.state.is_over:
                return  # this turn was chosen before the job's last turn had ended
            if run.wanted is JobState.STOPPED and not (run.is_prepared and run.training.position.micro):
                if run.is_prepared:
                    engine.upkeep.save(run, worker, is_last=True)
                engine.end(run, worker, JobState.STOPPED)
                return
            if not run.is_prepared:
                Preparation(engine, run, worker).run()
                if engine.pilots.end_jobs:
                    engine.end(run, worker, JobState.STOPPED)
            else:
                self._advance(worker)
        except (Exception, SystemExit) as error:  # a script's sys.exit() is its own, and not the fleet's
            self._handle(worker, error)
        finally:
            following = worker.following
            engine.give_back(run, worker, goes_on=isinstance(following, JobTurn) and following.run_of is run)

    def _advance(self, worker: Worker) -> None:
        run, engine = self.run_of, self.engine
        training = run.training
        batch = None
        while batch is None:
            if run.milestones.wants_validation and self._validate(worker):
                engine.upkeep.save(run, worker, is_last=True)
                engine.end(run, worker, JobState.STOPPED)
                return
            if training.is_done():
                self._finish(worker)
                return
            batch = training.feed.next_batch()
            if batch is None:
                self._note_end_of_pass()
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
        if run.plan.uncut is not None:
            run.plan.uncut.decide()
        if (
            training.feed.validation is not None
            and run.milestones.last_validation != training.position.step
            and self._validate(worker)
        ):
            engine.upkeep.save(run, worker, is_last=True)
            engine.end(run, worker, JobState.STOPPED)
            return
        for item in training.drop_unfinished_step():
            worker.memory.discard(item)
        engine.upkeep.save(run, worker, is_last=True)
        engine.end(run, worker, JobState.DONE)

    def _note_end_of_pass(self) -> None:
        training = self.run_of.training
        wants = training.feed.validation is not None and training.job.evaluate_every is None
        self.run_of.milestones.wants_validation = wants

    def _batches_of_turn(self, first: JobBatch) -> list[JobBatch]:
        """Return ``first``, or all batches of its step.

        A pass over the data that ends in the middle of a step also ends the turn.
        """
        run, training = self.run_of, self.run_of.training
        batches = [first]
        while run.plan.is_vertical and not training.position.micro and len(batches) < training.job.accumulate:
            last = batches[-1]
            batches[-1] = replace(last, leaves=[leaf.clone() for leaf in last.leaves])  # data may reuse them
            batch = training.feed.next_batch()
            if batch is None:
                self._note_end_of_pass()
                break
            batches.append(JobBatch(*batch, training.position.batch))
        return batches

    def _train(self, worker: Worker, batches: list[JobBatch]) -> None:
        """Train shard by shard if these are all batches of a step and of one shape, otherwise batch by batch."""
        training = self.run_of.training
        signatures = {batch.structure.signature for batch in batches}
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
        if signature not in run.plan.vertical_of:
            program = run.training.program(batch.leaves, batch.structure)
            preparation = Preparation(self.engine, run, worker)
            run.plan.vertical_of[signature] = preparation.goes_vertically(program, run.plan.measures_of[signature])
        return run.plan.vertical_of[signature]

    def _train_on(self, worker: Worker, batches: list[JobBatch]) -> None:
        run, training = self.run_of, self.run_of.training
        start_s = worker.log.busy.compute_s
        if run.plan.uncut is not None:
            mini: MiniBatch = self._train_uncut(worker, run.plan.uncut, batches[0])
            steps = [mini.work.steps]
        else:
            mini, steps = self._train_cut(worker, batches)
        losses = [results[0].item() for results in mini.results]
        for loss, stepped, batch in zip(losses, steps, batches, strict=True):
            if not math.isfinite(loss):
                raise FloatingPointError(f"the loss is {loss} at step {training.position.step}, batch {batch.number}")
            training.finish_batch(loss, batch.leaves, stepped=stepped)
        stepped = steps[-1]
        if stepped and training.update == "auto" and worker.memory.host is not None:
            worker.memory.host.decide(training)
        taken_s = (worker.log.busy.compute_s - start_s) * training.job.accumulate / len(batches)
        run.plan.seconds_per_step += (taken_s - run.plan.seconds_per_step) * 0.2
        every = training.job.evaluate_every
        if stepped and training.feed.validation is not None and every and training.position.step % every == 0:
            run.milestones.wants_validation = True

    def _train_cut(self, worker: Worker, batches: list[JobBatch]) -> tuple[MiniBatch, list[bool]]:
        """Train on these batches; return them as they ran, and which of them ended a step."""
        run, training = self.run_of, self.run_of.training
        training.weights.make_hollow_on(worker.device)
        leaves, structure = batches[0].leaves, batches[0].structure
        measures = self._measures_for(worker, leaves, structure)
        program = training.program(leaves, structure)
        works = [
            Work(training, worker.memory, program, batch.structure, micro=training.position.micro + number)
            for number, batch in enumerate(batches)
        ]
        steps = [work.steps for work in works]
        if program.whole is not None:
            return self._train_whole(worker, WholeBatch(works[0], leaves), measures), steps
        draws = [shard.draws for shard in measures]
        pairs = zip(works, batches, strict=True)
        mini = CutBatches([CutBatch(work, batch.leaves, run.plan.saves, draws) for work, batch in pairs])
        worker.run_minibatch(run, mini, _Measured(mini, measures, run.plan.saves))
        return mini, steps

    def _train_uncut(self, worker: Worker, uncut: Uncut, batch: JobBatch) -> MiniBatch:
        mini = uncut.batch(batch.leaves, batch.structure, trains=True)
        worker.run_minibatch(self.run_of, mini, uncut)
        uncut.learn(mini)
        return mini

    def _train_whole(self, worker: Worker, mini: WholeBatch, measures: Sequence[ShardMeasure]) -> WholeBatch:
        run = self.run_of
        expected = run.plan.ways.begin(mini, worker.memory, _Measured(mini, measures, run.plan.saves))
        worker.run_minibatch(run, mini, expected)
        run.plan.ways.learn(mini, worker.memory.room_bytes)
        return mini

    def _measures_for(self, worker: Worker, leaves: list[torch.Tensor], structure: Structure) -> list[ShardMeasure]:
        run, training = self.run_of, self.run_of.training
        if training.cuts.known(structure) is not None:
            return run.plan.measures_of[structure.signature]
        program = training.program(leaves, structure)
        Preparation(self.engine, run, worker).place_constants()
        measures = self.engine.pilots.measure(training, worker.memory, program, leaves, structure)
        run.plan.measures_of[structure.signature] = measures
        return measures

    def _validate(self, worker: Worker) -> bool:
        """Run one pass over the validation batches, and return whether the job must stop."""
        run, training = self.run_of, self.run_of.training
        assert training.feed.validation is not None
        run.milestones.last_validation, run.milestones.wants_validation = training.position.step, False
        sums: dict[str, float] = {}
        num_batches = 0
        with training.randomness.swapped_in():
            batches = iter(training.feed.validation)
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
        means = {name: value / num_batches for name, value in sums.items()}
        training.optimizer.step_on_plateau(means)
        training.history.validations.append({"step": float(training.position.step), **means})
        return self.engine.upkeep.validated(run, worker, means)

    def _evaluate(self, worker: Worker, batch: Any) -> dict[str, float]:  # any: a batch
        run, training = self.run_of, self.run_of.training
        leaves, structure = flatten(batch)
        if (uncut := run.plan.uncut) is not None:
            mini: MiniBatch = uncut.batch(leaves, structure, trains=False)
            worker.run_minibatch(run, mini, uncut)
            return self._named(mini.work.program.rebuild_result(mini.results[0]))
        if training.cuts.known(structure, training=False) is None:
            training.program(leaves, structure, training=False)
            Preparation(self.engine, run, worker).place_constants()
        program = training.program(leaves, structure, training=False)
        work = Work(training, worker.memory, program, structure, Behaviour(trains=False))
        mini = mini_batch(work, leaves, run.plan.saves)
        larger = max(1.0, sum(leaf.nbytes for leaf in leaves) / max(1, run.plan.leaf_bytes))
        worker.run_minibatch(run, mini, _AtMost(mini, run.plan.measures, larger))
        return self._named(program.rebuild_result(mini.results[0]))

    def _named(self, result: Any) -> dict[str, float]:  # any: a scalar or a dict of them
        training = self.run_of.training
        named = result if isinstance(result, dict) else {"loss" if training.job.metric is None else "metric": result}
        return {str(name): float(value) for name, value in named.items()}

    def _handle(self, worker: Worker, error: BaseException) -> None:
        """Handle an error of the job.

        The first time that memory runs out, the job restarts with smaller shards from its last checkpoint. After any
        other error it does so as often as the fleet retries, or ends.
        """
        run, engine = self.run_of, self.engine
        is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        may_help = run.is_prepared and not run.plan.num_times_smaller and run.plan.uncut is None
        if isinstance(error, CannotBeCut):
            error = CaptureError(
                f"a later batch shows that the job cannot be cut, because {error}, but the job was cut, as its "
                "first batch allowed. Let the first batch take the same way"
            )
        if is_memory and may_help:
            run.plan.num_times_smaller += 1
        elif engine.upkeep.may_retry(run, error):
            run.plan.num_retries += 1
            run.plan.uncut = None
        else:
            engine.fail(run, worker, error)
            return
        for item in run.training.items():
            worker.memory.discard(item)
        run.plan.ways = Ways()  # what it learned was about other shards
        run.milestones.wants_validation, run.milestones.last_validation, run.milestones.saved_step = False, -1, -1
        with engine.condition:
            engine.readers.remove(run.job.name)
            run.training, run.plan.is_ready, run.home = JobTraining(run.job), False, None


class _Measured:
    """Memory and time of training units, from the measures of their shards."""

    def __init__(self, mini: MiniBatch, measures: Sequence[ShardMeasure], saves: Sequence[bool]):
        self._mini, self._measures, self._saves = mini, measures, saves

    def transient_bytes(self, index: int) -> int:
        task = self._mini.tasks[index]
        shard, saves = self._measures[task.shard], self._saves[task.shard]
        if task.kind is UnitKind.STEP:  # its gradients are items
            work = self._mini.work
            if work.stays_away(task.shard):
                return 0
            return work.cast_bytes(task.shard) + self._step_bytes(task.shard) - shard.stepped_bytes
        if task.kind is UnitKind.FORWARD:
            return shard.saving_bytes if saves else shard.dropping_bytes
        most = shard.backward_bytes if saves else shard.again_bytes
        steps = self._mini.work.steps and not self._mini.work.steps_apart
        return max(most, self._step_bytes(task.shard) + shard.handed_bytes) if steps else most

    def _step_bytes(self, shard: int) -> int:
        """Return the bytes that the optimizer's step takes.

        Some or all of the state that a first step makes exists already.
        """
        measure = self._measures[shard]
        return max(measure.later_step_bytes, measure.step_bytes - self._mini.work.state_bytes(shard))

    def remaining_bytes(self, index: int) -> int:
        task = self._mini.tasks[index]
        shard = self._measures[task.shard]
        if task.kind is UnitKind.FORWARD:
            return shard.boundary_bytes + (shard.activation_bytes if self._saves[task.shard] else 0)
        return 0 if task.kind is UnitKind.STEP else shard.handed_bytes

    def recompute_s(self, index: int) -> float:
        shard = self._mini.tasks[index].shard
        return 0.0 if self._saves[shard] else self._measures[shard].forward_s


class _AtMost:
    """Memory of validation units.

    None takes more than training did, except in proportion to batches that are ``larger``.
    """

    def __init__(self, mini: MiniBatch, measures: Sequence[ShardMeasure], larger: float):
        self._mini, self._measures, self._larger = mini, measures, larger

    def transient_bytes(self, index: int) -> int:
        shard = self._measures[self._mini.tasks[index].shard]
        most_bytes = shard.saving_bytes or shard.backward_bytes  # the last shard has no forward of its own
        return int(self._larger * most_bytes)

    def remaining_bytes(self, index: int) -> int:  # noqa: ARG002
        return 0

    def recompute_s(self, index: int) -> float:  # noqa: ARG002
        return 0.0
