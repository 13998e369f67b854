"""Copies where the device is main memory: lane threads read and write the tensors' own memory.

Direct I/O requires aligned addresses. The aligned interior of a storage moves between its memory and the disk without a
copy by the processor; the unaligned edges, below two blocks, stay in RAM as ``bytes``. A fetch allocates memory with
the same address modulo 4096. So the interior is aligned there too, and vectorized kernels peel their loops as before,
which keeps results bit-identical. A fetch into an existing storage takes its address as it is. If that address has
another alignment, each thread reads one MiB at a time into its own aligned memory and copies from there.
"""

import ctypes
import mmap
import threading
import zlib
from collections.abc import Callable, Sequence
from functools import partial

import torch

from penstock.devices import want_huge_pages
from penstock.errors import TierFullError
from penstock.links import DEVICE, DISK, Link
from penstock.tiers._events import EventLog, note_copy
from penstock.tiers._handle import Handle
from penstock.tiers._handles import Box, Handles
from penstock.tiers._host_work import HostWork, Settling
from penstock.tiers._lane import Lane, LaneJob
from penstock.tiers._room import Room
from penstock.tiers._tier import Extent, Piece, Tier

_ADDRESS_BYTES = 4096
_BOUNCE_BYTES = 2**20
# Four threads reach the rate of an SSD with a tenth to a quarter of a core; one reached 4.7 of 6.4 GB/s in writing.
_WRITE_THREADS = 4
_READ_THREADS = 4


class MemoryMover:
    """Copies between main memory and tiers. ``verify`` checks every fetch (CRC-32).

    It is wide because it has every operation of `Mover`.
    """

    has_staging = False
    can_overwrite = False  # what of a storage is on disk depends on its address

    def __init__(self, handles: Handles, events: EventLog, *, max_in_flight_bytes: int, verify: bool):
        self.max_in_flight_bytes = max_in_flight_bytes
        self._hop = MemoryHop(handles, events, max_in_flight_bytes=max_in_flight_bytes)
        self._pieces = Pieces(verify)

    @property
    def in_flight_peak_bytes(self) -> int:
        """The most bytes that were on their way out at once."""
        return self._hop.out.in_flight.peak_bytes

    def bound_in_flight(self, size_bytes: int) -> None:
        self.max_in_flight_bytes = self._hop.out.max_in_flight_bytes = size_bytes

    def link_to(self, tier: Tier) -> Link:
        return Link(DEVICE, tier.place)

    def make_room(self, size_bytes: int) -> float:
        return self._hop.out.wait_for_room(size_bytes)

    def reserve(self, tiers: Sequence[Tier], handle: Handle) -> Room:
        reasons = []
        for tier in tiers:
            head_bytes, interior_bytes = _interior(handle, tier.alignment_bytes)
            try:
                extent = tier.reserve(interior_bytes) if interior_bytes else Extent(0, ())
            except TierFullError as error:
                reasons.append(str(error))
                continue
            tail = head_bytes + interior_bytes
            edges = (
                bytes(_memory(handle.data_pointer, head_bytes)),
                bytes(_memory(handle.data_pointer + tail, handle.size_bytes - tail)),
            )
            return Room(tier, extent, edges)
        raise TierFullError("; ".join(reasons) or "there is no tier below the device")

    @property
    def holds_handles(self) -> bool:
        return bool(self._hop.back.in_flight_bytes)

    def wait_for_a_copy(self) -> bool:
        return False  # lane threads finish by themselves, and a full disk should not stop the computation

    def start_out(self, handle: Handle, storage: torch.UntypedStorage, room: Room) -> None:
        room.checksums = [0] * len(room.extent.pieces)
        pieces = [
            partial(self._pieces.write, room, piece, address, number)
            for number, address, piece in room.pieces(handle.data_pointer + len(room.edges[0]))
        ]
        self._hop.send(handle, storage, room.tier, pieces)

    def cancel_out(self, handle: Handle) -> bool:
        job = handle.record.transit
        return isinstance(job, LaneJob) and self._hop.cancel(job)

    def hand_back(self, handle: Handle, storage: torch.UntypedStorage) -> None:
        """Do nothing: main memory has no streams."""

    def finish_out(self, handle: Handle) -> float:
        job = handle.record.transit
        return job.wait() if isinstance(job, LaneJob) else 0.0

    def let_go(self, handle: Handle) -> float:
        return self.finish_out(handle)

    def give_back(self, storage: torch.UntypedStorage) -> None:
        """Do nothing: the work that used it is done."""

    def hand_over(self, storage: torch.UntypedStorage) -> None:
        """Do nothing, as for `give_back`."""

    def before_write(self, handle: Handle) -> None:
        """Do nothing: what a lane reads after the write is never used, so it does no harm."""

    def allocate(self, handle: Handle, into: torch.UntypedStorage | None = None) -> torch.UntypedStorage:
        if into is None or not into.resizable():
            return allocate(handle.size_bytes, handle.address_remainder)
        into.resize_(handle.size_bytes)
        want_huge_pages(into)
        return into

    def start_in(
        self, handle: Handle, storage: torch.UntypedStorage, room: Room, after: HostWork | None = None
    ) -> None:
        if after is not None:
            after.wait()
        head, tail = room.edges
        address = storage.data_ptr()
        _memory(address, len(head))[:] = head
        _memory(address + handle.size_bytes - len(tail), len(tail))[:] = tail
        pieces = [
            partial(self._pieces.read, room, piece, target, number)
            for number, target, piece in room.pieces(address + len(head))
        ]
        self._hop.bring(handle, storage, room.tier, pieces)

    def settling(self, handle: Handle) -> Settling:  # noqa: ARG002
        return Settling()  # nothing is in host memory, which is the device

    def finish_in(self, handle: Handle) -> float:
        job = handle.record.transit
        assert isinstance(job, LaneJob)
        return job.wait()

    def rates_bytes_per_s(self) -> tuple[float | None, float | None]:
        return self._hop.out.rate_bytes_per_s(), self._hop.back.rate_bytes_per_s()

    def adopt(self, handle: Handle) -> None:
        raise AssertionError(f"{handle!r} cannot be in host memory, which is the device")

    def borrow(self, handle: Handle, original: Handle, room: Room) -> Room:  # noqa: ARG002
        return Room(room.tier, room.extent, room.edges, room.checksums, lender=room.lender or original)

    def poll(self) -> None:
        """Do nothing: lane threads report by themselves."""

    def device_stall_s(self) -> float:
        return 0.0

    def drain(self) -> None:
        self._hop.out.drain()
        self._hop.back.drain()

    def close(self) -> None:
        self._hop.out.close()
        self._hop.back.close()


