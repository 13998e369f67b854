"""Stretches of a model that is run whole, each in one shard, and what forward saved in them for backward."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.fleet._autograd import Place, Saved, is_large
from penstock.fleet._memory import Item
from penstock.fleet._problem import Task, UnitKind
from penstock.fleet._work import Work
from penstock.storages import storage_id


class Visit:
    """A unit of forward or backward, and what forward saved in it."""

    def __init__(self, task: Task, device: torch.device):
        self.task = task
        self.saved = Saved({}, device)
        self.versions: dict[int, int] = {}
        """Versions of saved storages at the time they were saved."""
        self.num_waiting = 0
        """Number of its own saved tensors that backward has not read yet."""


class VisitOrder:
    """The units of one mini-batch: as the previous one of its kind had them, until they come in another order."""

    def __init__(self, work: Work):
        shards = range(len(work.program.shards))
        self._ways = work.training.cuts.ways
        self._kind = (work.structure.signature, work.behaviour.trains)
        """The kind of mini-batches that take the same path through the model."""
        self._steps = [Task(UnitKind.STEP, shard) for shard in shards] if work.steps else []
        known = self._ways.get(self._kind)
        if known is None:
            known = [Task(UnitKind.FORWARD, shard) for shard in shards]
            known += [Task(UnitKind.BACKWARD, shard) for shard in reversed(shards)] if work.behaviour.trains else []
        self.tasks = [*known, *self._steps]
        self.index = -1
        """Index of the current task."""

    def enter(self, task: Task) -> int:
        """Note that the unit of ``task`` begins, and return its index."""
        self.index += 1
        expected = self.tasks[self.index :]
        if expected[:1] != [task]:  # the batch takes another path than the previous one, and rejoins it where it can
            later = expected[expected.index(task) + 1 :] if task in expected else expected
            self.tasks[self.index :] = [task, *later]
        return self.index

    def end(self) -> int:
        """Note that all that is left are steps of the optimizer, and return the index of the first one."""
        done = self.tasks[: self.index + 1]
        self._ways[self._kind] = done
        self.tasks[:] = [*done, *self._steps]
        return len(done)


class _Ticket:
    """A placeholder that autograd holds instead of a saved tensor."""

    __slots__ = ("_owner", "_packed", "_visit", "_visits")

    def __init__(self, visits: "Visits", visit: Visit, owner: Visit | None, packed: Any):  # any: as Saved has it
        self._visits, self._visit, self._owner, self._packed = visits, visit, owner, packed
        if owner is not None:
            owner.num_waiting += 1

    def tensor(self) -> torch.Tensor:
        """Return the saved tensor."""
        return self._visits.unpack(self._visit, self._packed)

    def __del__(self) -> None:
        if self._owner is not None:
            self._owner.num_waiting -= 1
            self._visits.let_go(self._owner)


def _unpack(packed: Any) -> torch.Tensor:  # any: a tensor, or a ticket
    return packed.tensor() if isinstance(packed, _Ticket) else packed


class Visits:
    """The visits of one mini-batch.

    ``enter(shard, visit)`` ends the current unit and begins backward of ``visit``. ``on_device(item)`` returns an
    item's storages. ``filled(tensor)`` returns the tensor with its bytes, which may begin another unit.
    """

    def __init__(
        self,
        work: Work,
        enter: Callable[[int, Visit], None],
        on_device: Callable[[Item], list[torch.UntypedStorage]],
        filled: Callable[[torch.Tensor], torch.Tensor],
    ):
        self.kind = UnitKind.FORWARD
        """Kind of the next units."""
        self.current: Visit | None = None
        self.saved_by_shard: Counter[int] = Counter()
        """Bytes that forward saved for backward and that no other item holds."""
        self._work, self._enter, self._on_device, self._filled = work, enter, on_device, filled
        self._all: list[Visit] = []
        self._known: dict[int, tuple[StorageWeakRef, int, Visit, Place]] = {}
        """Storages saved by units that have ended: per storage its version, the unit, and where its bytes are."""
        self._has_ended = False

    def begin(self, task: Task, visit: Visit | None) -> Visit:
        """Begin the unit of ``task``, with an earlier visit or a new one, and return the visit."""
        if visit is None:
            visit = Visit(task, self._work.memory.device)
            self._all.append(visit)
        visit.task = task
        self.current = visit
        return visit

    def likely(self, task: Task) -> Visit | None:
        """Return the visit whose backward the task probably is: the last one of its shard that still waits."""
        waiting = [visit for visit in self._all if visit.task.shard == task.shard and visit.saved.item is not None]
        return waiting[-1] if waiting else None

    def saved_items(self) -> list[tuple[int, Item]]:
        """Return the items that wait for backward, each with its shard."""
        return [(visit.task.shard, visit.saved.item) for visit in self._all if visit.saved.item is not None]

    def hooks(self) -> AbstractContextManager[Any]:
        """Return the context manager that applies to autograd's saved tensors while forward runs."""
        return saved_tensors_hooks(self._pack, _unpack)

    def keep_saved(self, visit: Visit) -> None:
        """Turn what an ended unit of forward saved into an item, unless autograd has already freed it."""
        weak = {key: StorageWeakRef(storage) for key, storage in visit.saved.storages.items() if is_large(storage)}
        visit.saved.finish(f"{self._work.training.job.name}: activations of shard {visit.task.shard}", {})
        if not visit.num_waiting:
            visit.saved.item = None
        if visit.saved.item is not None:
            self._work.memory.add(visit.saved.item)
            self.saved_by_shard[visit.task.shard] += visit.saved.item.size_bytes
            for key, storage in weak.items():  # each unit has its own copy of small ones, which keeps no other alive
                place = visit.saved.place(key)
                assert place is not None
                self._known[key] = (storage, visit.versions[key], visit, place)

    def unpack(self, visit: Visit, packed: Any) -> torch.Tensor:  # any: as Saved has it
        """Return a saved tensor to autograd. Backward enters the unit that saved it."""
        if self._has_ended:
            raise RuntimeError(
                f"job {self._work.training.job.name!r}: backward reached the graph of a mini-batch that is over, "
                "because something kept a part of that graph; detach what forward keeps: self.last = x.detach()"
            )
        if self.kind is UnitKind.BACKWARD and not (self.current is visit and visit.task.kind is self.kind):
            self._enter(visit.task.shard, visit)
        visit.saved.fetched = self._on_device
        return visit.saved.unpack(packed)

    def let_go(self, visit: Visit) -> None:
        """Free the item of the unit if backward has read its last saved tensor."""
        if not visit.num_waiting and visit.saved.item is not None and visit is not self.current:
            self._forget(visit)

    def discard(self) -> None:
        """Free all saved tensors at the end of the mini-batch."""
        self._has_ended = True
        for visit in self._all:
            if visit.saved.item is not None:
                self._forget(visit)

    def _pack(self, tensor: torch.Tensor) -> Any:  # any: a tensor, or a ticket
        if tensor.layout is not torch.strided:
            return tensor
        tensor = self._filled(tensor)
        visit = self.current
        assert visit is not None
        key = storage_id(tensor)
        owner: Visit | None = visit
        known = self._known.get(key) if is_large(tensor.untyped_storage()) else None
        if known is not None and not known[0].expired() and known[1] == tensor._version:
            owner = known[2]
            visit.saved.add_place(key, known[3])
        packed = visit.saved.pack(tensor)
        if isinstance(packed, torch.Tensor):
            return packed  # autograd keeps it itself
        visit.versions[key] = tensor._version
        if owner is visit and visit.saved.place(key) is not None:
            owner = None  # it belongs to a parameter
        return _Ticket(self, visit, owner, packed)

    def _forget(self, visit: Visit) -> None:
        item, visit.saved.item = visit.saved.item, None
        assert item is not None
        self._work.memory.discard(item)
        self._known = {key: known for key, known in self._known.items() if known[2] is not visit}
