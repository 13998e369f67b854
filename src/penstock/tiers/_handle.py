"""The receipt for a storage that was put into a tier."""

import enum
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.errors import InternalError
from penstock.tiers._tier import Extent, Tier

if TYPE_CHECKING:
    from penstock.tiers._waterfall import Waterfall


class HandleState(enum.Enum):
    """Where the bytes of a handle are."""

    LEAVING = "leaving"
    """On the device; the copy out has not finished."""
    PARKED = "parked"
    """In the tier; the device copy was dropped."""
    ARRIVING = "arriving"
    """In the tier, with a copy to the device begun or finished, and not yet asked for."""
    KEPT = "kept"
    """On the device to stay: no room in any tier, a failed copy, or asked for before the copy out ended."""
    RELEASED = "released"
    """Nowhere: the handle was released."""


class Handle:
    """The receipt for a storage that was put into a tier by ``Waterfall.park``.

    ``finish_out()`` waits for the copy out, ``prefetch()`` starts the copy back, ``get()`` returns the storage,
    ``release()`` gives its room back; a handle that is garbage-collected is released. All but ``release``, which may
    come from any thread, belong to the computing thread: it owns the memory that they allocate.
    """

    __slots__ = (
        "__weakref__",
        "_checksums",
        "_edges",
        "_error",
        "_extent",
        "_in_transit",
        "_is_wanted",
        "_missed_its_tier",
        "_num_moving",
        "_origin",
        "_state",
        "_storage",
        "_tier",
        "_was_forwarded",
        "_waterfall",
        "_weak",
        "address_remainder",
        "data_pointer",
        "label",
        "size_bytes",
    )

    def __init__(self, waterfall: "Waterfall", storage: torch.UntypedStorage, label: str):
        self.size_bytes = storage.nbytes()
        self.label = label
        self.data_pointer = storage.data_ptr()
        self.address_remainder = self.data_pointer % 4096
        self._waterfall = waterfall
        self._state = HandleState.LEAVING
        self._storage: torch.UntypedStorage | None = storage
        self._weak = StorageWeakRef(storage)
        self._tier: Tier | None = None
        self._extent: Extent | None = None
        self._edges: tuple[bytes, bytes] = (b"", b"")
        self._checksums: list[int] = []
        self._in_transit: object = None  # the mover's: a lane job or a pair of stream events
        self._is_wanted = False  # prefetched before its copy out ended
        self._was_forwarded = False  # handed back from memory, so that the end of its copy out frees nothing
        self._num_moving = 0  # copies that still touch the extent; its room is given back after the last
        self._missed_its_tier = False  # a later hop failed: the bytes are still in the memory on the way
        self._error: Exception | None = None
        self._origin: Handle | None = None  # the handle whose room this one borrows

    def __repr__(self) -> str:
        return f"<Handle {self.label!r} {self.size_bytes} bytes {self._state.value}>"

    def __del__(self) -> None:
        if self._state is not HandleState.RELEASED:
            self._waterfall._abandon(self)

    @property
    def state(self) -> HandleState:
        """Where the bytes are now."""
        return self._state

    @property
    def is_settled(self) -> bool:
        """Whether the bytes are in a tier and no copy touches them, so that ``Waterfall.borrow`` takes the handle."""
        return self._state is HandleState.PARKED and not self._num_moving and not self._missed_its_tier

    @property
    def is_held_elsewhere(self) -> bool:
        """Whether somebody else still holds the storage as it was put in, so that parking it frees nothing."""
        return self._storage is None and self._alive() is not None

    @property
    def device_storage(self) -> torch.UntypedStorage | None:
        """The storage, while the handle itself holds it: kept, or under way in either direction."""
        with self._waterfall._lock:
            return self._storage

    def finish_out(self) -> None:
        """Waits for the end of the copy out and drops the device copy: the computation needs its memory now."""
        self._waterfall._finish_out(self)

    def prefetch(self) -> bool:
        """Starts the copy back to the device; bytes that are still leaving stay instead.

        Returns whether they are on the device or on their way. ``False`` means that the device had no memory for
        them; ``get`` will try again.
        """
        return self._waterfall._prefetch(self)

    def get(self) -> torch.UntypedStorage:
        """The storage, byte for byte, waiting for its copy where needed. The bytes in the tier stay until ``release``.

        The handle keeps only a weak reference to what it returned, so that the bytes live as long as the caller needs
        them; a second ``get`` meanwhile returns the same storage. Raises ``TierReadError`` where the bytes could not be
        read back, and ``ValueError`` after ``release``.
        """
        return self._waterfall._get(self)

    def release(self) -> None:
        """Gives the room in the tier back. Bytes on the device that somebody holds stay valid. May be called again."""
        self._waterfall._release(self)

    def _room(self) -> tuple[Tier, Extent]:
        """Where the bytes are, while they have a place."""
        if self._tier is None or self._extent is None:
            raise InternalError(f"{self!r} has no room in a tier")
        return self._tier, self._extent

    def _alive(self) -> torch.UntypedStorage | None:
        """The storage as it was put or last fetched, if somebody still holds it."""
        return torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)  # type: ignore[attr-defined, no-any-return]
