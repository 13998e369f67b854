"""Host memory: mapped at its exact size, or in huge pages."""

import ctypes
import mmap

import torch

from penstock.arguments import checked, must_be

_HUGE_PAGE_BYTES = 2 * 2**20
"""Size of a huge page on x86-64, and on ARM with pages of 4 KiB."""
_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)
"""The system's number for the request; ``None`` where it knows none."""
_libc = ctypes.CDLL(None)


@checked("penstock.devices.map_memory(2**20)", size_bytes=1)
def map_memory(size_bytes: int) -> torch.Tensor:
    """Return ``size_bytes`` of zeros as ``uint8``, from the start of a page, and not inherited by forked children.

    The memory goes back to the system when the last tensor over it is freed. Raises ``OSError`` if there is none left.
    """
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(memory, dtype=torch.uint8)


def want_huge_pages(memory: torch.Tensor | torch.UntypedStorage) -> None:
    """Ask for huge pages for new memory, which is otherwise mapped page by page as it is first touched.

    ``memory``: a storage in main memory, or a tensor on one. One smaller than a huge page stays as it is, as does all
    memory where the system has no huge pages. Pages outside of the storage do not change, and its contents neither.
    """
    # A pool of memory touched before would be as fast, but it would hold memory that the step needs.
    if not isinstance(memory, torch.Tensor | torch.UntypedStorage) or memory.device.type != "cpu":
        example = "penstock.devices.want_huge_pages(torch.empty(2**24))"
        raise must_be("memory", "a tensor in main memory, or its storage", memory, example)
    storage = memory.untyped_storage() if isinstance(memory, torch.Tensor) else memory
    start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = (storage.data_ptr() + storage.nbytes() - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if whole >= _HUGE_PAGE_BYTES and _HUGE_PAGES is not None:
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(whole), _HUGE_PAGES)
