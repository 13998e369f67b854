"""Mini-batches of a model that was cut: what each unit computes, and what it needs on the device."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from penstock.fleet._autograd import Saved, ShardGraph, backward, dropping, forward
from penstock.fleet._buffers import Buffers
from penstock.fleet._halves import CastWatch
from penstock.fleet._job import AUTOCAST_DTYPES
from penstock.fleet._memory import Item
from penstock.fleet._order import TaskOrder
from penstock.fleet._problem import UnitKind
from penstock.fleet._random import Draws
from penstock.fleet._units import MiniBatch
from penstock.fleet._values import Values
from penstock.fleet._work import Work
from penstock.fleet._writes import run_watched


class CutBatch:
    """One mini-batch on its way through the shards.

    ``saves`` says for each shard whether backward uses what forward saved, or runs forward again. ``draws`` says where
    its operators draw random numbers.
    """

    def __init__(self, work: Work, leaves: Sequence[torch.Tensor], saves: Sequence[bool], draws: Sequence[Draws] = ()):
        self.work, self.order = work, TaskOrder(work)
        self.values = Values(work, self.order, leaves)
        self.results: list[torch.Tensor] = []
        """The results of the last shard, without gradients."""
        self._buffers = Buffers(work)
        self._saves = list(saves)
        self._draws = list(draws) or [Draws.ON_HOST] * len(work.program.shards)
        self._watches: dict[int, CastWatch] = {}
        """Per shard, what a pilot learned about casts."""
        self._marks: dict[int, Any] = {}
        """Per shard, the random state at the start of its forward."""

    def needs(self, index: int) -> list[Item]:
        """Return the items that task ``index`` works on, as far as they exist."""
        work, task = self.work, self.order.tasks[index]
        if task.kind is UnitKind.STEP:
            return work.step_items(task.shard)
        found = [*work.group_items(task.shard), *self.values.needed_by(task)]
        found += work.backward_items(task.shard) if task.kind is not UnitKind.FORWARD else []
        return list(dict.fromkeys(found))

    def run(self, index: int) -> None:
        """Run task ``index``. What it needs must be on the device."""
        task = self.order.tasks[index]
        if task.kind is UnitKind.STEP:
            self.work.step(task.shard)
            return
        with self.work.bound(self.work.groups[task.shard]):
            if not self.work.behaviour.trains:
                self._evaluate(task.shard)
            elif task.kind is UnitKind.FORWARD:
                self._forward(task.shard)
            else:
                self._backward(task.shard, is_last=task.kind is UnitKind.FUSED)
        self.values.drop_after(index)

    def casts(self, at: int) -> tuple[bool, ...]:
        """Return, per tensor of shard ``at``, whether a pilot's forward used it only by casting it."""
        watch = self._watches.get(at)
        return () if watch is None else tuple(name in watch.found for name in self.work.program.shards[at].tensors)

    def _context(self, at: int) -> AbstractContextManager[Any]:
        training, device = self.work.training, self.work.memory.device
        stack = ExitStack()
        dtype = AUTOCAST_DTYPES.get(training.job.precision)
        if dtype is not None:
            stack.enter_context(torch.autocast(device.type, dtype=dtype))
            if self.work.behaviour.is_pilot and self.work.memory.host is not None:
                shard = self.work.program.shards[at]
                tensors = dict(zip(shard.tensors, self.work.tensors(at), strict=True))
                self._watches[at] = CastWatch(tensors, dtype)
                stack.enter_context(self._watches[at])
        stack.enter_context(training.randomness.drawing(device, self._draws[at]))
        return stack

    def _run_forward(self, at: int) -> tuple[ShardGraph, Sequence[torch.Tensor]]:
        inputs, needing = self.values.inputs(at)
        with self._context(at):
            return forward(
                self.work.program.shards[at],
                self.work.tensors(at),
                inputs,
                travelling=self.work.travelling(at),
                needing=needing,
                device=self.work.memory.device,
                buffers=self._buffers.names,
            )

    def _forward(self, at: int) -> None:
        buffers = self._buffers
        self._marks[at] = self.work.training.randomness.mark()
        with buffers.forgotten(at) if self.work.behaviour.is_pilot else nullcontext():
            if self._saves[at]:
                self._forward_and_save(at)
            else:
                later = buffers.written_after(at)
                before = buffers.copies(at, later)
                with dropping():
                    graph, outputs = self._run_forward(at)
                needing = set(graph.left)
                del graph
                self.values.hand_on(at, outputs, needing)
                self.values.keep_before(at, buffers.changed(before, later))
            buffers.note_changed(at)

    def _forward_and_save(self, at: int) -> None:
        saved = Saved(self.values.homes(at), self.work.memory.device)
        with saved.hooks():
            graph, outputs = self._run_forward(at)
        items = self.values.hand_on(at, outputs, set(graph.left))
        del outputs
        saved.finish(f"{self.work.training.job.name}: activations of shard {at}", items)
        if saved.item is not None:
            self.work.memory.add(saved.item)
        graph.saved = saved
        self.values.graphs[at] = graph

    def _evaluate(self, at: int) -> None:
        shard = self.work.program.shards[at]
        inputs, _ = self.values.inputs(at)
        with torch.no_grad(), self.work.training.cuts.evaluating(), self._context(at):
            outputs = run_watched(shard, self.work.tensors(at), inputs, self._buffers.names, self.work.memory.device)
            if at == len(self.work.program.shards) - 1:
                self.results = [one.detach() for one in outputs]
            else:
                self.values.hand_on(at, outputs, set())
        self._buffers.note_changed(at)

    def _backward(self, at: int, *, is_last: bool) -> None:
        work = self.work
        graph = self.values.graphs.pop(at, None)
        gradients = self.values.take_gradients(at)
        self._lay_gradients_out(at)
        if graph is None or graph.saved is None:
            graph = self._forward_again(at, gradients, is_last=is_last)
        else:
            graph.saved.fetched = work.memory.get
        backward(graph, gradients, work.shared(at))
        if graph.saved is not None and graph.saved.item is not None:
            work.memory.discard(graph.saved.item)
        del graph
        self.values.hand_back(gradients)
        for one in work.owned(at):
            work.collect(one)

    def _forward_again(self, at: int, gradients: dict[str, torch.Tensor], *, is_last: bool) -> ShardGraph:
        """Run forward to get the graph for backward.

        For the last shard this is its first forward; it adds the loss's gradient.
        """
        work, buffers = self.work, self._buffers
        replay = nullcontext() if is_last else work.training.randomness.replaying(self._marks[at])
        tries = is_last and work.behaviour.is_pilot
        with replay, buffers.forgotten(at) if tries else buffers.standing_for(self.values.take_before(at)):
            graph, outputs = self._run_forward(at)
        if is_last:
            self.results = [one.detach() for one in outputs]
            gradients["result.0"] = work.seed(outputs[0])
            if not work.behaviour.is_pilot:
                buffers.note_changed(at)
        return graph

    def _lay_gradients_out(self, at: int) -> None:
        """Lay out the gradients of earlier batches, so that autograd adds to them."""
        for one in self.work.owned(at) if not self.work.behaviour.is_pilot else ():
            packed = self.work.training.gradients.get(one)
            if packed is not None:
                self.work.lay_out(one, self.work.memory.get(packed.item))


