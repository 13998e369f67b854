"""Pilot runs, which measure the seconds and bytes of every shard before the job trains.

A pilot runs one mini-batch twice through the units that will train it: once it keeps what forward saves, and once it
runs forward again in backward. It also runs a step of the optimizer on copies. Afterwards parameters, buffers, random
numbers and the position in the data are as before. Shards that compute the same on the same shapes count as one, with
the largest figures of any of them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from penstock.devices import backend_of
from penstock.errors import BudgetError
from penstock.fleet._batch import Structure
from penstock.fleet._cut import CutBatch, CutBatches
from penstock.fleet._groups import Group
from penstock.fleet._halves import drop_twin
from penstock.fleet._memory import DeviceMemory
from penstock.fleet._meter import UnitMeter, recorded
from penstock.fleet._packed import Packed
from penstock.fleet._problem import ShardCost, UnitKind
from penstock.fleet._program import BATCH, ShardProgram
from penstock.fleet._random import Draws
from penstock.fleet._stepper import is_worth_moving
from penstock.fleet._training import JobTraining
from penstock.fleet._tree import unchanged
from penstock.fleet._units import MiniBatch
from penstock.fleet._whole import WholeBatch
from penstock.fleet._work import Behaviour, Work
from penstock.tiers import gate

_SLACK_BYTES = 64 * 1024
"""Bytes that the items of a step may take in addition to their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMeasure:
    """Measures of one shard on one device. Bytes are in addition to those that the unit finds there.

    The record is wide because each kind of unit has its own figures.
    """

    forward_s: float = 0.0
    """Seconds of forward."""
    saving_bytes: int = 0
    """Peak of forward that keeps what autograd saves."""
    dropping_bytes: int = 0
    """Peak of forward that keeps nothing."""
    activation_bytes: int = 0
    """Bytes that autograd saves."""
    boundary_bytes: int = 0
    """Bytes of values that it hands on."""
    backward_s: float = 0.0
    """Seconds of backward alone; for the last shard, of forward and backward."""
    backward_bytes: int = 0
    """Peak of backward."""
    handed_bytes: int = 0
    """Bytes of gradients that backward hands on. They exist while the optimizer steps."""
    again_bytes: int = 0
    """Peak of backward that runs forward first."""
    step_s: float = 0.0
    """Seconds of the optimizer's step."""
    step_bytes: int = 0
    """Peak of the first step, including gradients and the state that it makes."""
    later_step_bytes: int = 0
    """Peak of later steps, including gradients."""
    state_bytes: int = 0
    """Bytes of the state that it makes, as items."""
    stepped_bytes: int = 0
    """Bytes of the parameters that it steps."""
    accumulated_bytes: int = 0
    """Bytes of their gradients, as items."""
    others_accumulated_bytes: int = 0
    """Bytes of other shards' gradients, as items, to which autograd adds before and after backward."""
    forward_needs_bytes: int = 0
    """Bytes of items that forward works on: parameters, buffers, values."""
    backward_needs_bytes: int = 0
    """Bytes of items that backward works on, if it uses what forward saved."""
    again_needs_bytes: int = 0
    """Bytes of items that backward works on, if it runs forward again."""
    parameter_bytes: int = 0
    """Bytes of parameters and buffers."""
    draws: Draws = Draws.ON_HOST
    """Where forward may draw random numbers."""
    draws_nothing: bool = False
    """Whether it left all random generators unchanged."""
    casts: tuple[bool, ...] = ()
    """Per tensor of the shard, whether forward uses it only by casting it to half precision; empty if not looked at."""

    def cost(self, saves: bool) -> ShardCost:
        """Return the shard's cost for schedulers and simulations."""
        return ShardCost(
            forward_s=self.forward_s,
            backward_s=self.backward_s,
            step_s=self.step_s,
            parameter_bytes=self.parameter_bytes,
            state_bytes=self.state_bytes,
            boundary_bytes=self.boundary_bytes,
            activation_bytes=self.activation_bytes,
            recomputes=not saves,
        )


