"""Pilot runs: what every shard really takes, in seconds and bytes, before the job trains.

A pilot runs one mini-batch twice through the units that will train it, once keeping what forward saves and once running
forward again in backward, and a step of the optimizer on copies. Parameters, buffers, random numbers and the position
in the data are as before afterwards. Shards that compute the same on the same shapes are measured once.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch

from penstock.errors import BudgetError
from penstock.fleet._batch import Structure
from penstock.fleet._memory import DeviceMemory
from penstock.fleet._problem import ShardCost, UnitKind
from penstock.fleet._program import Program
from penstock.fleet._training import Packed, Training
from penstock.fleet._units import Behaviour, MiniBatch
from penstock.probe import record_memory
from penstock.tiers import gate
from penstock.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMeasure:
    """One shard on one device. Bytes are those beside what the unit finds there."""

    forward_s: float = 0.0
    """Forward."""
    saving_bytes: int = 0
    """Peak of forward that keeps what autograd saves."""
    dropping_bytes: int = 0
    """Peak of forward that keeps nothing."""
    activation_bytes: int = 0
    """What autograd saves."""
    boundary_bytes: int = 0
    """Values that it hands on."""
    backward_s: float = 0.0
    """Backward alone; of the last shard forward and backward."""
    backward_bytes: int = 0
    """Its peak."""
    handed_bytes: int = 0
    """Gradients that backward hands on, which are there while the optimizer steps."""
    again_bytes: int = 0
    """Peak of backward that runs forward first."""
    step_s: float = 0.0
    """The optimizer's step."""
    step_bytes: int = 0
    """Its peak, state that it makes included."""
    state_bytes: int = 0
    """State that it makes."""
    parameter_bytes: int = 0
    """Parameters and buffers."""
    is_random: bool = True
    """Whether forward draws random numbers."""

    def cost(self, saves: bool) -> ShardCost:
        """As schedulers and simulations take it."""
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


def measure(
    training: Training,
    memory: DeviceMemory,
    program: Program,
    leaves: Sequence[torch.Tensor],
    structure: Structure,
    known: dict[tuple[Any, ...], ShardMeasure],
) -> list[ShardMeasure]:
    """Measures every shard that ``known`` lacks. Raises ``BudgetError`` naming the first that does not fit."""
    keys = [(one, *_circumstances(training, memory)) for one in program.fingerprints]
    if not all(key in known for key in keys):
        pilot = _Pilot(training, memory, program, leaves, structure)
        for key, found in zip(keys, pilot.run(), strict=True):
            known.setdefault(key, found)
    return [known[key] for key in keys]


def _circumstances(training: Training, memory: DeviceMemory) -> tuple[Any, ...]:
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


