"""Host memory from which this machine's accelerator copies without the host's help."""

import torch

from penstock.arguments import checked
from penstock.devices._of import accelerator_type, backend_of


@checked("penstock.devices.pin(tensor)")
def pin(memory: torch.Tensor) -> bool:
    """Register a host tensor's memory in place, at its exact size, and return whether that worked.

    Memory that is registered already is refused, so ask ``memory.is_pinned()`` first. Only CUDA and ROCm can do this.
    """
    kind = accelerator_type()
    return kind is not None and backend_of(kind).register(memory)


def unpin(address: int) -> None:
    """Undo ``pin``; no device may still be using the memory."""
    kind = accelerator_type()
    if kind is not None:
        backend_of(kind).unregister(address)


@checked("penstock.devices.pinned_memory(2**20)", size_bytes=1)
def pinned_memory(size_bytes: int) -> torch.Tensor | None:
    """Return new pinned memory, ``uint8`` from the start of a page; ``None`` if the system refuses to pin it."""
    kind = accelerator_type()
    return None if kind is None else backend_of(kind).pinned_memory(size_bytes)


def unpin_memory(memory: torch.Tensor) -> None:
    """Undo ``pinned_memory``; no device may still be using the memory."""
    kind = accelerator_type()
    if kind is not None:
        backend_of(kind).unpin(memory)
