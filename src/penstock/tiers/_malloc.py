"""Returning freed main memory to the system.

glibc's malloc maps large blocks one by one. As a program frees such blocks, malloc raises the size from which it does
so, up to 32 MiB. Smaller blocks then come from a heap that keeps freed memory in fragments. When activations move from
main memory to disk, those fragments are the memory that should have been saved: a training step whose tensors peaked at
115 MiB held 820 MiB of the system, and 145 MiB once the size was fixed (docs/design/main-memory.md). A fixed size costs
page faults, for every block is mapped and touched anew, so a few blocks are kept for the next ones of their size: in a
training at a quarter of its state a step took 0.8 of the time (the same page has the measurements).
"""

import ctypes
import mmap
import os
import threading

from penstock.arguments import checked
from penstock.native import drop_kept_blocks, keep_freed_blocks

_M_MMAP_THRESHOLD = -3
_MAPPED_FROM_BYTES = 2**20
_KEPT_BYTES = 2**25
"""The most bytes of freed blocks that are kept. With 16 MiB a step was as short, with 4 MiB longer by an eighth."""


def give_back_freed_memory() -> bool:
    """Fix the size from which malloc maps blocks separately at 1 MiB, for this process, and keep a few of those blocks.

    Returns whether that was done. It is not done if ``MALLOC_MMAP_THRESHOLD_`` is set, because then the user has
    decided, nor if the C library has no such setting.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES):
        return False
    keep_freed_blocks(_KEPT_BYTES)
    return True


def trim_freed_memory() -> bool:
    """Return freed memory to the system once, that of malloc's heaps and the blocks that are kept.

    Returns whether the C library can do that.

    Use it at the end of a phase that allocates and frees much. What comes next pays page faults for memory it touches
    again.
    """
    drop_kept_blocks()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))


class HeapKeeper:
    """A watcher that trims the heap whenever the process has grown by ``slack_bytes`` since the last time.

    Use it for threads that allocate and free blocks of all sizes for hours. Their heaps fragment, in a measurement to
    ten times the live bytes, while a fixed threshold (`give_back_freed_memory`) costs page faults in every step. Safe
    to share between threads.
    """

    @checked("HeapKeeper(2**26)", slack_bytes=0)
    def __init__(self, slack_bytes: int):
        self._slack_bytes = slack_bytes
        self._lock = threading.Lock()
        self._after_last_bytes = resident_bytes()

    def look(self) -> bool:
        """Trim the heap if the process has grown enough; return whether it did."""
        if resident_bytes() <= self._after_last_bytes + self._slack_bytes or not self._lock.acquire(blocking=False):
            return False
        try:
            trim_freed_memory()
            self._after_last_bytes = resident_bytes()
        finally:
            self._lock.release()
        return True


def resident_bytes() -> int:
    """Return the main memory in bytes that the process holds; 0 if the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0
