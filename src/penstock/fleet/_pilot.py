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
from penstock.fleet._meter import UnitMeter
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
from penstock.probe import record_memory
from penstock.tiers import gate

_SLACK_BYTES = 64 * 1024
"""Bytes that the items of a step may take in addition to their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMeasure:
    """Measures of one shard on one device. Bytes are in addition to those that the unit finds there."""

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


def required_bytes(one: ShardMeasure, *, saves: bool, accumulates: bool, waits: bool) -> int:
    """Return the bytes of the device that no unit of the shard exceeds in any step, without the next shard.

    ``accumulates`` says whether gradients of earlier batches exist, ``waits`` whether the optimizer has units of its
    own.
    """
    forward = one.forward_needs_bytes + (one.saving_bytes if saves else one.dropping_bytes)
    needs = one.backward_needs_bytes if saves else one.again_needs_bytes
    transient = one.backward_bytes if saves else one.again_bytes
    gradients = one.accumulated_bytes + one.others_accumulated_bytes if accumulates else 0
    if waits:  # the bytes of a step already include the gradients, but not as items
        step = one.accumulated_bytes + max(one.step_bytes, one.state_bytes + one.later_step_bytes)
        return max(forward, needs + gradients + transient, step + _SLACK_BYTES)
    first = max(transient, one.step_bytes + one.handed_bytes)
    later = one.state_bytes + max(transient, one.later_step_bytes + one.handed_bytes)
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
        (one, *_neighbours(training, program, at), *_circumstances(training, memory))
        for at, one in enumerate(program.fingerprints)
    ]
    if not all(key in known for key in keys):
        pilot = _Pilot(training, memory, program, leaves, structure)
        for key, found in zip(keys, pilot.run(), strict=True):
            known[key] = _with_most_bytes(known.get(key, found), found)
    measures = [known[key] for key in keys]
    for one, shard in zip(measures, program.shards, strict=True):
        _learn_casts(training, memory, shard.tensors, one.casts)
    return measures


def _learn_casts(training: JobTraining, memory: DeviceMemory, names: Sequence[str], casts: Sequence[bool]) -> None:
    for name, is_cast in zip(names, casts, strict=False):
        training.casts[name] = is_cast and training.casts.get(name, True)
        group = training.group_of[name]
        if not training.casts[name] or len(group.shards) > 1:
            drop_twin(memory, group)


def _with_most_bytes(one: ShardMeasure, other: ShardMeasure) -> ShardMeasure:
    """Return ``one`` with the larger bytes of ``one`` and ``other`` in each field.

    Kernels may take more memory with another alignment.
    """
    names = [field.name for field in fields(ShardMeasure) if field.name.endswith("_bytes")]
    return replace(one, **{name: max(getattr(one, name), getattr(other, name)) for name in names})


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


def _neighbours(training: JobTraining, program: ShardProgram, at: int) -> tuple[Any, ...]:
    """Return a key of what a shard works on in addition to its own tensors.

    It is equal for shards that take the same bytes.
    """
    if program.whole is not None:  # gradients of the other shards wait for each other, wherever the model is cut
        return at, *program.fingerprints
    shard, later = program.shards[at], program.shards[at + 1 :]
    groups = dict.fromkeys(training.group_of[name] for name in shard.tensors)
    return (
        tuple((name.startswith(BATCH), any(name in one.inputs for one in later)) for name in shard.inputs),
        tuple(any(name in one.inputs for one in later[1:]) for name in shard.outputs),
        tuple((one.kind, one.size_bytes, one.owner == at, len(one.shards) > 1) for one in groups),
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
        self._found = [ShardMeasure(parameter_bytes=self._size_bytes(at)) for at in range(len(program.shards))]

    def run(self) -> list[ShardMeasure]:
        training = self._training
        mark, cuda = training.randomness.mark(), training.randomness.cuda
        mode, scale, norms = training.is_finite, training.scale, dict(training.norms)
        training.weights.make_hollow_on(self._memory.device)
        try:
            if self._program.whole is not None:
                self._run_whole()
            else:
                self._pass(saves=True)
                self._pass(saves=False)
            for at in range(len(self._program.shards)):
                self._step(at)
        finally:
            training.randomness.cpu, training.randomness.cuda = mark[0], cuda
            training.is_finite, training.scale, training.norms = mode, scale, norms
        return self._found

    def _size_bytes(self, at: int) -> int:
        """Return the bytes of the groups that the shard uses."""
        return sum(
            one.size_bytes for one in {self._training.group_of[name] for name in self._program.shards[at].tensors}
        )

    def _pass(self, *, saves: bool) -> None:
        cut = CutBatch(self._work, self._leaves, [saves] * len(self._program.shards))
        mini = CutBatches([cut])
        try:
            for index, task in enumerate(mini.tasks):
                randomness = self._training.randomness
                before_draws = randomness.num_draws, randomness.num_host_draws
                mark = randomness.mark(self._memory.device)
                needs_bytes = self._bring_in(mini, index)
                taken_s, peak_bytes = _measured(self._memory.device, lambda at=index: mini.run(at))  # type: ignore[misc]
                before = self._found[task.shard]
                if task.kind is UnitKind.FORWARD:
                    before = replace(before, forward_needs_bytes=max(before.forward_needs_bytes, needs_bytes))
                    found = _after_forward(cut, before, task.shard, taken_s, peak_bytes, saves)
                else:
                    if task.kind is UnitKind.FUSED or saves:
                        before = replace(before, backward_needs_bytes=max(before.backward_needs_bytes, needs_bytes))
                    if task.kind is UnitKind.FUSED or not saves:
                        before = replace(before, again_needs_bytes=max(before.again_needs_bytes, needs_bytes))
                    found = _after_backward(before, task.kind, taken_s, peak_bytes, saves)
                    found = replace(found, handed_bytes=max(found.handed_bytes, cut.values.gradient_bytes()))
                if task.kind is not UnitKind.BACKWARD:
                    found = replace(
                        found,
                        draws=randomness.draws_since(*before_draws),
                        draws_nothing=randomness.is_at(mark),
                        casts=cut.casts(task.shard),
                    )
                self._found[task.shard] = found
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
                unchanged(self._training.model, numbers=False),
            ):
                mini.run_all(units)
        finally:
            mini.abandon()
        for index, task in enumerate(mini.tasks):
            needs_bytes = sum(item.size_bytes for item in mini.used[index])
            self._found[task.shard] = _after_visit(
                self._found[task.shard], task.kind, needs_bytes, mini.meter.peaks[index], units.seconds[index]
            )
            others_bytes = sum(
                _gradient_bytes(one) for one in mini.open_groups.get(index, ()) if one.owner != task.shard
            )
            before = self._found[task.shard]
            others_bytes = max(before.others_accumulated_bytes, others_bytes)
            self._found[task.shard] = replace(before, others_accumulated_bytes=others_bytes)
        for at, size_bytes in mini.saved_by_shard.items():
            self._found[at] = replace(self._found[at], activation_bytes=size_bytes)
        most = ShardMeasure(
            saving_bytes=max(one.saving_bytes for one in self._found),
            backward_bytes=max(one.backward_bytes for one in self._found),
        )
        self._found = [_as_others(one, most) for one in self._found]

    def _bring_in(self, mini: MiniBatch, index: int) -> int:
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

    def _step(self, at: int) -> None:
        training, memory = self._training, self._memory
        groups = [one for one in training.groups if one.kind == "trained" and one.owner == at]
        gradient_bytes = sum(one.size_bytes for one in groups)  # gradients of all groups exist while each is stepped
        for one in groups:
            assert one.item is not None
            memory.flush(keep=[one.item])
            (storage,) = memory.get(one.item)
            copies = {name: view.clone() for name, view in one.views(storage).items()}
            del storage
            if memory.held_bytes() + 3 * one.size_bytes > memory.budget_bytes:
                memory.flush()  # the copies replace it
            training.weights.bind(copies)
            parameters = {name: training.weights.parameters[name] for name in one.layouts}
            for parameter in parameters.values():
                parameter.grad = torch.zeros_like(parameter)
            states: dict[str, Any] = {}

            def step(parameters: Any = parameters, states: Any = states) -> None:
                states.update(training.optimizer.try_step(parameters))
                Packed.of("", _tensors_of(states))

            taken_s, peak_bytes = _measured(memory.device, step)
            gradients = {name: one.grad for name, one in parameters.items() if one.grad is not None}
            accumulated_bytes = Packed.bytes_of(gradients)
            training.weights.unbind(one.layouts)
            made = _tensors_of(states)
            made_bytes = sum(value.nbytes for value in made.values())
            kept = {name: value for name, value in made.items() if is_worth_moving(value, memory.device)}
            found = self._found[at]
            self._found[at] = replace(
                found,
                step_s=found.step_s + taken_s,
                step_bytes=max(found.step_bytes, gradient_bytes + found.state_bytes + peak_bytes),
                later_step_bytes=max(found.later_step_bytes, gradient_bytes + peak_bytes - made_bytes),
                state_bytes=found.state_bytes + Packed.bytes_of(kept),
                stepped_bytes=gradient_bytes,
                accumulated_bytes=found.accumulated_bytes + accumulated_bytes,
            )
            del copies, states, parameters, gradients, made, kept


def _gradient_bytes(one: Group) -> int:
    """Return the bytes of an item with the gradients of all parameters of the group."""
    return Packed.bytes_of(
        {
            name: torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")
            for name, layout in one.layouts.items()
        }
    )


def _tensors_of(states: dict[str, dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the tensors of optimizer states, by parameter and field."""
    fields = {f"{name}//{key}": value for name, state in states.items() for key, value in state.items()}
    return {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}


