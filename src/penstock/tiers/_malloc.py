"""Giving freed main memory back to the system.

glibc's malloc raises the size from which it maps blocks one by one, up to 32 MiB, as a program frees such blocks;
smaller ones then come from a heap that keeps what is freed in fragments. When activations leave main memory for disk
those fragments are the memory that was to be saved: a training step whose tensors peaked at 115 MiB held 820 MiB of the
system, and 145 MiB once the size was fixed (docs/design/main-memory.md). A fixed size costs page faults; the
same note has what was measured of it.
"""

import ctypes
import os

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
