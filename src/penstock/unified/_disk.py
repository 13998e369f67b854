"""Batched reads of rows from files: one call into C per batch, with enough open requests to keep the disk busy."""

import ctypes
import errno
import mmap
import os
import time
import warnings
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.errors import TierDegradedWarning, TierReadError
from penstock.storages import address
from penstock.unified._library import library
from penstock.unified._page_cache import PageCache, known_bytes_for
from penstock.unified._rows import RowType
from penstock.unified._table import Table

DEPTH = 64
"""Number of requests open at once. docs/design/unified.md has the rates by depth."""
MOST_BYTES = 32 * 1024
"""Largest request that reads several rows."""
_GAP_BYTES = 4096
"""Largest gap between rows that are read in one request: a disk reads the gap in less time than a request takes."""
_PAGE_BYTES = 4096
_PYTHON_THREADS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadReport:
    """The cost of reading a batch of rows."""

    num_cached: int = 0
    """Number of rows that the page cache held."""
    num_requests: int
    """Number of requests to the disk."""
    read_bytes: int
    """Bytes that these requests read: whole sectors, including gaps between rows."""
    disk_s: float = 0.0
    """Seconds until the last of them was answered."""
    num_peer: int = 0
    """Number of rows that came from the memory of another machine."""
    num_peer_disk: int = 0
    """Number of rows that came from the disk of another machine."""
    peer_s: float = 0.0
    """Seconds until the last of these had come; reading from this machine's disk goes on meanwhile."""


class RowReader(Protocol):
    """Whatever reads rows that are not in memory, as `RowFiles` does."""

    def read(self, rows: torch.Tensor, kind: RowType, out: torch.Tensor, positions: torch.Tensor | None) -> ReadReport:
        """Read rows (``int64 [n]``, in range) into ``out`` (contiguous; at ``positions``, ``int64 [n]``)."""


class _CFiles(ctypes.Structure):
    _fields_ = (
        ("descriptors", ctypes.c_void_p),
        ("num_files", ctypes.c_int64),
        ("first_byte", ctypes.c_int64),
        ("stride_bytes", ctypes.c_int64),
        ("align_bytes", ctypes.c_int64),
        ("gap_bytes", ctypes.c_int64),
        ("most_bytes", ctypes.c_int64),
        ("depth", ctypes.c_int64),
        ("by_ring", ctypes.c_int64),
    )


class _CReport(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("num_cached", "num_faults", "num_requests", "bytes", "disk_ns", "error", "file", "offset", "size")
    )