def required_bytes(shard: ShardMeasure, *, saves: bool, accumulates: bool, waits: bool) -> int:
    """Return the bytes of the device that no unit of the shard exceeds in any step, without the next shard.

    ``accumulates`` says whether gradients of earlier batches exist, ``waits`` whether the optimizer has units of its
    own.
    """
    forward = shard.forward_needs_bytes + (shard.saving_bytes if saves else shard.dropping_bytes)
    needs = shard.backward_needs_bytes if saves else shard.again_needs_bytes
    transient = shard.backward_bytes if saves else shard.again_bytes
    gradients = shard.accumulated_bytes + shard.others_accumulated_bytes if accumulates else 0
    if waits:  # the bytes of a step already include the gradients, but not as items
        step = shard.accumulated_bytes + max(shard.step_bytes, shard.state_bytes + shard.later_step_bytes)
        return max(forward, needs + gradients + transient, step + _SLACK_BYTES)
    first = max(transient, shard.step_bytes + shard.handed_bytes)
    later = shard.state_bytes + max(transient, shard.later_step_bytes + shard.handed_bytes)
    return max(forward, needs + gradients + max(first, later))


def measure(
    training: JobTraining,
    memory: DeviceMemory,
    program: ShardProgram,
    leaves: Sequence[torch.Tensor],
    structure: Structure,
    known: dict[tuple[Any, ...], ShardMeasure],
) -> list[ShardMeasure]:
    """Measure every shard that ``known`` lacks. Raise ``BudgetError`` if one cannot run within the budget."""
    keys = [
        (fingerprint, *_neighbours(training, program, index), *_circumstances(training, memory))
        for index, fingerprint in enumerate(program.fingerprints)
    ]
    if not all(key in known for key in keys):
        pilot = _Pilot(training, memory, program, leaves, structure)
        for key, measured in zip(keys, pilot.run(), strict=True):
            known[key] = _with_most_bytes(known.get(key, measured), measured)
    measures = [known[key] for key in keys]
    for measured, shard in zip(measures, program.shards, strict=True):
        _learn_casts(training, memory, shard.tensors, measured.casts)
    return measures


class Pilots:
    """The pilot runs of a fleet, and the settings by which jobs are cut.

    ``recompute`` and ``vertical`` are those of `Ablation`. ``lane_rate`` returns the bytes per second out of a device
    and back.
    """

    def __init__(
        self,
        *,
        budget_bytes: int,
        recompute: bool | None,
        vertical: bool,
        lane_rate: Callable[[], tuple[float, float]],
    ):
        self.budget_bytes, self.recompute, self.vertical, self.lane_rate = budget_bytes, recompute, vertical, lane_rate
        self.end_jobs = False
        """Whether jobs end as soon as their shards are measured."""
        self._known: dict[tuple[Any, ...], ShardMeasure] = {}

    def measure(
        self,
        training: JobTraining,
        memory: DeviceMemory,
        program: ShardProgram,
        leaves: Sequence[torch.Tensor],
        structure: Structure,
    ) -> list[ShardMeasure]:
        """Measure every shard that is not known yet. Raise ``BudgetError`` if one cannot run within the budget."""
        return measure(training, memory, program, leaves, structure, self._known)


def _learn_casts(training: JobTraining, memory: DeviceMemory, names: Sequence[str], casts: Sequence[bool]) -> None:
    for name, is_cast in zip(names, casts, strict=False):
        training.weights.casts[name] = is_cast and training.weights.casts.get(name, True)
        group = training.groups.by_name[name]
        if not training.weights.casts[name] or len(group.shards) > 1:
            drop_twin(memory, group)


def _with_most_bytes(first: ShardMeasure, second: ShardMeasure) -> ShardMeasure:
    """Return ``first`` with the larger bytes of ``first`` and ``second`` in each field.

    Kernels may take more memory with another alignment.
    """
    names = [field.name for field in fields(ShardMeasure) if field.name.endswith("_bytes")]
    return replace(first, **{name: max(getattr(first, name), getattr(second, name)) for name in names})


def _circumstances(training: JobTraining, memory: DeviceMemory) -> tuple[Any, ...]:
    master = training.optimizer.master
    shaping = {
        key: value for key, value in master.defaults.items() if key not in ("lr", "weight_decay", "betas", "eps")
    }
    return (
        memory.device.type,
        torch.get_num_threads() if memory.device.type == "cpu" else 0,
        training.job.precision,
        type(master).__name__,
        repr(sorted(shaping.items())),
    )


