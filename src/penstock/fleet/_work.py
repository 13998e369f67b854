"""The part of a job that its mini-batches work on: tensors of each shard, their gradients, optimizer states."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from penstock.fleet._batch import Structure
from penstock.fleet._groups import Group
from penstock.fleet._memory import DeviceMemory, Item
from penstock.fleet._packed import Packed
from penstock.fleet._program import ShardProgram
from penstock.fleet._stepper import Stepper
from penstock.fleet._training import JobTraining


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
        training: JobTraining,
        memory: DeviceMemory,
        program: ShardProgram,
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
        self._host = memory.host if collects and training.update != "device" else None
        """The host's steps, if the job may take them."""
        self.steps_apart = self.waits_for_all or self._host is not None
        """Whether the optimizer steps in units of its own, at the end."""
        self._given: set[Group] = set()
        """Groups that the host was given to step."""
        self._can: dict[Group, bool] = {}
        """Whether the host could step a group, as far as it was asked."""
        self._has_begun = False
        """Whether it was given all that it takes, so that nothing has to be predicted any more."""
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

    def item_of(self, one: Group) -> Item:
        """Return the item of a group that is somewhere: in training the one that travels."""
        item = one.item if self._host is None else one.travelling
        assert item is not None
        return item

    def group_items(self, at: int) -> list[Item]:
        """Return the items of the groups that shard ``at`` uses."""
        return [self.item_of(one) for one in self.groups[at] if one.item is not None]

    def collected_items(self, at: int) -> list[Item]:
        """Return the gradients and optimizer states of shard ``at``, as far as they exist."""
        places = (self.training.gradients, self.training.states)
        return [place[one].item for one in self.owned(at) for place in places if one in place]

    def backward_items(self, at: int) -> list[Item]:
        """Return those of these items that backward of shard ``at`` works on, if it collects gradients."""
        if not self.behaviour.trains or self.behaviour.is_pilot:
            return []
        if self.steps and not self.steps_apart:
            return self.collected_items(at)
        return [self.training.gradients[one].item for one in self.owned(at) if one in self.training.gradients]

    def step_items(self, at: int) -> list[Item]:
        """Return the items that the optimizer's unit of shard ``at`` works on."""
        if not self.training.is_finite:
            return []
        here = [one for one in self.owned(at) if not self._goes_to_host(one)]
        places = self.training.gradients, self.training.states
        found = [one.item for one in here if one.item is not None]
        return found + [place[one].item for one in here for place in places if one in place]

    def stays_away(self, at: int) -> bool:
        """Whether the optimizer's unit of shard ``at`` has nothing to do, because the host does it."""
        return self._host is not None and all(map(self._goes_to_host, self.owned(at)))

    def _goes_to_host(self, one: Group) -> bool:
        """Whether the host steps a group, or has been given it."""
        if self._host is None:
            return False
        if one in self._given:
            return True
        if self._has_begun or not self._host.takes(self.training, one):
            return False
        if one not in self._can:
            self._can[one] = self._host.can_step(self.training, one)
        return self._can[one]

    def state_items(self, at: int) -> list[Item]:
        """Return the optimizer states that shard ``at`` already has."""
        return [self.training.states[one].item for one in self.owned(at) if one in self.training.states]

    def cast_bytes(self, at: int) -> int:
        """Return the bytes of gradients that the optimizer's unit of shard ``at`` has to cast first."""
        found = [self.training.gradients[one] for one in self.owned(at) if one in self.training.gradients]
        parameters = self.training.weights.parameters
        return sum(
            parameters[name].nbytes
            for packed in found
            for name, (_, layout) in packed.places.items()
            if layout.dtype is not parameters[name].dtype
        )

    def state_bytes(self, at: int) -> int:
        """Return the bytes of these states."""
        return sum(item.size_bytes for item in self.state_items(at))

    # Tensors

    @contextmanager
    def bound(self, groups: Iterable[Group], *, to_step: bool = False) -> Iterator[None]:
        """Bind the model's tensors to the bytes of these groups, which are on the device, inside this context.

        Forward and backward use what travels, the optimizer the weights.
        """
        here = [one for one in groups if one.item is not None]
        for one in here:
            assert one.item is not None
            item = one.item if to_step else self.item_of(one)
            (storage,) = self.memory.get(item)
            layouts = one.layouts if one.twin is None or item is one.item else one.twin.layouts
            self.training.weights.bind({name: layout.rebuild(storage) for name, layout in layouts.items()})
        try:
            yield
        finally:
            for one in here:
                self.training.weights.unbind(one.layouts)

    def tensors(self, at: int) -> list[torch.Tensor]:
        """Return the tensors of shard ``at``."""
        return [self.training.weights.current(name) for name in self.program.shards[at].tensors]

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
            name: self.training.weights.current(name)
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
        """Give the group's parameters the gradients of earlier batches, so that autograd adds to them.

        Those of a weight that travels in half precision are added later, by `collect`.
        """
        weights = self.training.weights
        for name, tensor in self.training.gradients[one].views(list(storages)).items():
            if weights.current(name) is weights.tensors[name]:
                weights.tensors[name].grad = tensor

    def collect(self, one: Group) -> None:
        """Measure, step or keep the group's gradients, which are complete."""
        training = self.training
        gradients = self._complete(one)
        if self.behaviour.is_pilot and gradients:  # to find their bytes
            self._stepper.measure(gradients)
            Packed.of("", gradients)
        if self.behaviour.is_pilot or not gradients:
            return
        if self.steps:
            self._stepper.measure(gradients)
        if self.steps and not self.steps_apart:
            self._stepper.step(one, gradients)
            return
        if one in training.gradients and gradients.keys() == training.gradients[one].places.keys():
            self.memory.changed(training.gradients[one].item)
        else:
            if one in training.gradients:  # a parameter got its first gradient
                self.memory.discard(training.gradients.pop(one).item)
            for name in gradients:
                training.weights.tensors[name].grad = None
            packed = Packed.of(f"{training.job.name}: gradients of shard {one.owner}", gradients)
            training.gradients[one] = packed
            self.memory.add(packed.item)
        if self.steps and not self.waits_for_all:
            self._give(one, None)

    def _complete(self, one: Group) -> dict[str, torch.Tensor]:
        """Return the group's gradients, including those of earlier batches."""
        weights, found = self.training.weights, dict[str, torch.Tensor]()
        for name in one.layouts:
            leaf = weights.current(name)
            gradient = leaf.grad if leaf is weights.tensors[name] else self._widened(one, name, leaf)
            if gradient is not None:
                found[name] = gradient
        return found

    def _widened(self, one: Group, name: str, leaf: torch.Tensor) -> torch.Tensor | None:
        """Take the gradient of a weight in half precision, added to those of earlier batches.

        It is cast if others will be added to it, or if the loss scale will divide it.
        """
        training, gradient, earlier = self.training, leaf.grad, self.training.gradients.get(one)
        leaf.grad = None
        if earlier is not None and name in earlier.places:
            total = earlier.views(self.memory.get(earlier.item))[name]
            return total if gradient is None else total.add_(gradient)
        if gradient is not None and (training.job.accumulate > 1 or training.scale is not None):
            return gradient.to(training.weights.tensors[name].dtype)
        return gradient

    def begin_on_host(self) -> None:
        """Give the host what it steps, once all gradients are known."""
        self._has_begun = True
        if self._host is None or not self.steps or not self.waits_for_all or not self.training.is_finite:
            return
        if not self.training.gradients:
            return
        factor = self._stepper.clip_factor()
        for at in reversed(range(len(self.groups))):
            for one in self.owned(at):
                if one in self.training.gradients:
                    self._give(one, factor)

    def _give(self, one: Group, factor: torch.Tensor | None) -> None:
        if self._host is not None and self._host.begin(self.training, one, factor):
            self._given.add(one)

    def measure(self, packed: Packed, storages: Sequence[torch.UntypedStorage]) -> None:
        """Divide gradients to which this mini-batch adds nothing by the loss scale, and note their norms."""
        self._stepper.measure(packed.views(list(storages)))
        self.memory.changed(packed.item)

    def step(self, at: int) -> None:
        """Run the optimizer's unit of shard ``at``, once all gradients are known."""
        training, here = self.training, [one for one in self.owned(at) if one in self.training.gradients]
        if not training.is_finite:
            for one in here:
                self.memory.discard(training.gradients.pop(one).item)
            return
        with self.bound(here, to_step=True):
            for one in here:
                packed = training.gradients[one]
                gradients = packed.views(self.memory.get(packed.item))
                for name, gradient in gradients.items():
                    parameter = training.weights.tensors[name]
                    parameter.grad = gradient.to(parameter.dtype)  # the host was to take it in half precision
                if training.job.clip_norm is not None:
                    self._stepper.clip(gradients)
                self._stepper.step(one, gradients)
