"""Optimizers' updates in one pass over host memory: see ``updates.c``."""

import ctypes
import functools
import os

from penstock.native._build import load

UPDATES = ("Adam", "SGD", "Adagrad")
"""The updates, by their number."""
PRECISIONS = ("float32", "bfloat16", "float16")
"""The names of PyTorch's precisions, by their number."""
_MOST = 4
"""The most gradients that are summed, and the most casts that are written."""
_MOST_THREADS = 16
"""More threads do not make memory faster."""


class HostUpdatePass(ctypes.Structure):
    """The arguments of one update, as ``updates.c`` names them: addresses of dense memory, and settings."""

    _fields_ = [
        ("kind", ctypes.c_int64),
        ("num_elements", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("states", ctypes.c_void_p * 3),
        ("num_gradients", ctypes.c_int64),
        ("gradients", ctypes.c_void_p * _MOST),
        ("gradient_precision", ctypes.c_int64),
        ("num_casts", ctypes.c_int64),
        ("casts", ctypes.c_void_p * _MOST),
        ("cast_precisions", ctypes.c_int64 * _MOST),
        ("scale", ctypes.c_double),
        ("is_negated", ctypes.c_int64),
        ("is_decoupled", ctypes.c_int64),
        ("is_nesterov", ctypes.c_int64),
        ("weight_decay", ctypes.c_double),
        ("step_size", ctypes.c_double),
        ("rate", ctypes.c_double),
        ("first_decay", ctypes.c_double),
        ("second_decay", ctypes.c_double),
        ("root_of_bias", ctypes.c_double),
        ("epsilon", ctypes.c_double),
        ("momentum", ctypes.c_double),
        ("dampening", ctypes.c_double),
    ]

    def run(self, num_threads: int | None = None) -> bool:
        """Do the update, with threads of its own and without Python's lock; ``False`` where there is no library."""
        library = _library()
        if library is None:
            return False
        self.num_threads = num_threads or _num_threads()
        library.penstock_update(ctypes.byref(self))
        return True


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load("updates", openmp=True)
    if library is not None:
        library.penstock_update.argtypes = [ctypes.POINTER(HostUpdatePass)]
        library.penstock_update.restype = None
    return library


def _num_threads() -> int:
    """Return how many threads one process may take: its share of the processors that the caller may run on.

    Launchers of several processes let PyTorch's operators have one thread (``OMP_NUM_THREADS=1``): too few for memory.
    """
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // ranks))
