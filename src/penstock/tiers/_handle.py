"""The receipt for a storage that was put into a tier, and the states it goes through."""

import enum
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.arguments import must_be
from penstock.storages import storage_of
from penstock.tiers._room import Room

if TYPE_CHECKING:
    from penstock.tiers._waterfall import Waterfall


class HandleState(enum.Enum):
    """Where the bytes of a handle are."""

    LEAVING = "leaving"
    """On the device; the copy out has not finished."""
    PARKED = "parked"
    """In the tier; the device copy was dropped."""
    ARRIVING = "arriving"
    """In the tier; a copy to the device has begun or finished, and nobody has asked for it yet."""
    KEPT = "kept"
    """On the device to stay: no space in a tier, a failed copy, or asked for before the copy out ended."""
    RELEASED = "released"
    """The handle was released; it has no bytes."""


class Happening(enum.Enum):
    """An event that may change the state of a handle."""

    LEFT = "the copy out is complete"
    STAYS = "there is no copy out, or none that counts: no room, it failed, it was taken back, the bytes are wanted"
    CALLED = "memory is there for the copy in"
    TAKEN = "the copy in was handed to the computation, or what became of it"
    REFUSED = "the copy in could not begin"
    RELEASED = "nobody needs the bytes"


TRANSITIONS: dict[tuple[HandleState, Happening], HandleState] = {
    (HandleState.LEAVING, Happening.LEFT): HandleState.PARKED,
    (HandleState.LEAVING, Happening.STAYS): HandleState.KEPT,
    (HandleState.PARKED, Happening.CALLED): HandleState.ARRIVING,
    (HandleState.ARRIVING, Happening.TAKEN): HandleState.PARKED,
    (HandleState.ARRIVING, Happening.REFUSED): HandleState.PARKED,
    (HandleState.LEAVING, Happening.RELEASED): HandleState.RELEASED,
    (HandleState.PARKED, Happening.RELEASED): HandleState.RELEASED,
    (HandleState.ARRIVING, Happening.RELEASED): HandleState.RELEASED,
    (HandleState.KEPT, Happening.RELEASED): HandleState.RELEASED,
}
"""All state changes. Any other combination changes nothing: a copy may end after its handle was released."""

WITHOUT_ROOM = (HandleState.KEPT, HandleState.RELEASED)
"""States in which a handle no longer needs its space in the tier."""


class Handle:
    """The receipt for a storage that was put into a tier by ``Waterfall.park``.

    ``finish_out()`` waits for the copy out, ``prefetch()`` starts the copy back, ``get()`` returns the storage, and
    ``release()`` gives its space back. A handle that is garbage-collected is released. ``release`` may be called from
    any thread; all other methods belong to the computing thread, because it owns the memory that they allocate.
    """

    __slots__ = (
        "__weakref__",
        "_error",
        "_is_wanted",
        "_missed_its_tier",
        "_num_moving",
        "_room",
        "_state",
        "_storage",
        "_transit",
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
        # Only `Handles` changes the fields below, under its lock, except `_transit` and `_weak`.
        self._state = HandleState.LEAVING
        self._storage: torch.UntypedStorage | None = storage
        self._weak = StorageWeakRef(storage)
        self._room: Room | None = None
        self._num_moving = 0  # copies that still use the space in the tier; the last one to end gives it back
        self._is_wanted = False  # prefetched before its copy out ended
        self._was_forwarded = False  # returned from memory, so the end of its copy out frees nothing
        self._missed_its_tier = False  # a later hop failed: the bytes are still in staging memory
        self._error: Exception | None = None
        self._transit: object = None  # the mover's own record

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
        """Whether the bytes are in a tier and no copy touches them, so that ``Waterfall.borrow`` accepts the handle."""
        return self._state is HandleState.PARKED and not self._num_moving and not self._missed_its_tier

    @property
    def is_in_memory(self) -> bool:
        """Whether the bytes are in host memory, or being copied there, to stay."""
        room = self._room
        is_there = self._state in (HandleState.LEAVING, HandleState.PARKED, HandleState.ARRIVING)
        return is_there and room is not None and room.tier.is_memory and not self._missed_its_tier

    def host_tensor(self) -> torch.Tensor:
        """Return the bytes as a ``uint8`` tensor, without a copy. The handle must be settled and in host memory.

        Writing to it changes what ``get`` returns (`before_host_write`). It is valid as long as the handle.
        """
        room = self._room
        if room is None or not (self.is_in_memory and self.is_settled):
            raise ValueError(f"the handle must be settled and in host memory, got {self!r}")
        return room.tier.tensor(room.extent)[: self.size_bytes]

    def before_host_write(self) -> None:
        """Let ``get`` copy the bytes in even if somebody still holds the storage as it was."""
        self._waterfall._handles.renew(self)

    @property
    def is_held_elsewhere(self) -> bool:
        """Whether somebody else still holds the storage as it was parked, so that parking it frees no memory."""
        return self._storage is None and self._alive() is not None

    @property
    def device_storage(self) -> torch.UntypedStorage | None:
        """The storage, while the handle itself holds it: kept, or being copied in either direction."""
        with self._waterfall._handles.lock:
            return self._storage

    def finish_out(self) -> None:
        """Wait for the end of the copy out and drop the device copy. Call it when the computation needs the memory."""
        self._waterfall._finish_out(self)

    def prefetch(self, into: torch.UntypedStorage | None = None) -> bool:
        """Start the copy back to the device, or keep bytes that are still being copied out.

        ``into`` is a storage of 0 bytes, such as the one that was parked. It is resized and filled if the bytes can be
        read into it directly.

        Returns whether the bytes are on the device or being copied to it. ``False`` means that the device had no memory
        for them; ``get`` will try again.
        """
        return self._waterfall._prefetch(self, _storage_or_none(into))

    def get(self, into: torch.UntypedStorage | None = None) -> torch.UntypedStorage:
        """Return the storage, byte for byte, after waiting for its copy if needed.

        The bytes stay in the tier until ``release``. ``into`` works as in ``prefetch``; the storage returned may still
        be another one.

        The handle keeps only a weak reference to the storage returned, so its memory is freed when the caller drops it.
        A second ``get`` before that returns the same storage. Raises ``TierReadError`` if the bytes could not be read
        back, and ``ValueError`` after ``release``.
        """
        return self._waterfall._get(self, _storage_or_none(into))

    def before_write(self) -> None:
        """Make the device wait for a copy out that still reads the storage. Call it before you write to the storage.

        The copy in the tier is then out of date: ``release`` the handle.
        """
        self._waterfall._before_write(self)

    def release(self) -> None:
        """Give the space in the tier back. Bytes on the device that somebody holds stay valid. Idempotent."""
        self._waterfall._release(self)

    def _alive(self) -> torch.UntypedStorage | None:
        """Return the storage as it was parked or last fetched, if somebody still holds it and has not emptied it."""
        storage = storage_of(self._weak)
        return storage if storage is not None and storage.nbytes() == self.size_bytes else None


def _storage_or_none(into: torch.UntypedStorage | None) -> torch.UntypedStorage | None:
    if into is not None and not isinstance(into, torch.UntypedStorage):
        raise must_be("into", "a torch.UntypedStorage", into, "handle.get(into=tensor.untyped_storage())")
    return into
