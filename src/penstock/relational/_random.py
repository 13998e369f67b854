"""The hash that decides dropout's zeros; all emitters mix the same bits."""

from typing import TypeVar

import torch

MASK = 0xFFFFFFFF
_Bits = TypeVar("_Bits", int, torch.Tensor)


def hashed(value: _Bits) -> _Bits:
    """Return a permutation of 32-bit numbers that leaves no visible pattern (a finalizer with two multiplications)."""
    value = value & MASK
    value = value ^ (value >> 16)
    value = (value * 0x7FEB352D) & MASK
    value = value ^ (value >> 15)
    value = (value * 0x846CA68B) & MASK
    return value ^ (value >> 16)
