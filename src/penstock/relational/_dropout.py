"""Dropout's zeros: a hash of row, column, stream and seed, so that no mask is stored and all emitters drop the same.

The constants of the hash are here, and its text in C. `_triton_kernels` has the same formula in Triton, whose functions
have to be written as Python functions in a file of their own, from the constants here.
"""

import math
from typing import TypeVar

import torch

MASK = 0xFFFFFFFF
SHIFTS = (16, 15, 16)
"""Shifts of the hash, one before each factor and one at the end."""
FACTORS = (0x7FEB352D, 0x846CA68B)
"""Odd factors of the hash; with the shifts, they are those of the finalizer "lowbias32"."""
_Bits = TypeVar("_Bits", int, torch.Tensor)

C_SOURCE = f"""\
static inline uint32_t mix(uint32_t x) {{
    x ^= x >> {SHIFTS[0]};
    x *= {FACTORS[0]:#x}u;
    x ^= x >> {SHIFTS[1]};
    x *= {FACTORS[1]:#x}u;
    return x ^ (x >> {SHIFTS[2]});
}}

static inline real dropped(int64_t row, int64_t column, uint32_t seed, uint32_t stream, uint32_t limit, real scale) {{
    return mix(mix((uint32_t)row + (seed ^ stream)) + (uint32_t)column) >= limit ? scale : 0;
}}
"""
"""The hash in C, and the factor of an element."""


def hashed(value: _Bits) -> _Bits:
    """Return a permutation of 32-bit numbers that leaves no visible pattern (a finalizer with two multiplications)."""
    value = value & MASK
    for shift, factor in zip(SHIFTS[:2], FACTORS, strict=True):
        value = value ^ (value >> shift)
        value = (value * factor) & MASK
    return value ^ (value >> SHIFTS[2])


def limit_of(probability: float) -> int:
    """Return the least hash of an element that is kept."""
    return int(probability * 2**32)


def scale_of(probability: float) -> float:
    """Return the factor of elements that are kept."""
    return 1 / (1 - probability)


def dropout_mask(
    num_rows: int, shape: tuple[int, ...], seed: int, stream: int, probability: float, device: torch.device
) -> torch.Tensor:
    """Return 0 or ``1 / (1 - probability)`` for each element, float64 ``[num_rows, *shape]``.

    A hash of row, column, stream and seed decides.
    """
    row = torch.arange(num_rows, device=device).unsqueeze(1)
    column = torch.arange(math.prod(shape), device=device).unsqueeze(0)
    mixed = hashed(hashed(row + ((seed & MASK) ^ hashed(stream))) + column)
    keep = mixed >= limit_of(probability)
    return (keep.double() * scale_of(probability)).reshape(num_rows, *shape)
