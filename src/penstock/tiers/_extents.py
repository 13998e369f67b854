"""Exact-size sub-allocation of a range of bytes.

Best fit over a sorted list of free gaps; neighbors are merged when bytes come back. A reservation is rounded up only to
``alignment_bytes`` (PyTorch's pinned allocator rounds up to powers of two). Cost: linear in the number of gaps, which
stays small because a training step frees what it reserved. Guarantee: no two live reservations overlap; gaps and
reservations add up to the capacity. Known limit: nothing is moved, so a contiguous reservation can fail although enough
bytes are free; ``reserve_scattered`` takes several gaps instead.
"""

import bisect

from penstock.errors import InternalError


class ExtentAllocator:
    """An allocator of ranges within ``[0, capacity_bytes)``. Not thread-safe: its tier holds a lock."""

    def __init__(self, *, alignment_bytes: int):
        self.alignment_bytes = alignment_bytes
        self.capacity_bytes = 0
        self.free_bytes = 0
        self._gaps: list[tuple[int, int]] = []  # (offset, size), sorted by offset, never touching

    def grow(self, size_bytes: int) -> None:
        """Append ``size_bytes``, a multiple of the alignment, to the end of the range."""
        offset, self.capacity_bytes = self.capacity_bytes, self.capacity_bytes + size_bytes
        self.give_back(offset, size_bytes)

    def rounded(self, size_bytes: int) -> int:
        """Return the bytes that a reservation of ``size_bytes`` takes."""
        return -(-size_bytes // self.alignment_bytes) * self.alignment_bytes

    def reserve(self, size_bytes: int) -> int | None:
        """Return the offset of a contiguous range of the rounded size, or ``None`` if no gap is large enough."""
        size_bytes = self.rounded(size_bytes)
        best: tuple[int, int] | None = None
        for gap in self._gaps:
            if gap[1] >= size_bytes and (best is None or gap[1] < best[1]):
                best = gap
                if gap[1] == size_bytes:  # as most, since a step reserves what the last one gave back
                    break
        if best is None:
            return None
        self._take(best, size_bytes)
        return best[0]

    def reserve_scattered(self, size_bytes: int) -> list[tuple[int, int]] | None:
        """Return ranges ``(offset, size)`` that together hold the rounded size; ``None`` if too few bytes are free."""
        size_bytes = self.rounded(size_bytes)
        if size_bytes > self.free_bytes:
            return None
        whole = self.reserve(size_bytes)
        if whole is not None:
            return [(whole, size_bytes)]
        ranges = []
        for gap in sorted(self._gaps, key=lambda gap: -gap[1]):
            taken = min(gap[1], size_bytes)
            self._take(gap, taken)
            ranges.append((gap[0], taken))
            size_bytes -= taken
            if not size_bytes:
                break
        return ranges

    def give_back(self, offset: int, size_bytes: int) -> None:
        """Return a range to the free gaps. ``size_bytes`` may be the requested size or the rounded one."""
        start, end = offset, offset + self.rounded(size_bytes)
        position = bisect.bisect(self._gaps, (start, 0))
        before = self._gaps[position - 1] if position else None
        after = self._gaps[position] if position < len(self._gaps) else None
        if (before and before[0] + before[1] > start) or (after and after[0] < end):
            raise InternalError(f"bytes {start}..{end} were given back twice")
        self.free_bytes += end - start
        first, last = position, position
        if before and before[0] + before[1] == start:
            start, first = before[0], position - 1
        if after and after[0] == end:
            end, last = after[0] + after[1], position + 1
        self._gaps[first:last] = [(start, end - start)]

    def _take(self, gap: tuple[int, int], size_bytes: int) -> None:
        position = bisect.bisect_left(self._gaps, gap)
        rest = [(gap[0] + size_bytes, gap[1] - size_bytes)] if gap[1] > size_bytes else []
        self._gaps[position : position + 1] = rest
        self.free_bytes -= size_bytes
