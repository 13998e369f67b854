"""Mini-batches of a model that was cut: what each unit computes, and what it needs on the device."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from penstock.fleet._autograd import Saved, ShardGraph, backward, dropping, forward
from penstock.fleet._buffers import Buffers
from penstock.fleet._gradients import Gradients
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
        self.gradients = Gradients(work)
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
        items = [*work.group_items(task.shard), *self.values.needed_by(task)]
        items += work.backward_items(task.shard) if task.kind is not UnitKind.FORWARD else []
        return list(dict.fromkeys(items))

    def run(self, index: int) -> None:
        """Run task ``index``. What it needs must be on the device."""
        task = self.order.tasks[index]
        if task.kind is UnitKind.STEP:
            self.gradients.step(task.shard)
            return
        with self.work.bound(self.work.groups[task.shard]):
            if not self.work.behaviour.trains:
                self._evaluate(task.shard)
            elif task.kind is UnitKind.FORWARD:
                self._forward(task.shard)
            else:
                self._backward(task.shard, is_last=task.kind is UnitKind.FUSED)
        self.values.drop_after(index)

    def casts(self, shard: int) -> tuple[bool, ...]:
        """Return, per tensor of ``shard``, whether a pilot's forward used it only by casting it."""
        watch = self._watches.get(shard)
        return () if watch is None else tuple(name in watch.found for name in self.work.program.shards[shard].tensors)

    def _context(self, shard: int) -> AbstractContextManager[Any]:
        training, device = self.work.training, self.work.memory.device
        stack = ExitStack()
        dtype = AUTOCAST_DTYPES.get(training.job.precision)
        if dtype is not None:
            stack.enter_context(torch.autocast(device.type, dtype=dtype))
            if self.work.behaviour.is_pilot and self.work.memory.host is not None:
                names = self.work.program.shards[shard].tensors
                tensors = dict(zip(names, self.work.tensors(shard), strict=True))
                self._watches[shard] = CastWatch(tensors, dtype)
                stack.enter_context(self._watches[shard])
        stack.enter_context(training.randomness.drawing(device, self._draws[shard]))
        return stack

    def _run_forward(self, shard: int) -> tuple[ShardGraph, Sequence[torch.Tensor]]:
        inputs, needing = self.values.inputs(shard)
        with self._context(shard):
            return forward(
                self.work.program.shards[shard],
                self.work.tensors(shard),
                inputs,
                travelling=self.work.travelling(shard),
                needing=needing,
                device=self.work.memory.device,
                buffers=self._buffers.names,
            )

    def _forward(self, shard: int) -> None:
        buffers = self._buffers
        self._marks[shard] = self.work.training.randomness.mark()
        with buffers.forgotten(shard) if self.work.behaviour.is_pilot else nullcontext():
            if self._saves[shard]:
                self._forward_and_save(shard)
            else:
                later = buffers.written_after(shard)
                before = buffers.copies(shard, later)
                with dropping():
                    graph, outputs = self._run_forward(shard)
                needing = set(graph.left)
                del graph
                self.values.hand_on(shard, outputs, needing)
                self.values.keep_before(shard, buffers.changed(before, later))
            buffers.note_changed(shard)

    def _forward_and_save(self, shard: int) -> None:
        saved = Saved(self.values.homes(shard), self.work.memory.device)
        with saved.hooks():
            graph, outputs = self._run_forward(shard)
        items = self.values.hand_on(shard, outputs, set(graph.left))
        del outputs
        saved.finish(f"{self.work.training.job.name}: activations of shard {shard}", items)
        if saved.item is not None:
            self.work.memory.add(saved.item)
        graph.saved = saved
        self.values.graphs[shard] = graph

    def _evaluate(self, shard: int) -> None:
        layers, device = self.work.program.shards[shard], self.work.memory.device
        inputs, _ = self.values.inputs(shard)
        with torch.no_grad(), self.work.training.cuts.evaluating(), self._context(shard):
            outputs = run_watched(layers, self.work.tensors(shard), inputs, self._buffers.names, device)
            if shard == len(self.work.program.shards) - 1:
                self.results = [output.detach() for output in outputs]
            else:
                self.values.hand_on(shard, outputs, set())
        self._buffers.note_changed(shard)

    def _backward(self, shard: int, *, is_last: bool) -> None:
        work = self.work
        graph = self.values.graphs.pop(shard, None)
        gradients = self.values.take_gradients(shard)
        self._lay_gradients_out(shard)
        if graph is None or graph.saved is None:
            graph = self._forward_again(shard, gradients, is_last=is_last)
        else:
            graph.saved.fetched = work.memory.get
        backward(graph, gradients, work.shared(shard))
        if graph.saved is not None and graph.saved.item is not None:
            work.memory.discard(graph.saved.item)
        del graph
        self.values.hand_back(gradients)
        for group in work.owned(shard):
            self.gradients.collect(group)

    def _forward_again(self, shard: int, gradients: dict[str, torch.Tensor], *, is_last: bool) -> ShardGraph:
        """Run forward to get the graph for backward.

        For the last shard this is its first forward; it adds the loss's gradient.
        """
        work, buffers = self.work, self._buffers
        replay = nullcontext() if is_last else work.training.randomness.replaying(self._marks[shard])
        tries = is_last and work.behaviour.is_pilot
        with replay, buffers.forgotten(shard) if tries else buffers.standing_for(self.values.take_before(shard)):
            graph, outputs = self._run_forward(shard)
        if is_last:
            self.results = [output.detach() for output in outputs]
            gradients["result.0"] = self.gradients.seed(outputs[0])
            if not work.behaviour.is_pilot:
                buffers.note_changed(shard)
        return graph

    def _lay_gradients_out(self, shard: int) -> None:
        """Lay out the gradients of earlier batches, so that autograd adds to them."""
        if self.work.behaviour.is_pilot:
            return
        for group in self.work.owned(shard):
            packed = self.work.training.open_step.gradients.get(group)
            if packed is not None:
                self.gradients.lay_out(group, self.work.memory.get(packed.item))


