"""The hop between device memory and disk without host memory between them, where GPUDirect Storage works.

A request is a blocking call on a lane thread and does not know about streams. So the thread waits first: on the way out
for the work that produced the bytes, on the way in for the work that used the memory before. After the call the bytes
are there, and no stream has to wait.
"""

from collections.abc import Callable
from functools import partial

import torch

from penstock.devices import StreamEvent, Streams
from penstock.links import DEVICE, DISK, Link
from penstock.tiers._events import EventLog, note_copy
from penstock.tiers._handle import Handle
from penstock.tiers._handles import Box, Handles
from penstock.tiers._lane import Lane, LaneJob
from penstock.tiers._room import Room
from penstock.tiers._stream_hop import Transit
from penstock.tiers._tier import Piece, Tier

_THREADS = 4


class DirectHop:
    """Two lanes, out and in, between a device and tiers that it can reach by itself."""

    def __init__(
        self,
        streams: Streams,
        handles: Handles,
        events: EventLog,
        *,
        max_in_flight_bytes: int,
        node: int | None = None,
    ):
        out, back = Link(DEVICE, DISK).name, Link(DISK, DEVICE).name
        self.out = Lane(out, num_threads=_THREADS, max_in_flight_bytes=max_in_flight_bytes, node=node)
        self.back = Lane(back, num_threads=_THREADS, max_in_flight_bytes=2**62, node=node)
        self._streams = streams
        self._handles = handles
        self._events = events

    def reserve(self, tier: Tier, size_bytes: int) -> Room:
        """Reserve space in the tier. Raises ``TierFullError``."""
        return Room(tier, tier.reserve(size_bytes))

    def borrow(self, room: Room, lender: Handle) -> Room:
        """Return a way to reach space that another device has filled."""
        return Room(room.tier, room.extent, lender=room.lender or lender)

    def send(self, handle: Handle, storage: torch.UntypedStorage, room: Room, transit: Transit) -> None:
        """Begin to copy the storage out, once the work that produced it has finished."""
        box = [storage]
        transit.direct = self._submit(
            self.out,
            handle,
            box,
            room,
            transit.produced,
            room.tier.write_storage,
            partial(self._left, handle, box, room),
        )

    def bring(self, handle: Handle, box: Box, room: Room, transit: Transit) -> None:
        """Begin to copy the bytes in, once the work that used the memory before has finished."""
        self._submit(
            self.back,
            handle,
            box,
            room,
            transit.ready,
            room.tier.read_storage,
            partial(self._arrived, handle, box, room, transit),
        )

    def _submit(
        self,
        lane: Lane,
        handle: Handle,
        box: Box,
        room: Room,
        ready: StreamEvent,
        transfer: Callable[[Piece, torch.UntypedStorage], None],
        on_done: Callable[[LaneJob], None],
    ) -> LaneJob:
        pieces = [
            partial(self._move, transfer, piece, box, start, min(start + piece.size_bytes, handle.size_bytes), ready)
            for _, start, piece in room.pieces()
        ]
        return lane.submit(pieces, size_bytes=handle.size_bytes, label=handle.label, on_done=on_done)

    def _move(
        self,
        transfer: Callable[[Piece, torch.UntypedStorage], None],
        piece: Piece,
        box: Box,
        start: int,
        end: int,
        ready: StreamEvent,
    ) -> None:
        self._streams.synchronize(ready)
        transfer(piece, box[0][start:end])  # drops the slice here: the computing thread must drop the last reference

    def _left(self, handle: Handle, box: Box, room: Room, job: LaneJob) -> None:
        note_copy(self._events, Link(DEVICE, room.tier.place), "park", job)
        self._handles.left(handle, box, job.error)

    def _arrived(self, handle: Handle, box: Box, room: Room, transit: Transit, job: LaneJob) -> None:
        note_copy(self._events, Link(room.tier.place, DEVICE), "fetch", job)
        self._handles.arrived(handle, box, job.error)
        transit.note_queued()
