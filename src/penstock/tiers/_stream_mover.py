"""Moving bytes of a CUDA device: copies on two streams of their own, and lane threads between host memory and disk.

The host runs ahead of the device, so a copy is queued here, not done here. What keeps it right, each rule bought with
somebody's published bug (docs/design/streams.md lists them):

- A copy out waits for the work that produced its bytes: an event of the stream that is current at that moment.
- A copy in waits for the copy out of the same bytes, and for the work queued before its memory was allocated.
- The device copy of a storage is dropped when the copy out has passed, or after its stream was told to wait for it.
- Room in a tier is given back only when the last copy that touches it has passed.
- The bytes on their way out are bounded by letting the computing stream wait, so the host never has to.

Bytes for the disk pass through staging slabs of pinned memory; until the disk has them they are fetched from there. A
failed write leaves them there; where that leaves no room for a fetch, the fetch takes pageable memory of its own.
``verify`` covers the way to disk and back. Where device and disk talk directly
(`_direct_disk.py`) there is no staging, and a failed write leaves the storage on the device; checksums need the bytes
in host memory, so ``verify`` goes the long way.
"""

import threading
import time
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeGuard

import torch

from penstock.devices import Stream, StreamEvent, Streams
from penstock.errors import TierFullError, TierReadError
from penstock.tiers._direct_disk import DirectDisk
from penstock.tiers._disk import DiskTier
from penstock.tiers._events import EventLog
from penstock.tiers._handle import Handle, HandleState
from penstock.tiers._host import HostTier
from penstock.tiers._lane import Lane, LaneJob
from penstock.tiers._memory_mover import allocate
from penstock.tiers._tier import Extent, Piece, Tier
from penstock.tiers._waterfall import Waterfall

_DISK_THREADS = 4


@dataclass(slots=True, eq=False)
class _Transit:
    """What the mover knows of one handle. Guarded by the mover's condition."""

    produced: StreamEvent = None
    """Passed when the bytes are there to be copied out."""
    left: StreamEvent = None
    """Passed when the bytes are in host memory."""
    arrived: StreamEvent = None
    """Passed when they are back on the device; set when that copy is queued."""
    is_queued: threading.Event = field(default_factory=threading.Event)
    """Set when ``arrived`` is, or when the read from disk failed."""
    home: Stream = None
    """The stream that owns the memory of the copy under way."""
    staging: Extent | None = None
    """Where the bytes are in pinned memory on their way to or from disk."""
    num_staging_users: int = 0
    """Copies that touch the staging extent."""
    is_on_disk: bool = False
    """Whether the disk has the bytes."""
    checksums: list[int] = field(default_factory=list)
    direct: LaneJob | None = None
    """The copy straight to disk, begun or done."""


@dataclass(slots=True, eq=False)
class _Copy:
    """A copy queued on a stream and not yet seen to have passed."""

    handle: Handle
    box: list[torch.UntypedStorage]
    transit: _Transit
    started: StreamEvent
    passed: StreamEvent
    start_s: float
    source: torch.Tensor | None = None
    """Of a copy in: the host memory it reads, which may live for this copy alone."""
    uses_staging: bool = False
    """Of a copy in: whether it is one of the staging extent's users."""


class _Rate:
    """Bytes per second of the copies on one stream, by the device's own clock."""

    def __init__(self) -> None:
        self._copied_bytes = 0
        self._busy_s = 0.0

    def add(self, copy: _Copy, streams: Streams) -> None:
        self._copied_bytes += copy.handle.size_bytes
        self._busy_s += streams.elapsed_s(copy.started, copy.passed)

    def bytes_per_s(self) -> float | None:
        return self._copied_bytes / self._busy_s if self._busy_s else None


