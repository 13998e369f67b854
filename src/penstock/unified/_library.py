"""The compiled loops of this room, and the number of threads to call them with."""

import ctypes
import functools
import os
from typing import Any

import torch

from penstock import native

_PROCESS = os.getpid()
"""The process that may use OpenMP's threads: they do not survive a fork, so children use one thread."""
_SERIAL_BYTES = 256 * 1024
"""Size below which a copy on one thread is faster than waking the others."""
_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES: dict[str, dict[str, tuple[Any, ...]]] = {
    "unified": {
        "penstock_gather": (
            _NUMBER, _POINTER, _NUMBER, _NUMBER, _NUMBER, _POINTER, _POINTER, _NUMBER, _POINTER, _NUMBER,
        ),
        "penstock_split": (
            _NUMBER, _POINTER, _NUMBER, _NUMBER, _POINTER, _NUMBER, _POINTER, _POINTER, _POINTER, _POINTER,
        ),
        "penstock_read_rows": (None, _POINTER, _POINTER, _NUMBER, _POINTER, _POINTER, _NUMBER, _POINTER, _POINTER),
    },
    "sharing": {
        "penstock_sharing_look": (
            _NUMBER, _POINTER, _POINTER, _POINTER, _NUMBER, _POINTER, _POINTER, _POINTER, _POINTER,
        ),
        "penstock_sharing_publish": (
            None, _POINTER, _POINTER, _POINTER, _NUMBER, _POINTER, _POINTER, _POINTER, _POINTER, _NUMBER,
        ),
        "penstock_sharing_wait": (
            _NUMBER, _POINTER, _POINTER, _POINTER, _NUMBER, _POINTER, _POINTER, _POINTER, _POINTER, _NUMBER,
        ),
    },
    "sampling": {
        "penstock_sample_offsets": (_NUMBER, _POINTER, _NUMBER, _POINTER, _NUMBER, _NUMBER, _NUMBER, _POINTER),
        "penstock_sample": (
            None, _POINTER, _POINTER, _NUMBER, _POINTER, _NUMBER, _NUMBER, _NUMBER, _POINTER, _POINTER, _POINTER,
            _NUMBER,
        ),
        "penstock_read_ahead": (_NUMBER, _POINTER, _NUMBER, _POINTER, _NUMBER, _NUMBER, _NUMBER),
        "penstock_neighbours": (None, _POINTER, _NUMBER, _POINTER, _NUMBER, _POINTER, _NUMBER),
        "penstock_relabel": (
            _NUMBER, _POINTER, _POINTER, _NUMBER, _POINTER, _NUMBER, _POINTER, _POINTER, _NUMBER,
        ),
        "penstock_by_target": (
            _NUMBER, _POINTER, _POINTER, _NUMBER, _NUMBER, _NUMBER, _POINTER, _POINTER, _POINTER,
        ),
    },
}  # fmt: skip
"""Result and argument types, as in the C sources."""


@functools.cache
def library(name: str = "unified") -> ctypes.CDLL | None:
    """Return the library of ``native/<name>.c``: "unified", "sharing" or "sampling".

    ``None`` on a machine without a compiler.
    """
    compiled = native.load(name, openmp=True)
    if compiled is not None:
        for function_name, (result, *arguments) in _SIGNATURES[name].items():
            function = getattr(compiled, function_name)
            function.restype, function.argtypes = result, arguments
    return compiled


def threads_for(size_bytes: int) -> int:
    """Return the number of threads to process that many bytes."""
    return 1 if os.getpid() != _PROCESS or size_bytes < _SERIAL_BYTES else torch.get_num_threads()
