"""All handles of one waterfall: their state changes, under one lock, and their statistics.

Movers report here when their copies end; the waterfall calls on behalf of the computation. The space of a handle in its
tier is given back when the handle no longer needs it and the last copy that touches it has ended, in either order.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.tiers._handle import Handle
from penstock.tiers._record import WITHOUT_ROOM, HandleState, Happening
from penstock.tiers._room import Room

Box = list[torch.UntypedStorage]
"""A list with the storage of one copy. The computing thread empties it, so that its allocator and profiler see that."""


class Handles:
    """The states of one waterfall's handles. It is wide because every change of a state is here, under one lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a finalizer may release a handle of a closed waterfall
        self.leftovers: deque[tuple[Handle | None, Box]] = deque()
        """Boxes of copies that have ended; boxes of copies out come with their handle."""
        self.troubles: deque[str] = deque()
        """Reasons why storages stay on the device."""
        self.num_leaving_room = 0
        """Number of handles whose space is needed only by copies that still touch it."""
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
        """Count a new handle."""
        with self.lock:
            self.counts["num_live_handles"] += 1

    def lend(self, handle: Handle, original: Handle, room: Room) -> None:
        """Set up a new handle to bytes that another waterfall has parked and that this one reaches through ``room``."""
        with self.lock:
            handle.size_bytes, handle.data_pointer = original.size_bytes, original.data_pointer
            handle.address_remainder = original.address_remainder
            record = handle.record
            record.room, record.storage, record.state = room, None, HandleState.PARKED

    # Called for the computation

    def give(self, handle: Handle, room: Room) -> None:
        """Give the handle its space in a tier; a copy out is about to begin."""
        with self.lock:
            handle.record.room, handle.record.num_moving = room, 1
            self.counts["bounced_bytes"] += room.edge_bytes

    def hand_over(self, outdated: Handle, handle: Handle) -> Room | None:
        """Release one handle and give another one its space in host memory, where a copy out is about to begin.

        Returns ``None`` if that is not possible. Copies that still touch the space come before those of the new handle,
        since a direction has one stream, and the computation has used what came in.
        """
        room = outdated.record.room
        if room is None or not room.tier.is_memory or room.lender is not None:
            return None
        if outdated.record.state is not HandleState.PARKED or outdated.size_bytes != handle.size_bytes:
            return None
        with self._changing(outdated):
            outdated.record.room = None
            self.counts["num_live_handles"] -= outdated.record.happens(Happening.RELEASED)
        self.give(handle, room)
        return room

    def keep(self, handle: Handle, trouble: str) -> None:
        """Keep the storage on the device, because there is no space or the copy out could not begin."""
        with self._changing(handle):
            handle.record.happens(Happening.STAYS)
            handle.record.num_moving = 0
            self.counts["kept_bytes"] += handle.size_bytes
            self.troubles.append(trouble)

    def take_back(self, handle: Handle) -> None:
        """Keep the storage on the device, because the copy out was canceled before it began."""
        with self._changing(handle):
            handle.record.happens(Happening.STAYS)
            handle.record.num_moving -= 1

    def want(self, handle: Handle) -> bool:
        """Return whether the bytes are being copied out, and if so, let them stay on the device when that copy ends."""
        with self.lock:
            is_leaving = handle.record.state is HandleState.LEAVING
            handle.record.is_wanted |= is_leaving
            return is_leaving

    def forward(self, handle: Handle) -> torch.UntypedStorage | None:
        """Return the storage without a copy, if it has not left the device or somebody still holds it; else ``None``.

        Raises ``ValueError`` after ``release``.
        """
        record = handle.record
        with self.lock:
            if record.state is HandleState.RELEASED:
                raise _released(handle)
            if record.state is HandleState.ARRIVING:
                return None
            storage = record.storage if record.storage is not None else record.alive(handle.size_bytes)
            if storage is not None:
                record.was_forwarded = True
                self.counts["forwarded_bytes"] += handle.size_bytes
            return storage

    def call(self, handle: Handle, storage: torch.UntypedStorage) -> Room | None:
        """Note that a copy into ``storage`` begins; return where its bytes are, or ``None`` after ``release``."""
        record = handle.record
        with self.lock:
            if not record.happens(Happening.CALLED):
                return None
            record.storage = storage
            record.num_moving += 1
            return record.room

    def renew(self, handle: Handle) -> None:
        """Forget the storage that was parked or last fetched, since the bytes in the tier are about to change."""
        with self.lock:
            handle.record.weak = StorageWeakRef(torch.UntypedStorage(0))

    def refuse(self, handle: Handle) -> None:
        """Note that the copy in could not begin."""
        with self._changing(handle):
            if handle.record.happens(Happening.REFUSED):
                handle.record.storage = None
            handle.record.num_moving -= 1

    def take(self, handle: Handle) -> torch.UntypedStorage:
        """Return what a copy in has brought; the caller has waited for the copy. Raises the error of the copy."""
        record = handle.record
        with self.lock:
            if not record.happens(Happening.TAKEN):
                raise _released(handle)
            storage, record.storage = record.storage, None
            if record.error is not None:
                error, record.error = record.error, None
                try:
                    raise error
                finally:
                    del error  # its traceback would keep this frame alive, and so the handle and its space
            assert storage is not None
            record.weak = StorageWeakRef(storage)
            self.counts["fetched_bytes"] += handle.size_bytes
            return storage

    def release(self, handle: Handle) -> None:
        """Release the handle: nobody needs the bytes."""
        with self._changing(handle):
            self.counts["num_live_handles"] -= handle.record.happens(Happening.RELEASED)

    # Called by movers

    def left(self, handle: Handle, box: Box, error: Exception | None) -> None:
        """Note the end of a copy out.

        May run on a lane thread, which must not be the one that drops the contents of ``box``.
        """
        # FSDP may free and fill a storage again while it is being copied out; then the copy is worth nothing.
        has_moved = box[0].nbytes() != handle.size_bytes or box[0].data_ptr() != handle.data_pointer
        record = handle.record
        with self._changing(handle):
            if error is None and not has_moved and not record.is_wanted:
                if record.happens(Happening.LEFT):
                    record.storage = None
                    self.counts["parked_bytes"] += handle.size_bytes
                    if record.room is not None and record.room.tier.is_disk:
                        self.counts["written_to_disk_bytes"] += handle.size_bytes
            elif record.happens(Happening.STAYS) and not record.is_wanted:
                self.counts["kept_bytes"] += handle.size_bytes
                if error is not None:
                    self._note_failure(error)
            record.num_moving -= 1
            self.leftovers.append((handle, box))  # last: the computing thread must drop the last reference

    def missed(self, handle: Handle, error: Exception) -> None:
        """Note that a later hop failed; the bytes are still complete in the memory before it."""
        with self.lock:
            handle.record.missed_its_tier = True
            self._note_failure(error)

    def arrived(self, handle: Handle, box: Box, error: Exception | None) -> None:
        """Note the end of a copy in. May run on a lane thread, like ``left``."""
        with self._changing(handle):
            if error is not None and handle.record.state is HandleState.ARRIVING:
                handle.record.error = error
            handle.record.num_moving -= 1
            self.leftovers.append((None, box))

    def begun(self, handle: Handle) -> None:
        """Note one more copy that touches the handle's space, which is kept until ``landed`` is called."""
        with self.lock:
            handle.record.num_moving += 1

    def landed(self, handle: Handle) -> None:
        """Note the end of a copy that touches the handle's space."""
        with self._changing(handle):
            handle.record.num_moving -= 1

    @contextlib.contextmanager
    def _changing(self, handle: Handle) -> Iterator[None]:
        """Hold the lock; on exit, give back space that neither the handle nor a copy needs."""
        # Not earlier: a storage that is wanted again is complete in staging memory while it is still being written to
        # disk from there. When its space was given back at that moment, another storage got it and came back wrong.
        room, record = None, handle.record
        with self.lock:
            was_leaving_room = record.is_leaving_room
            yield
            self.num_leaving_room += record.is_leaving_room - was_leaving_room
            if record.state in WITHOUT_ROOM and not record.num_moving:
                room, record.room = record.room, None
                if record.state is HandleState.RELEASED and record.storage is not None:
                    self.leftovers.append((None, [record.storage]))
                    record.storage = None
        if room is not None:
            room.give_back()

    def _note_failure(self, error: Exception) -> None:
        self.counts["num_failed_writes"] += 1
        self.troubles.append(str(error))


def _released(handle: Handle) -> ValueError:
    return ValueError(f"{handle!r} was released; get() comes before release()")
