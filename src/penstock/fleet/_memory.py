"""A device's memory as a cache over the tiers, with known future uses.

An `Item` is a set of storages that move together: parameters of a shard, what its forward saved, a value between
shards. The device's worker says what the current unit needs, and when everything else is next used. The item whose next
use is farthest away goes first. An item that was changed is written out when it has to go, or earlier when its memory
will be needed soon. An item that has a copy in a lower tier is simply dropped. So a job that fits is never moved at
all, and one that does not fit streams through the device.

Belongs to the device's thread. The counted bytes are those of every storage that is held or being copied out or in.
"""

import math
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch

from penstock.devices import backend_of
from penstock.errors import BudgetError, BudgetNotKeptWarning
from penstock.storages import id_of
from penstock.tiers import Handle, HandleState, Waterfall
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.fleet._host_steps import HostSteps

SMALL_BYTES = 64 * 1024
"""Size below which storages are not worth a copy of their own. Where it matters, they are packed."""
_TRIES = 4
# Sums of the tensors alone named budgets at which AdamW failed in its second step.
_SLACK_BYTES = 4096
"""Bytes that an aligned allocation may take in addition to its own."""


def counted_bytes(sizes: Sequence[int]) -> int:
    """Return the bytes that an item with storages of these sizes counts as."""
    return sum(sizes) + _SLACK_BYTES * len(sizes)


class Pending(Protocol):
    """Work of the host on items in host memory."""

    def finish(self) -> None:
        """Wait for its end. Raise its error."""

    def abandon(self) -> None:
        """Wait until it touches nothing any more, and forget its error: the job is over."""


class Item:
    """Storages that move together.

    They are in ``storages`` while on the device, and in ``handles`` while a tier has them.
    """

    __slots__ = ("handles", "is_stale", "label", "next_use", "pending", "size_bytes", "sizes", "staying", "storages")

    def __init__(self, label: str, storages: Sequence[torch.UntypedStorage]):
        self.label = label
        self.sizes = tuple(storage.nbytes() for storage in storages)
        self.size_bytes = counted_bytes(self.sizes)
        self.storages: list[torch.UntypedStorage] | None = list(storages)
        self.handles: list[Handle | None] | None = None
        self.next_use = math.inf
        """Its next use, in units from now; set by the worker."""
        self.is_stale = False
        """Whether the job has gone to another device, so that this copy no longer counts."""
        self.pending: Pending | None = None
        """A step of the host that works on it."""
        self.staying = [None if storage.nbytes() else storage for storage in storages]
        """Per storage, the storage itself if it has no bytes: there is nothing to move."""

    def __repr__(self) -> str:
        return f"<Item {self.label!r} {self.size_bytes} bytes{'' if self.storages is None else ' on the device'}>"

    @property
    def has_copy_below(self) -> bool:
        """Whether dropping it from the device loses nothing, now or once its copy has ended."""
        return self.handles is not None and all(
            handle is None or handle.state is not HandleState.KEPT for handle in self.handles
        )

    @property
    def is_settled(self) -> bool:
        """Whether another device may take it."""
        is_free = self.handles is not None and self.pending is None
        return is_free and all(handle is not None and handle.is_settled for handle in self.handles or ())

    def held_bytes(self) -> int:
        """Return the bytes of the device that it takes now."""
        if self.storages is not None:
            return self.size_bytes
        held = sum(storage.nbytes() for storage in self.staying if storage is not None)
        for handle in self.handles or ():
            if handle is not None and handle.state is not HandleState.PARKED:
                held += handle.size_bytes + _SLACK_BYTES
        return held

    def before_write(self) -> None:
        """Wait for copies out that still read it. Call it before the item is written to on the device."""
        for handle in self.handles or ():
            if handle is not None:
                handle.before_write()

    def release_copies(self) -> None:
        """Give back its copies in lower tiers."""
        for handle in self.handles or ():
            if handle is not None:
                handle.release()
        self.handles = None

    @staticmethod
    def below(handle: Handle) -> "Item":
        """Return an item of one storage that is in a lower tier."""
        item = Item(handle.label, ())
        item.sizes, item.size_bytes = (handle.size_bytes,), counted_bytes([handle.size_bytes])
        item.storages, item.handles, item.staying = None, [handle], [None]
        return item

    def borrowed(self, waterfall: Waterfall) -> "Item":
        """Return the same bytes as an item of another device. This item is stale from now on."""
        other = self.shared(waterfall)
        self.is_stale = True
        return other

    def shared(self, waterfall: Waterfall) -> "Item":
        """Return the same bytes as an item of another device, if both only read them.

        The item must be settled (`is_settled`).
        """
        other = Item(self.label, ())
        other.sizes, other.size_bytes = self.sizes, self.size_bytes
        assert self.handles is not None
        other.storages, other.staying = None, [None] * len(self.sizes)
        other.handles = [waterfall.borrow(handle) for handle in self.handles if handle is not None]
        return other