def _neighbours(training: JobTraining, program: ShardProgram, index: int) -> tuple[Any, ...]:
    """Return a key of what a shard works on in addition to its own tensors.

    It is equal for shards that take the same bytes.
    """
    if program.whole is not None:  # gradients of the other shards wait for each other, wherever the model is cut
        return index, *program.fingerprints
    shard, later = program.shards[index], program.shards[index + 1 :]
    groups = dict.fromkeys(training.groups.by_name[name] for name in shard.tensors)
    return (
        tuple((name.startswith(BATCH), any(name in after.inputs for after in later)) for name in shard.inputs),
        tuple(any(name in after.inputs for after in later[1:]) for name in shard.outputs),
        tuple((group.kind, group.size_bytes, group.owner == index, len(group.shards) > 1) for group in groups),
    )


class _Pilot:
    def __init__(
        self,
        training: JobTraining,
        memory: DeviceMemory,
        program: ShardProgram,
        leaves: Sequence[torch.Tensor],
        structure: Structure,
    ):
        self._training, self._memory, self._program = training, memory, program
        self._leaves = leaves
        self._work = Work(training, memory, program, structure, Behaviour(is_pilot=True))
        self._found = [ShardMeasure(parameter_bytes=self._size_bytes(shard)) for shard in range(len(program.shards))]

    def run(self) -> list[ShardMeasure]:
        training = self._training
        mark, cuda = training.randomness.mark(), training.randomness.cuda
        open_step = training.open_step
        mode, scale, norms = open_step.is_finite, open_step.scale, dict(open_step.norms)
        training.weights.make_hollow_on(self._memory.device)
        try:
            if self._program.whole is not None:
                self._run_whole()
            else:
                self._pass(saves=True)
                self._pass(saves=False)
            for shard in range(len(self._program.shards)):
                self._step(shard)
        finally:
            training.randomness.cpu, training.randomness.cuda = mark[0], cuda
            open_step.is_finite, open_step.scale, open_step.norms = mode, scale, norms
        return self._found

    def _size_bytes(self, shard: int) -> int:
        """Return the bytes of the groups that the shard uses."""
        by_name = self._training.groups.by_name
        return sum(group.size_bytes for group in {by_name[name] for name in self._program.shards[shard].tensors})

    def _pass(self, *, saves: bool) -> None:
        cut = CutBatch(self._work, self._leaves, [saves] * len(self._program.shards))
        mini = CutBatches([cut])
        try:
            for index, task in enumerate(mini.tasks):
                randomness = self._training.randomness
                before_draws = randomness.num_draws, randomness.num_host_draws
                mark = randomness.mark(self._memory.device)
                needs_bytes = self.bring_in(mini, index)
                taken_s, peak_bytes = _measured(self._memory.device, lambda position=index: mini.run(position))  # type: ignore[misc]
                before = self._found[task.shard]
                if task.kind is UnitKind.FORWARD:
                    before = replace(before, forward_needs_bytes=max(before.forward_needs_bytes, needs_bytes))
                    measured = _after_forward(cut, before, task.shard, taken_s, peak_bytes, saves)
                else:
                    if task.kind is UnitKind.FUSED or saves:
                        before = replace(before, backward_needs_bytes=max(before.backward_needs_bytes, needs_bytes))
                    if task.kind is UnitKind.FUSED or not saves:
                        before = replace(before, again_needs_bytes=max(before.again_needs_bytes, needs_bytes))
                    measured = _after_backward(before, task.kind, taken_s, peak_bytes, saves)
                    measured = replace(measured, handed_bytes=max(measured.handed_bytes, cut.values.gradient_bytes()))
                if task.kind is not UnitKind.BACKWARD:
                    measured = replace(
                        measured,
                        draws=randomness.draws_since(*before_draws),
                        draws_nothing=randomness.is_at(mark),
                        casts=cut.casts(task.shard),
                    )
                self._found[task.shard] = measured
        finally:
            mini.abandon()

    def _run_whole(self) -> None:
        """Run a model that is not cut once. Its backward uses what forward saved."""
        mini = WholeBatch(self._work, self._leaves)
        mini.meter, units = UnitMeter(self._memory), _PilotUnits(self, mini)
        try:
            with (
                _out_of_memory_said(self._memory.device),
                gate.computing(),
                unchanged(self._training.weights.model, numbers=False),
            ):
                mini.run_all(units)
        finally:
            mini.abandon()
        for index, task in enumerate(mini.tasks):
            needs_bytes = sum(item.size_bytes for item in mini.uses[index].items)
            self._found[task.shard] = _after_visit(
                self._found[task.shard], task.kind, needs_bytes, mini.meter.peaks[index], units.seconds[index]
            )
            others = [group for group in mini.uses[index].open_groups if group.owner != task.shard]
            others_bytes = sum(map(_gradient_bytes, others))
            before = self._found[task.shard]
            others_bytes = max(before.others_accumulated_bytes, others_bytes)
            self._found[task.shard] = replace(before, others_accumulated_bytes=others_bytes)
        for shard, size_bytes in mini.saved_by_shard.items():
            self._found[shard] = replace(self._found[shard], activation_bytes=size_bytes)
        most = ShardMeasure(
            saving_bytes=max(shard.saving_bytes for shard in self._found),
            backward_bytes=max(shard.backward_bytes for shard in self._found),
        )
        self._found = [_as_others(shard, most) for shard in self._found]

    def bring_in(self, mini: MiniBatch, index: int) -> int:
        """Bring what a unit needs, and nothing else, to the device, and return the bytes."""
        memory, needs = self._memory, mini.needs(index)
        shard = self._program.shards[mini.tasks[index].shard]
        mini.plan_uses(index)
        missing = sum(item.size_bytes - item.held_bytes() for item in needs)
        memory.make_room(missing, needs, f"the shard {shard.label}")
        for item in needs:
            memory.get(item)
        memory.flush(keep=needs)
        return sum(item.size_bytes for item in needs)

    def _step(self, shard: int) -> None:
        training, memory = self._training, self._memory
        groups = [group for group in training.groups if group.kind == "trained" and group.owner == shard]
        # Gradients of all groups exist while each is stepped.
        gradient_bytes = sum(group.size_bytes for group in groups)
        for group in groups:
            assert group.item is not None
            memory.flush(keep=[group.item])
            (storage,) = memory.get(group.item)
            copies = {name: view.clone() for name, view in group.views(storage).items()}
            del storage
            if memory.held_bytes() + 3 * group.size_bytes > memory.budget_bytes:
                memory.flush()  # the copies replace it
            training.weights.bind(copies)
            parameters = {name: training.weights.parameters[name] for name in group.layouts}
            for parameter in parameters.values():
                parameter.grad = torch.zeros_like(parameter)
            states: dict[str, Any] = {}

            def step(parameters: Any = parameters, states: Any = states) -> None:
                states.update(training.optimizer.try_step(parameters))
                Packed.of("", _tensors_of(states))

            taken_s, peak_bytes = _measured(memory.device, step)
            gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
            accumulated_bytes = Packed.bytes_of(gradients)
            training.weights.unbind(group.layouts)
            new = _tensors_of(states)
            new_bytes = sum(value.nbytes for value in new.values())
            kept = {name: value for name, value in new.items() if is_worth_moving(value, memory.device)}
            before = self._found[shard]
            self._found[shard] = replace(
                before,
                step_s=before.step_s + taken_s,
                step_bytes=max(before.step_bytes, gradient_bytes + before.state_bytes + peak_bytes),
                later_step_bytes=max(before.later_step_bytes, gradient_bytes + peak_bytes - new_bytes),
                state_bytes=before.state_bytes + Packed.bytes_of(kept),
                stepped_bytes=gradient_bytes,
                accumulated_bytes=before.accumulated_bytes + accumulated_bytes,
            )
            del copies, states, parameters, gradients, new, kept