class RowFiles:
    """Tables of the same layout in one or several files: row ``r`` is row ``r // n`` of file ``r % n``.

    Rows that the page cache holds are copied from it. Reads of all others bypass it (``O_DIRECT``) if the file system
    allows that; otherwise they use it, and one warning says so. Up to ``depth`` requests are open at once, with a
    thread for each; or up to four times as many short ones in the same buffers, through io_uring, if ``by_ring`` is set
    and the kernel lets us.
    """

    def __init__(self, tables: Sequence[Table], *, direct: bool = True, depth: int = DEPTH, by_ring: bool = True):
        self.tables = list(tables)
        self.num_rows = sum(table.shape[0] for table in tables)
        self.depth, self.by_ring = depth, by_ring
        self._descriptors: list[int] = []
        self._closer = weakref.finalize(self, _close, self._descriptors)
        self.align_bytes = 1
        for table in self.tables:
            descriptor, align = _open(table, direct)
            self._descriptors.append(descriptor)
            self.align_bytes = max(self.align_bytes, align)
        if direct and self.align_bytes == 1:
            warnings.warn(
                f"{self.tables[0].path}: this file system refuses O_DIRECT, so rows go through the page cache. A file "
                "on ext4, xfs or btrfs on a local SSD avoids it.",
                TierDegradedWarning,
                stacklevel=7,  # who made the features, behind `checked` and `renamed`
            )
        self._cache = PageCache.of(self.tables, self._descriptors) if library() is not None else None

    def read(
        self,
        rows: torch.Tensor,
        kind: RowType,
        out: torch.Tensor,
        positions: torch.Tensor | None,
        *,
        from_cache: bool = True,
    ) -> ReadReport:
        """Read rows (``int64 [n]``, in range) into ``out`` (contiguous; at ``positions``, ``int64 [n]``).

        Without ``from_cache`` the disk gives rows that the page cache has too. Raises ``TierReadError`` if a request
        fails or the file has become too short.
        """
        if not len(rows) or not kind.row_bytes:
            return ReadReport(num_requests=0, read_bytes=0)
        compiled = library()
        if compiled is None:
            return self._read_by_python(rows, kind, out, positions)
        descriptors = torch.tensor(self._descriptors, dtype=torch.int32, device="cpu")
        table, report = self.tables[0], _CReport()
        files = _CFiles(
            descriptors=descriptors.data_ptr(), num_files=len(descriptors), first_byte=table.first_byte,
            stride_bytes=table.stride_bytes, align_bytes=self.align_bytes, gap_bytes=_GAP_BYTES,
            most_bytes=MOST_BYTES, depth=self.depth, by_ring=self.by_ring,
        )  # fmt: skip
        known = self._cache if from_cache else None
        cache = known.usable(len(rows) * kind.row_bytes) if known is not None else None
        # its threads and its ring live for one call, so that none is missing after a fork
        compiled.penstock_read_rows(
            ctypes.byref(files), None if cache is None else ctypes.byref(cache), self.num_rows, address(rows),
            address(positions), len(rows), ctypes.byref(kind.into(out)), ctypes.byref(report),
        )  # fmt: skip
        if report.error:
            raise _read_error(self.tables[report.file], report.offset, report.size, report.error)
        if known is not None:
            known.learn(report.num_cached, report.num_faults)
        return ReadReport(
            num_cached=report.num_cached, num_requests=report.num_requests, read_bytes=report.bytes,
            disk_s=report.disk_ns / 1e9,
        )  # fmt: skip

    def close(self) -> None:
        """Close the files; nobody may be reading them. May be called again."""
        if self._cache is not None:
            self._cache.close()
        self._closer()

    def _read_by_python(
        self, rows: torch.Tensor, kind: RowType, out: torch.Tensor, positions: torch.Tensor | None
    ) -> ReadReport:
        """Read with one buffered request per row, from a few threads."""
        start_s = time.perf_counter()
        distinct, inverse = rows.unique(return_inverse=True)
        raw = torch.empty(len(distinct), kind.row_bytes, dtype=torch.uint8, device="cpu")
        view = memoryview(raw.numpy()).cast("B")  # type: ignore[arg-type]
        size = kind.row_bytes

        def fetch(number: int) -> None:
            row, file = divmod(int(distinct[number]), len(self.tables))
            table, into = self.tables[file], view[number * size : (number + 1) * size]
            offset = table.first_byte + row * table.stride_bytes
            _read_exactly(table, self._descriptors[file], into, offset, self.align_bytes)

        with ThreadPoolExecutor(_PYTHON_THREADS) as pool:
            list(pool.map(fetch, range(len(distinct))))
        converted = kind.convert(raw.view(kind.stored).view(-1, *kind.shape))[inverse]
        if positions is None:
            out.view(-1, *kind.shape).copy_(converted)
        else:
            out.view(-1, *kind.shape)[positions] = converted
        return ReadReport(
            num_requests=len(distinct), read_bytes=len(distinct) * size, disk_s=time.perf_counter() - start_s
        )


def buffer_bytes_for(stride_bytes: int, num_rows: int) -> int:
    """Return the most memory that reading rows of files takes in addition to the rows."""
    return DEPTH * (max(MOST_BYTES, stride_bytes) + 2 * _PAGE_BYTES) + known_bytes_for(num_rows * stride_bytes)


def _open(table: Table, direct: bool) -> tuple[int, int]:
    """Return a descriptor, and the number that offsets and lengths must be multiples of."""
    for flag in (os.O_DIRECT, 0) if direct else (0,):
        try:
            descriptor = os.open(table.path, os.O_RDONLY | os.O_CLOEXEC | flag)
        except OSError as error:
            if flag and error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                continue
            raise
        if not flag:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            return descriptor, 1
        align = next((size for size in (512, _PAGE_BYTES) if _can_read(descriptor, size)), None)
        if align is not None:
            return descriptor, align
        os.close(descriptor)
    raise AssertionError("unreachable: the last flag either opens or raises")


def _can_read(descriptor: int, size: int) -> bool:
    with mmap.mmap(-1, _PAGE_BYTES) as page:
        try:
            os.preadv(descriptor, [memoryview(page)[:size]], size)
        except OSError:
            return False
        return True


def _read_exactly(table: Table, descriptor: int, view: memoryview, offset: int, align: int) -> None:
    low = offset // align * align
    length = -(-(offset + len(view) - low) // align) * align
    with mmap.mmap(-1, length + _PAGE_BYTES) as room:
        had, needed = 0, offset - low + len(view)
        while had < needed:
            try:
                count = os.preadv(descriptor, [memoryview(room)[had:length]], low + had)
            except OSError as error:
                raise _read_error(table, low, needed, error.errno or errno.EIO) from error
            if not count:
                raise _read_error(table, low, needed, -1)
            had += count
        view[:] = room[offset - low : needed]


def _read_error(table: Table, offset: int, size: int, code: int) -> TierReadError:
    reason = "the file ends before that" if code < 0 else os.strerror(code)
    return TierReadError(
        tier="disk",
        file=str(table.path),
        offset=offset,
        size_bytes=size,
        reason=reason,
        errno=code if code > 0 else None,
    )


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