class MemoryHop:
    """Two lanes, out and in, between main memory and tiers, and the storages that travel on them."""

    def __init__(self, handles: Handles, events: EventLog, *, max_in_flight_bytes: int):
        self.out = Lane(Link(DEVICE, DISK).name, num_threads=_WRITE_THREADS, max_in_flight_bytes=max_in_flight_bytes)
        self.back = Lane(Link(DISK, DEVICE).name, num_threads=_READ_THREADS, max_in_flight_bytes=2**62)
        self._handles = handles
        self._events = events
        self._lock = threading.Lock()
        self._travelling: dict[LaneJob, tuple[Box, Tier]] = {}

    def send(
        self, handle: Handle, storage: torch.UntypedStorage, tier: Tier, pieces: Sequence[Callable[[], None]]
    ) -> None:
        """Queue the copy out."""
        self._submit(self.out, handle, storage, tier, pieces, self._on_left)

    def bring(
        self, handle: Handle, storage: torch.UntypedStorage, tier: Tier, pieces: Sequence[Callable[[], None]]
    ) -> None:
        """Queue the copy in."""
        self._submit(self.back, handle, storage, tier, pieces, self._on_arrived)

    def cancel(self, job: LaneJob) -> bool:
        """Cancel a copy out that has not begun; return whether it was canceled."""
        if not self.out.cancel(job):
            return False
        job.context = None
        with self._lock:
            del self._travelling[job]
        return True

    def _submit(
        self,
        lane: Lane,
        handle: Handle,
        storage: torch.UntypedStorage,
        tier: Tier,
        pieces: Sequence[Callable[[], None]],
        on_done: Callable[[LaneJob], None],
    ) -> None:
        with self._lock:  # so that the job is recorded before it can end
            job = lane.submit(pieces or [_nothing], size_bytes=handle.size_bytes, label=handle.label, on_done=on_done)
            job.context = handle
            self._travelling[job] = [storage], tier
            handle.record.transit = job

    def _on_left(self, job: LaneJob) -> None:
        handle, box, tier = self._landed(job)
        note_copy(self._events, Link(DEVICE, tier.place), "park", job)
        self._handles.left(handle, box, job.error)

    def _on_arrived(self, job: LaneJob) -> None:
        handle, box, tier = self._landed(job)
        note_copy(self._events, Link(tier.place, DEVICE), "fetch", job)
        error, job.error = job.error, None
        self._handles.arrived(handle, box, error)

    def _landed(self, job: LaneJob) -> tuple[Handle, Box, Tier]:
        with self._lock:
            handle, job.context = job.context, None
            assert isinstance(handle, Handle)
            return handle, *self._travelling.pop(job)