def _gradient_bytes(group: Group) -> int:
    """Return the bytes of an item with the gradients of all parameters of the group."""
    return Packed.bytes_of(
        {
            name: torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")
            for name, layout in group.layouts.items()
        }
    )


def _tensors_of(states: dict[str, dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the tensors of optimizer states, by parameter and field."""
    fields = {f"{name}//{key}": value for name, state in states.items() for key, value in state.items()}
    return {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}


def _after_forward(
    cut: CutBatch, before: ShardMeasure, shard: int, taken_s: float, peak_bytes: int, saves: bool
) -> ShardMeasure:
    after = replace(
        before, forward_s=min(taken_s, before.forward_s or taken_s), boundary_bytes=cut.values.value_bytes(shard)
    )
    if not saves:
        return replace(after, dropping_bytes=peak_bytes)
    return replace(after, saving_bytes=peak_bytes, activation_bytes=cut.values.saved_bytes(shard))


def _after_backward(before: ShardMeasure, kind: UnitKind, taken_s: float, peak_bytes: int, saves: bool) -> ShardMeasure:
    if kind is UnitKind.FUSED:
        both_s = min(taken_s, before.backward_s or taken_s)
        return replace(before, backward_s=both_s, backward_bytes=peak_bytes, again_bytes=peak_bytes)
    if saves:
        return replace(before, backward_s=taken_s, backward_bytes=peak_bytes)
    return replace(before, again_bytes=peak_bytes)


def _after_visit(
    before: ShardMeasure, kind: UnitKind, needs_bytes: int, peak_bytes: int, taken_s: float
) -> ShardMeasure:
    """Add one visit to the measure of a shard. A model that is run whole may visit a shard several times."""
    if kind is UnitKind.FORWARD:
        most = max(before.saving_bytes, peak_bytes)
        return replace(
            before,
            forward_s=before.forward_s + taken_s,
            forward_needs_bytes=max(before.forward_needs_bytes, needs_bytes),
            saving_bytes=most,
            dropping_bytes=most,
        )
    most, needs_bytes = max(before.backward_bytes, peak_bytes), max(before.backward_needs_bytes, needs_bytes)
    return replace(
        before,
        backward_s=before.backward_s + taken_s,
        backward_needs_bytes=needs_bytes,
        again_needs_bytes=needs_bytes,
        backward_bytes=most,
        again_bytes=most,
    )


def _as_others(shard: ShardMeasure, most: ShardMeasure) -> ShardMeasure:
    """Fill in the measure of a shard that the pilot did not reach: assume as much as the others take."""
    forward, backward = shard.saving_bytes or most.saving_bytes, shard.backward_bytes or most.backward_bytes
    return replace(
        shard,
        saving_bytes=forward,
        dropping_bytes=forward,
        backward_bytes=backward,
        again_bytes=backward,
        forward_needs_bytes=shard.forward_needs_bytes or shard.parameter_bytes,
        backward_needs_bytes=shard.backward_needs_bytes or shard.parameter_bytes,
        again_needs_bytes=shard.again_needs_bytes or shard.parameter_bytes,
    )


class _PilotUnits:
    """The units of a pilot that runs a model whole."""

    def __init__(self, pilot: _Pilot, mini: WholeBatch):
        self._pilot, self._mini = pilot, mini
        self.seconds: dict[int, float] = {}

    def begin(self, index: int) -> int:
        self._pilot.bring_in(self._mini, index)
        self.seconds[index] = -time.perf_counter()
        return 0

    def compute(self, index: int) -> None:
        raise AssertionError(f"unit {index} of a pilot would be an optimizer step")

    def end(self, index: int) -> None:
        self.seconds[index] += time.perf_counter()


@contextmanager
def _out_of_memory_said(device: torch.device) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise BudgetError(f"{device} ran out of memory in a pilot run: {error}") from error


def _measured(device: torch.device, run: Callable[[], None]) -> tuple[float, int]:
    """Return the seconds of ``run``, and its peak of bytes above those at the start.

    Raises ``BudgetError`` if memory ran out.
    """
    with _out_of_memory_said(device), gate.computing(), recorded(device) as recording:
        start_s = time.perf_counter()
        run()
        backend_of(device).finish()
        taken_s = time.perf_counter() - start_s
    return taken_s, recording.report.activation_bytes
