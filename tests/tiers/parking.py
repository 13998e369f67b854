"""Bytes to park, handles that are parked, and the bytes of storages."""

import torch

from penstock.tiers import HandleState


def random_bytes(size_bytes, seed=0):
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def plain(storage):
    """The bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()


def parked(waterfall, size_bytes=50_000, seed=0):
    """A handle whose bytes have left, and the bytes."""
    tensor = random_bytes(size_bytes, seed)
    expected = plain(tensor.untyped_storage())
    handle = waterfall.park(tensor.untyped_storage(), label=f"storage {seed}")
    del tensor
    waterfall.drain()
    assert handle.state is HandleState.PARKED
    return handle, expected


def park_all(waterfall, tensors):
    """Handles of the tensors' storages, after all copies have ended, well or not; warnings have been given."""
    handles = [waterfall.park(tensor.untyped_storage()) for tensor in tensors]
    waterfall.drain()
    waterfall.drain()
    return handles
