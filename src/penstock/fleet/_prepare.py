"""Preparation of a job: its model is built, cut into measured shards and packed into groups that can move."""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from penstock.errors import BudgetError
from penstock.fleet._batch import Structure
from penstock.fleet._cuts import Cuttable
from penstock.fleet._devices import free_bytes
from penstock.fleet._engine import Engine
from penstock.fleet._groups import content_key
from penstock.fleet._job import CannotBeCut
from penstock.fleet._life import JobRun, JobState
from penstock.fleet._optimizer import WHAT_WORKS
from penstock.fleet._partition import AtomCost, PartitionProblem, largest_atom_bytes, merged, partition
from penstock.fleet._pilot import ShardMeasure, required_bytes
from penstock.fleet._program import ShardProgram
from penstock.fleet._uncut import Uncut
from penstock.fleet._vertical import is_cheaper, is_possible, parked_bytes
from penstock.fleet._worker import Worker
from penstock.tiers import gate, trim_freed_memory
from penstock.units import format_bytes

_MOST_ATOMS = 300
_PLACING_BYTES = 2**16
"""Bytes that a group may take in addition to its own while it is put in place."""
_MOST_FACTOR = 1.5**7
"""Limit of the factor by which estimates are scaled up, and the model cut finer, when pilots find more.

Beyond it, each atom is a shard.
"""


