"""Registering host memory with CUDA, so that devices copy from it, or read it in place, without a copy by the host."""

import torch

from penstock.arguments import checked

_PORTABLE_AND_MAPPED = 1 | 2
"""For every device of the process, and into their address space."""


@checked("penstock.devices.pin(tensor)")
def pin(memory: torch.Tensor) -> bool:
    """Registers a host tensor's memory where it is, at its exact size (``cudaHostRegister``); whether it could be.

    What is registered already is refused, so ask ``memory.is_pinned()`` first. Other kinds of accelerators take none.
    """
    try:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE_AND_MAPPED))
    except (RuntimeError, AssertionError):  # PyTorch without CUDA asserts
        return False
    if status:
        _forget_error()
    return status == 0


def unpin(address: int) -> None:
    """Undoes ``pin``; no device may still be using the memory."""
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def _forget_error() -> None:
    """CUDA reports a refusal once more at the next launch, whoever makes it; so we make one."""
    try:
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError):
        pass
