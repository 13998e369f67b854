"""The hop between pinned host memory and a tier that no device reaches: lane threads write and read.

Bytes pass through staging memory, and until the tier has them they are fetched from there. After a failed write they
stay there. If that leaves no space for a fetch, the fetch takes pageable memory of its own.
"""

import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from penstock.devices import Streams
from penstock.errors import TierFullError
from penstock.links import DISK, HOST, Link
from penstock.tiers._events import EventLog, note_copy
from penstock.tiers._handle import Handle
from penstock.tiers._handles import Box, Handles
from penstock.tiers._host import HostTier
from penstock.tiers._lane import Lane, LaneJob
from penstock.tiers._memory_mover import allocate
from penstock.tiers._room import Room
from penstock.tiers._stream_hop import StreamHop, Transit, as_bytes
from penstock.tiers._tier import Extent, Piece, Tier

_THREADS = 4


@dataclass(slots=True, eq=False)
class StagedRoom(Room):
    """Space in a tier, and the staging memory through which its bytes pass. Guarded by the hop's condition."""

    hop: "StagedHop | None" = None
    staging: Extent | None = None
    """Where the bytes are in staging memory."""
    num_users: int = 0
    """Number of copies that touch the staging memory."""
    is_written: bool = False
    """Whether the tier has the bytes."""

    def give_back(self) -> None:
        assert self.hop is not None
        self.hop.forget(self)
        super(StagedRoom, self).give_back()