class DeviceMemory:
    """The bytes that items and units take of a device's budget.

    ``budget_bytes`` limits all items and the current unit together.
    """

    def __init__(self, device: torch.device, waterfall: Waterfall, budget_bytes: int):
        self.device = device
        self.backend = backend_of(device)
        self.waterfall = waterfall
        self.budget_bytes = budget_bytes
        self.library_bytes = 0
        """Bytes that the device's libraries keep for the computing thread, such as workspaces of matrix products."""
        self.peak_bytes = 0
        """The most that items and units ever took together, as counted."""
        self.stall_s = 0.0
        """Seconds for which the thread waited for copies."""
        self.host: HostSteps | None = None
        """Steps on the host, if the device is an accelerator."""
        self._items: dict[Item, None] = {}  # those with bytes on the device
        self._leaving: dict[Item, None] = {}
        self._has_said_above = False

    def held_bytes(self) -> int:
        """Return the bytes of all items on the device or being copied out or in, plus what libraries keep."""
        self._reap()
        return self.library_bytes + sum(item.held_bytes() for item in self._items)

    @property
    def room_bytes(self) -> int:
        """The part of the budget that items and units may use."""
        return self.budget_bytes - self.library_bytes

    def storages_here(self) -> set[int]:
        """Return the storages of all items on the device or being copied out or in, by identity."""
        here = {id_of(storage) for item in self._items for storage in item.storages or ()}
        for handle in (handle for item in self._items for handle in item.handles or ()):
            storage = handle.device_storage if handle is not None else None
            if storage is not None:
                here.add(id_of(storage))
        self._reap()  # storages that left meanwhile are in no handle any more, and are freed now
        return here

    def add(self, item: Item) -> Item:
        """Count an item that was made on this device, or borrowed."""
        self._items[item] = None
        return item

    def discard(self, item: Item) -> None:
        """Free an item that is needed nowhere any more."""
        if item.pending is not None:
            item.pending.abandon()
        self._items.pop(item, None)
        self._leaving.pop(item, None)
        item.release_copies()
        item.storages = None

    def changed(self, item: Item) -> None:
        """Drop copies in lower tiers, which are outdated since the bytes on the device were written to."""
        assert item.storages is not None, f"{item.label} was written to after it had left"
        self._leaving.pop(item, None)
        item.release_copies()

    def prefetch(self, item: Item) -> None:
        """Begin to copy in what is not on the device, unless the host still works on it."""
        if item.pending is None and item.storages is None and item.handles is not None:
            self._items[item] = None
            self._leaving.pop(item, None)
            states = {handle.state for handle in item.handles if handle is not None}
            if states & {HandleState.LEAVING, HandleState.KEPT}:  # still on the device: taken back as it is
                self.get(item)
                return
            for handle in item.handles:
                if handle is not None:
                    handle.prefetch()

    def get(self, item: Item) -> list[torch.UntypedStorage]:
        """Return the storages, and wait for their copies if necessary. Raise ``TierReadError`` if a read fails."""
        if item.storages is None:
            start_s = time.perf_counter()
            if item.pending is not None:
                item.pending.finish()
            self._items[item] = None
            self._leaving.pop(item, None)
            assert item.handles is not None
            storages = []
            for handle, stays in zip(item.handles, item.staying, strict=True):
                storage = stays if handle is None else handle.get()
                assert storage is not None
                storages.append(storage)
            item.storages = storages
            if any(handle is not None and handle.state is HandleState.KEPT for handle in item.handles):
                self.changed(item)
            self.stall_s += time.perf_counter() - start_s
        return item.storages

    def write(self, item: Item) -> None:
        """Begin to copy out an item that has no copy in a lower tier. It stays usable on the device."""
        if item.storages is not None and not item.has_copy_below:
            self.changed(item)  # tries a failed copy again
        if item.handles is None:
            assert item.storages is not None
            item.handles = [
                None if stays is not None else self.waterfall.park(storage, item.label)
                for storage, stays in zip(item.storages, item.staying, strict=True)
            ]

    def evict(self, item: Item) -> None:
        """Release the item's bytes on the device as soon as a lower tier has them."""
        self.get(item)  # it may be on its way in, and no longer be the next one used
        self.write(item)
        item.storages = None
        self._leaving[item] = None

    def make_room(self, size_bytes: int, pinned: Iterable[Item], why: str, *, may_exceed: bool = False) -> None:
        """Wait until ``size_bytes`` more fit the budget next to ``pinned``.

        If they never can, raises ``BudgetError``, or goes on above the budget with a warning (``may_exceed``).
        """
        pinned = set(pinned)
        start_s = time.perf_counter()
        while self.held_bytes() + size_bytes > self.budget_bytes:
            victim = self._farthest(pinned)
            if victim is not None and (victim.has_copy_below or not self._leaving):
                self.evict(victim)
            elif self._leaving:
                self._wait_for_oldest()
            else:
                self._refuse(size_bytes, why, may_exceed=may_exceed)
                break
        self.stall_s += time.perf_counter() - start_s
        self.peak_bytes = max(self.peak_bytes, self.held_bytes() + size_bytes)

    @contextmanager
    def unbounded(self) -> Iterator[None]:
        """Lift the budget inside this context.

        A job that will be refused is measured there, so that the error can name the budget that it needs.
        """
        budget_bytes, self.budget_bytes = self.budget_bytes, sys.maxsize
        try:
            yield
        finally:
            self.budget_bytes = budget_bytes

    def may_take(self, size_bytes: int, pinned: Iterable[Item]) -> bool:
        """Whether ``size_bytes`` more fit now, after dropping items that have a copy in a lower tier. Does not wait."""
        pinned = set(pinned)
        while self.held_bytes() + size_bytes > self.budget_bytes:
            clean = [
                item for item in self._items if item.storages is not None and item.has_copy_below and item not in pinned
            ]
            if not clean:
                return False
            self.evict(max(clean, key=lambda item: (item.next_use, item.size_bytes)))
        self.peak_bytes = max(self.peak_bytes, self.held_bytes() + size_bytes)
        return True

    def begin_to_leave(self, size_bytes: int, pinned: Iterable[Item]) -> None:
        """Start copies out so that ``size_bytes`` are free when they end. Does not wait."""
        pinned = set(pinned)
        stays = sum(item.held_bytes() for item in self._items if item not in self._leaving)
        while stays + size_bytes > self.room_bytes:
            victim = self._farthest(pinned)
            if victim is None:
                return
            stays -= victim.held_bytes()
            self.evict(victim)

    def flush(self, keep: Iterable[Item] = ()) -> None:
        """Move everything except ``keep`` out of the device."""
        keep = set(keep)
        for item in list(self._items):
            if item.storages is not None and item not in keep:
                self.evict(item)
        self.waterfall.drain()
        self._reap()

    def _reap(self) -> None:
        self.waterfall.reap()
        if self.host is not None:
            self.host.poll()
        for item in [item for item in self._items if item.is_stale]:
            self._items.pop(item)
            self._leaving.pop(item, None)
            item.storages = item.handles = None
        for item in [item for item in self._items if item.storages is None and not item.held_bytes()]:
            del self._items[item]  # all of it is in lower tiers
            self._leaving.pop(item, None)

    def _farthest(self, pinned: set[Item]) -> Item | None:
        held = [item for item in self._items if item not in self._leaving and item not in pinned and item.held_bytes()]
        return max(held, key=lambda item: (item.next_use, item.has_copy_below, item.size_bytes), default=None)

    def _wait_for_oldest(self) -> None:
        """Wait for the oldest copy out.

        A failed copy is tried a few times, since others may free space meanwhile.
        """
        item = next(iter(self._leaving))
        for attempt in range(_TRIES):
            for handle in item.handles or ():
                if handle is not None and handle.state is HandleState.LEAVING:
                    handle.finish_out()
            if item.has_copy_below:
                self._leaving.pop(item, None)
                return
            time.sleep(0.1 * attempt)
            self._reap()
            self.evict(item)
        self._leaving.pop(item, None)
        raise BudgetError(
            f"{item.label} ({format_bytes(item.size_bytes)}) could not leave {self.device}: the tiers below are "
            "full or failed. Give more host memory or disk: fleet.run(..., host='64GiB', disk='/nvme')"
        )

    def _refuse(self, size_bytes: int, why: str, *, may_exceed: bool) -> None:
        held = self.library_bytes + sum(item.held_bytes() for item in self._items)
        if not may_exceed:
            raise BudgetError(
                f"{why} takes {format_bytes(size_bytes)} in addition to the {format_bytes(held)} that it works on, "
                f"more than the budget of {format_bytes(self.budget_bytes)} on {self.device}; it needs at least "
                f"{held + size_bytes} bytes"
            )
        if not self._has_said_above:
            self._has_said_above = True
            warnings.warn(
                f"{why} takes {held + size_bytes} bytes together with all that it works on, above the budget of "
                f"{self.budget_bytes} bytes on {self.device}: a mini-batch takes another path through the model "
                "than the first one did. Training goes on above the budget, and this warning is shown once. Give a "
                "larger budget, or smaller batches: Job(accumulate=4, ...)",
                BudgetNotKeptWarning,
                stacklevel=2,
            )
