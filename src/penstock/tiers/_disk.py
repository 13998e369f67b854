"""The disk tier: unnamed files striped over one or more directories, with direct I/O where the system supports it."""

import errno
import itertools
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence

import torch

from penstock.arguments import checked
from penstock.directio import BLOCK_BYTES, DeviceFile, SpillFile, warn_of_memory
from penstock.errors import BudgetError, TierDegradedWarning, TierFullError, TierReadError, TierWriteError
from penstock.links import DISK
from penstock.probe import ledger
from penstock.tiers._budget import Budget, DiskSpec
from penstock.tiers._extents import ExtentAllocator
from penstock.tiers._tier import Extent, Piece, Tier
from penstock.units import format_bytes

REQUEST_BYTES = 8 * 2**20
"""The largest single read or write: large enough for the full rate of an SSD, small enough to spread over threads."""
_GROWTH_BYTES = 256 * 2**20
_SPARE_SHARE = 0.02
"""Share of a file system that is left free for other programs."""


class DiskTier(Tier):
    """A tier in unnamed files, one in each of the given directories; requests of 8 MiB go to the files in rotation.

    ``budget`` is charged for the bytes reserved per directory; without one, only the free space limits them. The files
    grow in steps and keep their size until ``close``; ``reserved_bytes`` is that size. Directories in main memory
    (tmpfs) work, with a warning; their bytes count as memory held (``probe.ledger``).

    Raises ``FileNotFoundError``, ``NotADirectoryError`` or ``PermissionError`` for directories that cannot be used.
    """

    place = DISK

    @checked("DiskTier('/nvme')")
    def __init__(self, disk: DiskSpec, *, budget: Budget | None = None, direct: bool = True):
        limits = Budget(disk=disk).disk_bytes
        if not limits:
            raise ValueError("a disk tier needs a directory: DiskTier('/nvme'), or several: DiskTier(['/a', '/b'])")
        self._lock = threading.Lock()
        self._is_closed = False
        self._device_files: list[DeviceFile] = []
        self._files: list[_File] = []
        self._closer = weakref.finalize(self, _close, self._device_files, self._files)
        self._closer.atexit = False
        try:
            for path, limit in limits.items():
                self._files.append(_File(SpillFile(path, direct=direct), limit, budget))
        except OSError:
            self.close()
            raise
        self._turn = itertools.cycle(range(len(self._files)))
        warn_of_memory(limits, stacklevel=2)
        self.is_disk = not all(file.spill.memory_kind for file in self._files)
        self.alignment_bytes = BLOCK_BYTES if any(file.spill.is_direct for file in self._files) else 1
        buffered = [
            file.spill.directory for file in self._files if not (file.spill.is_direct or file.spill.memory_kind)
        ]
        if buffered and direct:
            warnings.warn(
                f"{', '.join(map(str, buffered))}: this file system refuses O_DIRECT, so transfers go through the page "
                "cache and cost a copy. A directory on ext4, xfs or btrfs on a local SSD avoids it.",
                TierDegradedWarning,
                stacklevel=3,
            )

    @property
    def capacity_bytes(self) -> int:
        """Bytes that the budget and the file systems allow at this moment."""
        with self._lock:
            return sum(file.room_bytes() + file.allocator.capacity_bytes for file in self._files)

    @property
    def used_bytes(self) -> int:
        """Bytes in live extents, in whole blocks."""
        with self._lock:
            return sum(file.allocator.capacity_bytes - file.allocator.free_bytes for file in self._files)

    @property
    def reserved_bytes(self) -> int:
        """Total size of the unnamed files."""
        with self._lock:
            return sum(file.allocator.capacity_bytes for file in self._files)

    @property
    def is_direct(self) -> bool:
        """Whether every directory supports direct I/O."""
        return all(file.spill.is_direct for file in self._files)

    @property
    def talks_to_device(self) -> bool:
        """Whether ``write_storage`` and ``read_storage`` work."""
        return bool(self._device_files)

    def open_to_device(self, open_file: Callable[[SpillFile], DeviceFile] = DeviceFile) -> None:
        """Let a CUDA device read and write the files by itself. Raises what ``DeviceFile`` raises."""
        self._device_files = [open_file(file.spill) for file in self._files]

    def write_storage(self, piece: Piece, storage: torch.UntypedStorage) -> None:
        """Write a storage of the device (at most ``piece.size_bytes``) into ``piece``. Raises ``TierWriteError``."""
        try:
            self._device_files[piece.file].write(storage, piece.offset)
        except (OSError, RuntimeError) as error:
            raise TierWriteError(
                **self._where(piece, 0), reason=str(error), errno=getattr(error, "errno", None)
            ) from error

    def read_storage(self, piece: Piece, storage: torch.UntypedStorage) -> None:
        """Fill a storage of the device (at most ``piece.size_bytes``) from ``piece``. Raises ``TierReadError``."""
        try:
            self._device_files[piece.file].read(storage, piece.offset)
        except (OSError, RuntimeError) as error:
            raise TierReadError(
                **self._where(piece, 0), reason=str(error), errno=getattr(error, "errno", None)
            ) from error

    @checked("tier.reserve(4096)", size_bytes=1)
    def reserve(self, size_bytes: int) -> Extent:
        """Reserve ``size_bytes``, in pieces of at most 8 MiB that are spread over the directories."""
        pieces: list[Piece] = []
        with self._lock:
            try:
                for start in range(0, size_bytes, REQUEST_BYTES):
                    pieces += self._reserve_request(min(REQUEST_BYTES, size_bytes - start))
            except TierFullError:
                self._give_back(pieces)
                raise
        return Extent(size_bytes, tuple(pieces))

    @checked("tier.release(extent)")
    def release(self, extent: Extent) -> None:
        """Give the extent's blocks back to this tier; the files do not shrink."""
        with self._lock:
            if not self._is_closed:
                self._give_back(extent.pieces)

    def close(self) -> None:
        """Close the files, which frees their disk space at once."""
        with self._lock:
            self._is_closed = True
            self._closer()

    @checked("tier.file_name(extent.pieces[0])")
    def file_name(self, piece: Piece) -> str:
        """Return the name of the directory that has the piece's file."""
        return self._files[piece.file].spill.name

    def _write_some(self, piece: Piece, start: int, view: memoryview) -> int:
        return self._files[piece.file].spill.write(view, piece.offset + start)

    def _read_some(self, piece: Piece, start: int, view: memoryview) -> int:
        return self._files[piece.file].spill.read(view, piece.offset + start)

    def _reserve_request(self, size_bytes: int) -> list[Piece]:
        """Reserve space for one request in the next directory that has enough. The caller holds the lock."""
        first = next(self._turn)
        order = [(first + step) % len(self._files) for step in range(len(self._files))]
        reasons = []
        for index in order:
            file = self._files[index]
            try:
                file.grow_for(size_bytes)
            except (OSError, BudgetError) as error:
                reasons.append(f"{file.spill.directory}: {error}")
                continue
            ranges = file.allocator.reserve_scattered(size_bytes) or []
            return _pieces(index, ranges, size_bytes)
        raise TierFullError(f"no room for {format_bytes(size_bytes)} on disk ({'; '.join(reasons)})")

    def _give_back(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self._files[piece.file].allocator.give_back(piece.offset, piece.size_bytes)


def _close(device_files: list[DeviceFile], files: "list[_File]") -> None:
    """Close all files and credit their bytes, once: at ``close``, or when the tier is garbage-collected."""
    for device_file in device_files:
        device_file.close()
    for file in files:
        file.close()


class _File:
    """A spill file, the allocator of its blocks, and its limit."""

    def __init__(self, spill: SpillFile, limit_bytes: int | None, budget: Budget | None):
        self.spill = spill
        self.limit_bytes = limit_bytes
        self.allocator = ExtentAllocator(alignment_bytes=BLOCK_BYTES)
        self._budget = budget

    def room_bytes(self) -> int:
        """Return the bytes by which the file may still grow."""
        system = os.statvfs(self.spill.directory)
        free = system.f_bavail * system.f_frsize - int(system.f_blocks * system.f_frsize * _SPARE_SHARE)
        if self.limit_bytes is not None:
            free = min(free, self.limit_bytes - self.allocator.capacity_bytes)
        return max(0, free // BLOCK_BYTES * BLOCK_BYTES)

    def grow_for(self, size_bytes: int) -> None:
        """Ensure that ``size_bytes`` are free in the file, growing it in large steps while there is space."""
        missing = self.allocator.rounded(size_bytes) - self.allocator.free_bytes
        if missing <= 0:
            return
        room = self.room_bytes()
        if room < missing:
            raise OSError(errno.ENOSPC, f"only {format_bytes(room)} may still be used")
        try:
            self._grow(min(max(missing, _GROWTH_BYTES), room))
        except BudgetError:  # other holders have the rest of the budget
            self._grow(missing)

    def _grow(self, step: int) -> None:
        place = str(self.spill.directory)
        if self._budget is not None:
            self._budget.charge(place, step)
        try:
            self.spill.grow(self.allocator.capacity_bytes + step)
        except OSError:
            if self._budget is not None:
                self._budget.credit(place, step)
            raise
        self.allocator.grow(step)
        if self.spill.memory_kind:
            ledger.charge(step)  # preallocated pages count at once

    def close(self) -> None:
        self.spill.close()
        if self.spill.memory_kind:
            ledger.charge(-self.allocator.capacity_bytes)
        if self._budget is not None:
            self._budget.credit(str(self.spill.directory), self.allocator.capacity_bytes)
        self._budget = None
        self.allocator = ExtentAllocator(alignment_bytes=BLOCK_BYTES)


def _pieces(file: int, ranges: list[tuple[int, int]], size_bytes: int) -> list[Piece]:
    pieces = []
    for offset, range_bytes in ranges:
        pieces.append(Piece(file, offset, min(range_bytes, size_bytes)))
        size_bytes -= range_bytes
    return pieces
