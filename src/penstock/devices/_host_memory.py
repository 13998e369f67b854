"""Host memory that is mapped at its exact size."""

import mmap

import torch

from penstock.arguments import checked


@checked("penstock.devices.map_memory(2**20)", size_bytes=1)
def map_memory(size_bytes: int) -> torch.Tensor:
    """Return ``size_bytes`` of zeros as ``uint8``, from the start of a page, and not inherited by forked children.

    The memory goes back to the system when the last tensor over it is freed. Raises ``OSError`` if there is none left.
    """
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(memory, dtype=torch.uint8)
