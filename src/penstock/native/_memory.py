"""PyTorch's allocator for the CPU: what it takes and gives back is seen, and some is kept: see ``memory.c``."""

import ctypes
import functools

from penstock.native._build import load


@functools.cache
def memory_library() -> ctypes.CDLL | None:
    """Return the library that stands between PyTorch and malloc; ``None`` if it cannot be had or finds no allocator."""
    import torch  # which takes a second, and commands that need none import this

    library = load("memory")
    if library is None:
        return None
    library.penstock_memory_watch.argtypes = []
    library.penstock_memory_watch.restype = ctypes.c_int64
    library.penstock_memory_begin.argtypes = []
    library.penstock_memory_begin.restype = ctypes.c_void_p
    library.penstock_memory_end.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)]
    library.penstock_memory_end.restype = ctypes.c_int64
    library.penstock_memory_free.argtypes = [ctypes.c_void_p]
    library.penstock_memory_free.restype = None
    library.penstock_memory_keep.argtypes = [ctypes.c_int64]
    library.penstock_memory_keep.restype = ctypes.c_int64
    library.penstock_memory_drop.argtypes = []
    library.penstock_memory_drop.restype = None
    torch.empty(1, device="cpu")  # the allocator has used both of its functions before they are replaced
    return library if library.penstock_memory_watch() else None


def keep_freed_blocks(size_bytes: int) -> int:
    """Keep up to so many bytes of large tensors' memory, once freed, for the next tensors; return the most before.

    Only blocks of 1 MiB and more are kept, 64 at most, the latest first. ``0`` frees what is kept. Does nothing where
    there is no C compiler.
    """
    library = memory_library()
    return 0 if library is None else int(library.penstock_memory_keep(size_bytes))


def drop_kept_blocks() -> None:
    """Free the blocks that are kept now."""
    library = memory_library() if memory_library.cache_info().currsize else None
    if library is not None:
        library.penstock_memory_drop()
