"""From a job's factories to shards that were measured, in groups that can move, and what of them is recomputed."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from penstock.errors import BudgetError
from penstock.fleet._batch import Structure
from penstock.fleet._groups import content_key
from penstock.fleet._life import JobRun, JobState
from penstock.fleet._memory import Item
from penstock.fleet._partition import AtomCost, PartitionProblem, merged, partition
from penstock.fleet._pilot import ShardMeasure, measure
from penstock.fleet._program import Captured, Program
from penstock.fleet._stages import Staged
from penstock.fleet._worker import Worker
from penstock.tiers import gate, trim_freed_memory

if TYPE_CHECKING:
    from penstock.fleet._engine import Engine

_MOST_ATOMS = 300
_MOST_FACTOR = 1.5**7
"""Estimates are scaled up so far, and the model cut finer, when pilots find more; then each atom is a shard."""


class Preparation:
    """From a job's factories to shards that were measured, in groups that can move."""

    def __init__(self, engine: "Engine", run: JobRun, worker: Worker):
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
        run.leaf_bytes = sum(one.nbytes for one in leaves)
        captured = training.capture(leaves, structure, training=True)
        training.learn_constants(captured)
        self._cut(captured, leaves, structure)
        training.hollow()
        if resume is not None:
            resume()
        run.num_steps = training.count_steps()
        trim_freed_memory()  # a model was made and traced; a dozen prepared jobs would hold gigabytes of fragments
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
        costs, ends = self._costs(captured)
        with gate.computing():
            share = training.optimizer.state_share(training.parameters)
        factor = 1.0
        error: BudgetError | None = None
        finest = tuple(range(len(costs)))
        chosen: tuple[int, ...] = ()
        while chosen != finest:
            problem = PartitionProblem(
                atoms=tuple(_scaled(one, factor) for one in costs),
                trained=frozenset(training.optimizer.trained),
                state_share=share,
                budget_bytes=int(self.engine.budget_bytes * 0.7**run.is_smaller),
            )
            try:
                chosen = partition(problem) if factor < _MOST_FACTOR else finest
            except BudgetError:
                if error is None:
                    raise
                chosen = finest  # by estimates that were scaled up; only pilots know
            program = training.use(captured, structure, tuple(ends[end] for end in chosen))
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
            error = None
            break
        if error is not None:
            raise error
        self.engine.let_frozen_go()  # of cuts that were tried
        run.measures_of = {structure.signature: run.measures}
        run.saves = choose_saves(run.measures, memory.budget_bytes, self.engine.lane_rate(), self.engine.recompute)
        run.seconds_per_step = run.job.accumulate * sum(one.forward_s + one.backward_s for one in run.measures)
        run.seconds_per_step += sum(one.step_s for one in run.measures)

    def _costs(self, captured: Captured | Staged) -> tuple[list[AtomCost], list[int]]:
        """As estimated, of few enough atoms; and the index of the last one in each."""
        sizes = {name: tensor.nbytes for name, tensor in self.run_of.training.originals.items()}
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

    def _check(self, measures: Sequence[ShardMeasure], program: Program) -> None:
        """Raises ``BudgetError`` where a unit takes more than the budget, next shard not counted."""
        for one, shard in zip(measures, program.shards, strict=True):
            most = max(
                one.parameter_bytes
                + one.state_bytes
                + max(one.again_bytes, one.step_bytes + one.handed_bytes)
                + one.boundary_bytes,
                one.parameter_bytes + one.dropping_bytes,
            )
            if most > self.engine.budget_bytes:
                raise BudgetError(
                    f"the shard {shard.label} takes {most} bytes, above the budget of {self.engine.budget_bytes}; "
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
                    self.engine.frozen.setdefault(key, {})[self.worker.index] = group.item

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
    Both lanes run beside the computation, so a mini-batch takes as long as the longest of the three. Shards are taken
    in the order of seconds per byte, and as many recompute as makes the mini-batch shortest.
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
