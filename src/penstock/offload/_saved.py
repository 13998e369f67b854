"""Objects that stand for saved tensors in the autograd graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.tiers import Handle, HandleState, ViewLayout, check_version, version_of


class EntryOwner(Protocol):
    """A cycle, as far as its entries know it."""

    num_open: int
    """Number of entries that are alive and that backward has not asked for."""
    is_over: bool
    """Whether the cycle has ended."""

    def needed(self, entry: SavedEntry) -> None:
        """Note that backward asks for the entry."""


class SavedEntry:
    """One saved storage in one version, shared by the packed tensors that refer to it. It dies with the last of them.

    A fetched storage is held until every packed tensor has been used once. Then autograd itself holds what it works on.
    A second backward (``retain_graph``) fetches it again.
    """

    __slots__ = (
        "__weakref__",
        "_held",
        "_unused",
        "cycle",
        "handle",
        "index",
        "is_needed",
        "kept",
        "may_leave",
        "origin",
        "version",
    )

    def __init__(self, cycle: EntryOwner, index: int, origin: StorageWeakRef, version: int, *, may_leave: bool):
        self.cycle = cycle
        self.may_leave = may_leave  # whether the rules let it be parked
        self.index = index
        self.origin = origin  # while it lives, no other storage can get this one's identity
        self.version = version
        self.handle: Handle | None = None
        """The handle of the parked bytes; ``None`` if the packed tensors themselves keep the storage."""
        self.is_needed = False
        self.kept: weakref.WeakSet[KeptTensor] = weakref.WeakSet()
        """Packed tensors that keep the storage although it may leave."""
        self._held: torch.UntypedStorage | None = None
        self._unused = 0

    def __del__(self) -> None:
        if not self.is_needed:
            self.cycle.num_open -= 1

    def add(self) -> None:
        """Add a packed tensor that refers to this storage."""
        self._unused += 1

    def leave(self, park: Callable[[torch.UntypedStorage], Handle]) -> None:
        """Park the storage if it may leave, whether it was kept or fetched so far, and wait until it has left."""
        kept = list(self.kept)
        if kept:
            self.handle = park(kept[0].tensor.untyped_storage())
            for packed in kept:
                packed.leave(self)
            self.kept.clear()
        if self.handle is not None and self.handle.state is HandleState.KEPT:
            self.handle = park(self.handle.get())
        if self.handle is not None and self.handle.state is HandleState.ARRIVING:
            self.handle.get()  # nobody holds it, so it goes
        if self.handle is not None and self.handle.state is HandleState.LEAVING:
            self.handle.finish_out()

    def fetch(self, is_first_use: bool) -> torch.UntypedStorage:
        """Return the storage on the device for one packed tensor; ``is_first_use`` in this backward."""
        assert self.handle is not None
        if self._held is None:
            self._held = self.handle.get()
        storage = self._held
        self._unused -= is_first_use
        if self._unused <= 0:
            self._held = None
        return storage


class KeptTensor:
    """A saved tensor that stays as it is. It checks for in-place changes, which PyTorch does not do under hooks."""

    __slots__ = ("__weakref__", "_parked", "entry", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, entry: SavedEntry | None = None):
        self.tensor = tensor if tensor.is_leaf else tensor.detach()  # the result of a node would keep that node alive
        self.version = version_of(tensor)
        self.entry = entry
        self._parked: ParkedTensor | None = None

    def leave(self, entry: SavedEntry) -> None:
        """Stand for a parked storage from now on."""
        self._parked = ParkedTensor(entry, self.tensor)
        del self.tensor

    def unpack(self) -> torch.Tensor:
        """Return the tensor, or raise an error if it was changed since."""
        if self._parked is not None:
            return self._parked.unpack()
        if self.entry is not None:
            self.entry.cycle.needed(self.entry)
        check_version(self.tensor, self.version)
        return self.tensor


class ParkedTensor:
    """A view of a parked storage: its layout, and an alias without bytes that shares the version counter."""

    __slots__ = ("__weakref__", "_alias", "_is_used", "_layout", "entry")

    def __init__(self, entry: SavedEntry, tensor: torch.Tensor):
        entry.add()
        self.entry = entry
        self._layout = ViewLayout.of(tensor)
        self._alias = _hollow(tensor)
        self._is_used = False

    def unpack(self) -> torch.Tensor:
        """Return the tensor, rebuilt on the fetched storage, or raise an error if it was changed since it was saved."""
        check_version(self._alias, self.entry.version, dtype=self._layout.dtype, shape=self._layout.shape)
        entry = self.entry
        entry.cycle.needed(entry)
        storage = entry.fetch(not self._is_used)
        self._is_used = True
        return self._layout.rebuild(storage)


class Opaque:
    """A part of a wrapper that is no tensor, such as the mesh of a DTensor."""

    __slots__ = ("part",)

    def __init__(self, part: Any):  # any: it is only handed back
        self.part = part

    def unpack(self) -> Any:
        """Return the part as it was."""
        return self.part


class WrappedTensor:
    """A saved tensor of a wrapper class such as DTensor: its parts are packed, the wrapper is rebuilt."""

    __slots__ = ("_context", "_parts", "_shape", "_stride", "_type")

    def __init__(self, tensor: torch.Tensor, parts: dict[str, Any], context: Any):  # any: as in PyTorch's protocol
        self._type = type(tensor)
        self._parts = parts
        self._context = context
        self._shape = tensor.shape
        self._stride = tensor.stride()

    def unpack(self) -> torch.Tensor:
        """Return the wrapper around its unpacked parts."""
        parts = {name: part.unpack() for name, part in self._parts.items()}
        return self._type.__tensor_unflatten__(parts, self._context, self._shape, self._stride)  # type: ignore[attr-defined, no-any-return]


Packed = KeptTensor | ParkedTensor | WrappedTensor


def _hollow(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias of ``tensor`` without bytes, whose ``_version`` follows every in-place change of ``tensor``."""
    alias = tensor.detach()
    alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias
