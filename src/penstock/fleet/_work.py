"""The part of a job that its mini-batches work on: tensors of each shard, their gradients, optimizer states."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from penstock.fleet._batch import Structure
from penstock.fleet._groups import Group
from penstock.fleet._memory import DeviceMemory, Item
from penstock.fleet._packed import Packed
from penstock.fleet._program import Program
from penstock.fleet._stepper import Stepper
from penstock.fleet._training import Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """Settings for units that differ from ordinary training."""

    is_pilot: bool = False
    """Whether units only measure. Buffers, gradients and random numbers are unchanged afterwards."""
    trains: bool = True
    """Whether units train; ``False`` for validation."""


class Work:
    """The tensors and items that one mini-batch of a job works on, on the device of ``memory``.

    ``micro`` is the number of mini-batches of its step that precede it, if it differs from the job's position.
    """

    def __init__(
        self,
        training: Training,
        memory: DeviceMemory,
        program: Program,
        structure: Structure,
        behaviour: Behaviour | None = None,
        micro: int | None = None,
    ):
        self.training, self.memory, self.program, self.structure = training, memory, program, structure
        self.behaviour = behaviour or Behaviour()
        self._stepper = Stepper(training, memory)
        job, collects = training.job, self.behaviour.trains and not self.behaviour.is_pilot
        before = training.position.micro if micro is None else micro
        self.steps = collects and before == job.accumulate - 1
        """Whether the optimizer steps at its end."""
        self.waits_for_all = program.whole is not None or job.clip_norm is not None or training.scale is not None
        """Whether the optimizer needs all gradients before it changes anything.

        A model that is run whole may read any parameter until backward has ended.
        """
        self.groups = [
            list(dict.fromkeys(training.group_of[name] for name in shard.tensors)) for shard in program.shards
        ]
        """The groups of each shard."""
        used = {one for groups in self.groups for one in groups}
        for one in training.gradients if collects else ():
            if one not in used:  # from batches of another shape; this graph does not use it, but it is stepped
                self.groups[one.owner].append(one)

    # Items

    def owned(self, at: int) -> list[Group]:
        """Return the groups whose gradients shard ``at`` collects."""
        return [one for one in self.groups[at] if one.kind == "trained" and one.owner == at]

    def group_items(self, at: int) -> list[Item]:
        """Return the items of the groups that shard ``at`` uses."""
        return [one.item for one in self.groups[at] if one.item is not None]

    def collected_items(self, at: int) -> list[Item]:
        """Return the gradients and optimizer states of shard ``at``, as far as they exist."""
        places = (self.training.gradients, self.training.states)
        return [place[one].item for one in self.owned(at) for place in places if one in place]

    def backward_items(self, at: int) -> list[Item]:
        """Return those of these items that backward of shard ``at`` works on, if it collects gradients."""
        if not self.behaviour.trains or self.behaviour.is_pilot:
            return []
        if self.steps and not self.waits_for_all:
            return self.collected_items(at)
        return [self.training.gradients[one].item for one in self.owned(at) if one in self.training.gradients]

    def step_items(self, at: int) -> list[Item]:
        """Return the items that the optimizer's unit of shard ``at`` works on."""
        own = [one.item for one in self.owned(at) if one.item is not None]
        return own + self.collected_items(at)

    def state_bytes(self, at: int) -> int:
        """Return the bytes of optimizer state that shard ``at`` already has."""
        states = self.training.states
        return sum(states[one].item.size_bytes for one in self.owned(at) if one in states)

    # Tensors

    @contextmanager
    def bound(self, groups: Iterable[Group]) -> Iterator[None]:
        """Bind the model's tensors to the bytes of these groups, which are on the device, inside this context."""
        here = [one for one in groups if one.item is not None]
        for one in here:
            assert one.item is not None
            (storage,) = self.memory.get(one.item)
            self.training.weights.bind(one.views(storage))
        try:
            yield
        finally:
            for one in here:
                self.training.weights.unbind(one.layouts)

    def tensors(self, at: int) -> list[torch.Tensor]:
        """Return the tensors of shard ``at``."""
        return [self.training.weights.tensors[name] for name in self.program.shards[at].tensors]

    def travelling(self, at: int) -> list[str]:
        """Return the names of the shard's tensors whose gradients another shard collects."""
        group_of = self.training.group_of
        return [
            name
            for name in self.program.shards[at].tensors
            if group_of[name].kind == "trained" and group_of[name].owner != at
        ]

    def shared(self, at: int) -> dict[str, torch.Tensor]:
        """Return the parameters that the shard owns and others also use."""
        return {
            name: self.training.weights.tensors[name]
            for one in self.owned(at)
            if len(one.shards) > 1
            for name in one.layouts
        }

    def seed(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the gradient of ``loss`` with which backward begins. Raise ``ValueError`` if it cannot be a loss."""
        if loss.numel() != 1 or not loss.requires_grad:
            raise ValueError(
                f"the loss must be a scalar that requires a gradient, got a tensor of shape {tuple(loss.shape)} with "
                f"requires_grad={loss.requires_grad}; for instance loss=lambda model, batch: "
                "torch.nn.functional.cross_entropy(model(batch[0]), batch[1])"
            )
        seed = torch.ones_like(loss)
        if self.training.scale is not None:
            seed = seed * self.training.scale.value
        return seed / self.training.job.accumulate if self.training.job.accumulate > 1 else seed

    # Gradients and steps

    def lay_out(self, one: Group, storages: Sequence[torch.UntypedStorage]) -> None:
        """Give the group's parameters the gradients of earlier batches, so that autograd adds to them."""
        for name, tensor in self.training.gradients[one].views(list(storages)).items():
            self.training.weights.tensors[name].grad = tensor

    def collect(self, one: Group) -> None:
        """Measure, step or keep the group's gradients, which are complete."""
        training = self.training
        found = {name: training.weights.tensors[name].grad for name in one.layouts}
        gradients = {name: gradient for name, gradient in found.items() if gradient is not None}
        if self.behaviour.is_pilot and gradients:  # to find their bytes
            self._stepper.measure(gradients)
            Packed.of("", gradients)
        if self.behaviour.is_pilot or not gradients:
            return
        if self.steps:
            self._stepper.measure(gradients)
        if self.steps and not self.waits_for_all:
            self._stepper.step(one, gradients)
        elif one in training.gradients and gradients.keys() == training.gradients[one].places.keys():
            self.memory.changed(training.gradients[one].item)
        else:
            if one in training.gradients:  # a parameter got its first gradient
                self.memory.discard(training.gradients.pop(one).item)
            for name in gradients:
                training.weights.tensors[name].grad = None
            packed = Packed.of(f"{training.job.name}: gradients of shard {one.owner}", gradients)
            training.gradients[one] = packed
            self.memory.add(packed.item)

    def measure(self, packed: Packed, storages: Sequence[torch.UntypedStorage]) -> None:
        """Divide gradients to which this mini-batch adds nothing by the loss scale, and note their norms."""
        self._stepper.measure(packed.views(list(storages)))
        self.memory.changed(packed.item)

    def step(self, at: int) -> None:
        """Run the optimizer's unit of shard ``at``, once all gradients are known."""
        training = self.training
        for one in self.owned(at):
            packed = training.gradients.get(one)
            if packed is None:
                continue
            gradients = packed.views(self.memory.get(packed.item))
            if training.is_finite:
                for name, gradient in gradients.items():
                    training.weights.tensors[name].grad = gradient
                if training.job.clip_norm is not None:
                    self._stepper.clip(gradients)
                self._stepper.step(one, gradients)
            else:
                self.memory.discard(training.gradients.pop(one).item)