class Preparation:
    """Preparation of one job on one device."""

    def __init__(self, engine: Engine, run: JobRun, worker: Worker):
        self.engine, self.run_of, self.worker = engine, run, worker

    def run(self) -> None:
        """Build the job, cut its model and measure the shards. The job can train afterwards."""
        run, engine = self.run_of, self.engine
        training = run.training
        with engine.condition:
            run.state, run.milestones.started_s = JobState.RUNNING, time.time()
            run.home = self.worker
        training.build(self.worker.device)
        if self.worker.memory.host is None:
            training.update = "device"
        engine.readers.add(run.job.name, training.feed)
        resume = engine.upkeep.restore(run)
        leaves, structure = training.feed.peek()
        try:
            if training.cuts.uncut_because:
                raise CannotBeCut(training.cuts.uncut_because)
            captured = training.cuts.capture(leaves, structure, training=True)
            run.plan.leaf_bytes = sum(leaf.nbytes for leaf in leaves)
            training.weights.learn(captured.constants)
            self._cut(captured, leaves, structure)
            training.weights.let_originals_go()
        except CannotBeCut as reason:
            self._stay_uncut(str(reason))
        if resume is not None:
            resume()
        run.plan.num_steps = training.feed.count_steps()
        trim_freed_memory()  # a model was made and traced; otherwise a dozen prepared jobs hold gigabytes of fragments
        with engine.condition:
            run.plan.is_ready = True

    def _stay_uncut(self, reason: str) -> None:
        """Prepare the job to run in its own loop. Raise ``TypeError`` if it asks for more than that."""
        run, training, job = self.run_of, self.run_of.training, self.run_of.job
        if job.stages is not None:
            raise TypeError(f"job {job.name!r} asks for stages=, but it cannot be cut, because {reason}. {WHAT_WORKS}")
        if job.update == "host":
            raise TypeError(
                f"job {job.name!r} asks for update='host', but it cannot be cut, because {reason}. {WHAT_WORKS}"
            )
        if self.engine.pilots.end_jobs:
            raise TypeError(f"its costs are not known before it trains: it cannot be cut, because {reason}")
        self._take_away()
        training.stay_uncut(reason, self.worker.device)
        run.plan.uncut = Uncut(training, self.worker.memory)

    def place_constants(self) -> None:
        """Put the constants of a new graph into a group of their own."""
        training = self.run_of.training
        fresh = {
            name: tensor for name, tensor in training.weights.originals.items() if name not in training.groups.by_name
        }
        if fresh:
            training.add_group(fresh)
            self._place()
            training.weights.let_originals_go()

    def _cut(self, captured: Cuttable, leaves: list[torch.Tensor], structure: Structure) -> None:
        run, training, memory = self.run_of, self.run_of.training, self.worker.memory
        costs, ends = self._costs(captured)
        with gate.computing():
            share = training.optimizer.state_share(training.weights.parameters)
        factor = 1.0
        finest = tuple(range(len(costs)))
        chosen: tuple[int, ...] = ()
        while True:
            problem = PartitionProblem(
                atoms=tuple(_scaled(cost, factor) for cost in costs),
                trained=frozenset(training.optimizer.trained),
                state_share=share,
                budget_bytes=int(self._room_bytes * 0.7**run.plan.num_times_smaller),
            )
            try:
                chosen = partition(problem) if factor < _MOST_FACTOR else finest
            except BudgetError as refused:
                self._refuse_by_far(problem, refused)
                chosen = finest  # those were estimates; only pilots know
            program = training.use(captured, structure, tuple(ends[end] for end in chosen))
            try:
                # What cannot be cut finer is measured above the budget too, so that the error can name one that works.
                with memory.unbounded() if chosen == finest else nullcontext():
                    self._place()
                    run.plan.measures = self.engine.pilots.measure(training, memory, program, leaves, structure)
                self._check(run.plan.measures, program)  # if it raises, a finer cut is tried
                break
            except BudgetError:
                self._take_away()
                if chosen == finest:
                    raise
                factor *= 1.5
        self.engine.let_frozen_go()  # those of cuts that were tried
        run.plan.measures_of = {structure.signature: run.plan.measures}
        run.plan.saves = choose_saves(
            run.plan.measures,
            self._room_bytes,
            self.engine.pilots.lane_rate(),
            False if program.whole is not None else self.engine.pilots.recompute,
            required=self._required,
        )
        run.plan.is_vertical = self.goes_vertically(program, run.plan.measures)
        run.plan.vertical_of = {structure.signature: run.plan.is_vertical}
        per_batch_s = sum(shard.forward_s + shard.backward_s for shard in run.plan.measures)
        step_s = sum(shard.step_s for shard in run.plan.measures)
        run.plan.seconds_per_step = run.job.accumulate * per_batch_s + step_s

    def goes_vertically(self, program: ShardProgram, measures: Sequence[ShardMeasure]) -> bool:
        """Whether a step goes shard by shard.

        It must be possible, move fewer bytes, and leave room in the lower tiers for what exists at once.
        """
        run, count = self.run_of, self.run_of.job.accumulate
        if count < 2 or not self.engine.pilots.vertical or not is_possible(run.training, program, measures):
            return False
        if not is_cheaper(measures, count, self._room_bytes):
            return False
        tiers = self.worker.memory.waterfall.tiers
        below = sum(tier.capacity_bytes - tier.used_bytes for tier in tiers) / max(1, len(self.engine.workers))
        return parked_bytes(measures, run.plan.saves, count) <= below / 2

    def _costs(self, captured: Cuttable) -> tuple[list[AtomCost], list[int]]:
        """Return estimated costs of not too many atoms, and the index of the last original atom in each."""
        sizes = {name: tensor.nbytes for name, tensor in self.run_of.training.weights.originals.items()}
        costs = [
            AtomCost(
                tensors={name: sizes[name] for name in atom.tensors},
                activation_bytes=atom.activation_bytes,
                crossing_bytes=atom.crossing_bytes,
                label=atom.label,
            )
            for atom in captured.atoms
        ]
        return merged(costs, _MOST_ATOMS)

    @property
    def _room_bytes(self) -> int:
        """The budget minus what the device's libraries keep. Devices are assumed to be alike."""
        return self.engine.pilots.budget_bytes - self.worker.memory.library_bytes

    def _required(self, shard: ShardMeasure, saves: bool) -> int:
        job = self.run_of.job
        training, accumulates = self.run_of.training, job.accumulate > 1
        waits = job.clip_norm is not None or job.precision == "float16" or training.cuts.tree is not None
        ways = [True] if waits or training.update == "host" else [False, True] if training.update == "auto" else [False]
        return max(required_bytes(shard, saves=saves, accumulates=accumulates, waits=one_waits) for one_waits in ways)

    def _check(self, measures: Sequence[ShardMeasure], program: ShardProgram) -> None:
        """Raise ``BudgetError`` if a unit takes more than the budget, without the next shard.

        With the budget that the error names, every unit of every step fits, as long as batches are like the first.
        """
        saving = [True] if program.whole is not None else [False] if self.engine.pilots.recompute else [True, False]
        needs = [min(self._required(shard, saves) for saves in saving) for shard in measures]
        needs[-1] = self._required(measures[-1], saves=True)  # forward and backward are one unit
        largest = max(group.size_bytes for group in self.run_of.training.groups) + _PLACING_BYTES
        most, worst = max((size_bytes, index) for index, size_bytes in enumerate(needs))
        if max(most, largest) <= self._room_bytes:
            return
        least = max(most, largest) + self.worker.memory.library_bytes
        raise BudgetError(
            f"`budget` must be at least {least} ({format_bytes(least)}) for job {self.run_of.job.name!r}, got "
            f"{format_bytes(self.engine.pilots.budget_bytes)}: the shard {program.shards[worst].label} takes "
            f"{format_bytes(most)} and cannot be cut further. This holds for batches like the first; smaller batches "
            "(accumulate=) take less"
        )

    def _refuse_by_far(self, problem: PartitionProblem, refused: BudgetError) -> None:
        """Raise ``refused`` if a part of the model is estimated too large even to be tried on the device."""
        room_bytes = free_bytes(self.worker.device)
        if largest_atom_bytes(problem) > room_bytes / 2:
            raise refused

    def _place(self) -> None:
        """Put groups that are nowhere yet into the device's memory.

        They move to lower tiers when memory is needed.
        """
        training, memory = self.run_of.training, self.worker.memory
        for group in training.groups:
            if group.item is not None:
                continue
            key = ""
            if group.kind == "frozen":
                key = content_key({name: training.weights.originals[name] for name in group.layouts}, group.layouts)
                with self.engine.condition:
                    group.item = self.engine.frozen.find(key, self.worker.index, memory)
                if group.item is not None:
                    continue
            memory.make_room(
                group.size_bytes + _PLACING_BYTES, (), f"shard {group.owner} of job {self.run_of.job.name!r}"
            )
            group.item = memory.add(training.initial_item(group, memory.device))
            if group.kind == "frozen":
                memory.write(group.item)
                with self.engine.condition:
                    self.engine.frozen.put(key, self.worker.index, group.item)

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
    measures: Sequence[ShardMeasure],
    budget_bytes: int,
    rates: tuple[float, float],
    recompute: bool | None,
    required: Callable[[ShardMeasure, bool], int],
) -> list[bool]:
    """Choose, per shard, whether backward uses what forward saved.

    ``recompute`` decides it for all shards where possible.

    ``required`` returns the bytes that a shard takes if it saves, and if it does not.

    A saved activation costs its copies out and in, unless the whole job stays on the device. An activation that is not
    saved costs another forward. Both lanes run in parallel with the computation, so a mini-batch takes as long as the
    longest of the three. Shards are taken in the order of seconds per byte, and the number of them that recompute is
    the one that makes the mini-batch shortest.
    """
    last = len(measures) - 1
    can_save = [required(shard, True) <= budget_bytes for shard in measures]
    saves = [can and recompute is not True for can in can_save]
    saves[last] = True  # forward and backward are one unit
    if recompute is not None:
        return saves
    order = sorted(range(last), key=lambda index: measures[index].forward_s / max(1, measures[index].activation_bytes))
    whole = sum(2 * shard.parameter_bytes + shard.state_bytes + shard.activation_bytes for shard in measures)
    if whole + max(shard.backward_bytes for shard in measures) <= budget_bytes:
        return saves

    def length_s(chosen: Sequence[bool]) -> float:
        compute_s = sum(shard.forward_s + shard.backward_s + shard.step_s for shard in measures)
        in_bytes = sum(2 * shard.parameter_bytes + shard.state_bytes + shard.boundary_bytes for shard in measures)
        out_bytes = sum(shard.parameter_bytes + shard.state_bytes + shard.boundary_bytes for shard in measures)
        for keeps, shard in zip(chosen, measures, strict=True):
            compute_s += 0.0 if keeps else shard.forward_s
            in_bytes += shard.activation_bytes if keeps else 0
            out_bytes += shard.activation_bytes if keeps else 0
        return max(compute_s, out_bytes / rates[0], in_bytes / rates[1])

    best, best_s = saves, length_s(saves)
    for index in order:
        saves = [keeps and other != index for other, keeps in enumerate(saves)]
        taken_s = length_s(saves)
        if taken_s < best_s:
            best, best_s = saves, taken_s
    return best
