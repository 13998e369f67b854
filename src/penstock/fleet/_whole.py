"""A mini-batch of a model that is run whole: its own code, from its first line to its last, and autograd's backward.

Units are not calls here but stretches of time. The model's tensors are hollow. When the code calls a module, or an
operator uses a tensor, whose shard is not on the device, the current unit ends and that shard's unit begins. In
backward the same happens when autograd asks for a tensor that was saved in another unit. So units come in the order
that this batch takes. The order of the previous batch of the same kind, if any, tells what to fetch ahead.

What forward saved leaves with its unit and comes back with it. Values that the code itself holds stay on the device;
pilots count them. The optimizer steps when backward has ended, shard by shard: only then is it certain that nothing
reads a parameter any more.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch

from penstock.fleet._arrivals import Arrivals
from penstock.fleet._batch import flatten
from penstock.fleet._cut import CutBatch, CutBatches
from penstock.fleet._groups import Group
from penstock.fleet._hollow_model import HollowModel
from penstock.fleet._job import AUTOCAST_DTYPES
from penstock.fleet._memory import Item
from penstock.fleet._meter import UnitMeter
from penstock.fleet._problem import Task, UnitKind
from penstock.fleet._units import Between, MiniBatch
from penstock.fleet._visits import Visit, VisitOrder, Visits
from penstock.fleet._work import Work


@dataclass(slots=True)
class UnitUse:
    """Items and groups of one unit, as it ran."""

    items: dict[Item, None]
    """Items that it worked on."""
    open_groups: set[Group] = field(default_factory=set)
    """Groups for which only some gradients had arrived when it ended."""


class WholeBatch(MiniBatch):
    """One mini-batch, run whole. ``tasks`` holds the expected tasks, and in the end the actual ones."""

    def __init__(self, work: Work, leaves: Sequence[torch.Tensor]):
        self.work = work
        self.meter: UnitMeter | None = None
        """A meter of units; set by pilots, by verification and for mini-batches that may show something new."""
        self.uses: dict[int, UnitUse] = {}
        """Per index of a task, what it worked on."""
        self._leaves = leaves
        self._results: list[torch.Tensor] = []
        self._model = HollowModel(work, self._bring, self._fill)
        self._visits = Visits(work, self._enter, self._on_device, self._model.filled)
        self._arrivals = Arrivals(work, self._on_device)
        self._order = VisitOrder(work)
        self.tasks = self._order.tasks  # the same list, which changes as units come
        self._between: Between
        self._own_bytes = 0
        """Bytes that the current unit takes in addition to items."""

    @property
    def results(self) -> list[list[torch.Tensor]]:
        """The model's results, without gradients."""
        return [self._results]

    @property
    def saved_by_shard(self) -> dict[int, int]:
        """Bytes per shard that forward saved for backward and that no other item holds."""
        return dict(self._visits.saved_by_shard)

    def run_all(self, between: Between) -> None:
        """Run the model, backward and the optimizer's steps, and notify ``between`` of the units."""
        self._between = between
        with self._prepared():
            if self.work.behaviour.trains:
                self._train()
            else:
                self._validate()
            num_done = self._order.end()
        self._arrivals.gradients.begin_on_host()
        self._run_from(num_done, between)

    def run(self, index: int) -> None:
        """Run task ``index``, a step of the optimizer. Forward and backward are one long call."""
        self._arrivals.gradients.step(self.tasks[index].shard)

    def needs(self, index: int) -> list[Item]:
        """Return the items that task ``index`` works on, as far as they exist."""
        task, visits = self.tasks[index], self._visits
        if task.kind is UnitKind.STEP:
            return self.work.step_items(task.shard)
        items = dict.fromkeys(self.work.group_items(task.shard))
        items |= dict.fromkeys(self._arrivals.items())
        visit = visits.current if index == self._order.index else visits.likely(task)
        if task.kind is UnitKind.BACKWARD and visit is not None:
            items |= visit.saved.homes
            if visit.saved.item is not None:
                items[visit.saved.item] = None
        return [item for item in items if item.storages is not None or item.handles is not None]

    def plan_uses(self, index: int) -> None:
        """Set the next use of each item, counted in units from task ``index``."""
        end = len(self.tasks) - index
        nearest: dict[tuple[bool, int], int] = {}
        for distance, task in enumerate(self.tasks[index:]):
            nearest.setdefault((task.kind is UnitKind.BACKWARD, task.shard), distance)
            if task.kind is UnitKind.STEP and not self.work.stays_away(task.shard):
                nearest.setdefault((False, task.shard), distance)
        for shard in range(len(self.work.groups)):
            uses = [nearest[key, shard] for key in (True, False) if (key, shard) in nearest]
            for item in self.work.group_items(shard):
                item.next_use = min(uses, default=end + shard)
            for item in self.work.collected_items(shard):  # the steps come last, see the top of this file
                item.next_use = end
        for shard, item in self._visits.saved_items():
            item.next_use = nearest.get((True, shard), end)

    def abandon(self) -> None:
        """Give back everything that is under way."""
        self._visits.discard()

    # The run

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        """Make the model's tensors hollow on this device, and detect every use of one."""
        with ExitStack() as stack:
            stack.enter_context(self._model.hooked())
            if self.meter is not None:
                self._model.watch.note = self.meter.note
                stack.enter_context(self.meter.recording())
            stack.callback(self._model.unbind)
            stack.callback(self._visits.discard)  # code may keep parts of the graph that backward did not reach
            yield

    def _train(self) -> None:
        randomness = self.work.training.randomness
        with ExitStack() as stack:
            if self.work.behaviour.is_pilot:
                stack.enter_context(randomness.undisturbed())
            stack.enter_context(randomness.drawing_anyhow(self.work.memory.device))
            stack.enter_context(self._arrivals.hooks())
            self._enter(0)
            with self._visits.hooks(), self._model.watch:
                outputs = self._call()
            self._model.adopt_buffers()
            self._results = [output.detach() for output in outputs]
            loss = outputs[0]
            del outputs
            self._visits.kind, self._model.refuses_writes = UnitKind.BACKWARD, False
            with self._model.watch:
                torch.autograd.backward(loss, self._arrivals.gradients.seed(loss))
            del loss
            self._leave()
            self._arrivals.collect_all()

    def _validate(self) -> None:
        self._enter(0)
        randomness = self.work.training.randomness.drawing_anyhow(self.work.memory.device)
        with torch.no_grad(), self.work.training.cuts.evaluating(), randomness, self._model.watch:
            self._results = [output.detach() for output in self._call()]
        self._model.adopt_buffers()
        self._leave()

    def _call(self) -> Sequence[torch.Tensor]:
        training, device = self.work.training, self.work.memory.device
        whole, dtype = self.work.program.whole, AUTOCAST_DTYPES.get(training.job.precision)
        assert whole is not None
        leaves = [leaf.to(device) for leaf in self._leaves]
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            outputs, whole.result = flatten(whole.function(training.weights.model, self.work.structure.rebuild(leaves)))
        return outputs

    # Units

    def _enter(self, shard: int, visit: Visit | None = None) -> None:
        """End the current unit and begin another."""
        self._leave()
        task = Task(self._visits.kind, shard)
        index = self._order.enter(task)
        saved = self._visits.begin(task, visit).saved
        torch.clear_autocast_cache()  # casts of parameters that leave
        self._own_bytes = self._between.begin(index)
        use = self.uses[index] = UnitUse(dict.fromkeys(self.needs(index)))
        for group in self.work.groups[task.shard]:
            if group.item is not None:
                self._model.bind(group, saved)
                use.items[group.item] = None
        if self.meter is not None:
            self.meter.go_on(index)

    def _leave(self) -> None:
        visits = self._visits
        visit, kind = visits.current, None if visits.current is None else visits.current.task.kind
        if visit is None:
            return
        if kind is UnitKind.FORWARD:
            visits.keep_saved(visit)
        if self.meter is not None:
            self.meter.pause()
        self._model.unbind()
        visits.current = None
        if kind is UnitKind.BACKWARD:
            visits.let_go(visit)
            self.uses[self._order.index].open_groups = self._arrivals.open_groups
            self._arrivals.collect_complete()
        self._between.end(self._order.index)

    # The model's tensors

    def _bring(self, names: list[str]) -> None:
        """Begin the unit of the shard of these tensors, which are about to be used."""
        assert self._visits.current is not None
        owners = [self.work.training.groups.by_name[name].owner for name in names]
        if self._visits.current.task.shard not in owners:
            self._enter(max(owners))
        self._fill(names)

    def _fill(self, names: list[str]) -> None:
        """Bring the hollow ones of ``names`` to the current unit."""
        groups = dict.fromkeys(self.work.training.groups.by_name[name] for name in names)
        assert self._visits.current is not None
        for group in groups:
            if group.item is not None and not self._model.is_bound(group):
                with self._not_measured():
                    self._on_device(group.item)
                    self._model.bind(group, self._visits.current.saved)

    def _on_device(self, item: Item) -> list[torch.UntypedStorage]:
        """Return the storages of an item that the current unit turns out to need."""
        memory, items = self.work.memory, self.uses[self._order.index].items
        if item.storages is None:
            with self._not_measured():
                pinned = [*items, item]
                missing = item.size_bytes - item.held_bytes()
                room = memory.room_bytes - sum(other.size_bytes for other in pinned)  # it may take an unmeasured path
                label = f"job {self.work.training.job.name!r}: {item.label}"
                own_bytes, is_pilot = max(0, min(self._own_bytes, room)), self.work.behaviour.is_pilot
                memory.make_room(missing + own_bytes, pinned, label, may_exceed=not is_pilot)
                memory.get(item)
        items[item] = None
        return memory.get(item)

    @contextmanager
    def _not_measured(self) -> Iterator[None]:
        if self.meter is None:
            yield
            return
        self.meter.pause()
        yield
        self.meter.go_on(self._order.index)


def mini_batch(work: Work, leaves: Sequence[torch.Tensor], saves: Sequence[bool]) -> MiniBatch:
    """Return a mini-batch of a model that was cut, or of one that is run whole."""
    return WholeBatch(work, leaves) if work.program.whole is not None else CutBatches([CutBatch(work, leaves, saves)])
