"""Identities of storages, which tell which tensors share their bytes."""

from collections.abc import Callable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

storage_id: Callable[[torch.Tensor], int] = torch._C._storage_id  # type: ignore[attr-defined]
"""Return the identity of a tensor's storage, without making an object of it.

No other living storage has the same. Raises `NotImplementedError` for a tensor without storage, such as a sparse one.
"""


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
