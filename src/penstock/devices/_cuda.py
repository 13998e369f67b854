"""The backend of NVIDIA's devices, and of AMD's, which PyTorch names alike: what `torch.accelerator` lacks.

Overrides, and the reason for each:

- `pinned_memory`, `unpin`: PyTorch rounds pinned memory up to a power of two. Mapped and registered memory has its
  exact size, and goes back to the system.
- `numa_node`: PyTorch has the device's position on the bus only under CUDA's own names.
- `register`, `unregister`: memory that exists already is registered in place, so that kernels can read it there.

`tests/devices/test_cuda.py` checks the order of the calls, with a runtime that records them.
"""

from typing import Any

import torch

from penstock.devices._accelerator import Accelerator
from penstock.devices._host_memory import map_memory
from penstock.devices._numa import node_of_pci

_PORTABLE_AND_MAPPED = 1 | 2
"""Flags that register memory for every device of the process and map it into their address space."""


class Cuda(Accelerator):
    """A device of CUDA or ROCm."""

    @property
    def numa_node(self) -> int | None:
        properties = torch.cuda.get_device_properties(self.device)
        parts = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
        if None in parts:  # older versions do not have them
            return None
        domain, bus, slot = parts
        return node_of_pci(f"{domain:04x}:{bus:02x}:{slot:02x}.0")

    def pinned_memory(self, size_bytes: int) -> torch.Tensor | None:
        memory = map_memory(size_bytes)
        return memory if self.register(memory) else None

    def unpin(self, memory: torch.Tensor) -> None:
        self.unregister(memory.data_ptr())

    def register(self, memory: torch.Tensor) -> bool:
        try:
            status = int(_runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE_AND_MAPPED))
        except RuntimeError:  # raised by the first call, which makes the device's context
            return False
        if status:
            self._forget_error()
        return status == 0

    def unregister(self, address: int) -> None:
        _runtime().cudaHostUnregister(address)

    def _forget_error(self) -> None:
        """Clear the error.

        CUDA reports a refusal again at the next kernel launch of any caller, so this launches a kernel.
        """
        try:
            torch.zeros(1, device=self.device)
        except (RuntimeError, AssertionError):  # PyTorch without CUDA asserts
            pass


def _runtime() -> Any:  # any: a module of PyTorch without types
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
