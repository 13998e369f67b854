"""Identities of storages, which tell which tensors share their bytes, and addresses for compiled code."""

from collections.abc import Callable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

storage_id: Callable[[torch.Tensor], int] = torch._C._storage_id  # type: ignore[attr-defined]
"""Return the identity of a tensor's storage, without making an object of it.

No other living storage has the same. Raises `NotImplementedError` for a tensor without storage, such as a sparse one.
"""


def id_or_zero(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage; 0 if it has none, as a sparse tensor."""
    try:
        return storage_id(tensor)
    except (RuntimeError, NotImplementedError):
        return 0


def id_of(storage: torch.UntypedStorage) -> int:
    """Return the identity of a storage, equal to `storage_id` of every tensor in it."""
    return int(storage._cdata)


def is_gone(weak: StorageWeakRef) -> bool:
    """Return whether no tensor uses the storage any more that a weak reference is to."""
    return bool(torch.UntypedStorage._expired(weak.cdata))  # type: ignore[attr-defined]


def storage_of(weak: StorageWeakRef) -> torch.UntypedStorage | None:
    """Return the storage that a weak reference is to, or None if it is gone."""
    return torch.UntypedStorage._new_with_weak_ptr(weak.cdata)  # type: ignore[attr-defined, no-any-return]


def has_bytes(storage: torch.UntypedStorage) -> bool:
    """Return whether a storage has memory. Those of forward mode's zeros and of transforms' wrappers have none."""
    try:
        return bool(storage.data_ptr())
    except RuntimeError:
        return False


def address(tensor: torch.Tensor | None) -> int | None:
    """Return the address of a tensor's first number, for compiled code; ``None`` for ``None``.

    Raises `TypeError` for a tensor without memory that compiled code could read.
    """
    if tensor is None:
        return None
    pointer = _address_of(tensor)
    if pointer is None:
        raise _no_memory("a tensor that compiled code reads", tensor)
    return pointer


def as_plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose numbers are in memory of its own: itself, or what a PyG index such as `EdgeIndex` holds.

    Raises `TypeError` that names ``name`` for all other tensors: sparse, nested, freed, on ``meta``, and those of
    classes that wrap other tensors. What such a class holds need not be its value, so nothing is unwrapped by guessing.
    """
    if hasattr(tensor, "as_tensor"):  # of PyG's classes; an operator on them may return the class again
        tensor = tensor.as_tensor()
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or _address_of(tensor) is None:
        raise _no_memory(f"`{name}`", tensor)
    return tensor


def _address_of(tensor: torch.Tensor) -> int | None:
    """Return the address of the first number, 0 if there are no numbers; ``None`` if they are not in memory."""
    try:
        if type(tensor) is not torch.Tensor and tensor.untyped_storage().device.type == "meta":
            return None  # fake tensors warn when they are asked for an address
        pointer = tensor.data_ptr()
        # a view into no memory has the address of its offset
        if pointer > tensor.storage_offset() * tensor.element_size() or not tensor.numel():
            return pointer
    except RuntimeError:  # of storages that have no address at all
        pass
    return None


def _no_memory(what: str, tensor: torch.Tensor) -> TypeError:
    kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    return TypeError(
        f"{what} must be a dense tensor with memory of its own, got one without ({kind}, {tensor.layout}, "
        f"{tensor.device}): its storage was freed, or its class wraps other tensors. Give the tensor that it stands "
        "for, such as tensor.to_dense(), or full_tensor() of a DTensor"
    )
