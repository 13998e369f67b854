"""CUDA kernels in Triton: gather rows over the link in whole lines, and draw neighbors from a pinned graph.

A warp reads lines of 128 bytes. A tile starts at the line in which its row starts, so no line is requested twice,
whatever the size of the rows (PyTorch-Direct, arXiv 2101.07956, section 4.4, uses a circular shift for the same
purpose).
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_wanted"])  # another number of rows needs no other kernel
def gather_rows(
    table, index, positions, out, bad, scale, num_wanted, num_rows, first, stride,
    WIDTH: tl.constexpr, LINE: tl.constexpr, VECTOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WRAPS: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_SCALE: tl.constexpr,
):  # fmt: skip
    """Gather rows of ``WIDTH`` numbers, ``stride`` apart; the table starts ``first`` numbers after the start of a line.

    ``LINE``: numbers in a line. ``VECTOR``: numbers read at once; divides ``WIDTH``, ``stride`` and ``first``. ``bad``
    (``int64 [1]``) receives a position, plus one, whose row does not exist; such rows become zeros.
    """
    columns = tl.arange(0, COLUMNS)
    for tile in range(tl.program_id(0), tl.cdiv(num_wanted, ROWS), tl.num_programs(0)):
        place = tile * ROWS + tl.arange(0, ROWS)
        wanted = place < num_wanted
        row = tl.load(index + place, mask=wanted, other=0).to(tl.int64)
        if WRAPS:
            row = tl.where(row < 0, row + num_rows, row)
        exists = (row >= 0) & (row < num_rows)
        tl.store(bad + tl.zeros_like(place), place.to(tl.int64) + 1, mask=wanted & ~exists)
        begin = tl.where(exists, row, 0) * stride
        shift = ((begin + first) % LINE).to(tl.int32)
        to = place.to(tl.int64)
        if HAS_POSITIONS:
            to = tl.load(positions + place, mask=wanted, other=0)
        for block in range(0, WIDTH + LINE - 1, COLUMNS):
            # in vectors, so that the compiler sees that a vector's numbers are all inside or all outside
            unit = ((block + columns) // VECTOR)[None, :] - (shift // VECTOR)[:, None]
            inside = (unit >= 0) & (unit < WIDTH // VECTOR) & wanted[:, None]
            column = unit * VECTOR + (columns % VECTOR)[None, :]
            value = tl.load(table + (begin[:, None] + column), mask=inside & exists[:, None], other=0)
            if HAS_SCALE:
                value = value.to(tl.float32) * tl.load(scale + column, mask=inside, other=0)
            tl.store(out + (to[:, None] * WIDTH + column), value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _hashed(value):
    value = (value ^ (value >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    value = (value ^ (value >> 15)) * tl.full((), 0x846CA68B, tl.uint32)
    return value ^ (value >> 16)


@triton.jit(do_not_specialize=["size", "seed_low", "seed_high"])  # 1 would become a constant, which has no dtype
def sample_neighbours(
    starts, index, nodes, offsets, neighbours, edges, size, seed_low, seed_high,
    FANOUT: tl.constexpr, SLOTS: tl.constexpr, REPLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw like native/unified.c, bit for bit; ``SLOTS`` is ``FANOUT`` rounded up to a power of two, at least 2."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    asked = place < size
    node = tl.load(nodes + place, mask=asked, other=0)
    first = tl.load(starts + node, mask=asked, other=0)
    degree = tl.load(starts + node + 1, mask=asked, other=0) - first
    begin = tl.load(offsets + place, mask=asked, other=0)
    count = tl.load(offsets + place + 1, mask=asked, other=0) - begin
    key = tl.full((BLOCK,), 0x9E3779B9, tl.uint32) ^ seed_low.to(tl.uint32)
    key = _hashed(_hashed(key) ^ seed_high.to(tl.uint32))
    key = _hashed(_hashed(key ^ (node & 0xFFFFFFFF).to(tl.uint32)) ^ (node >> 32).to(tl.uint32))
    slot = tl.arange(0, SLOTS)
    taken = tl.full((BLOCK, SLOTS), -1, tl.int64)
    for number in range(FANOUT):
        most = degree - count + number
        bound = degree if REPLACE else most + 1
        chosen = ((_hashed(key).to(tl.uint64) * bound.to(tl.uint64)) >> 32).to(tl.int64)
        if not REPLACE:
            is_taken = tl.max((taken == chosen[:, None]).to(tl.int32), axis=1) > 0
            chosen = tl.where(is_taken, most, chosen)
            chosen = tl.where(count == degree, number, chosen)
            taken = tl.where(slot[None, :] == number, chosen[:, None], taken)
        key += tl.full((BLOCK,), 0x9E3779B9, tl.uint32)
        mine = asked & (number < count)
        tl.store(edges + begin + number, first + chosen, mask=mine)
        source = tl.load(index + first + chosen, mask=mine, other=0).to(tl.int64)
        tl.store(neighbours + begin + number, source, mask=mine)