class CutBatches(MiniBatch):
    """One mini-batch, or all mini-batches of a step, shard by shard: all of them pass one shard before the next."""

    def __init__(self, minis: Sequence[CutBatch]):
        self._minis, self.work = minis, minis[-1].work
        self._places = _order(minis)
        self.tasks = [minis[number].order.tasks[index] for number, index in self._places]
        self._at = {place: at for at, place in enumerate(self._places)}
        self._end_of_backward = max(at for at, task in enumerate(self.tasks) if task.kind is not UnitKind.STEP)
        self._of_shard: dict[int, list[int]] = {}
        """Per shard, the positions of its tasks."""
        for at, task in enumerate(self.tasks):
            self._of_shard.setdefault(task.shard, []).append(at)

    @property
    def results(self) -> list[list[torch.Tensor]]:
        """The results of the last shard for each mini-batch, without gradients."""
        return [one.results for one in self._minis]

    def needs(self, index: int) -> list[Item]:
        """Return the items that task ``index`` works on, as far as they exist."""
        number, own = self._places[index]
        return self._minis[number].needs(own)

    def run(self, index: int) -> None:
        """Run task ``index``. What it needs is on the device, or is fetched now."""
        number, own = self._places[index]
        self._minis[number].run(own)
        if index == self._end_of_backward:
            self.work.begin_on_host()

    def plan_uses(self, index: int) -> None:
        """Set the next use of each item, counted in units from task ``index``."""
        work = self.work
        for one in work.training.groups:
            for item in (one.item, one.travelling):
                if item is not None:
                    item.next_use = math.inf
        behind = len(self.tasks) - index  # where the units of the next mini-batch begin
        for shard, everywhere in self._of_shard.items():
            away = work.stays_away(shard)
            places = [at for at in everywhere if not (away and self.tasks[at].kind is UnitKind.STEP)]
            nearest = min((at - index for at in places if at >= index), default=behind + shard)
            for item in work.group_items(shard):
                item.next_use = min(item.next_use, nearest)
            ends = [at - index for at in places if at >= index and self.tasks[at].kind is not UnitKind.FORWARD]
            for item in work.collected_items(shard):
                item.next_use = min(ends, default=behind + len(work.program.shards))
            for item in work.state_items(shard) if away else ():
                item.next_use = math.inf
        for number, mini in enumerate(self._minis):
            for item, uses in mini.values.uses():
                later = [self._at[number, own] - index for own in uses if self._at[number, own] >= index]
                item.next_use = min(later, default=math.inf)

    def abandon(self) -> None:
        """Give back everything that is under way."""
        for mini in self._minis:
            mini.values.abandon()


def _order(minis: Sequence[CutBatch]) -> list[tuple[int, int]]:
    """Return pairs of mini-batch and task in the order in which they run."""
    found: list[tuple[int, int]] = []
    for index, task in enumerate(minis[0].order.tasks):
        found += [(number, index) for number in range(len(minis))] if task.kind is not UnitKind.STEP else []
    last = len(minis) - 1
    found += [(last, index) for index, task in enumerate(minis[last].order.tasks) if task.kind is UnitKind.STEP]
    return found
