"""Buffers that forward of a shard may write to, and how a forward that runs again finds them."""

from collections.abc import Collection

import torch

from penstock.fleet._work import Work
from penstock.fleet._writes import StandIns


class Buffers:
    """Of one mini-batch of a model that was cut."""

    def __init__(self, work: Work):
        training = work.training
        self._work = work
        self.names = frozenset(name for name in training.weights.tensors if training.group_of[name].kind == "buffer")
        """All of the model's."""

    def note_changed(self, at: int) -> None:
        """Copies below are old if forward of shard ``at`` may have written to buffers."""
        for one in self._work.groups[at] if self._work.program.shards[at].writes_buffers else ():
            if one.kind == "buffer" and one.item is not None:
                self._work.memory.changed(one.item)

    def written_after(self, at: int) -> set[str]:
        """Buffers that shard ``at`` reads and a later one may write to."""
        shards = self._work.program.shards
        later = {name for one in shards[at + 1 :] if one.writes_buffers for name in one.tensors}
        return later & self.names & set(shards[at].tensors)

    def copies(self, at: int, others: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """Of those that forward of shard ``at`` may write to, and of ``others``."""
        shard = self._work.program.shards[at]
        names = {*others, *(self.names & set(shard.tensors) if shard.writes_buffers else ())}
        return {
            name: self._work.training.weights.tensors[name].detach().clone() for name in shard.tensors if name in names
        }

    def changed(self, before: dict[str, torch.Tensor], later: Collection[str]) -> dict[str, torch.Tensor]:
        """Those of ``before`` that forward changed, or will ``later``. Batch norm's kernel raises no version."""
        tensors = self._work.training.weights.tensors
        return {
            name: copy
            for name, copy in before.items()
            if name in later or not torch.equal(copy, tensors[name].detach())
        }

    def forgotten(self, at: int) -> StandIns:
        """While it is entered, what shard ``at`` writes to buffers is forgotten."""
        return self.standing_for(self.copies(at))

    def standing_for(self, others: dict[str, torch.Tensor]) -> StandIns:
        """While it is entered, these are the buffers."""
        return StandIns(self._work.training.weights.tensors, others)