class StagedHop:
    """Two lanes, out and in, between staging memory and the tiers below it."""

    def __init__(
        self,
        streams: Streams,
        staging: HostTier,
        copies: StreamHop,
        handles: Handles,
        events: EventLog,
        *,
        wait_for_a_copy: Callable[[], bool],
        verify: bool,
        node: int | None = None,
    ):
        self.staging = staging
        self.out = Lane(Link(HOST, DISK).name, num_threads=_THREADS, max_in_flight_bytes=2**62, node=node)
        self.back = Lane(Link(DISK, HOST).name, num_threads=_THREADS, max_in_flight_bytes=2**62, node=node)
        self.condition = threading.Condition(threading.RLock())
        """Notified when staging memory becomes free."""
        self._streams = streams
        self._copies = copies
        self._handles = handles
        self._events = events
        self._wait_for_a_copy = wait_for_a_copy
        self._verify = verify

    def reserve(self, tier: Tier, size_bytes: int) -> Room:
        """Reserve space in the tier and in the staging memory on the way to it. Raises ``TierFullError``."""
        extent = tier.reserve(size_bytes)
        try:
            staging = self._reserve(extent.size_bytes)
        except TierFullError:
            tier.release(extent)
            raise
        return StagedRoom(tier, extent, hop=self, staging=staging, num_users=1)

    def borrow(self, room: Room, lender: Handle) -> Room:
        """Return a way to reach settled space of another device, with staging memory of this hop."""
        return StagedRoom(
            room.tier, room.extent, checksums=room.checksums, lender=room.lender or lender, hop=self, is_written=True
        )

    def send(self, handle: Handle, storage: torch.UntypedStorage, room: Room, transit: Transit) -> None:
        """Queue the copy out into staging memory, and let a lane write the bytes from there."""
        assert isinstance(room, StagedRoom) and room.staging is not None
        self._copies.send(handle, storage, transit, self.staging.tensor(room.staging))
        self._handles.begun(handle)
        memory = self.staging.view(room.staging)
        room.checksums = [0] * len(room.extent.pieces)
        pieces = [
            partial(self._write_piece, room, piece, memory[start : start + piece.size_bytes], transit, number)
            for number, start, piece in room.pieces()
        ]
        try:
            self.out.submit(
                pieces, size_bytes=handle.size_bytes, label=handle.label, on_done=partial(self._written, handle, room)
            )
        except RuntimeError as error:  # no thread could be started
            self._write_ended(handle, room, error)

    def bring(self, handle: Handle, box: Box, room: Room, transit: Transit) -> None:
        """Queue the copy in: from staging memory if the bytes are still there, else after a lane has read them."""
        assert isinstance(room, StagedRoom)
        with self.condition:
            staging = room.staging
            room.num_users += staging is not None
        if staging is not None:
            try:
                self._copies.bring(handle, box, transit, self.staging.tensor(staging), partial(self._drop, room))
            except RuntimeError:
                self._drop(room)
                raise
        else:
            self._read(handle, box, room, transit)

    def forget(self, room: StagedRoom) -> None:
        """Free the staging memory of a room that is being given back, even if a failed write left its bytes there."""
        with self.condition:
            room.is_written, room.num_users = True, 1  # this call itself, which is dropped below
        self._drop(room)

    def _reserve(self, size_bytes: int) -> Extent:
        """Reserve staging memory, waiting for copies under way to free theirs."""
        while True:
            try:
                return self.staging.reserve(size_bytes)
            except TierFullError:
                if not self._wait_for_a_copy():
                    return self.staging.reserve(size_bytes)  # the last copy may have ended in between

    def _write_piece(self, room: StagedRoom, piece: Piece, view: memoryview, transit: Transit, number: int) -> None:
        self._streams.synchronize(transit.left)
        if self._verify:
            room.checksums[number] = zlib.crc32(view)
        room.tier.write(piece, view)

    def _written(self, handle: Handle, room: StagedRoom, job: LaneJob) -> None:
        note_copy(self._events, Link(HOST, room.tier.place), "park", job)
        self._write_ended(handle, room, job.error)

    def _write_ended(self, handle: Handle, room: StagedRoom, error: Exception | None) -> None:
        room.is_written = error is None
        if error is not None:
            self._handles.missed(handle, error)  # the bytes stay in staging memory
        self._drop(room)
        self._handles.landed(handle)

    def _read(self, handle: Handle, box: Box, room: StagedRoom, transit: Transit) -> None:
        size_bytes = room.extent.size_bytes
        try:
            staging = self._reserve(size_bytes)
        except TierFullError:  # failed writes occupy all of it, maybe for long, and these bytes are needed now
            memory, on_passed = as_bytes(allocate(size_bytes, address_remainder=0)), None
        else:
            memory, on_passed = self.staging.tensor(staging), partial(self._drop, room)
            with self.condition:
                room.staging, room.num_users = staging, 1
        bytes_ = memory.numpy().data
        pieces = [
            partial(self._read_piece, room, piece, bytes_[start : start + piece.size_bytes], number)
            for number, start, piece in room.pieces()
        ]
        try:
            self.back.submit(
                pieces,
                size_bytes=handle.size_bytes,
                label=handle.label,
                on_done=partial(self._have_read, handle, box, room, transit, memory, on_passed),
            )
        except RuntimeError:  # no thread could be started
            if on_passed is not None:
                on_passed()
            raise

    def _read_piece(self, room: StagedRoom, piece: Piece, view: memoryview, number: int) -> None:
        room.tier.read(piece, view)
        if self._verify:
            room.check(piece, number, view)

    def _have_read(
        self,
        handle: Handle,
        box: Box,
        room: Room,
        transit: Transit,
        memory: torch.Tensor,
        on_passed: Callable[[], None] | None,
        job: LaneJob,
    ) -> None:
        note_copy(self._events, Link(room.tier.place, HOST), "fetch", job)
        error = job.error
        if error is None:
            try:
                self._copies.bring(handle, box, transit, memory, on_passed)
                return
            except RuntimeError as raised:  # an error of the device, for the caller that waits for the bytes
                error = raised
        if on_passed is not None:
            on_passed()
        self._handles.arrived(handle, box, error)
        del error  # its traceback would keep this frame alive, and so the handle and its space
        transit.note_queued()

    def _drop(self, room: StagedRoom) -> None:
        """Remove one user; the last one frees the staging memory, unless only that has the bytes."""
        with self.condition:
            if room.staging is None:
                return
            room.num_users -= 1
            if room.num_users > 0 or not room.is_written:
                return
            staging, room.staging = room.staging, None
            self.staging.release(staging)
            self.condition.notify_all()
