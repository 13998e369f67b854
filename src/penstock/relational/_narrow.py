"""Products of nodes' rows with narrow matrices of types, node by node (`native/narrow.h`): scores of attention.

Ordered by types, as wide products are, they read a node's row from memory once for each of its pairs. The matrices of
all types together fit into cache, so that an order by nodes reads it once for all.
"""

import ctypes

import torch

from penstock.relational._domain import ENDS, Domain
from penstock.relational._indexes import Indexes
from penstock.relational._ir import Matmul, OuterSum, Program, Shape
from penstock.storages import address

MOST_NUMBERS = 8
"""The most numbers of a pair; they are also at most a fourth of a node's row. Tiles are as fast for more of them."""
MOST_BYTES = 2**20
"""The most bytes of all matrices together, of which each part of a sum of outer products has its own."""
LEAST_PARTS = 8
"""Parts that nodes are divided into, if there are no more threads; sums do not depend on the number of threads then."""


class CNarrow(ctypes.Structure):
    """The ``Narrow`` struct of `native/narrow.h`."""

    _fields_ = (
        ("num_types", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("narrow", ctypes.c_int64),
        ("element_bytes", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
        ("num_parts", ctypes.c_int64),
        ("borders", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("types", ctypes.c_void_p),
    )


def is_narrow_score(program: Program, place: int) -> bool:
    """Return whether a product turns nodes' rows into a few numbers for each of their pairs."""
    operation = program[place]
    assert isinstance(operation, Matmul)
    row = program[operation.operands[0]]
    return row.domain is ENDS.get(operation.domain) and _is_narrow(program, operation, row.shape, operation.shape)


def is_narrow_sum(program: Program, place: int) -> bool:
    """Return whether a product, to be summed by node, turns a few numbers of each pair into a row."""
    operation = program[place]
    assert isinstance(operation, Matmul)
    pair = program[operation.operands[0]]
    return pair.domain is operation.domain and _is_narrow(program, operation, operation.shape, pair.shape)


def is_narrow_outer(program: Program, place: int) -> bool:
    """Return whether a sum of outer products, by type, is one of nodes' rows and a few numbers of their pairs."""
    operation = program[place]
    assert isinstance(operation, OuterSum)
    end, domains = ENDS.get(operation.over), [program[operand].domain for operand in operation.operands]
    if operation.domain is not Domain.EDGE_TYPE or end is None or set(domains) != {operation.over, end}:
        return False
    row, pair = (program[operation.operands[domains.index(domain)]].shape for domain in (end, operation.over))
    return _are_narrow(row, pair)


def _is_narrow(program: Program, operation: Matmul, row: Shape, pair: Shape) -> bool:
    matrix = program[operation.operands[1]]
    has_pairs = operation.domain in ENDS and matrix.domain is Domain.EDGE_TYPE
    return has_pairs and len(matrix.shape) == 2 and _are_narrow(row, pair)


def _are_narrow(row: Shape, pair: Shape) -> bool:
    return len(row) == len(pair) == 1 and pair[0] <= min(MOST_NUMBERS, row[0] // 4)


def narrow(
    indexes: Indexes, over: Domain, sides: tuple[int, int], element_bytes: int, num_threads: int
) -> CNarrow | None:
    """Return sizes and indexes for the C functions; ``None`` if the matrices of all types are too large.

    ``over``: the domain of the pairs. ``sides``: of a matrix, ``(width, numbers of a pair)``.
    """
    num_types, (width, numbers) = indexes.count(Domain.EDGE_TYPE), sides
    if num_types * width * numbers * element_bytes > MOST_BYTES:
        return None
    end, num_parts = ENDS[over], max(LEAST_PARTS, num_threads)
    positions, starts = indexes.order(over, end)
    types = indexes.index_in_order(over, end, Domain.EDGE_TYPE)
    borders = indexes.remember(("borders of nodes", over, num_parts), lambda: _borders(starts, num_parts))
    sizes = CNarrow(
        num_types, width, numbers, element_bytes, num_threads, num_parts, address(borders), address(starts),
        address(positions), address(types),
    )  # fmt: skip
    sizes.keeps = positions, starts, types, borders  # type: ignore[attr-defined]  # alive as long as their addresses are used
    return sizes


def _borders(starts: torch.Tensor, num_parts: int) -> torch.Tensor:
    """Return the node at which each part begins, so that all have as many pairs, and the end of the last one's."""
    wanted = torch.arange(num_parts + 1, device=starts.device) * int(starts[-1]) // num_parts
    borders = torch.searchsorted(starts, wanted)
    borders[0], borders[-1] = 0, len(starts) - 1
    return borders
