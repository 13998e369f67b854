"""Triton kernels that do not depend on the layer, and functions that generated kernels call.

Like the C side, they use no atomics. An instance writes what it cannot finish as parts, and `add_parts` combines them
in order, so the same schedule gives bit-identical results.
"""

import triton
import triton.language as tl

from penstock.relational._dropout import FACTORS, SHIFTS
from penstock.relational._elementwise import DENSITY_AT_0, SQRT_HALF

# Triton reads globals of a kernel only if they are constexpr.
_SHIFT_0, _SHIFT_1, _SHIFT_2 = (tl.constexpr(shift) for shift in SHIFTS)
_FACTOR_0, _FACTOR_1 = (tl.constexpr(factor) for factor in FACTORS)
_SQRT_HALF, _DENSITY_AT_0 = tl.constexpr(SQRT_HALF), tl.constexpr(DENSITY_AT_0)


@triton.jit
def mix(x):
    """Mix 32 bits, like `penstock.relational._dropout.hashed`."""
    x = x ^ (x >> _SHIFT_0)
    x = x * _FACTOR_0
    x = x ^ (x >> _SHIFT_1)
    x = x * _FACTOR_1
    return x ^ (x >> _SHIFT_2)


@triton.jit
def dropped(row, column, seed, stream, limit, scale):
    """Return 0 or ``scale``, by a hash."""
    start = mix(row.to(tl.uint32) + (seed.to(tl.uint32) ^ stream))
    return tl.where(mix(start + column.to(tl.uint32)) >= limit, scale, 0.0)


