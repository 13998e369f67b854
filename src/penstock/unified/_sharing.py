"""Rows that one rank has read from a disk or another machine, and that the ranks of this machine may need again."""

import ctypes

import torch

from penstock.storages import address
from penstock.unified._disk import ReadReport, RowReader
from penstock.unified._library import library
from penstock.unified._rows import RowType

_WAYS = 8
"""Slots that a row may be in, as in native/sharing.c."""
_BESIDE_BYTES = 3 * 8
"""Bytes beside each slot's row: its word, its owner and its stamp."""
_CLOCK_BYTES = 64
_COPIED, _CLAIMED, _ALONE, _AWAITED = range(4)
_PATIENCE_NS = 2 * 10**9
"""How long to wait for a row that another process reads; then it is read again here."""
_CACHED_SHARE = 0.5
_SKIPPED_BATCHES = 15
"""Batches that are read without looking here, after one of which the page cache had most: no disk is spared then."""


class _CShared(ctypes.Structure):
    _fields_ = (
        ("words", ctypes.c_void_p),
        ("owners", ctypes.c_void_p),
        ("stamps", ctypes.c_void_p),
        ("clock", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("num_sets", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
    )


class SharedReads:
    """Slots in shared memory for rows that were read from elsewhere; the oldest make room for new ones.

    ``memory``: zeros, ``uint8``, shared by all processes that make such an object of it, for rows of ``kind``.
    """

    def __init__(self, memory: torch.Tensor, kind: RowType):
        row_bytes = kind.width * kind.dtype.itemsize
        num_slots = num_slots_in(len(memory), row_bytes)
        starts = [0, _CLOCK_BYTES]
        for size_bytes in (8, 8, 8):
            starts.append(starts[-1] + size_bytes * num_slots)
        clock, words, owners, stamps, rows = (memory.data_ptr() + start for start in starts)
        self._memory = memory  # its addresses are in the struct
        self._shared = _CShared(
            words=words, owners=owners, stamps=stamps, clock=clock, rows=rows, num_sets=num_slots // _WAYS,
            row_bytes=row_bytes,
        )  # fmt: skip
        self._num_skipped = 0

    def read(
        self, files: RowReader, rows: torch.Tensor, kind: RowType, out: torch.Tensor, positions: torch.Tensor | None
    ) -> tuple[int, list[ReadReport]]:
        """Read rows like ``files.read``, but those that another rank has read, or is reading, come from there.

        Returns the number of the latter, and the cost of those that were read here. Raises ``TierReadError`` as
        ``files.read`` does; then other ranks read for themselves what was claimed here.
        """
        compiled = library("sharing")
        if compiled is None or not len(rows) or self._num_skipped:
            self._num_skipped = max(0, self._num_skipped - 1)
            return 0, [files.read(rows, kind, out, positions)]
        verdicts = torch.empty(len(rows), dtype=torch.int8, device="cpu")
        claims = torch.empty(2, len(rows), dtype=torch.int64, device="cpu")
        asked = (ctypes.byref(self._shared), address(rows), address(positions), len(rows), address(out))
        claimed = (address(verdicts), address(claims[0]), address(claims[1]))
        num_shared, reports = compiled.penstock_sharing_look(*asked, *claimed), []
        while True:
            chosen = ((verdicts == _CLAIMED) | (verdicts == _ALONE)).nonzero().view(-1)
            if len(chosen):
                are_read = False
                try:
                    places = chosen if positions is None else positions[chosen]
                    reports.append(files.read(rows[chosen], kind, out, places))
                    are_read = True
                finally:
                    compiled.penstock_sharing_publish(*asked, *claimed, are_read)
                verdicts[chosen] = _COPIED
            if not bool((verdicts == _AWAITED).any()):
                break
            num_shared += compiled.penstock_sharing_wait(*asked, *claimed, _PATIENCE_NS)
        if sum(report.num_cached for report in reports) > _CACHED_SHARE * len(rows):
            self._num_skipped = _SKIPPED_BATCHES
        return num_shared, reports


def num_slots_in(size_bytes: int, row_bytes: int) -> int:
    """Return the number of rows for which there are slots in so much memory."""
    return max(0, size_bytes - _CLOCK_BYTES) // (row_bytes + _BESIDE_BYTES) // _WAYS * _WAYS
