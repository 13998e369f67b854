"""Buffers that forward of a shard may write to, and their values for a forward that runs again."""

from collections.abc import Collection

import torch

from penstock.fleet._work import Work
from penstock.fleet._writes import StandIns


class Buffers:
    """The buffers of one mini-batch of a model that was cut."""

    def __init__(self, work: Work):
        training = work.training
        self._work = work
        self.names = frozenset(
            name for name in training.weights.tensors if training.groups.by_name[name].kind == "buffer"
        )
        """Names of all buffers of the model."""

    def note_changed(self, index: int) -> None:
        """Mark lower copies of buffers as outdated if forward of shard ``index`` may have written to the buffers."""
        for group in self._work.groups[index] if self._work.program.shards[index].writes_buffers else ():
            if group.kind == "buffer" and group.item is not None:
                self._work.memory.changed(group.item)

    def written_after(self, index: int) -> set[str]:
        """Return the buffers that shard ``index`` reads and a later shard may write to."""
        shards = self._work.program.shards
        later = {name for layers in shards[index + 1 :] if layers.writes_buffers for name in layers.tensors}
        return later & self.names & set(shards[index].tensors)

    def copies(self, index: int, others: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """Return copies of the buffers that forward of shard ``index`` may write to, and of ``others``."""
        shard = self._work.program.shards[index]
        names = {*others, *(self.names & set(shard.tensors) if shard.writes_buffers else ())}
        return {
            name: self._work.training.weights.tensors[name].detach().clone() for name in shard.tensors if name in names
        }

    def changed(self, before: dict[str, torch.Tensor], later: Collection[str]) -> dict[str, torch.Tensor]:
        """Return those of ``before`` that forward changed, and those in ``later``, which will change.

        Values are compared because batch norm's kernel does not increase a tensor's version.
        """
        tensors = self._work.training.weights.tensors
        return {
            name: copy
            for name, copy in before.items()
            if name in later or not torch.equal(copy, tensors[name].detach())
        }

    def forgotten(self, index: int) -> StandIns:
        """Return a context in which everything that shard ``index`` writes to buffers is undone at the end."""
        return self.standing_for(self.copies(index))

    def standing_for(self, others: dict[str, torch.Tensor]) -> StandIns:
        """Return a context in which ``others`` replace the buffers."""
        return StandIns(self._work.training.weights.tensors, others)