@triton.jit
def larger(a, b):
    """Return the larger number; NaN if either is NaN."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent, near 0 by its series, because the quotient would lose digits there."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    s = x * x
    near = x * (1.0 - s * (0.33333333 - s * (0.13333333 - s * (0.05396825 - s * 0.02186949))))
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -far, far))


@triton.jit
def gelu(x):
    """Return GELU, computed with the error function."""
    return 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))


@triton.jit
def gelu_slope(x):
    """Return the derivative of ``gelu``."""
    return 0.5 * (1.0 + tl.erf(x * _SQRT_HALF)) + x * tl.exp(-0.5 * x * x) * _DENSITY_AT_0


@triton.jit
def row_of(index, has_index, position, end):
    """Return the row at each position: by an index if there is one (``has_index``: 1), else the same."""
    is_indexed = position < end * has_index
    return tl.where(is_indexed, tl.load(index + position, mask=is_indexed, other=0), position).to(tl.int64)


@triton.jit(do_not_specialize=["has_index", "has_places", "adds"])
def typed_matmul(
    block_types,
    block_starts,
    segments,
    rows,
    index,
    matrices,
    places,
    results,
    has_index,
    has_places,
    adds,
    row_stride: tl.constexpr,
    head_stride: tl.constexpr,
    matrix_stride: tl.constexpr,
    matrix_head_stride: tl.constexpr,
    HEADS: tl.constexpr,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    IS_HALF: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    BLOCK_OUTER: tl.constexpr,
):
    """Multiply rows by the matrix of their type.

    ``results[places] [rows, heads, outer] = rows[index] [.., heads, inner] @ matrices [types, .., inner, outer]``, to
    which it adds what was there if it ``adds``. Instance (block, tile of outer, head): rows of one type, from a list of
    blocks. What is known at run time only needs no kernel of its own.
    """
    block = tl.program_id(0)
    kind = tl.load(block_types + block).to(tl.int64)
    start = tl.load(block_starts + block)
    end = tl.load(segments + kind + 1)
    head = tl.program_id(2)
    position = start + tl.arange(0, BLOCK_ROWS)
    live = position < end
    source = row_of(index, has_index, position, end)
    outer = tl.program_id(1) * BLOCK_OUTER + tl.arange(0, BLOCK_OUTER)
    total = tl.zeros([BLOCK_ROWS, BLOCK_OUTER], dtype=tl.float32)
    for begin in range(0, INNER, BLOCK_INNER):
        inner = begin + tl.arange(0, BLOCK_INNER)
        a = tl.load(
            rows + source[:, None] * row_stride + head * head_stride + inner[None, :],
            mask=live[:, None] & (inner < INNER)[None, :],
            other=0.0,
        )
        if TRANSPOSED:
            elements = outer[None, :] * INNER + inner[:, None]
        else:
            elements = inner[:, None] * OUTER + outer[None, :]
        b = tl.load(
            matrices + kind * matrix_stride + head * matrix_head_stride + elements,
            mask=(inner < INNER)[:, None] & (outer < OUTER)[None, :],
            other=0.0,
        )
        if not IS_HALF:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    row = row_of(places, has_places, position, end)
    result = results + (row[:, None] * HEADS + head) * OUTER + outer[None, :]
    fits = (outer < OUTER)[None, :]
    onto = tl.load(result, mask=(position < end * adds)[:, None] & fits, other=0.0).to(tl.float32)
    tl.store(result, onto + total, mask=live[:, None] & fits)


@triton.jit(do_not_specialize=["left_has_index", "right_has_index"])
def typed_outer(
    block_types,
    block_starts,
    segments,
    left,
    left_index,
    right,
    right_index,
    parts,
    left_has_index,
    right_has_index,
    left_stride: tl.constexpr,
    left_head_stride: tl.constexpr,
    right_stride: tl.constexpr,
    right_head_stride: tl.constexpr,
    HEADS: tl.constexpr,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    IS_HALF: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    BLOCK_OUTER: tl.constexpr,
):
    """Compute ``parts [blocks, heads, inner, outer]``: for each block of rows of one type, the sum of left outer right.

    Instance (block, tile of inner and outer, head).
    """
    block = tl.program_id(0)
    kind = tl.load(block_types + block).to(tl.int64)
    start = tl.load(block_starts + block)
    end = tl.minimum(tl.load(segments + kind + 1), start + SPLIT)
    head = tl.program_id(2)
    tiles = (OUTER + BLOCK_OUTER - 1) // BLOCK_OUTER
    inner = (tl.program_id(1) // tiles) * BLOCK_INNER + tl.arange(0, BLOCK_INNER)
    outer = (tl.program_id(1) % tiles) * BLOCK_OUTER + tl.arange(0, BLOCK_OUTER)
    total = tl.zeros([BLOCK_INNER, BLOCK_OUTER], dtype=tl.float32)
    for begin in range(start, end, BLOCK_ROWS):
        position = begin + tl.arange(0, BLOCK_ROWS)
        live = position < end
        of_left = row_of(left_index, left_has_index, position, end)
        of_right = row_of(right_index, right_has_index, position, end)
        a = tl.load(
            left + of_left[None, :] * left_stride + head * left_head_stride + inner[:, None],
            mask=(inner < INNER)[:, None] & live[None, :],
            other=0.0,
        )
        b = tl.load(
            right + of_right[:, None] * right_stride + head * right_head_stride + outer[None, :],
            mask=live[:, None] & (outer < OUTER)[None, :],
            other=0.0,
        )
        if not IS_HALF:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    tl.store(
        parts + ((block.to(tl.int64) * HEADS + head) * INNER + inner[:, None]) * OUTER + outer[None, :],
        total,
        mask=(inner < INNER)[:, None] & (outer < OUTER)[None, :],
    )


@triton.jit(do_not_specialize=["width"])
def add_parts(
    groups,
    firsts,
    counts,
    parts,
    results,
    width,
    IS_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Combine the parts of each ``results[group] [width]``, ``counts`` of them from ``firsts`` on, in order."""
    task = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    fits = column < width
    first = tl.load(firsts + task).to(tl.int64)
    total = tl.load(parts + first * width + column, mask=fits, other=0.0)
    for number in range(1, tl.load(counts + task)):
        part = tl.load(parts + (first + number) * width + column, mask=fits, other=0.0)
        if IS_MAX:
            total = larger(total, part)
        else:
            total = total + part
    group = tl.load(groups + task).to(tl.int64)
    tl.store(results + group * width + column, total, mask=fits)
