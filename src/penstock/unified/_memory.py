"""Host memory that devices read in place: registered at its exact size, and unregistered when nothing can reach it."""

import mmap
import threading
import warnings
import weakref
from typing import Any

import torch

from penstock.devices import pin, unpin
from penstock.errors import TierDegradedWarning
from penstock.probe import ledger
from penstock.tiers import Budget
from penstock.unified._order import DeviceOrder
from penstock.units import format_bytes

_known: "weakref.WeakValueDictionary[tuple[int, int], Memory]" = weakref.WeakValueDictionary()
"""Memory by address and size, so that it is registered once however often it is wrapped.

CUDA rejects a second registration, and reports that again at the next launch of whichever kernel.
"""
_lock = threading.RLock()  # finalizers may run wherever memory is allocated
_pinned: dict[int, int] = {}
"""Bytes from each address that we have registered and not yet unregistered."""
_let_go_some = threading.Condition(_lock)


_PATIENCE_S = 10.0
"""Seconds to wait for another thread to unregister memory."""


class Memory:
    """One storage in host memory. Views share it, and its order of accesses."""

    def __init__(self, tensor: torch.Tensor, *, reference: tuple[Any, ...] | None = None):
        self.storage = tensor.untyped_storage()
        self.whole = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        """Address, shape, strides and dtype of the whole table."""
        self.reference = reference
        """A function that opens the same memory in another process, and its first arguments; ``None`` if none can."""
        self._owner = _owner_of(self.storage)
        self.order: DeviceOrder = self._owner.order if self._owner else DeviceOrder()
        self.is_registered = self._owner is not None or _is_pinned(self.storage) or self._register()
        self._views: dict[torch.device, torch.UntypedStorage] = {}

    @staticmethod
    def of(tensor: torch.Tensor, reference: tuple[Any, ...] | None = None) -> "Memory":
        """Return the memory of a tensor's storage, the same object for every wrap."""
        storage = tensor.untyped_storage()
        with _lock:
            # memory that dies leaves `_known` before its finalizer unregisters it; its address may be wrapped meanwhile
            _let_go_some.wait_for(lambda: not _is_being_let_go(storage), timeout=_PATIENCE_S)
            key = storage.data_ptr(), storage.nbytes()
            memory = _known.get(key)
            if memory is None or not key[1]:
                memory = _known[key] = Memory(tensor, reference=reference)
            return memory

    def on(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return the tensor ``host`` over this memory as a tensor of the device, without a copy.

        On ``meta`` the result has no memory; PyTorch infers shapes that way. Raises ``ValueError`` for devices that
        cannot read host memory.
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
            self._views[device] = self._view(device)
        empty = torch.empty(0, dtype=host.dtype, device=device)
        return empty.set_(self._views[device], host.storage_offset(), host.shape, host.stride())  # type: ignore[call-overload,no-any-return]

    def _view(self, device: torch.device) -> torch.UntypedStorage:
        address, size_bytes = self.storage.data_ptr(), self.storage.nbytes()
        owner = torch.as_tensor(_Exported(address, 1, self.storage)).device
        if owner != device:  # PyTorch would copy all of it
            raise ValueError(
                f"the memory was registered when {owner} was the current device, but is now used on {device}: call "
                f"torch.cuda.set_device({device.index}) before wrap, as with one process for each device. Rows can be "
                "read on any device: tensor[index]"
            )
        return torch.as_tensor(_Exported(address, size_bytes, self.storage)).untyped_storage()

    def _register(self) -> bool:
        whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(self.storage)  # type: ignore[call-overload]
        if not whole.nbytes or not torch.cuda.is_available():
            return False
        if not pin(whole):
            warnings.warn(
                f"the system refused to register {format_bytes(whole.nbytes)} of host memory with CUDA: rows are "
                "gathered by the CPU and copied. Raise `ulimit -l`, or give a smaller table.",
                TierDegradedWarning,
                stacklevel=6,  # who called `wrap`, `empty` or `from_file`, behind `checked`
            )
            return False
        _pinned[whole.data_ptr()] = whole.nbytes
        weakref.finalize(self, _let_go, self.storage, self.order)
        return True


class InPlace:
    """A tensor in host memory, for operators and kernels that use it where it lies."""

    __slots__ = ("memory", "plain")

    def __init__(self, plain: torch.Tensor, memory: Memory):
        self.plain = plain
        """The tensor as a plain one."""
        self.memory = memory
        """The memory in which it lies."""

    def on(self, device: torch.device | None) -> torch.Tensor:
        """Return it as a plain tensor of the device (``None``: the CPU), without a copy. Raises as ``Memory.on``."""
        return self.plain if device is None else self.memory.on(self.plain, device)

    def before(self, device: torch.device | None, *, writes: bool) -> None:
        """Wait for the accesses that must be over before the device (``None``: the CPU) reads or writes."""
        if device is None:
            self.memory.order.before_host(writes=writes)
        elif device.type == "cuda":  # operators on ``meta`` access nothing
            self.memory.order.before_device(device, writes=writes)

    def after(self, device: torch.device | None, *, writes: bool) -> None:
        """Note the access that the device has just queued."""
        if device is not None and device.type == "cuda":
            self.memory.order.after_device(device, writes=writes)


def _owner_of(storage: torch.UntypedStorage) -> Memory | None:
    """Return the registered memory of ours that contains all of this storage; the caller keeps it alive."""
    begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    for (address, size_bytes), memory in list(_known.items()):
        if memory.is_registered and address <= begin and end <= address + size_bytes and size_bytes:
            return memory
    return None


def _is_being_let_go(storage: torch.UntypedStorage) -> bool:
    """Return whether another thread has yet to unregister memory of ours that overlaps with this storage."""
    begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    return any(
        begin < address + size_bytes and address < end and not any(key[0] == address for key in list(_known))
        for address, size_bytes in _pinned.items()
    )


def _is_pinned(storage: torch.UntypedStorage) -> bool:
    """Return whether somebody else has registered all of it."""
    if not storage.nbytes():
        return False
    whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)  # type: ignore[call-overload]
    return bool(whole.is_pinned() and whole[-1:].is_pinned())


class _Exported:
    """An object for ``torch.as_tensor`` that exports bytes; the result keeps it alive, and so the storage."""

    def __init__(self, address: int, size_bytes: int, storage: torch.UntypedStorage):
        self._storage = storage
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def exact(size_bytes: int, budget: Budget | None = None) -> torch.Tensor:
    """Allocate zeroed host memory, ``uint8 [size_bytes]``, in whole pages; ``budget`` is charged while it lives.

    Raises ``BudgetError`` if it would exceed the budget, ``MemoryError`` if the system has none left.
    """
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    if budget is not None:
        budget = budget.named("unified")
        budget.charge("host", size_bytes)
    try:  # PyTorch's allocator of pinned memory would round up to a power of two
        mapped = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if budget is not None:
            budget.credit("host", size_bytes)
        raise MemoryError(f"cannot allocate {format_bytes(size_bytes)} of host memory: {error}") from error
    ledger.charge(size_bytes)
    weakref.finalize(mapped, _uncharge, size_bytes, budget)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _uncharge(size_bytes: int, budget: Budget | None) -> None:
    ledger.charge(-size_bytes)
    if budget is not None:
        budget.credit("host", size_bytes)


def _let_go(storage: torch.UntypedStorage, order: DeviceOrder) -> None:
    order.before_host(writes=True)  # no kernel may still be reading
    with _lock:
        unpin(storage.data_ptr())
        _pinned.pop(storage.data_ptr(), None)
        _let_go_some.notify_all()