class Pieces:
    """The transfer of single pieces between main memory and a tier. Runs on lane threads."""

    def __init__(self, verify: bool):
        self._verify = verify
        self._bounces = threading.local()

    def write(self, room: Room, piece: Piece, address: int, number: int) -> None:
        """Write the piece from memory at ``address``."""
        view = _memory(address, piece.size_bytes)
        if self._verify:
            room.checksums[number] = zlib.crc32(view)
        room.tier.write(piece, view)

    def read(self, room: Room, piece: Piece, address: int, number: int) -> None:
        """Read the piece into memory at ``address``."""
        view = _memory(address, piece.size_bytes)
        if address % room.tier.alignment_bytes:  # this memory has another alignment than the one written from
            for start in range(0, piece.size_bytes, _BOUNCE_BYTES):
                part = Piece(piece.file, piece.offset + start, min(_BOUNCE_BYTES, piece.size_bytes - start))
                bounce = self._bounce()[: part.size_bytes]
                room.tier.read(part, bounce)
                view[start : start + part.size_bytes] = bounce
        else:
            room.tier.read(piece, view)
        if self._verify:
            room.check(piece, number, view)

    def _bounce(self) -> memoryview:
        """Return this thread's aligned buffer."""
        buffer: memoryview | None = getattr(self._bounces, "memory", None)
        if buffer is None:
            self._bounces.memory = buffer = memoryview(mmap.mmap(-1, _BOUNCE_BYTES))
        return buffer


def _interior(handle: Handle, alignment_bytes: int) -> tuple[int, int]:
    """Return the bytes before the aligned interior of the handle's storage, and the bytes of the interior."""
    head_bytes = min(-handle.data_pointer % alignment_bytes, handle.size_bytes)
    interior_bytes = (handle.size_bytes - head_bytes) // alignment_bytes * alignment_bytes
    return head_bytes, interior_bytes


def _memory(address: int, size_bytes: int) -> memoryview:
    """Return the bytes at ``address``, in place. The caller keeps their storage alive."""
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")


def allocate(size_bytes: int, address_remainder: int) -> torch.UntypedStorage:
    """Allocate main memory with PyTorch's allocator, at an address that is ``address_remainder`` modulo 4096."""
    if not size_bytes:
        return torch.UntypedStorage(0)
    block = torch.empty(size_bytes + _ADDRESS_BYTES, dtype=torch.uint8)
    start = block.data_ptr() + (address_remainder - block.data_ptr()) % _ADDRESS_BYTES
    want_huge_pages(block)
    memory = (ctypes.c_char * size_bytes).from_address(start)
    memory.block = block.untyped_storage()  # type: ignore[attr-defined]  # lives as long as the storage that borrows from it
    return torch.frombuffer(memory, dtype=torch.uint8, count=size_bytes).untyped_storage()


def _nothing() -> None:
    """Do nothing: the one piece of a copy whose bytes are all in its edges."""
