"""The hop between device memory and disk with no host memory between them, where GPUDirect Storage works.

A request is a blocking call on a lane thread and knows nothing of streams. So the thread waits first: for the work that
produced the bytes on their way out, or for the work that used the memory before, on their way in. After the call the
bytes are there, and nobody has to wait for a stream.
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
from penstock.tiers._tier import Piece, Tier
from penstock.tiers._transit import Transit

_THREADS = 4


class DirectHop:
    """The two lanes between a device and tiers that talk to it."""

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
        """Room in the tier. Raises ``TierFullError``."""
        return Room(tier, tier.reserve(size_bytes))

    def borrow(self, room: Room, lender: Handle) -> Room:
        """A way to a room that another has filled."""
        return Room(room.tier, room.extent, lender=room.lender or lender)

    def send(self, handle: Handle, storage: torch.UntypedStorage, room: Room, transit: Transit) -> None:
        """Begins to copy the storage out, once the work that produced it has passed."""
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
        """Begins to copy the bytes in, once the work that used the memory before has passed."""
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
            partial(self._move, transfer, piece, box, at, min(at + piece.size_bytes, handle.size_bytes), ready)
            for _, at, piece in room.pieces()
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
        transfer(piece, box[0][start:end])  # the slice dies here: the last reference is the computing thread's to drop

    def _left(self, handle: Handle, box: Box, room: Room, job: LaneJob) -> None:
        note_copy(self._events, Link(DEVICE, room.tier.place), "park", job)
        self._handles.left(handle, box, job.error)

    def _arrived(self, handle: Handle, box: Box, room: Room, transit: Transit, job: LaneJob) -> None:
        note_copy(self._events, Link(room.tier.place, DEVICE), "fetch", job)
        self._handles.arrived(handle, box, job.error)
        transit.is_queued.set()
