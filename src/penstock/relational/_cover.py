"""The choice of the end at which each edge is multiplied, so that few rows are.

A sum over edges of ``x[e.src] @ weight[e.etype]`` takes a product for every pair of a source and a type, or, if rows
are summed before, for every pair of a target and a type. Each edge may choose: it joins two pairs, and one of them must
be multiplied. So the fewest products are a minimum vertex cover of the pairs. The 100,000 edges of one type that enter
a hub are one product at their target, while the rest may have fewer sources than targets.

Types share no pairs, so each has a cover of its own. ``penstock_cover`` (`native/indexes.c`) compares a few candidates
for each type: all edges at one end, or those at one end whose pair there has many edges. That takes a few passes over
the edges and comes close to the minimum (``python -m benchmarks.relational --part variants``).
"""

from typing import NamedTuple

import torch

from penstock.relational._domain import EDGES, Domain
from penstock.relational._ir import Builder, Map, Matmul, Operation, Program, Reduce, rewritten
from penstock.relational._passes import is_reorderable

PAYS = 0.85
"""Largest share of the rows at the better end with which a cover is used: it adds a sum per node and per type."""


class Cover(NamedTuple):
    """The end at which each edge is multiplied."""

    at_target: torch.Tensor
    """Whether it is the target, ``bool [num_edges]``."""
    num_rows: int
    """Number of products."""


def cover(program: Program) -> Program:
    """Let sums over edges of products with the matrix of a type take each product at one end or the other.

    A product that something else reads is needed for all pairs of one end, so its sum stays as it is. The exception are
    dots, which `reorder` rewrites.
    """
    readers, builder, places = program.readers(), Builder(), list[int]()
    for operation in program.operations:
        match = _summed_product(program, readers, operation)
        if match is None:
            places.append(builder.add(rewritten(operation, places)))
        else:
            product, factor = match
            row, matrix = (places[operand] for operand in program[product].operands)
            scale = None if factor is None else places[factor]
            parts = [end(builder, operation, row, matrix, scale) for end in (_at_source, _at_target)]
            places.append(builder.map("add", *parts, domain=operation.domain))
    return builder.program(places[output] for output in program.outputs)


def _summed_product(program: Program, readers: list[list[int]], operation: Operation) -> tuple[int, int | None] | None:
    """Return the product that a sum over edges to targets adds up and its factor, if nothing else reads both."""
    if not isinstance(operation, Reduce) or operation.kind != "sum":
        return None
    if operation.over is not Domain.EDGE or operation.domain is not Domain.TARGET:
        return None
    place, factor = operation.operands[0], None
    top = program[place]
    if isinstance(top, Map) and top.function == "multiply" and len(readers[place]) == 1:
        is_product = [isinstance(program[operand], Matmul) for operand in top.operands]
        if is_product not in ([True, False], [False, True]):
            return None
        place, factor = top.operands[is_product.index(True)], top.operands[is_product.index(False)]
        shape = program[factor].shape
        if (shape and shape[-1] != 1) or len(shape) > len(program[place].shape):
            return None
    product = program[place]
    if not isinstance(product, Matmul) or product.domain is not Domain.SOURCE_AND_TYPE or product.transposed:
        return None
    others = [program[reader] for reader in readers[place] if program[reader] not in (operation, top)]
    is_alone = all(is_reorderable(program, other, place) for other in others)
    is_by_type = program[product.operands[1]].domain is Domain.EDGE_TYPE
    is_wanted = {place, operation.operands[0]} & set(program.outputs)
    return (place, factor) if is_by_type and is_alone and not is_wanted else None


def _at_source(builder: Builder, operation: Operation, row: int, matrix: int, factor: int | None) -> int:
    """Add the sum over some edges of products that pairs of a source have."""
    edges = EDGES[Domain.COVER_SOURCE]
    shape = operation.shape if factor is None else builder[row].shape[:-1] + builder[matrix].shape[-1:]
    product = builder.add(Matmul(domain=Domain.COVER_SOURCE, shape=shape, operands=(row, matrix)))
    message = product if factor is None else builder.map("multiply", factor, product, domain=edges)
    total = Reduce(domain=operation.domain, shape=operation.shape, operands=(message,), over=edges)
    return builder.add(total)


def _at_target(builder: Builder, operation: Operation, row: int, matrix: int, factor: int | None) -> int:
    """Add the products of sums over the other edges that pairs of a target have."""
    edges = EDGES[Domain.COVER_TARGET]
    message = row if factor is None else builder.map("multiply", factor, row, domain=edges)
    inner = builder.add(
        Reduce(domain=Domain.COVER_TARGET, shape=builder[message].shape, operands=(message,), over=edges)
    )
    product = builder.add(Matmul(domain=Domain.COVER_TARGET, shape=operation.shape, operands=(inner, matrix)))
    return builder.add(
        Reduce(domain=operation.domain, shape=operation.shape, operands=(product,), over=Domain.COVER_TARGET)
    )
