"""Copies between device memory and disk with no host memory between them, where GPUDirect Storage works.

A request is a blocking call on a lane thread and knows nothing of streams. So the thread waits first: for the work that
produced the bytes on their way out, or for the work that used the memory before, on their way in. After the call the
bytes are there, and nobody has to wait for a stream.
"""

from collections.abc import Callable
from functools import partial

import torch

from penstock.devices import StreamEvent, Streams
from penstock.tiers._disk import DiskTier
from penstock.tiers._lane import Lane, LaneJob
from penstock.tiers._tier import Extent, Piece

_THREADS = 4


class DirectDisk:
    """The two lanes between a device and its disks."""

    def __init__(self, streams: Streams, *, max_in_flight_bytes: int):
        self.out = Lane("device->disk", num_threads=_THREADS, max_in_flight_bytes=max_in_flight_bytes)
        self.back = Lane("disk->device", num_threads=_THREADS, max_in_flight_bytes=2**62)
        self._streams = streams

    def start(
        self,
        lane: Lane,
        tier: DiskTier,
        extent: Extent,
        box: list[torch.UntypedStorage],
        ready: StreamEvent,
        label: str,
        on_done: Callable[[LaneJob], None],
    ) -> LaneJob:
        """Begins to copy the storage in ``box`` to or from ``extent``, once ``ready`` has passed."""
        transfer = tier.write_storage if lane is self.out else tier.read_storage
        size_bytes = box[0].nbytes()
        pieces, at = [], 0
        for piece in extent.pieces:
            end = min(at + piece.size_bytes, size_bytes)
            pieces.append(partial(self._move, transfer, piece, box, at, end, ready))
            at = end
        return lane.submit(pieces, size_bytes=size_bytes, label=label, on_done=on_done)

    def drain(self) -> None:
        """Waits for all copies."""
        self.out.drain()
        self.back.drain()

    def close(self) -> None:
        """Drains and ends the lanes."""
        self.out.close()
        self.back.close()

    def _move(
        self,
        transfer: Callable[[Piece, torch.UntypedStorage], None],
        piece: Piece,
        box: list[torch.UntypedStorage],
        start: int,
        end: int,
        ready: StreamEvent,
    ) -> None:
        self._streams.synchronize(ready)
        transfer(piece, box[0][start:end])  # the slice dies here: the last reference is the computing thread's to drop
