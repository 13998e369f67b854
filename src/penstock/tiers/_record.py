"""Where the bytes of a handle are: the states it goes through, and the record of them."""

import enum

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.storages import storage_of
from penstock.tiers._room import Room


class HandleState(enum.Enum):
    """Where the bytes of a handle are."""

    __hash__ = object.__hash__  # the enum's own takes a call in Python

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

    __hash__ = object.__hash__

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


class Record:
    """Where the bytes of one handle are. Only `Handles` changes it, under its lock, except ``transit``."""

    __slots__ = (
        "error",
        "is_wanted",
        "missed_its_tier",
        "num_moving",
        "room",
        "state",
        "storage",
        "transit",
        "was_forwarded",
        "weak",
    )

    def __init__(self, storage: torch.UntypedStorage):
        self.state = HandleState.LEAVING
        self.storage: torch.UntypedStorage | None = storage
        """The storage, while the handle itself holds it."""
        self.weak = StorageWeakRef(storage)
        """The storage as it was parked or last fetched; somebody else may hold it."""
        self.room: Room | None = None
        self.num_moving = 0
        """Number of copies that still use the space in the tier; the last one to end gives it back."""
        self.is_wanted = False
        """Whether it was prefetched before its copy out ended."""
        self.was_forwarded = False
        """Whether it was returned from memory, so that the end of its copy out frees nothing."""
        self.missed_its_tier = False
        """Whether a later hop failed: the bytes are still in staging memory."""
        self.error: Exception | None = None
        """The error of the last copy in, until somebody asks for the bytes."""
        self.transit: object = None
        """The mover's own record of the copies."""

    @property
    def is_leaving_room(self) -> bool:
        """Whether only copies under way still need the space in the tier."""
        return self.state in WITHOUT_ROOM and self.num_moving > 0

    def happens(self, happening: Happening) -> bool:
        """Apply the transition table; return whether the state changed. The caller holds the lock of `Handles`."""
        after = TRANSITIONS.get((self.state, happening))
        if after is None:
            return False
        self.state = after
        return True

    def alive(self, size_bytes: int) -> torch.UntypedStorage | None:
        """Return the storage of ``weak``, if somebody still holds it and has not emptied it."""
        storage = storage_of(self.weak)
        return storage if storage is not None and len(storage) == size_bytes else None
