"""The compiled loops of this room, and with how many threads to call them."""

import ctypes
import functools
import os
from typing import Any

import torch

from penstock import native

_PROCESS = os.getpid()
"""OpenMP's threads do not survive a fork: children stay with one."""
_SERIAL_BYTES = 256 * 1024
"""So little is copied sooner than threads wake up."""
_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "penstock_gather": (
        _NUMBER, _POINTER, _NUMBER, _NUMBER, _NUMBER, _POINTER, _POINTER, _NUMBER, _POINTER, _NUMBER,
    ),
    "penstock_split": (
        _NUMBER, _POINTER, _NUMBER, _NUMBER, _POINTER, _NUMBER, _POINTER, _POINTER, _POINTER, _POINTER,
    ),
    "penstock_read_rows": (None, _POINTER, _NUMBER, _POINTER, _POINTER, _NUMBER, _POINTER, _POINTER),
    "penstock_sample_offsets": (_NUMBER, _POINTER, _POINTER, _NUMBER, _NUMBER, _NUMBER, _POINTER),
    "penstock_sample": (
        None, _POINTER, _POINTER, _NUMBER, _POINTER, _NUMBER, _NUMBER, _NUMBER, _POINTER, _POINTER, _POINTER, _NUMBER,
    ),
    "penstock_relabel": (
        _NUMBER, _POINTER, _POINTER, _NUMBER, _POINTER, _NUMBER, _POINTER, _POINTER, _NUMBER,
    ),
    "penstock_by_target": (
        _NUMBER, _POINTER, _POINTER, _NUMBER, _NUMBER, _NUMBER, _POINTER, _POINTER, _POINTER,
    ),
}  # fmt: skip
"""Results and arguments, as in the source."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """``native/unified.c``; ``None`` on a machine without a compiler."""
    found = native.load("unified", openmp=True)
    if found is not None:
        for name, (result, *arguments) in _SIGNATURES.items():
            function = getattr(found, name)
            function.restype, function.argtypes = result, arguments
    return found


def threads_for(size_bytes: int) -> int:
    """How many threads go through so many bytes."""
    return 1 if os.getpid() != _PROCESS or size_bytes < _SERIAL_BYTES else torch.get_num_threads()


def address(tensor: torch.Tensor | None) -> int | None:
    """Of a tensor's first number."""
    return None if tensor is None else tensor.data_ptr()
