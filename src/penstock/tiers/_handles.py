"""All handles of one waterfall: what happens to them, under one lock, and the sums of it.

Movers report here how their copies end; the waterfall asks and tells on behalf of the computation. A room is given back
when its handle needs it no more and the last copy that touches it has ended, in whichever order.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.tiers._handle import TRANSITIONS, WITHOUT_ROOM, Handle, HandleState, Happening
from penstock.tiers._room import Room

Box = list[torch.UntypedStorage]
"""Holds the storage of one copy. The computing thread empties it: its allocator and its profiler are to see that."""


class Handles:
    """The states of one waterfall's handles."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a finaliser may release a handle of a closed waterfall
        self.leftovers: deque[tuple[Handle | None, Box]] = deque()
        """Boxes of copies that have ended, each of a copy out with its handle."""
        self.troubles: deque[str] = deque()
        """Why storages stay on the device."""
        self.num_leaving_room = 0
        """Handles that need their room no more, but for the copies that still touch it."""
        self.counts = {
            "parked_bytes": 0,
            "fetched_bytes": 0,
            "forwarded_bytes": 0,
            "kept_bytes": 0,
            "bounced_bytes": 0,
            "written_to_disk_bytes": 0,
            "num_live_handles": 0,
            "num_failed_writes": 0,
        }

    def add(self) -> None:
        """There is one more."""
        with self.lock:
            self.counts["num_live_handles"] += 1

    def lend(self, handle: Handle, original: Handle, room: Room) -> None:
        """A new handle to bytes that another waterfall has parked, and to which ``room`` leads here."""
        with self.lock:
            handle.size_bytes, handle.data_pointer = original.size_bytes, original.data_pointer
            handle.address_remainder = original.address_remainder
            handle._room, handle._storage, handle._state = room, None, HandleState.PARKED

    # What the computation wants

    def give(self, handle: Handle, room: Room) -> None:
        """There is room, and a copy out is about to begin."""
        with self.lock:
            handle._room, handle._num_moving = room, 1
            self.counts["bounced_bytes"] += room.edge_bytes

    def keep(self, handle: Handle, trouble: str) -> None:
        """There is no room, or the copy out could not begin."""
        with self._changing(handle):
            self._happens(handle, Happening.STAYS)
            handle._num_moving = 0
            self.counts["kept_bytes"] += handle.size_bytes
            self.troubles.append(trouble)

    def take_back(self, handle: Handle) -> None:
        """The copy out was taken back before it began: the storage is wanted, or wanted no more."""
        with self._changing(handle):
            self._happens(handle, Happening.STAYS)
            handle._num_moving -= 1

    def want(self, handle: Handle) -> bool:
        """Whether the bytes are leaving; then the end of that copy leaves them where they are."""
        with self.lock:
            handle._is_wanted |= handle._state is HandleState.LEAVING
            return handle._state is HandleState.LEAVING

    def forward(self, handle: Handle) -> torch.UntypedStorage | None:
        """The storage without a copy, where it has not left or somebody still holds it.

        Raises ``ValueError`` after ``release``.
        """
        with self.lock:
            if handle._state is HandleState.RELEASED:
                raise _released(handle)
            if handle._state is HandleState.ARRIVING:
                return None
            storage = handle._storage if handle._storage is not None else handle._alive()
            if storage is not None:
                handle._was_forwarded = True
                self.counts["forwarded_bytes"] += handle.size_bytes
            return storage

    def call(self, handle: Handle, storage: torch.UntypedStorage) -> Room | None:
        """A copy into ``storage`` is about to begin; returns where its bytes are, ``None`` after ``release``."""
        with self.lock:
            if not self._happens(handle, Happening.CALLED):
                return None
            handle._storage = storage
            handle._num_moving += 1
            return handle._room

    def refuse(self, handle: Handle) -> None:
        """The copy in could not begin."""
        with self._changing(handle):
            if self._happens(handle, Happening.REFUSED):
                handle._storage = None
            handle._num_moving -= 1

    def take(self, handle: Handle) -> torch.UntypedStorage:
        """What a copy in has brought, for which the caller has waited. Raises its error."""
        with self.lock:
            if not self._happens(handle, Happening.TAKEN):
                raise _released(handle)
            storage, handle._storage = handle._storage, None
            if handle._error is not None:
                error, handle._error = handle._error, None
                try:
                    raise error
                finally:
                    del error  # else its traceback keeps this frame, and the frame the handle and its room
            assert storage is not None
            handle._weak = StorageWeakRef(storage)
            self.counts["fetched_bytes"] += handle.size_bytes
            return storage

    def release(self, handle: Handle) -> None:
        """Nobody needs the bytes."""
        with self._changing(handle):
            self.counts["num_live_handles"] -= self._happens(handle, Happening.RELEASED)

    # What movers report

    def left(self, handle: Handle, box: Box, error: Exception | None) -> None:
        """The copy out has ended. May run on a lane thread, which must not be the one to drop what is in ``box``."""
        has_moved = box[0].nbytes() != handle.size_bytes or box[0].data_ptr() != handle.data_pointer
        with self._changing(handle):
            if error is None and not has_moved and not handle._is_wanted:
                if self._happens(handle, Happening.LEFT):
                    self._note_parked(handle)
            elif self._happens(handle, Happening.STAYS) and not handle._is_wanted:
                self.counts["kept_bytes"] += handle.size_bytes
                if error is not None:
                    self._note_failure(error)
            handle._num_moving -= 1
            self.leftovers.append((handle, box))  # last: what the computing thread drops must be the last reference

    def missed(self, handle: Handle, error: Exception) -> None:
        """A later hop failed; the bytes are whole in the memory before it."""
        with self.lock:
            handle._missed_its_tier = True
            self._note_failure(error)

    def arrived(self, handle: Handle, box: Box, error: Exception | None) -> None:
        """The copy in has ended. May run on a lane thread, as above."""
        with self._changing(handle):
            if error is not None and handle._state is HandleState.ARRIVING:
                handle._error = error
            handle._num_moving -= 1
            self.leftovers.append((None, box))

    def begun(self, handle: Handle) -> None:
        """One more copy touches the handle's room, which stays until it has ``landed``."""
        with self.lock:
            handle._num_moving += 1

    def landed(self, handle: Handle) -> None:
        """One of the copies that touch the handle's room has ended."""
        with self._changing(handle):
            handle._num_moving -= 1

    @contextlib.contextmanager
    def _changing(self, handle: Handle) -> Iterator[None]:
        """Holds the lock; afterwards gives back a room that neither the handle nor a copy needs."""
        room = None
        with self.lock:
            was_leaving_room = _is_leaving_room(handle)
            yield
            self.num_leaving_room += _is_leaving_room(handle) - was_leaving_room
            if handle._state in WITHOUT_ROOM and not handle._num_moving:
                room, handle._room = handle._room, None
                if handle._state is HandleState.RELEASED and handle._storage is not None:
                    self.leftovers.append((None, [handle._storage]))
                    handle._storage = None
        if room is not None:
            room.give_back()

    def _happens(self, handle: Handle, happening: Happening) -> bool:
        """Whether it changes the handle's state, as the table has it. Holds the lock."""
        after = TRANSITIONS.get((handle._state, happening))
        if after is None:
            return False
        handle._state = after
        return True

    def _note_parked(self, handle: Handle) -> None:
        handle._storage = None
        self.counts["parked_bytes"] += handle.size_bytes
        if handle._room is not None and handle._room.tier.is_disk:
            self.counts["written_to_disk_bytes"] += handle.size_bytes

    def _note_failure(self, error: Exception) -> None:
        self.counts["num_failed_writes"] += 1
        self.troubles.append(str(error))


def _is_leaving_room(handle: Handle) -> bool:
    return handle._state in WITHOUT_ROOM and handle._num_moving > 0


def _released(handle: Handle) -> ValueError:
    return ValueError(f"{handle!r} was released; get() comes before release()")
