"""The host tier: slabs of memory, pinned if an accelerator copies from them, sub-allocated in whole pages.

PyTorch's pinned allocator rounds every allocation up to a power of two, and every pin blocks the device. Here a slab is
pinned once, on CUDA at its exact size (``cudaHostRegister``), and reservations come out of it in whole pages. Where the
system refuses to pin (``ulimit -l``, a full host), the slab stays pageable and one warning says so.
"""

import contextlib
import ctypes
import threading
import warnings

import numpy as np
import torch

from penstock.arguments import checked
from penstock.devices import map_memory, on_node, pinned_memory, unpin_memory
from penstock.errors import BudgetError, TierDegradedWarning, TierFullError
from penstock.links import HOST
from penstock.probe import ledger
from penstock.tiers._budget import Budget
from penstock.tiers._extents import ExtentAllocator
from penstock.tiers._tier import Extent, Piece, Tier
from penstock.units import format_bytes, parse_bytes

_ALIGNMENT_BYTES = 4096
"""Alignment of slabs and reservations: whole pages, so that the disk can read and write the same memory directly."""
SLAB_BYTES = 512 * 2**20
"""Smallest slab that is mapped, if the capacity allows it."""


class HostTier(Tier):
    """A tier of at most ``capacity`` bytes in host memory; ``pinned`` if an accelerator copies from it.

    Every extent is one piece, so ``tensor(extent)`` is contiguous. ``budget`` is charged for whole slabs. Pinned slabs
    lie on the NUMA node ``node``.
    """

    place = HOST
    alignment_bytes = 1
    is_memory = True

    @checked("HostTier('8GiB', pinned=False)")
    def __init__(self, capacity: int | str, *, pinned: bool, budget: Budget | None = None, node: int | None = None):
        self._capacity_bytes = parse_bytes(capacity)
        self._pinned = pinned
        self._budget = budget
        self._node = node
        self._lock = threading.Lock()
        self._slabs: list[_Slab] = []
        self._is_closed = False
        self._has_warned = False

    @property
    def capacity_bytes(self) -> int:
        """The most bytes that the slabs may take."""
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes in live extents, in whole pages."""
        with self._lock:
            return sum(slab.allocator.capacity_bytes - slab.allocator.free_bytes for slab in self._slabs)

    @property
    def reserved_bytes(self) -> int:
        """Total size of the slabs."""
        with self._lock:
            return self._reserved_bytes()

    @property
    def is_pinned(self) -> bool:
        """Whether every slab so far could be pinned."""
        return self._pinned and all(slab.is_pinned for slab in self._slabs)

    @checked("tier.reserve(4096)", size_bytes=1)
    def reserve(self, size_bytes: int) -> Extent:
        """Reserve ``size_bytes`` contiguously in one slab; map a new slab if no existing one has a large enough gap."""
        with self._lock:
            if self._is_closed:
                raise ValueError("this host tier is closed; make a new one: HostTier('8GiB', pinned=False)")
            for index, slab in enumerate(self._slabs):
                offset = slab.allocator.reserve(size_bytes)
                if offset is not None:
                    return Extent(size_bytes, (Piece(index, offset, size_bytes),))
            slab = self._add_slab(size_bytes)
            offset = slab.allocator.reserve(size_bytes)
            assert offset is not None
            return Extent(size_bytes, (Piece(len(self._slabs) - 1, offset, size_bytes),))

    @checked("tier.release(extent)")
    def release(self, extent: Extent) -> None:
        """Give the extent's bytes back to its slab."""
        (piece,) = extent.pieces
        with self._lock:
            if self._slabs:  # still open
                self._slabs[piece.file].allocator.give_back(piece.offset, piece.size_bytes)

    @checked("tier.prepare(2**29)", size_bytes=0)
    def prepare(self, size_bytes: int) -> None:
        """Map slabs for that many bytes now, up to the capacity, because mapping and pinning take time."""
        with self._lock:
            missing = min(size_bytes, self._capacity_bytes) - self._reserved_bytes()
            if missing >= _ALIGNMENT_BYTES and not self._is_closed:
                with contextlib.suppress(TierFullError):
                    self._add_slab(missing // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES)

    @checked("tier.allow(2**30)", capacity_bytes=0)
    def allow(self, capacity_bytes: int) -> None:
        """Raise the capacity to ``capacity_bytes``, if it is lower. The budget may still refuse a slab."""
        with self._lock:
            self._capacity_bytes = max(self._capacity_bytes, capacity_bytes)

    @checked("tier.tensor(extent)")
    def tensor(self, extent: Extent) -> torch.Tensor:
        """Return the extent's memory as ``uint8`` ``[size_bytes]``, valid until the extent is released."""
        (piece,) = extent.pieces
        return self._slabs[piece.file].tensor(piece.offset, piece.size_bytes)

    @checked("tier.view(extent)")
    def view(self, extent: Extent) -> memoryview:
        """Return the extent's memory as a ``memoryview``, valid until the extent is released."""
        (piece,) = extent.pieces
        return self._slabs[piece.file].view[piece.offset : piece.offset + piece.size_bytes]

    def close(self) -> None:
        """Unpin and unmap the slabs."""
        with self._lock:
            self._is_closed = True
            if self._budget is not None:
                self._budget.credit("host", self._reserved_bytes())
            for slab in self._slabs:
                slab.close()
            self._slabs = []

    @checked("tier.file_name(extent.pieces[0])")
    def file_name(self, piece: Piece) -> str:
        """Return the number of the piece's slab, as text."""
        return f"slab {piece.file}"

    def _write_some(self, piece: Piece, start: int, view: memoryview) -> int:
        _copy(self._slabs[piece.file].view[piece.offset + start :], view, len(view))
        return len(view)

    def _read_some(self, piece: Piece, start: int, view: memoryview) -> int:
        _copy(view, self._slabs[piece.file].view[piece.offset + start :], len(view))
        return len(view)

    def _reserved_bytes(self) -> int:
        return sum(slab.allocator.capacity_bytes for slab in self._slabs)

    def _add_slab(self, size_bytes: int) -> "_Slab":
        needed = -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        room = (self._capacity_bytes - self._reserved_bytes()) // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
        if room < needed:
            raise TierFullError(
                f"no room for {format_bytes(size_bytes)} in host memory: {format_bytes(self._reserved_bytes())} of "
                f"{format_bytes(self._capacity_bytes)} are in slabs without a large enough gap"
            )
        try:
            try:
                slab = self._make_slab(min(max(needed, SLAB_BYTES), room))
            except (BudgetError, OSError):  # other holders have the rest of the budget
                slab = self._make_slab(needed)
        except (BudgetError, OSError) as error:
            raise TierFullError(f"no room for {format_bytes(size_bytes)} in host memory: {error}") from error
        if self._pinned and not slab.is_pinned and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the system refused to pin {format_bytes(slab.allocator.capacity_bytes)} of host memory; copies go "
                "through pageable memory and overlap less. Raise `ulimit -l` or give a smaller host=... to avoid it.",
                TierDegradedWarning,
                stacklevel=2,
            )
        self._slabs.append(slab)
        return slab

    def _make_slab(self, size_bytes: int) -> "_Slab":
        if self._budget is not None:
            self._budget.charge("host", size_bytes)
        try:
            with on_node(self._node):  # pinning touches every page
                return _Slab(size_bytes, self._pinned)
        except OSError:
            if self._budget is not None:
                self._budget.credit("host", size_bytes)
            raise


class _Slab:
    """One mapping of host memory."""

    def __init__(self, size_bytes: int, pinned: bool):
        with torch.inference_mode(False):  # otherwise nobody could write to it outside of inference mode
            memory = pinned_memory(size_bytes) if pinned else None
            self.is_pinned = memory is not None
            self._memory = map_memory(size_bytes) if memory is None else memory
        self.view = memoryview(self._memory.numpy())  # type: ignore[arg-type]
        self.allocator = ExtentAllocator(alignment_bytes=_ALIGNMENT_BYTES)
        self.allocator.grow(size_bytes)
        ledger.charge(size_bytes)

    def tensor(self, offset: int, size_bytes: int) -> torch.Tensor:
        return self._memory[offset : offset + size_bytes]

    def close(self) -> None:
        if self.is_pinned:
            unpin_memory(self._memory)
        ledger.charge(-self.allocator.capacity_bytes)
        # The memory is freed with the last tensor over it.
        del self.view, self._memory


def _copy(destination: memoryview, source: memoryview, size_bytes: int) -> None:
    """Copy without holding the interpreter's lock, which slice assignment of memory views would hold."""
    ctypes.memmove(_address(destination), _address(source), size_bytes)


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data) if len(view) else 0
