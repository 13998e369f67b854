"""A mini-batch of a model that is run whole: its own code, from its first line to its last, and autograd's backward.

Units are not calls here but stretches of time. The model's tensors are hollow; when the code calls a module, or an
operator uses a tensor, whose shard is not on the device, the unit at hand ends and that shard's begins. In backward
the same happens when autograd asks for what was saved in another unit. So units come in whatever order this batch
takes, and the order of the batch before, if it was of the same kind, says what to fetch ahead.

What forward saved goes away with its unit and comes back with it. Values that the code itself holds stay on the device;
pilots count them. The optimizer steps when backward has ended, shard by shard: only then is it certain that nobody
reads a parameter any more.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.errors import CaptureError
from penstock.fleet._accesses import Watch, writes_to
from penstock.fleet._autograd import Place, Saved, is_large
from penstock.fleet._batch import flatten
from penstock.fleet._groups import Group
from penstock.fleet._job import AUTOCAST_DTYPES
from penstock.fleet._memory import DeviceMemory, Item
from penstock.fleet._meter import Meter
from penstock.fleet._problem import Task, UnitKind
from penstock.fleet._program import Program
from penstock.fleet._training import Training
from penstock.fleet._units import ACTIVATIONS, Between, MiniBatch


class _Visit:
    """A unit of forward or backward, and what forward saved in it."""

    def __init__(self, task: Task, device: torch.device):
        self.task = task
        self.saved = Saved({}, device)
        self.versions: dict[int, int] = {}
        """Of saved storages, when they were saved."""
        self.num_waiting = 0
        """Saved tensors of its own that backward has not read yet."""


class _Ticket:
    """What autograd holds instead of a saved tensor."""

    __slots__ = ("_batch", "_owner", "_packed", "_visit")

    def __init__(self, batch: "WholeBatch", visit: _Visit, owner: _Visit | None, packed: Any):  # any: as Saved has it
        self._batch, self._visit, self._owner, self._packed = batch, visit, owner, packed
        if owner is not None:
            owner.num_waiting += 1

    def tensor(self) -> torch.Tensor:
        """The saved tensor."""
        return self._batch.unpack(self._visit, self._packed)

    def __del__(self) -> None:
        if self._owner is not None:
            self._owner.num_waiting -= 1
            self._batch.let_go(self._owner)


def _unpack(packed: Any) -> torch.Tensor:  # any: a tensor, or a ticket
    return packed.tensor() if isinstance(packed, _Ticket) else packed


class WholeBatch(MiniBatch):
    """One mini-batch, run whole. ``tasks`` is what is expected of it, and in the end what it was."""

    def __init__(self, *given: Any, **options: Any):  # any: those of MiniBatch
        super().__init__(*given, **options)
        self.meter: Meter | None = None
        """Measures units, for pilots."""
        self.used: dict[int, dict[Item, None]] = {}
        """By index of the task, the items that it worked on."""
        self.open_groups: dict[int, set[Group]] = {}
        """By index of the task, groups of which gradients had arrived when it ended, and others had not."""
        self._between: Between
        self._index = -1
        self._kind = UnitKind.FORWARD
        """Of the units that come."""
        self._visit: _Visit | None = None
        self._visits: list[_Visit] = []
        self._known: dict[int, tuple[StorageWeakRef, int, _Visit, Place]] = {}
        """What units that have ended saved, by storage: its version, the unit, and where its bytes are."""
        self._bound: dict[Group, int] = {}
        """Groups whose tensors stand for bytes on the device, and the identity of the storage."""
        self._open: dict[Group, set[str]] = {}
        """Groups whose gradients arrive, and of which parameters they have."""
        self._collected: set[Group] = set()
        self._saved_bytes: Counter[int] = Counter()
        self._has_ended = False
        self._own_bytes = 0
        """What the unit at hand takes beside items."""
        self._hollow: dict[int, str] = {}
        known = self.training.ways.get(self._way)
        if known is not None:
            self.tasks = [*known, *(task for task in self.tasks if task.kind is UnitKind.STEP)]

    @property
    def waits_for_all(self) -> bool:
        """Always: a parameter may be read until backward has ended."""
        return True

    def run_all(self, between: Between) -> None:
        """Runs the model, backward and the optimizer's steps, and tells ``between`` of the units."""
        self._between = between
        with self._prepared():
            if self.behaviour.trains:
                self._train()
            else:
                self._validate()
            steps = [task for task in self._tasks() if task.kind is UnitKind.STEP]
            done = self.tasks[: self._index + 1]
            self.training.ways[self._way] = done
            self.tasks = [*done, *steps]
        for index in range(len(done), len(self.tasks)):
            between.begin(index)
            between.compute(index)
            between.end(index)

    def needs(self, index: int) -> list[Item]:
        """Items that task ``index`` works on, as far as they exist."""
        task = self.tasks[index]
        if task.kind is UnitKind.STEP:
            return super().needs(index)
        found = dict.fromkeys(one.item for one in self._groups[task.shard] if one.item is not None)
        gradients = self.training.gradients if not self.behaviour.is_pilot else {}
        found |= dict.fromkeys(gradients[one].item for one in self._open if one in gradients)  # autograd adds to them
        visit = self._visit if index == self._index else self._likely(task)
        if task.kind is UnitKind.BACKWARD and visit is not None:
            found |= visit.saved.homes
            if visit.saved.item is not None:
                found[visit.saved.item] = None
        return [item for item in found if item.storages is not None or item.handles is not None]

    def plan_uses(self, index: int, base: float = 0.0, *, goes_on: bool = True) -> None:
        """Tells items when they are used next, as seen before task ``index``, in units from now."""
        end = len(self.tasks) - index
        nearest: dict[tuple[bool, int], int] = {}
        for at, task in enumerate(self.tasks[index:]):
            nearest.setdefault((task.kind is UnitKind.BACKWARD, task.shard), at)
            if task.kind is UnitKind.STEP:
                nearest.setdefault((False, task.shard), at)
        for at, groups in enumerate(self._groups):
            uses = [nearest[key, at] for key in (True, False) if (key, at) in nearest]
            use = base + min(uses, default=end + at if goes_on else float("inf"))
            for one in groups:
                if one.item is not None:
                    one.item.next_use = use
                for packed in (self.training.gradients.get(one), self.training.states.get(one)):
                    if packed is not None:
                        packed.item.next_use = base + end
        for visit in self._visits:
            if visit.saved.item is not None:
                visit.saved.item.next_use = base + nearest.get((True, visit.task.shard), end)

    @property
    def saved_by_shard(self) -> dict[int, int]:
        """Bytes that forward saved for backward and nobody else holds, by shard."""
        return dict(self._saved_bytes)

    def abandon(self) -> None:
        """Gives back whatever is under way."""
        super().abandon()
        self._discard_saved()

    def _discard_saved(self) -> None:
        self._has_ended = True
        for visit in self._visits:
            if visit.saved.item is not None:
                self._forget(visit)

    def unpack(self, visit: _Visit, packed: Any) -> torch.Tensor:  # any: as Saved has it
        """A saved tensor, for autograd: backward is in the unit that saved it."""
        if self._has_ended:
            raise RuntimeError(
                f"job {self.training.job.name!r}: something kept a part of the graph of a mini-batch that is over, and "
                "runs its backward; detach what forward keeps: self.last = x.detach()"
            )
        if self._kind is UnitKind.BACKWARD and not (self._visit is visit and visit.task.kind is self._kind):
            self._enter(visit.task.shard, visit)
        visit.saved.fetched = self._on_device
        return visit.saved.unpack(packed)

    def let_go(self, visit: _Visit) -> None:
        """Backward has read one more of what the unit saved; the item goes when it was the last."""
        if not visit.num_waiting and visit.saved.item is not None and visit is not self._visit:
            self._forget(visit)

    @property
    def _way(self) -> tuple[Any, ...]:
        return (self.structure.signature, self.behaviour.trains)

    def _tasks(self) -> list[Task]:
        shards = range(len(self.program.shards))
        tasks = [Task(UnitKind.FORWARD, at) for at in shards]
        if self.behaviour.trains:
            tasks += [Task(UnitKind.BACKWARD, at) for at in reversed(shards)]
        return tasks + ([Task(UnitKind.STEP, at) for at in shards] if self.steps else [])

    # The run

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        """The model's tensors are hollow, on this device, and whoever uses one is seen."""
        training = self.training
        self._hollow = training.hollow_on(self.memory.device)
        self._watch = Watch(self._hollow, training.tensors, self._bring, self._fill, self._refuse_writes)
        with ExitStack() as stack:
            for module in training.model.modules():
                own = [
                    tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None
                ]
                if own:
                    stack.callback(module.register_forward_pre_hook(self._announces(own), prepend=True).remove)
            if self.meter is not None:
                self._watch.note = self.meter.note
                stack.enter_context(self.meter.recording())
            stack.callback(self._unbind)
            stack.callback(self._discard_saved)  # code may keep parts of the graph that backward did not come by
            yield

    def _announces(self, own: list[torch.Tensor]) -> Callable[..., None]:
        def announce(*_: object) -> None:
            self._watch.need(own)

        return announce

    def _train(self) -> None:
        training, device = self.training, self.memory.device
        with ExitStack() as stack:
            if self.behaviour.is_pilot:
                stack.enter_context(training.randomness.undisturbed())
            stack.enter_context(training.randomness.drawing_anyhow(device))
            for name, parameter in training.parameters.items():
                if name in training.optimizer.trained:
                    stack.callback(parameter.register_hook(self._lays_out(name)).remove)
                    stack.callback(parameter.register_post_accumulate_grad_hook(self._notes(name)).remove)
                elif parameter.requires_grad:  # nobody steps it
                    stack.callback(parameter.register_post_accumulate_grad_hook(_drop_gradient).remove)
            stack.callback(self._drop_gradients)
            loss = self._loss()
            self._kind = UnitKind.BACKWARD
            with self._watch:
                torch.autograd.backward(loss, self._seed(loss))
            del loss
            self._leave()
            for one in list(self._open):
                self._collect(one)
            if self.steps:
                self._measure_the_rest()

    def _loss(self) -> torch.Tensor:
        self._enter(0)
        with saved_tensors_hooks(self._pack, _unpack), self._watch:
            outputs = self._call()
        self._adopt_buffers()
        self.results = [output.detach() for output in outputs]
        return outputs[0]

    def _validate(self) -> None:
        self._enter(0)
        randomness = self.training.randomness.drawing_anyhow(self.memory.device)
        with torch.no_grad(), self.training.evaluating(), randomness, self._watch:
            self.results = [output.detach() for output in self._call()]
        self._adopt_buffers()
        self._leave()

    def _call(self) -> Sequence[torch.Tensor]:
        whole, dtype = self.program.whole, AUTOCAST_DTYPES.get(self.training.job.precision)
        assert whole is not None
        leaves = [leaf.to(self.memory.device) for leaf in self._leaves.values()]
        with torch.autocast(self.memory.device.type, dtype=dtype, enabled=dtype is not None):
            outputs, whole.result = flatten(whole.function(self.training.model, self.structure.rebuild(leaves)))
        return outputs

    def _adopt_buffers(self) -> None:
        """A buffer that forward replaced by another tensor: its numbers go where the buffer's are."""
        training = self.training
        for prefix, module in training.model.named_modules():
            for key, tensor in module._buffers.items():
                name = f"{prefix}.{key}" if prefix else key
                old = training.tensors.get(name)
                if old is None or tensor is old:
                    continue
                if tensor is None or (tensor.shape, tensor.dtype) != (old.shape, old.dtype):
                    raise CaptureError(
                        f"forward replaces the buffer {name} by something of another shape or dtype, which a fleet "
                        "cannot keep; write into it: self.buffer.copy_(new)"
                    )
                module._buffers[key] = old
                if not self.behaviour.is_pilot:
                    self._watch.need([old])
                    with torch.no_grad():
                        old.copy_(tensor)

    # Units

    def _enter(self, shard: int, visit: _Visit | None = None) -> None:
        """Ends the unit at hand, and begins one."""
        self._leave()
        task = Task(self._kind, shard)
        self._index += 1
        expected = self.tasks[self._index :]
        if expected[:1] != [task]:  # the batch goes another way than the one before, and meets it again where it may
            later = expected[expected.index(task) + 1 :] if task in expected else expected
            self.tasks[self._index :] = [task, *later]
        if visit is None:
            visit = _Visit(task, self.memory.device)
            self._visits.append(visit)
        visit.task = task
        self._visit = visit
        torch.clear_autocast_cache()  # casts of parameters that go
        self._own_bytes = self._between.begin(self._index)
        self.used[self._index] = dict.fromkeys(self.needs(self._index))
        for one in self._groups[task.shard]:
            self._bind(one)
        if self.meter is not None:
            self.meter.go_on(self._index)

    def _leave(self) -> None:
        visit, kind = self._visit, None if self._visit is None else self._visit.task.kind
        if visit is None:
            return
        if kind is UnitKind.FORWARD:
            self._keep_saved(visit)
        if self.meter is not None:
            self.meter.pause()
        self._unbind()
        self._visit = None
        if kind is UnitKind.BACKWARD:
            self.let_go(visit)
            self.open_groups[self._index] = set(self._open)
            for one in [one for one, names in self._open.items() if names >= self._trained(one)]:
                self._collect(one)
        self._between.end(self._index)

    def _likely(self, task: Task) -> _Visit | None:
        """The unit whose backward such a task will be: of those of its shard that wait still, the last."""
        waiting = [visit for visit in self._visits if visit.task.shard == task.shard and visit.saved.item is not None]
        return waiting[-1] if waiting else None

    # The model's tensors

    def _bind(self, one: Group) -> None:
        if one.item is None or one in self._bound:
            return
        assert self._visit is not None
        (storage,) = self.memory.get(one.item)
        views = one.views(storage)
        if one.kind != "buffer":
            self._visit.saved.add_home(storage, one.item)
        elif self.behaviour.is_pilot:
            views = {name: view.clone() for name, view in views.items()}
        self.training.bind(views)
        self._bound[one] = storage._cdata
        self.used[self._index][one.item] = None

    def _unbind(self) -> None:
        for one, key in self._bound.items():
            if one.kind == "buffer":
                if one.item is not None and not self.behaviour.is_pilot:
                    self.memory.changed(one.item)
                continue
            for name in one.layouts:
                if self.training.tensors[name].untyped_storage()._cdata != key:
                    raise writes_to(name)
        self.training.bind_hollow(name for one in self._bound for name in one.layouts)
        self._bound = {}

    def _bring(self, names: list[str]) -> None:
        """Somebody is about to use these tensors: the unit of their shard begins."""
        assert self._visit is not None
        owners = [self.training.group_of[name].owner for name in names]
        if self._visit.task.shard not in owners:
            self._enter(max(owners))
        self._fill(names)

    def _refuse_writes(self, tensors: list[torch.Tensor]) -> None:
        """Raises ``CaptureError`` if an operator is to write to parameters."""
        if self._kind is not UnitKind.FORWARD:
            return
        written = {tensor.untyped_storage()._cdata for tensor in tensors}
        for one, key in self._bound.items():
            if one.kind != "buffer" and key in written:
                raise writes_to(next(iter(one.layouts)))

    def _fill(self, names: list[str]) -> None:
        """Those of ``names`` that are hollow come to the unit at hand."""
        groups = dict.fromkeys(self.training.group_of[name] for name in names)
        for one in groups:
            if one not in self._bound and one.item is not None:
                with self._not_measured():
                    self._on_device(one.item)
                    self._bind(one)

    def _on_device(self, item: Item) -> list[torch.UntypedStorage]:
        """The item's storages, which the unit at hand turns out to need."""
        if item.storages is None:
            with self._not_measured():
                pinned = [*self.used[self._index], item]
                missing = item.size_bytes - item.held_bytes()
                room = self.memory.room_bytes - sum(one.size_bytes for one in pinned)  # of another way than measured
                label = f"job {self.training.job.name!r}: {item.label}"
                self.memory.make_room(missing + max(0, min(self._own_bytes, room)), pinned, label)
                self.memory.get(item)
        self.used[self._index][item] = None
        return self.memory.get(item)

    @contextmanager
    def _not_measured(self) -> Iterator[None]:
        if self.meter is None:
            yield
            return
        self.meter.pause()
        yield
        self.meter.go_on(self._index)

    # What forward saves

    def _pack(self, tensor: torch.Tensor) -> Any:  # any: a tensor, or a ticket
        if self._watch.need([tensor]):  # which may begin another unit
            tensor = self._watch.filled(tensor)
        visit = self._visit
        assert visit is not None
        key = tensor.untyped_storage()._cdata
        owner: _Visit | None = visit
        known = self._known.get(key) if is_large(tensor.untyped_storage()) else None
        if known is not None and not known[0].expired() and known[1] == tensor._version:
            owner = known[2]
            visit.saved.add_place(key, known[3])
        packed = visit.saved.pack(tensor)
        if isinstance(packed, torch.Tensor):
            return packed  # autograd keeps it itself
        visit.versions[key] = tensor._version
        if owner is visit and visit.saved.place(key) is not None:
            owner = None  # a parameter's
        return _Ticket(self, visit, owner, packed)

    def _keep_saved(self, visit: _Visit) -> None:
        """Forward's unit has ended: what it saved becomes an item, unless autograd has let go of it."""
        weak = {key: StorageWeakRef(storage) for key, storage in visit.saved.storages.items() if is_large(storage)}
        visit.saved.finish(f"{self.training.job.name}: {ACTIVATIONS} of shard {visit.task.shard}", {})
        if not visit.num_waiting:
            visit.saved.item = None
        if visit.saved.item is not None:
            self.memory.add(visit.saved.item)
            self._saved_bytes[visit.task.shard] += visit.saved.item.size_bytes
            for key, storage in weak.items():  # of small ones each unit has its own copy, so that none keeps another's
                place = visit.saved.place(key)
                assert place is not None
                self._known[key] = (storage, visit.versions[key], visit, place)

    def _forget(self, visit: _Visit) -> None:
        item, visit.saved.item = visit.saved.item, None
        assert item is not None
        self.memory.discard(item)
        self._known = {key: known for key, known in self._known.items() if known[2] is not visit}

    # Gradients

    def _trained(self, one: Group) -> set[str]:
        return {name for name in one.layouts if self.training.tensors[name].requires_grad}

    def _lays_out(self, name: str) -> Callable[[torch.Tensor], None]:
        def lay_out(_: torch.Tensor) -> None:
            """Gradients of the batches before, so that autograd adds to them."""
            one = self.training.group_of[name]
            packed = self.training.gradients.get(one)
            if packed is not None and one not in self._open and not self.behaviour.is_pilot:
                for key, tensor in packed.views(self._on_device(packed.item)).items():
                    self.training.tensors[key].grad = tensor
            self._open.setdefault(one, set())

        return lay_out

    def _notes(self, name: str) -> Callable[[torch.Tensor], None]:
        def note(_: torch.Tensor) -> None:
            self._open[self.training.group_of[name]].add(name)

        return note

    def _collect(self, one: Group) -> None:
        """The group's gradients are whole: they become an item, or go back into theirs."""
        del self._open[one]
        self._collected.add(one)
        self._collect_group(one)
        for name in one.layouts:
            self.training.tensors[name].grad = None

    def _drop_gradients(self) -> None:
        """Those that were not collected: a pilot's, or of a backward that did not end."""
        self._open = {}
        for parameter in self.training.parameters.values():
            parameter.grad = None

    def _measure_the_rest(self) -> None:
        """Gradients from batches before to which this one had nothing to add."""
        training = self.training
        for one, packed in training.gradients.items():
            if one not in self._collected:
                self._stepper.measure(packed.views(self._on_device(packed.item)))
                self.memory.changed(packed.item)


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def mini_batch(
    training: Training, memory: DeviceMemory, program: Program, *given: Any, **options: Any
) -> MiniBatch:  # any: those of MiniBatch
    """A mini-batch of a model that was cut, or of one that is run whole."""
    kind = MiniBatch if program.whole is None else WholeBatch
    return kind(training, memory, program, *given, **options)