class _Pilot:
    def __init__(
        self,
        training: Training,
        memory: DeviceMemory,
        program: Program,
        leaves: Sequence[torch.Tensor],
        structure: Structure,
    ):
        self._training, self._memory, self._program = training, memory, program
        self._given = leaves, structure
        self._found = [ShardMeasure(parameter_bytes=self._size_bytes(at)) for at in range(len(program.shards))]
        self._largest = 0, ""
        """Bytes that a shard takes, and its label."""

    def run(self) -> list[ShardMeasure]:
        training = self._training
        mark, cuda = training.randomness.mark(), training.randomness.cuda
        mode, scale = training.is_finite, training.scale
        try:
            self._pass(saves=True)
            self._pass(saves=False)
            for at in range(len(self._program.shards)):
                self._step(at)
        except BudgetError:
            self._refuse_too_large()  # which names a budget for all shards so far
            raise
        finally:
            training.randomness.cpu, training.randomness.cuda = mark[0], cuda
            training.is_finite, training.scale = mode, scale
        self._refuse_too_large()
        return self._found

    def _size_bytes(self, at: int) -> int:
        """Of the groups that the shard uses."""
        return sum(
            one.size_bytes for one in {self._training.group_of[name] for name in self._program.shards[at].tensors}
        )

    def _pass(self, *, saves: bool) -> None:
        num_shards = len(self._program.shards)
        mini = MiniBatch(
            self._training,
            self._memory,
            self._program,
            *self._given,
            saves=[saves] * num_shards,
            behaviour=Behaviour(is_pilot=True),
        )
        try:
            for index, task in enumerate(mini.tasks):
                draws = self._training.randomness.num_draws
                taken_s, peak_bytes = self._unit(mini, index)
                before = self._found[task.shard]
                if task.kind is UnitKind.FORWARD:
                    found = self._after_forward(mini, before, task.shard, taken_s, peak_bytes, saves)
                else:
                    found = _after_backward(before, task.kind, taken_s, peak_bytes, saves)
                    found = replace(found, handed_bytes=max(found.handed_bytes, mini.gradient_bytes()))
                if task.kind is not UnitKind.BACKWARD:
                    found = replace(found, is_random=self._training.randomness.num_draws > draws)
                self._found[task.shard] = found
        finally:
            mini.abandon()

    def _unit(self, mini: MiniBatch, index: int) -> tuple[float, int]:
        memory, needs = self._memory, mini.needs(index)
        shard = self._program.shards[mini.tasks[index].shard]
        mini.plan_uses(index)
        missing = sum(item.size_bytes for item in needs if item.storages is None)
        memory.make_room(missing, needs, f"the shard {shard.label}")
        for item in needs:
            memory.get(item)
        memory.flush(keep=needs)
        taken_s, peak_bytes = _measured(memory.device, lambda: mini.run(index))
        self._largest = max(self._largest, (sum(item.size_bytes for item in needs) + peak_bytes, shard.label))
        return taken_s, peak_bytes

    def _refuse_too_large(self) -> None:
        size_bytes, label = self._largest
        if size_bytes > self._memory.budget_bytes:
            raise BudgetError(
                f"the shard {label} takes {format_bytes(size_bytes)}, above the budget of "
                f"{format_bytes(self._memory.budget_bytes)} on {self._memory.device}; a budget of "
                f"{size_bytes} has room for it, or take smaller batches (accumulate=)"
            )

    def _after_forward(
        self, mini: MiniBatch, before: ShardMeasure, at: int, taken_s: float, peak_bytes: int, saves: bool
    ) -> ShardMeasure:
        before = replace(
            before, forward_s=min(taken_s, before.forward_s or taken_s), boundary_bytes=mini.value_bytes(at)
        )
        if not saves:
            return replace(before, dropping_bytes=peak_bytes)
        return replace(before, saving_bytes=peak_bytes, activation_bytes=mini.saved_bytes(at))

    def _step(self, at: int) -> None:
        training, memory = self._training, self._memory
        groups = [one for one in training.groups if one.kind == "trained" and one.owner == at]
        gradient_bytes = sum(one.size_bytes for one in groups)  # of all of them, while each is stepped
        for one in groups:
            assert one.item is not None
            memory.flush(keep=[one.item])
            (storage,) = memory.get(one.item)
            copies = {name: view.clone() for name, view in one.views(storage).items()}
            training.bind(copies)
            parameters = {name: training.parameters[name] for name in one.layouts}
            for parameter in parameters.values():
                parameter.grad = torch.zeros_like(parameter)
            states: dict[str, Any] = {}

            def step(parameters: Any = parameters, states: Any = states) -> None:
                states.update(training.optimizer.try_step(parameters))
                fields = {f"{name}//{key}": value for name, state in states.items() for key, value in state.items()}
                Packed.of("", {key: value for key, value in fields.items() if _is_tensor(value)})

            taken_s, peak_bytes = _measured(memory.device, step)
            training.unbind(one.layouts)
            state_bytes = sum(
                value.nbytes for state in states.values() for value in state.values() if _is_tensor(value)
            )
            found = self._found[at]
            self._found[at] = replace(
                found,
                step_s=found.step_s + taken_s,
                step_bytes=max(found.step_bytes, gradient_bytes + found.state_bytes + peak_bytes),
                state_bytes=found.state_bytes + state_bytes,
            )
            del copies, states, parameters
            taken_bytes = 2 * one.size_bytes + peak_bytes
            self._largest = max(self._largest, (taken_bytes, f"step of {self._program.shards[at].label}"))


def _is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor)


def _after_backward(before: ShardMeasure, kind: UnitKind, taken_s: float, peak_bytes: int, saves: bool) -> ShardMeasure:
    if kind is UnitKind.FUSED:
        both_s = min(taken_s, before.backward_s or taken_s)
        return replace(before, backward_s=both_s, backward_bytes=peak_bytes, again_bytes=peak_bytes)
    if saves:
        return replace(before, backward_s=taken_s, backward_bytes=peak_bytes)
    return replace(before, again_bytes=peak_bytes)


def _measured(device: torch.device, run: Callable[[], None]) -> tuple[float, int]:
    """Seconds, and peak of bytes beside those at the start. Raises ``BudgetError`` where memory ran out."""
    try:
        with gate.computing(), record_memory(device, this_thread_only=True) as recording:
            start_s = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken_s = time.perf_counter() - start_s
    except torch.OutOfMemoryError as error:
        raise BudgetError(f"{device} ran out of memory in a pilot run: {error}") from error
    return taken_s, recording.report.activation_bytes
