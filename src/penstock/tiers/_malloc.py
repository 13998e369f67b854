"""Giving freed main memory back to the system.

glibc's malloc raises the size from which it maps blocks one by one, up to 32 MiB, as a program frees such blocks;
smaller ones then come from a heap that keeps what is freed in fragments. When activations leave main memory for disk
those fragments are the memory that was to be saved: a training step whose tensors peaked at 115 MiB held 820 MiB of the
system, and 145 MiB once the size was fixed (docs/design/main-memory.md). A fixed size costs page faults; the
same note has what was measured of it.
"""

import ctypes
import mmap
import os
import threading

from penstock.arguments import checked

_M_MMAP_THRESHOLD = -3
_MAPPED_FROM_BYTES = 2**20


def give_back_freed_memory() -> bool:
    """Fixes the size from which malloc maps blocks of their own at 1 MiB, for this process.

    Returns whether that was done: not where ``MALLOC_MMAP_THRESHOLD_`` is set, since the user has decided, nor where
    the C library has no such setting.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES))


def trim_freed_memory() -> bool:
    """Gives what malloc keeps in its heaps back to the system, once; returns whether the C library can.

    For the ends of phases that make and free much: what comes next pays page faults for what it touches again.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))


class HeapKeeper:
    """Trims whenever the process has grown by ``slack_bytes`` since the last time.

    For threads that allocate and free blocks of all sizes for hours: heaps fragment, to ten times of what is alive when
    measured, while a fixed threshold (`give_back_freed_memory`) costs page faults in every step. Safe to share.
    """

    @checked("HeapKeeper(2**26)", slack_bytes=0)
    def __init__(self, slack_bytes: int):
        self._slack_bytes = slack_bytes
        self._lock = threading.Lock()
        self._after_last_bytes = resident_bytes()

    def look(self) -> bool:
        """Trims if it is time; returns whether it did."""
        if resident_bytes() <= self._after_last_bytes + self._slack_bytes or not self._lock.acquire(blocking=False):
            return False
        try:
            trim_freed_memory()
            self._after_last_bytes = resident_bytes()
        finally:
            self._lock.release()
        return True


def resident_bytes() -> int:
    """Main memory that the process holds; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0