class StreamMover:
    """Copies between a device with streams, pinned host memory and disk."""

    out_lane = "device->host"
    in_lane = "host->device"

    def __init__(
        self, streams: Streams, staging: HostTier, events: EventLog, *, max_in_flight_bytes: int, verify: bool
    ):
        self.waterfall: Waterfall  # set by waterfall_for
        self._in_flight_peak_bytes = 0
        self._streams = streams
        self._staging = staging
        self._events = events
        self._max_in_flight_bytes = max_in_flight_bytes
        self._verify = verify
        self._out, self._in = streams.create(), streams.create()
        self._direct = DirectDisk(streams, max_in_flight_bytes=max_in_flight_bytes)
        self._to_disk = Lane("host->disk", num_threads=_DISK_THREADS, max_in_flight_bytes=2**62)
        self._from_disk = Lane("disk->host", num_threads=_DISK_THREADS, max_in_flight_bytes=2**62)
        self._condition = threading.Condition(threading.RLock())
        self._in_flight_bytes = 0
        self._leaving: deque[_Copy] = deque()
        self._passing: deque[_Copy] = deque()  # the device has given their storages up, and waits for them
        self._arriving: deque[_Copy] = deque()
        self._out_rate, self._in_rate = _Rate(), _Rate()
        self._stalls: deque[tuple[StreamEvent, StreamEvent]] = deque()
        self._stall_s = 0.0

    @property
    def in_flight_peak_bytes(self) -> int:
        return max(self._in_flight_peak_bytes, self._direct.out.peak_in_flight_bytes)

    def make_room(self, size_bytes: int) -> float:
        most_bytes = self._max_in_flight_bytes - size_bytes
        while self._leaving and self._in_flight_bytes + self._direct.out.in_flight_bytes > most_bytes:
            self._let_oldest_leave()
        return self._direct.out.wait_for_room(self._in_flight_bytes + size_bytes)

    def reserve(self, tiers: Sequence[Tier], handle: Handle) -> tuple[Tier, Extent]:
        reasons = []
        for tier in tiers:
            try:
                return tier, self._reserve_in(tier, handle)
            except TierFullError as error:
                reasons.append(str(error))
        raise TierFullError("; ".join(reasons) or "there is no tier below the device")

    @property
    def holds_handles(self) -> bool:  # the lanes first: they pass on to the stream
        return bool(
            self._from_disk.in_flight_bytes or self._direct.back.in_flight_bytes or self._arriving or self._passing
        )

    def wait_for_a_copy(self) -> bool:
        is_lane_busy = any(lane.in_flight_bytes for lane in self._lanes())  # first, as above
        if self._arriving:
            self._streams.synchronize(self._arriving[0].passed)
        elif self._passing or self._leaving:
            self._streams.synchronize((self._passing or self._leaving)[0].passed)
        elif is_lane_busy:
            with self._condition:
                self._condition.wait(timeout=0.01)  # bounded, since the end of a copy may come before the wait
        else:
            return False
        self.poll()
        return True

    def start_out(self, handle: Handle) -> None:
        (tier, extent), storage = handle._room(), handle._storage
        assert storage is not None
        transit = handle._in_transit
        if not isinstance(transit, _Transit):
            transit = handle._in_transit = _Transit()
        box = [storage]
        transit.home = self._streams.current()
        transit.produced = self._streams.record(transit.home)
        if self._is_direct(tier):
            transit.direct = self._direct.start(
                self._direct.out,
                tier,
                extent,
                box,
                transit.produced,
                handle.label,
                partial(self._left_directly, handle, box),
            )
            return
        target = self._host_bytes(tier, extent, transit)[: handle.size_bytes]
        self._streams.wait(self._out, transit.produced)
        started = self._streams.record(self._out)
        self._streams.copy(self._out, target, _as_bytes(storage))
        transit.left = self._streams.record(self._out)
        self._leaving.append(_Copy(handle, box, transit, started, transit.left, time.time()))
        self._in_flight_bytes += handle.size_bytes
        self._in_flight_peak_bytes = max(self._in_flight_peak_bytes, self._in_flight_bytes)
        if transit.staging is not None:
            self.waterfall._begun(handle)
            self._write_to_disk(handle, transit, tier, extent)

    def cancel_out(self, handle: Handle) -> bool:
        transit = handle._in_transit  # what is on a stream cannot be taken back
        return isinstance(transit, _Transit) and transit.direct is not None and self._direct.out.cancel(transit.direct)

    def hand_back(self, handle: Handle, storage: torch.UntypedStorage) -> None:
        transit, current = handle._in_transit, self._streams.current()
        if isinstance(transit, _Transit) and transit.produced is not None and current != transit.home:
            self._streams.wait(current, transit.produced)
            self._streams.share(storage, current)

    def finish_out(self, handle: Handle) -> float:
        transit = handle._in_transit
        if isinstance(transit, _Transit) and transit.direct is not None:
            return transit.direct.wait()
        while handle._state is HandleState.LEAVING and self._leaving:
            self._let_oldest_leave()
        return 0.0

    def start_in(self, handle: Handle) -> None:
        (tier, extent), transit = handle._room(), handle._in_transit
        assert isinstance(transit, _Transit)
        storage = self._streams.allocate(handle.size_bytes)
        box = [storage]
        handle._storage, handle._state = storage, HandleState.ARRIVING
        transit.home = self._streams.current()
        transit.is_queued = threading.Event()
        ready = self._streams.record(transit.home)
        with self._condition:
            in_memory = isinstance(tier, HostTier) or transit.staging is not None
            uses_staging = transit.staging is not None
            transit.num_staging_users += uses_staging
        if in_memory:
            try:
                self._queue_in(handle, box, transit, ready, self._host_bytes(tier, extent, transit), uses_staging)
            except RuntimeError:
                self._drop_staging(transit)
                raise
        elif self._is_direct(tier):
            transit.arrived = None
            self._direct.start(
                self._direct.back,
                tier,
                extent,
                box,
                ready,
                handle.label,
                partial(self._arrived_directly, handle, box, transit),
            )
        else:
            self._read_from_disk(handle, box, transit, ready, tier, extent)

    def finish_in(self, handle: Handle) -> float:
        transit = handle._in_transit
        assert isinstance(transit, _Transit)
        start_s = time.perf_counter()
        waited_s = 0.0
        if not transit.is_queued.is_set():
            transit.is_queued.wait()
            waited_s = time.perf_counter() - start_s
        if handle._error is not None:
            handle._storage = None
            return waited_s
        current = self._streams.current()
        if transit.arrived is not None:
            self._let_wait(current, transit.arrived)
            with self._condition:
                for copy in self._arriving:
                    if copy.transit is transit:
                        copy.box.clear()  # what is queued from now on comes after the copy
        if current != transit.home:
            assert handle._storage is not None
            self._streams.share(handle._storage, current)
        return waited_s

    def poll(self) -> None:
        while self._passing and self._streams.is_done(self._passing[0].passed):
            copy = self._passing.popleft()
            self._out_rate.add(copy, self._streams)
            self.waterfall._landed(copy.handle)
        while self._leaving and self._streams.is_done(self._leaving[0].passed):
            self._out_rate.add(self._leaving[0], self._streams)
            self._finish_leaving()
        while True:
            with self._condition:
                if not self._arriving or not self._streams.is_done(self._arriving[0].passed):
                    break
                copy = self._arriving.popleft()
            self._in_rate.add(copy, self._streams)
            self._note(self.in_lane, "fetch", copy)
            if copy.uses_staging:
                self._drop_staging(copy.transit)
            self.waterfall._arrived(copy.handle, copy.box)

    def borrow(self, handle: Handle, original: Handle) -> None:
        known = original._in_transit
        assert isinstance(known, _Transit)
        handle._in_transit = _Transit(left=known.left, is_on_disk=True, checksums=known.checksums)

    def rates_bytes_per_s(self) -> tuple[float | None, float | None]:
        return (
            _slowest(
                self._out_rate.bytes_per_s(), self._to_disk.rate_bytes_per_s(), self._direct.out.rate_bytes_per_s()
            ),
            _slowest(
                self._in_rate.bytes_per_s(), self._from_disk.rate_bytes_per_s(), self._direct.back.rate_bytes_per_s()
            ),
        )

    def device_stall_s(self) -> float:
        while self._stalls and self._streams.is_done(self._stalls[0][1]):
            self._stall_s += self._streams.elapsed_s(*self._stalls.popleft())
        return self._stall_s

    def drain(self) -> None:
        for copy in (*self._passing, *self._leaving):
            self._streams.synchronize(copy.passed)
        self.poll()
        for lane in self._lanes():
            lane.drain()
        for copy in list(self._arriving):
            self._streams.synchronize(copy.passed)
        self.poll()

    def close(self) -> None:
        self.drain()
        for lane in self._lanes():
            lane.close()
        self._staging.close()

    def _reserve_in(self, tier: Tier, handle: Handle) -> Extent:
        """Room in ``tier``, and for a disk also in the staging memory on the way to it."""
        extent = tier.reserve(_whole_blocks(handle, tier))
        if not isinstance(tier, HostTier) and not self._is_direct(tier):
            try:
                staging = self._reserve_staging(extent.size_bytes)
            except TierFullError:
                tier.release(extent)
                raise
            handle._in_transit = _Transit(staging=staging, num_staging_users=1)
        return extent

    def _is_direct(self, tier: Tier) -> TypeGuard[DiskTier]:
        return isinstance(tier, DiskTier) and tier.talks_to_device and not self._verify

    def _lanes(self) -> tuple[Lane, ...]:
        return self._to_disk, self._from_disk, self._direct.out, self._direct.back

    def _left_directly(self, handle: Handle, box: list[torch.UntypedStorage], job: LaneJob) -> None:
        self._events.add(
            lane="device->disk", kind="park", label=job.label, size_bytes=job.size_bytes, start_s=job.start_s
        )
        self.waterfall._left(handle, box, job.error)

    def _arrived_directly(
        self, handle: Handle, box: list[torch.UntypedStorage], transit: _Transit, job: LaneJob
    ) -> None:
        self._events.add(
            lane="disk->device", kind="fetch", label=job.label, size_bytes=job.size_bytes, start_s=job.start_s
        )
        handle._error = job.error
        self.waterfall._arrived(handle, box)
        transit.is_queued.set()

    def _reserve_staging(self, size_bytes: int) -> Extent:
        """Staging memory, waiting for copies under way to give theirs back."""
        while True:
            try:
                return self._staging.reserve(size_bytes)
            except TierFullError:
                if not self.wait_for_a_copy():
                    return self._staging.reserve(size_bytes)  # the last may have ended in between

    def _let_wait(self, stream: Stream, event: StreamEvent) -> None:
        if self._streams.is_done(event):
            return
        start = self._streams.record(stream)
        self._streams.wait(stream, event)
        self._stalls.append((start, self._streams.record(stream)))

    def _let_oldest_leave(self) -> None:
        """The device waits for the oldest copy out, so that what is queued from now on may take its memory."""
        oldest = self._leaving[0]
        self._let_wait(oldest.transit.home, oldest.passed)  # alone: its memory goes to no other stream
        self.waterfall._begun(oldest.handle)  # its room is in use until the copy has passed
        self._passing.append(oldest)
        self._finish_leaving()

    def _finish_leaving(self) -> None:
        copy = self._leaving.popleft()
        self._in_flight_bytes -= copy.handle.size_bytes
        self._note(self.out_lane, "park", copy)
        self.waterfall._left(copy.handle, copy.box, None)

    def _host_bytes(self, tier: Tier, extent: Extent, transit: _Transit) -> torch.Tensor:
        if transit.staging is not None:
            return self._staging.tensor(transit.staging)
        assert isinstance(tier, HostTier)
        return tier.tensor(extent)

    def _queue_in(
        self,
        handle: Handle,
        box: list[torch.UntypedStorage],
        transit: _Transit,
        ready: StreamEvent,
        source: torch.Tensor,
        uses_staging: bool,
    ) -> None:
        """Queues the last hop, from pinned memory to the device. May run on a lane thread."""
        with self._condition:
            self._streams.wait(self._in, ready)
            if transit.left is not None:
                self._streams.wait(self._in, transit.left)
            started = self._streams.record(self._in)
            self._streams.copy(self._in, _as_bytes(box[0]), source[: handle.size_bytes])
            transit.arrived = self._streams.record(self._in)
            self._arriving.append(
                _Copy(handle, box, transit, started, transit.arrived, time.time(), source, uses_staging)
            )
        transit.is_queued.set()

    def _write_to_disk(self, handle: Handle, transit: _Transit, tier: Tier, extent: Extent) -> None:
        assert transit.staging is not None
        memory = self._staging.view(transit.staging)
        transit.checksums = [0] * len(extent.pieces)
        pieces, at = [], 0
        for index, piece in enumerate(extent.pieces):
            view = memory[at : at + piece.size_bytes]
            pieces.append(partial(self._write_piece, tier, piece, view, transit, index))
            at += piece.size_bytes
        try:
            self._to_disk.submit(
                pieces,
                size_bytes=handle.size_bytes,
                label=handle.label,
                on_done=partial(self._written, handle, transit),
            )
        except RuntimeError as error:  # no thread to be had
            self._write_ended(handle, transit, error)

    def _write_piece(self, tier: Tier, piece: Piece, view: memoryview, transit: _Transit, index: int) -> None:
        self._streams.synchronize(transit.left)
        if self._verify:
            transit.checksums[index] = zlib.crc32(view)
        tier.write(piece, view)

    def _written(self, handle: Handle, transit: _Transit, job: LaneJob) -> None:
        self._events.add(
            lane="host->disk", kind="park", label=job.label, size_bytes=job.size_bytes, start_s=job.start_s
        )
        self._write_ended(handle, transit, job.error)

    def _write_ended(self, handle: Handle, transit: _Transit, error: Exception | None) -> None:
        transit.is_on_disk = error is None
        if error is not None:
            self.waterfall._write_failed(handle, error)  # the bytes stay in pinned memory
        self._drop_staging(transit)
        self.waterfall._landed(handle)

    def _read_from_disk(
        self,
        handle: Handle,
        box: list[torch.UntypedStorage],
        transit: _Transit,
        ready: StreamEvent,
        tier: Tier,
        extent: Extent,
    ) -> None:
        try:
            staging = self._reserve_staging(extent.size_bytes)
        except TierFullError:  # failed writes hold all of it, maybe for long, and these bytes are needed now
            memory, uses_staging = _as_bytes(allocate(extent.size_bytes, address_remainder=0)), False
        else:
            memory, uses_staging = self._staging.tensor(staging), True
            with self._condition:
                transit.staging, transit.num_staging_users = staging, 1
        pieces, at = [], 0
        for index, piece in enumerate(extent.pieces):
            view = memory[at : at + piece.size_bytes].numpy().data
            pieces.append(partial(self._read_piece, tier, piece, view, transit, index))
            at += piece.size_bytes
        try:
            self._from_disk.submit(
                pieces,
                size_bytes=handle.size_bytes,
                label=handle.label,
                on_done=partial(self._read_done, handle, box, transit, ready, memory, uses_staging),
            )
        except RuntimeError:  # no thread to be had
            if uses_staging:
                self._drop_staging(transit)
            raise

    def _read_piece(self, tier: Tier, piece: Piece, view: memoryview, transit: _Transit, index: int) -> None:
        tier.read(piece, view)
        if self._verify and zlib.crc32(view) != transit.checksums[index]:
            raise TierReadError(
                tier=tier.name,
                file=tier.file_name(piece),
                offset=piece.offset,
                size_bytes=piece.size_bytes,
                reason="the bytes differ from those written (CRC-32)",
            )

    def _read_done(
        self,
        handle: Handle,
        box: list[torch.UntypedStorage],
        transit: _Transit,
        ready: StreamEvent,
        memory: torch.Tensor,
        uses_staging: bool,
        job: LaneJob,
    ) -> None:
        self._events.add(
            lane="disk->host", kind="fetch", label=job.label, size_bytes=job.size_bytes, start_s=job.start_s
        )
        error = job.error
        if error is None:
            try:
                self._queue_in(handle, box, transit, ready, memory, uses_staging)
                return
            except RuntimeError as raised:  # the device's; whoever waits for the bytes is to see it
                error = raised
        handle._error = error
        if uses_staging:
            self._drop_staging(transit)
        self.waterfall._arrived(handle, box)
        transit.is_queued.set()

    def _drop_staging(self, transit: _Transit) -> None:
        with self._condition:
            if transit.staging is None:
                return
            transit.num_staging_users -= 1
            if transit.num_staging_users > 0 or not transit.is_on_disk:
                return
            staging, transit.staging = transit.staging, None
            self._staging.release(staging)
            self._condition.notify_all()

    def forget(self, handle: Handle) -> None:
        """The handle's room is being given back; so is the staging memory in which a failed write left its bytes."""
        transit = handle._in_transit
        if isinstance(transit, _Transit):
            with self._condition:
                transit.is_on_disk, transit.num_staging_users = True, 1  # this one, dropped here
            self._drop_staging(transit)

    def _note(self, lane: str, kind: str, copy: _Copy) -> None:
        self._events.add(
            lane=lane, kind=kind, label=copy.handle.label, size_bytes=copy.handle.size_bytes, start_s=copy.start_s
        )


def _whole_blocks(handle: Handle, tier: Tier) -> int:
    """What the handle takes in ``tier``: direct transfers move whole blocks, and staging memory has them to spare."""
    return -(-max(1, handle.size_bytes) // tier.alignment_bytes) * tier.alignment_bytes


def _slowest(*rates: float | None) -> float | None:
    return min((rate for rate in rates if rate is not None), default=None)


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload, no-any-return]
