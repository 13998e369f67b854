"""Returning freed main memory to the system.

glibc's malloc maps large blocks one by one. As a program frees such blocks, malloc raises the size from which it does
so, up to 32 MiB. Smaller blocks then come from a heap that keeps freed memory in fragments. When activations move from
main memory to disk, those fragments are the memory that should have been saved: a training step whose tensors peaked at
115 MiB held 820 MiB of the system, and 145 MiB once the size was fixed (docs/design/main-memory.md). A fixed size costs
page faults; the same page has the measurements.
"""

import ctypes
import mmap
import os
import threading

from penstock.arguments import checked

_M_MMAP_THRESHOLD = -3
_MAPPED_FROM_BYTES = 2**20


def give_back_freed_memory() -> bool:
    """Fix the size from which malloc maps blocks separately at 1 MiB, for this process.

    Returns whether that was done. It is not done if ``MALLOC_MMAP_THRESHOLD_`` is set, because then the user has
    decided, nor if the C library has no such setting.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES))


def trim_freed_memory() -> bool:
    """Return the free memory in malloc's heaps to the system once; return whether the C library can do that.

    Use it at the end of a phase that allocates and frees much. What comes next pays page faults for memory it touches
    again.
    """
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