def _after_forward(
    cut: CutBatch, before: ShardMeasure, at: int, taken_s: float, peak_bytes: int, saves: bool
) -> ShardMeasure:
    found = replace(
        before, forward_s=min(taken_s, before.forward_s or taken_s), boundary_bytes=cut.values.value_bytes(at)
    )
    if not saves:
        return replace(found, dropping_bytes=peak_bytes)
    return replace(found, saving_bytes=peak_bytes, activation_bytes=cut.values.saved_bytes(at))


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


def _as_others(one: ShardMeasure, most: ShardMeasure) -> ShardMeasure:
    """Fill in the measure of a shard that the pilot did not reach: assume as much as the others take."""
    forward, backward = one.saving_bytes or most.saving_bytes, one.backward_bytes or most.backward_bytes
    return replace(
        one,
        saving_bytes=forward,
        dropping_bytes=forward,
        backward_bytes=backward,
        again_bytes=backward,
        forward_needs_bytes=one.forward_needs_bytes or one.parameter_bytes,
        backward_needs_bytes=one.backward_needs_bytes or one.parameter_bytes,
        again_needs_bytes=one.again_needs_bytes or one.parameter_bytes,
    )


class _PilotUnits:
    """The units of a pilot that runs a model whole."""

    def __init__(self, pilot: _Pilot, mini: WholeBatch):
        self._pilot, self._mini = pilot, mini
        self.seconds: dict[int, float] = {}

    def begin(self, index: int) -> int:
        self._pilot._bring_in(self._mini, index)
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
    with _out_of_memory_said(device), gate.computing(), record_memory(device, this_thread_only=True) as recording:
        start_s = time.perf_counter()
        run()
        backend_of(device).finish()
        taken_s = time.perf_counter() - start_s
    return taken_s, recording.report.activation_bytes