class CutBatches(MiniBatch):
    """One mini-batch, or all mini-batches of a step, shard by shard: all of them pass one shard before the next."""

    def __init__(self, minis: Sequence[CutBatch]):
        self._minis, self.work = minis, minis[-1].work
        self._places = _order(minis)
        self.tasks = [minis[number].order.tasks[index] for number, index in self._places]
        self._position = {place: position for position, place in enumerate(self._places)}
        self._end_of_backward = max(index for index, task in enumerate(self.tasks) if task.kind is not UnitKind.STEP)
        self._of_shard: dict[int, list[int]] = {}
        """Per shard, the positions of its tasks."""
        for index, task in enumerate(self.tasks):
            self._of_shard.setdefault(task.shard, []).append(index)

    @property
    def results(self) -> list[list[torch.Tensor]]:
        """The results of the last shard for each mini-batch, without gradients."""
        return [mini.results for mini in self._minis]

    def needs(self, index: int) -> list[Item]:
        """Return the items that task ``index`` works on, as far as they exist."""
        number, own = self._places[index]
        return self._minis[number].needs(own)

    def run(self, index: int) -> None:
        """Run task ``index``. What it needs is on the device, or is fetched now."""
        number, own = self._places[index]
        self._minis[number].run(own)
        if index == self._end_of_backward:
            self._minis[-1].gradients.begin_on_host()

    def plan_uses(self, index: int) -> None:
        """Set the next use of each item, counted in units from task ``index``."""
        work = self.work
        for group in work.training.groups:
            for item in (group.item, group.travelling):
                if item is not None:
                    item.next_use = math.inf
        behind = len(self.tasks) - index  # where the units of the next mini-batch begin
        for shard, everywhere in self._of_shard.items():
            away = work.stays_away(shard)
            places = [place for place in everywhere if not (away and self.tasks[place].kind is UnitKind.STEP)]
            nearest = min((place - index for place in places if place >= index), default=behind + shard)
            for item in work.group_items(shard):
                item.next_use = min(item.next_use, nearest)
            later = [place for place in places if place >= index]
            ends = [place - index for place in later if self.tasks[place].kind is not UnitKind.FORWARD]
            for item in work.collected_items(shard):
                item.next_use = min(ends, default=behind + len(work.program.shards))
            for item in work.state_items(shard) if away else ():
                item.next_use = math.inf
        for number, mini in enumerate(self._minis):
            for item, uses in mini.values.uses():
                positions = [self._position[number, own] for own in uses]
                item.next_use = min((place - index for place in positions if place >= index), default=math.inf)

    def abandon(self) -> None:
        """Give back everything that is under way."""
        for mini in self._minis:
            mini.values.abandon()


def _order(minis: Sequence[CutBatch]) -> list[tuple[int, int]]:
    """Return pairs of mini-batch and task in the order in which they run."""
    order: list[tuple[int, int]] = []
    for index, task in enumerate(minis[0].order.tasks):
        order += [(number, index) for number in range(len(minis))] if task.kind is not UnitKind.STEP else []
    last = len(minis) - 1
    order += [(last, index) for index, task in enumerate(minis[last].order.tasks) if task.kind is UnitKind.STEP]
    return order
