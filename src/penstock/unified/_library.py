"""The compiled loops of this room, and with how many threads to call them."""

import ctypes
import functools
import os

import torch

from penstock import native

_PROCESS = os.getpid()
"""OpenMP's threads do not survive a fork: children stay with one."""
_SERIAL_BYTES = 256 * 1024
"""So little is copied sooner than threads wake up."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """``native/unified.c``; ``None`` on a machine without a compiler."""
    found = native.load("unified", openmp=True)
    if found is not None:
        for name in (
            "penstock_gather", "penstock_split", "penstock_sample_offsets", "penstock_relabel", "penstock_by_target",
        ):  # fmt: skip
            getattr(found, name).restype = ctypes.c_int64
        found.penstock_read_rows.restype = None
        found.penstock_sample.restype = None
    return found


def threads_for(size_bytes: int) -> int:
    """How many threads go through so many bytes."""
    return 1 if os.getpid() != _PROCESS or size_bytes < _SERIAL_BYTES else torch.get_num_threads()


def address(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    """Of a tensor's first number."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def number(value: int) -> ctypes.c_int64:
    """A 64-bit argument."""
    return ctypes.c_int64(value)
