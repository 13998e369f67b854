"""A mini-batch of a model that is run whole: its own code, from its first line to its last, and autograd's backward.

Units are not calls here but stretches of time. The model's tensors are hollow. When the code calls a module, or an
operator uses a tensor, whose shard is not on the device, the current unit ends and that shard's unit begins. In
backward the same happens when autograd asks for a tensor that was saved in another unit. So units come in the order
that this batch takes. The order of the previous batch of the same kind, if any, tells what to fetch ahead.

What forward saved leaves with its unit and comes back with it. Values that the code itself holds stay on the device;
pilots count them. The optimizer steps when backward has ended, shard by shard: only then is it certain that nothing
reads a parameter any more.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from penstock.errors import CaptureError
from penstock.fleet._accesses import HollowWatch, writes_to
from penstock.fleet._arrivals import Arrivals
from penstock.fleet._batch import flatten
from penstock.fleet._cut import CutBatch, CutBatches
from penstock.fleet._groups import Group
from penstock.fleet._job import AUTOCAST_DTYPES
from penstock.fleet._memory import Item
from penstock.fleet._meter import UnitMeter
from penstock.fleet._problem import Task, UnitKind
from penstock.fleet._units import Between, MiniBatch
from penstock.fleet._visits import Visit, Visits
from penstock.fleet._work import Work
from penstock.storages import id_of, storage_id


class WholeBatch(MiniBatch):
    """One mini-batch, run whole. ``tasks`` holds the expected tasks, and in the end the actual ones."""

    def __init__(self, work: Work, leaves: Sequence[torch.Tensor]):
        self.work = work
        self.meter: UnitMeter | None = None
        """A meter of units; set by pilots, by verification and for mini-batches that may show something new."""
        self.used: dict[int, dict[Item, None]] = {}
        """Per index of a task, the items that it worked on."""
        self.open_groups: dict[int, set[Group]] = {}
        """Per index of a task, groups for which only some gradients had arrived when it ended."""
        self._leaves = leaves
        self._results: list[torch.Tensor] = []
        self._visits = Visits(work, self._enter, self._on_device, self._filled)
        self._arrivals = Arrivals(work, self._on_device)
        self._between: Between
        self._index = -1
        self._bound: dict[Group, int] = {}
        """Groups whose tensors have their bytes on the device, with the identity of the storage."""
        self._own_bytes = 0
        """Bytes that the current unit takes in addition to items."""
        self._watch: HollowWatch
        self._way = (work.structure.signature, work.behaviour.trains)
        """The kind of mini-batches that take the same path through the model."""
        shards = range(len(work.program.shards))
        self._steps = [Task(UnitKind.STEP, at) for at in shards] if work.steps else []
        known = work.training.cuts.ways.get(self._way)
        if known is None:
            known = [Task(UnitKind.FORWARD, at) for at in shards]
            known += [Task(UnitKind.BACKWARD, at) for at in reversed(shards)] if work.behaviour.trains else []
        self.tasks = [*known, *self._steps]

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
            done = self.tasks[: self._index + 1]
            self.work.training.cuts.ways[self._way] = done
            self.tasks = [*done, *self._steps]
        self.work.begin_on_host()
        self._run_from(len(done), between)

    def run(self, index: int) -> None:
        """Run task ``index``, a step of the optimizer. Forward and backward are one long call."""
        self.work.step(self.tasks[index].shard)

    def needs(self, index: int) -> list[Item]:
        """Return the items that task ``index`` works on, as far as they exist."""
        task, visits = self.tasks[index], self._visits
        if task.kind is UnitKind.STEP:
            return self.work.step_items(task.shard)
        found = dict.fromkeys(self.work.group_items(task.shard))
        found |= dict.fromkeys(self._arrivals.items())
        visit = visits.current if index == self._index else visits.likely(task)
        if task.kind is UnitKind.BACKWARD and visit is not None:
            found |= visit.saved.homes
            if visit.saved.item is not None:
                found[visit.saved.item] = None
        return [item for item in found if item.storages is not None or item.handles is not None]

    def plan_uses(self, index: int) -> None:
        """Set the next use of each item, counted in units from task ``index``."""
        end = len(self.tasks) - index
        nearest: dict[tuple[bool, int], int] = {}
        for at, task in enumerate(self.tasks[index:]):
            nearest.setdefault((task.kind is UnitKind.BACKWARD, task.shard), at)
            if task.kind is UnitKind.STEP and not self.work.stays_away(task.shard):
                nearest.setdefault((False, task.shard), at)
        for at in range(len(self.work.groups)):
            uses = [nearest[key, at] for key in (True, False) if (key, at) in nearest]
            for item in self.work.group_items(at):
                item.next_use = min(uses, default=end + at)
            for item in self.work.collected_items(at):
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
        training = self.work.training
        hollow = training.weights.hollow_on(self.work.memory.device)
        self._watch = HollowWatch(hollow, training.weights.tensors, self._bring, self._fill, self._refuse_writes)
        with ExitStack() as stack:
            for module in training.model.modules():
                own = [
                    tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None
                ]
                if own:
                    stack.callback(module.register_forward_pre_hook(_announces(self._watch, own), prepend=True).remove)
            if self.meter is not None:
                self._watch.note = self.meter.note
                stack.enter_context(self.meter.recording())
            stack.callback(self._unbind)
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
            with self._visits.hooks(), self._watch:
                outputs = self._call()
            self._adopt_buffers()
            self._results = [output.detach() for output in outputs]
            loss = outputs[0]
            del outputs
            self._visits.kind = UnitKind.BACKWARD
            with self._watch:
                torch.autograd.backward(loss, self.work.seed(loss))
            del loss
            self._leave()
            self._arrivals.collect_all()

    def _validate(self) -> None:
        self._enter(0)
        randomness = self.work.training.randomness.drawing_anyhow(self.work.memory.device)
        with torch.no_grad(), self.work.training.cuts.evaluating(), randomness, self._watch:
            self._results = [output.detach() for output in self._call()]
        self._adopt_buffers()
        self._leave()

    def _call(self) -> Sequence[torch.Tensor]:
        training, device = self.work.training, self.work.memory.device
        whole, dtype = self.work.program.whole, AUTOCAST_DTYPES.get(training.job.precision)
        assert whole is not None
        leaves = [leaf.to(device) for leaf in self._leaves]
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            outputs, whole.result = flatten(whole.function(training.model, self.work.structure.rebuild(leaves)))
        return outputs

    def _adopt_buffers(self) -> None:
        """Copy the values of a tensor with which forward replaced a buffer into the buffer."""
        training = self.work.training
        for prefix, module in training.model.named_modules():
            for key, tensor in module._buffers.items():
                name = f"{prefix}.{key}" if prefix else key
                old = training.weights.tensors.get(name)
                if old is None or tensor is old:
                    continue
                if tensor is None or (tensor.shape, tensor.dtype) != (old.shape, old.dtype):
                    raise CaptureError(
                        f"forward replaces the buffer {name} by something of another shape or dtype, which a fleet "
                        "does not support; write into the buffer: self.buffer.copy_(new)"
                    )
                module._buffers[key] = old
                if not self.work.behaviour.is_pilot:
                    self._watch.need([old])
                    with torch.no_grad():
                        old.copy_(tensor)

    # Units

    def _enter(self, shard: int, visit: Visit | None = None) -> None:
        """End the current unit and begin another."""
        self._leave()
        task = Task(self._visits.kind, shard)
        self._index += 1
        expected = self.tasks[self._index :]
        if expected[:1] != [task]:  # the batch takes another path than the previous one, and rejoins it where it can
            later = expected[expected.index(task) + 1 :] if task in expected else expected
            self.tasks[self._index :] = [task, *later]
        self._visits.begin(task, visit)
        torch.clear_autocast_cache()  # casts of parameters that leave
        self._own_bytes = self._between.begin(self._index)
        self.used[self._index] = dict.fromkeys(self.needs(self._index))
        for one in self.work.groups[task.shard]:
            self._bind(one)
        if self.meter is not None:
            self.meter.go_on(self._index)

    def _leave(self) -> None:
        visits = self._visits
        visit, kind = visits.current, None if visits.current is None else visits.current.task.kind
        if visit is None:
            return
        if kind is UnitKind.FORWARD:
            visits.keep_saved(visit)
        if self.meter is not None:
            self.meter.pause()
        self._unbind()
        visits.current = None
        if kind is UnitKind.BACKWARD:
            visits.let_go(visit)
            self.open_groups[self._index] = self._arrivals.open_groups
            self._arrivals.collect_complete()
        self._between.end(self._index)

    # The model's tensors

    def _bind(self, one: Group) -> None:
        if one.item is None or one in self._bound:
            return
        assert self._visits.current is not None
        (storage,) = self.work.memory.get(one.item)
        views = one.views(storage)
        if one.kind != "buffer":
            self._visits.current.saved.add_home(storage, one.item)
        elif self.work.behaviour.is_pilot:
            views = {name: view.clone() for name, view in views.items()}
        self.work.training.weights.bind(views)
        self._bound[one] = id_of(storage)
        self.used[self._index][one.item] = None

    def _unbind(self) -> None:
        for one, key in self._bound.items():
            if one.kind == "buffer":
                if one.item is not None and not self.work.behaviour.is_pilot:
                    self.work.memory.changed(one.item)
                continue
            for name in one.layouts:
                if storage_id(self.work.training.weights.tensors[name]) != key:
                    raise writes_to(name)
        self.work.training.weights.unbind_there(name for one in self._bound for name in one.layouts)
        self._bound = {}

    def _bring(self, names: list[str]) -> None:
        """Begin the unit of the shard of these tensors, which are about to be used."""
        assert self._visits.current is not None
        owners = [self.work.training.group_of[name].owner for name in names]
        if self._visits.current.task.shard not in owners:
            self._enter(max(owners))
        self._fill(names)

    def _refuse_writes(self, tensors: list[torch.Tensor]) -> None:
        """Raise ``CaptureError`` if an operator is about to write to parameters."""
        if self._visits.kind is not UnitKind.FORWARD:
            return
        written = {storage_id(tensor) for tensor in tensors}
        for one, key in self._bound.items():
            if one.kind != "buffer" and key in written:
                raise writes_to(next(iter(one.layouts)))

    def _fill(self, names: list[str]) -> None:
        """Bring the hollow ones of ``names`` to the current unit."""
        groups = dict.fromkeys(self.work.training.group_of[name] for name in names)
        for one in groups:
            if one not in self._bound and one.item is not None:
                with self._not_measured():
                    self._on_device(one.item)
                    self._bind(one)

    def _filled(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor with its bytes. Another unit may have to begin for it."""
        return self._watch.filled(tensor) if self._watch.need([tensor]) else tensor

    def _on_device(self, item: Item) -> list[torch.UntypedStorage]:
        """Return the storages of an item that the current unit turns out to need."""
        memory = self.work.memory
        if item.storages is None:
            with self._not_measured():
                pinned = [*self.used[self._index], item]
                missing = item.size_bytes - item.held_bytes()
                room = memory.room_bytes - sum(one.size_bytes for one in pinned)  # it may take an unmeasured path
                label = f"job {self.work.training.job.name!r}: {item.label}"
                memory.make_room(missing + max(0, min(self._own_bytes, room)), pinned, label)
                memory.get(item)
        self.used[self._index][item] = None
        return memory.get(item)

    @contextmanager
    def _not_measured(self) -> Iterator[None]:
        if self.meter is None:
            yield
            return
        self.meter.pause()
        yield
        self.meter.go_on(self._index)


def _announces(watch: HollowWatch, own: list[torch.Tensor]) -> Callable[..., None]:
    def announce(*_: object) -> None:
        watch.need(own)

    return announce


def mini_batch(work: Work, leaves: Sequence[torch.Tensor], saves: Sequence[bool]) -> MiniBatch:
    """Return a mini-batch of a model that was cut, or of one that is run whole."""
    return WholeBatch(work, leaves) if work.program.whole is not None else CutBatches([CutBatch(work, leaves, saves)])
