"""The part of a job that its mini-batches work on: tensors of each shard, their gradients, optimizer states."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from penstock.fleet._batch import Structure
from penstock.fleet._groups import Group
from penstock.fleet._host_steps import HostSteps
from penstock.fleet._memory import DeviceMemory, Item
from penstock.fleet._packed import Packed
from penstock.fleet._program import ShardProgram
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
        job, collects = training.job, self.behaviour.trains and not self.behaviour.is_pilot
        before = training.position.micro if micro is None else micro
        self.steps = collects and before == job.accumulate - 1
        """Whether the optimizer steps at its end."""
        scales = training.open_step.scale is not None
        self.waits_for_all = program.whole is not None or job.clip_norm is not None or scales
        """Whether the optimizer needs all gradients before it changes anything.

        A model that is run whole may read any parameter until backward has ended.
        """
        host = memory.host if collects and training.update != "device" else None
        self.hosted = None if host is None else HostedGroups(training, host)
        """The groups that the host steps, if the job may take the host."""
        self.steps_apart = self.waits_for_all or self.hosted is not None
        """Whether the optimizer steps in units of its own, at the end."""
        by_name = training.groups.by_name
        self.groups = [list(dict.fromkeys(by_name[name] for name in shard.tensors)) for shard in program.shards]
        """The groups of each shard."""
        used = {group for groups in self.groups for group in groups}
        for group in training.open_step.gradients if collects else ():
            if group not in used:  # from batches of another shape; this graph does not use it, but it is stepped
                self.groups[group.owner].append(group)

    # Items

    def owned(self, shard: int) -> list[Group]:
        """Return the groups whose gradients ``shard`` collects."""
        return [group for group in self.groups[shard] if group.kind == "trained" and group.owner == shard]

    def item_of(self, group: Group) -> Item:
        """Return the item of a group that is somewhere: in training the one that travels."""
        item = group.item if self.hosted is None else group.travelling
        assert item is not None
        return item

    def group_items(self, shard: int) -> list[Item]:
        """Return the items of the groups that ``shard`` uses."""
        return [self.item_of(group) for group in self.groups[shard] if group.item is not None]

    def gradients_of(self, shard: int) -> list[Packed]:
        """Return the gradients of earlier mini-batches that ``shard`` collects, as far as they exist."""
        gradients = self.training.open_step.gradients
        return [gradients[group] for group in self.owned(shard) if group in gradients]

    def collected_items(self, shard: int) -> list[Item]:
        """Return the gradients and optimizer states of ``shard``, as far as they exist."""
        places = (self.training.open_step.gradients, self.training.states.packed)
        return [place[group].item for group in self.owned(shard) for place in places if group in place]

    def backward_items(self, shard: int) -> list[Item]:
        """Return those of these items that backward of ``shard`` works on, if it collects gradients."""
        if not self.behaviour.trains or self.behaviour.is_pilot:
            return []
        if self.steps and not self.steps_apart:
            return self.collected_items(shard)
        return [packed.item for packed in self.gradients_of(shard)]

    def step_items(self, shard: int) -> list[Item]:
        """Return the items that the optimizer's unit of ``shard`` works on."""
        if not self.training.open_step.is_finite:
            return []
        here = [group for group in self.owned(shard) if self.hosted is None or group not in self.hosted]
        places = self.training.open_step.gradients, self.training.states.packed
        items = [group.item for group in here if group.item is not None]
        return items + [place[group].item for group in here for place in places if group in place]

    def stays_away(self, shard: int) -> bool:
        """Whether the optimizer's unit of ``shard`` has nothing to do, because the host does it."""
        hosted = self.hosted
        return hosted is not None and all(group in hosted for group in self.owned(shard))

    def state_items(self, shard: int) -> list[Item]:
        """Return the optimizer states that ``shard`` already has."""
        states = self.training.states.packed
        return [states[group].item for group in self.owned(shard) if group in states]

    def cast_bytes(self, shard: int) -> int:
        """Return the bytes of gradients that the optimizer's unit of ``shard`` has to cast first."""
        parameters = self.training.weights.parameters
        return sum(
            parameters[name].nbytes
            for packed in self.gradients_of(shard)
            for name, (_, layout) in packed.places.items()
            if layout.dtype is not parameters[name].dtype
        )

    def state_bytes(self, shard: int) -> int:
        """Return the bytes of the states of `state_items`."""
        return sum(item.size_bytes for item in self.state_items(shard))

    # Tensors

    @contextmanager
    def bound(self, groups: Iterable[Group], *, to_step: bool = False) -> Iterator[None]:
        """Bind the model's tensors to the bytes of these groups, which are on the device, inside this context.

        Forward and backward use what travels, the optimizer the weights.
        """
        here = [group for group in groups if group.item is not None]
        for group in here:
            assert group.item is not None
            item = group.item if to_step else self.item_of(group)
            (storage,) = self.memory.get(item)
            layouts = group.layouts if group.twin is None or item is group.item else group.twin.layouts
            self.training.weights.bind({name: layout.rebuild(storage) for name, layout in layouts.items()})
        try:
            yield
        finally:
            for group in here:
                self.training.weights.unbind(group.layouts)

    def tensors(self, shard: int) -> list[torch.Tensor]:
        """Return the tensors of ``shard``."""
        return [self.training.weights.current(name) for name in self.program.shards[shard].tensors]

    def travelling(self, shard: int) -> list[str]:
        """Return the names of the shard's tensors whose gradients another shard collects."""
        by_name = self.training.groups.by_name
        return [
            name
            for name in self.program.shards[shard].tensors
            if by_name[name].kind == "trained" and by_name[name].owner != shard
        ]

    def shared(self, shard: int) -> dict[str, torch.Tensor]:
        """Return the parameters that the shard owns and others also use."""
        return {
            name: self.training.weights.current(name)
            for group in self.owned(shard)
            if len(group.shards) > 1
            for name in group.layouts
        }


class HostedGroups:
    """The groups of a job that the host steps at the end of a mini-batch."""

    def __init__(self, training: JobTraining, host: HostSteps):
        self._training, self._host = training, host
        self._begun: set[Group] = set()
        """Groups that the host was given to step."""
        self._can: dict[Group, bool] = {}
        """Whether the host could step a group, as far as it was asked."""
        self._is_complete = False

    def __contains__(self, group: Group) -> bool:
        """Whether the host steps a group, or has been given it."""
        if group in self._begun:
            return True
        # After `complete` only what was begun counts: more groups may become able to step, but nobody will give them.
        if self._is_complete or not self._host.takes(self._training, group):
            return False
        if group not in self._can:
            self._can[group] = self._host.can_step(self._training, group)
        return self._can[group]

    def give(self, group: Group, factor: torch.Tensor | None) -> None:
        """Let the host step a group whose gradients are complete, if it can."""
        if self._host.begin(self._training, group, factor):
            self._begun.add(group)

    def complete(self) -> None:
        """Note that nothing has to be predicted any more, because the host was given all that it takes."""
        self._is_complete = True
