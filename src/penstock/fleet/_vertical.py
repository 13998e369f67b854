"""Accumulation shard by shard: all mini-batches of a step go through a shard before the next shard comes.

A step of ``k`` mini-batches fetches each shard twice instead of ``2 k`` times, and its gradients never leave before
they are complete. In exchange the values between shards of all mini-batches are there at once. Sums are those of one
mini-batch after the other, to the bit: a shard's gradients are added in the same order.
"""

import math
from collections.abc import Sequence

from penstock.fleet._memory import Item
from penstock.fleet._pilot import ShardMeasure
from penstock.fleet._problem import UnitKind
from penstock.fleet._program import Program
from penstock.fleet._training import Training
from penstock.fleet._units import MiniBatch


class VerticalStep(MiniBatch):
    """The mini-batches of one optimizer step, as one whose tasks are all of theirs in another order."""

    def __init__(self, minis: Sequence[MiniBatch]):  # not those of MiniBatch: it is made of some
        first = minis[0]
        self.minis = minis
        self.training, self.memory, self.program = first.training, first.memory, first.program
        self.structure, self.behaviour = first.structure, first.behaviour
        self._places = _order(minis)
        self.tasks = [minis[number].tasks[index] for number, index in self._places]
        self._at = {place: at for at, place in enumerate(self._places)}
        self._of_shard: dict[int, list[int]] = {}
        """By shard, the places of its tasks."""
        for at, task in enumerate(self.tasks):
            self._of_shard.setdefault(task.shard, []).append(at)

    @property
    def steps(self) -> bool:
        """Whether the optimizer steps at its end."""
        return True

    def needs(self, index: int) -> list[Item]:
        """Items that task ``index`` works on, as far as they exist."""
        number, own = self._places[index]
        return self.minis[number].needs(own)

    def run(self, index: int) -> None:
        """Runs task ``index``; what it needs is on the device, or is fetched now."""
        number, own = self._places[index]
        self.minis[number].run(own)

    def plan_uses(self, index: int, base: float = 0.0, *, goes_on: bool = True) -> None:
        """Tells items when they are used next, as seen before task ``index``, in units from now."""
        for one in self.training.groups:
            if one.item is not None:
                one.item.next_use = math.inf
        num_shards = len(self.program.shards)
        for shard, places in self._of_shard.items():
            later = [at - index for at in places if at >= index]
            later += [len(self.tasks) - index + shard] if goes_on else []
            nearest = base + min(later, default=math.inf)
            for item in self.minis[0].group_items(shard):
                item.next_use = min(item.next_use, nearest)
            ends = [at - index for at in places if at >= index and self.tasks[at].kind is not UnitKind.FORWARD]
            for item in self.minis[-1].owned_items(shard):
                item.next_use = base + min(ends, default=len(self.tasks) - index + num_shards)
        for number, mini in enumerate(self.minis):
            for item, uses in mini.value_uses():
                later = [self._at[number, own] - index for own in uses if self._at[number, own] >= index]
                item.next_use = base + min(later, default=math.inf)

    def state_bytes(self, at: int) -> int:
        """Bytes of optimizer state that shard ``at`` has already."""
        return self.minis[-1].state_bytes(at)

    def abandon(self) -> None:
        """Gives back whatever is under way."""
        for mini in self.minis:
            mini.abandon()


def _order(minis: Sequence[MiniBatch]) -> list[tuple[int, int]]:
    """Mini-batch and task of it, in the order in which they run."""
    found: list[tuple[int, int]] = []
    for index, task in enumerate(minis[0].tasks):
        found += [(number, index) for number in range(len(minis))] if task.kind is not UnitKind.STEP else []
    last = len(minis) - 1
    found += [(last, index) for index, task in enumerate(minis[last].tasks) if task.kind is UnitKind.STEP]
    return found


def is_possible(training: Training, program: Program, measures: Sequence[ShardMeasure]) -> bool:
    """Whether the order of mini-batches makes no difference to any shard.

    Not where operators draw random numbers, which have to be drawn mini-batch by mini-batch; nor where a shard writes
    to buffers that another reads; nor where the model is run whole.
    """
    if program.whole is not None or training.tree is not None or not all(one.draws_nothing for one in measures):
        return False
    for at, shard in enumerate(program.shards):
        written = set(shard.tensors) if shard.writes_buffers else set()
        others = {name for other, one in enumerate(program.shards) if other != at for name in one.tensors}
        if any(training.group_of[name].kind == "buffer" for name in written & others):
            return False
    return True


def is_cheaper(measures: Sequence[ShardMeasure], num_batches: int, room_bytes: int) -> bool:
    """Whether fewer bytes move: values between shards out and in, against shards and their gradients."""
    parameters = sum(one.parameter_bytes for one in measures)
    gradients = sum(one.accumulated_bytes for one in measures)
    whole = parameters + gradients + sum(one.state_bytes for one in measures)
    if whole + max(one.backward_bytes for one in measures) <= room_bytes:
        return False  # nothing of it ever leaves
    return 2 * num_batches * handed_bytes(measures) < 2 * (num_batches - 1) * (parameters + gradients)


def handed_bytes(measures: Sequence[ShardMeasure]) -> int:
    """Of one mini-batch: values between shards."""
    return sum(one.boundary_bytes for one in measures)


def parked_bytes(measures: Sequence[ShardMeasure], saves: Sequence[bool], num_batches: int) -> int:
    """The most that mini-batches have on the device or below it at once, beside what one alone has."""
    activations = sum(one.activation_bytes for one, keeps in zip(measures[:-1], saves, strict=False) if keeps)
    return (num_batches - 1) * (handed_bytes(measures) + activations)
