"""Host memory that devices read in place: registered at its exact size, and let go when nothing can reach it."""

import mmap
import warnings
import weakref
from typing import Any

import torch

from penstock.errors import TierDegradedWarning
from penstock.probe import ledger
from penstock.tiers import Budget
from penstock.unified._order import CudaMarks, Order
from penstock.units import format_bytes

_REGISTER_FLAGS = 1 | 2
"""Portable: for every device of the process. Mapped: into their address space."""
_ALREADY_REGISTERED = 712
"""Somebody else did, and will undo it."""


class Memory:
    """One storage in host memory. Views share it, and with it the order of accesses."""

    def __init__(self, tensor: torch.Tensor, *, reference: tuple[Any, ...] | None = None):
        self.storage = tensor.untyped_storage()
        self.whole = (tensor.data_ptr(), tensor.nbytes)
        """Where all of the table lies in it."""
        self.reference = reference
        """Arguments of ``from_file`` that give the same memory in another process; ``None`` where none do."""
        self.order = Order(CudaMarks())
        self.is_registered = tensor.is_pinned() or self._register()
        self._views: dict[torch.device, torch.UntypedStorage] = {}

    def on(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The tensor ``host`` over this memory as one of the device, without a copy.

        On ``meta`` it has no memory, which is how shapes are found. Raises ``ValueError`` for devices that cannot
        read host memory.
        """
        if device.type == "meta":
            return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
        if device.type != "cuda":
            raise ValueError(f"{device} cannot read host memory in place; unified tensors work with CUDA and the CPU")
        if not self.is_registered:
            raise ValueError(
                f"the system refused to register {format_bytes(self.storage.nbytes())} of host memory with CUDA, so "
                "only rows can be read on the device: tensor[index]. Raise `ulimit -l`, or keep the file in /dev/shm"
            )
        if device not in self._views:
            whole = _Exported(self.storage.data_ptr(), self.storage.nbytes(), self.storage)
            self._views[device] = torch.as_tensor(whole, device=device).untyped_storage()
        empty = torch.empty(0, dtype=host.dtype, device=device)
        return empty.set_(self._views[device], host.storage_offset(), host.shape, host.stride())  # type: ignore[call-overload,no-any-return]

    def _register(self) -> bool:
        size_bytes = self.storage.nbytes()
        if not size_bytes or not torch.cuda.is_available():
            return False
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = self.storage.data_ptr()
        try:
            status = int(runtime.cudaHostRegister(address, size_bytes, _REGISTER_FLAGS))
        except RuntimeError:
            status = -1
        if status == 0:
            weakref.finalize(self, _let_go, self.storage, self.order)
        elif status != _ALREADY_REGISTERED:
            warnings.warn(
                f"the system refused to register {format_bytes(size_bytes)} of host memory with CUDA (error {status}): "
                "rows are gathered by the CPU and copied. Raise `ulimit -l`, or give a smaller table.",
                TierDegradedWarning,
                stacklevel=4,
            )
        return status in (0, _ALREADY_REGISTERED)


class _Exported:
    """Bytes for ``torch.as_tensor``, which keeps this object, and so the storage, while its result lives."""

    def __init__(self, address: int, size_bytes: int, storage: torch.UntypedStorage):
        self._storage = storage
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def exact(size_bytes: int, budget: Budget | None = None) -> torch.Tensor:
    """Zeroed host memory, ``uint8 [size_bytes]``, in whole pages and no more; ``budget`` is charged for its life.

    Raises ``BudgetError`` where it would exceed the budget, ``MemoryError`` where the system has none.
    """
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8)
    if budget is not None:
        budget.charge("host", size_bytes)
    try:
        mapped = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if budget is not None:
            budget.credit("host", size_bytes)
        raise MemoryError(f"no {format_bytes(size_bytes)} of host memory: {error}") from error
    ledger.charge(size_bytes)
    weakref.finalize(mapped, _uncharge, size_bytes, budget)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _uncharge(size_bytes: int, budget: Budget | None) -> None:
    ledger.charge(-size_bytes)
    if budget is not None:
        budget.credit("host", size_bytes)


def _let_go(storage: torch.UntypedStorage, order: Order) -> None:
    order.before_host(writes=True)  # no kernel may still be reading
    torch.cuda.cudart().cudaHostUnregister(storage.data_ptr())  # type: ignore[no-untyped-call]
