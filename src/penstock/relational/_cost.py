"""The cost of a step: its floating-point operations, and the bytes that it has to move at least."""

import math
from dataclasses import dataclass

from penstock.relational._domain import Domain
from penstock.relational._graph import RelationalGraph
from penstock.relational._ir import Constant, Count, Dot, Map, Matmul, Operation, OuterSum, Reduce, SameRows, SumTo
from penstock.relational._lower import BlockedSum, Lowered, Outer, Product, Traversal
from penstock.units import format_bytes

_INDEX_BYTES = 4


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one step on one graph."""

    flops: int
    """Floating-point operations; an ``exp`` counts as one."""
    bytes: int
    """Bytes read and written at least: every value and index once, however often rows are looked up."""

    def __str__(self) -> str:
        return f"{self.flops / 1e6:,.1f} MFLOP, {format_bytes(self.bytes)}"


def cost(lowered: Lowered, number: int, graph: RelationalGraph, element_bytes: int) -> Cost:
    """Return the cost of the step with that number."""
    program, step = lowered.program, lowered.steps[number]

    def size(at: int) -> int:
        one = program[at]
        return graph.count(one.domain) * math.prod(one.shape) * element_bytes

    def traversal(one: Traversal, *, writes: bool) -> Cost:
        rows = graph.count(one.over)
        computed, read = _closure(lowered, one)
        looked_up = {program[at].domain for at in read} - {one.over, one.by, Domain.ONE}
        moved = sum(map(size, {*read, *(one.roots if writes else ())}))
        moved += rows * _INDEX_BYTES * (len(looked_up) + (one.by is not None))
        return Cost(rows * sum(_flops_of_a_row(lowered, program[at]) for at in computed), moved)

    if isinstance(step, Traversal):
        return traversal(step, writes=True)
    one = program[step.place]
    if isinstance(step, BlockedSum):
        left, matrix = program[step.product].operands
        rows = graph.count(program[step.product].domain)
        flops = rows * (_flops_of_a_row(lowered, program[step.product]) + _flops_of_a_row(lowered, one))
        moved = size(matrix) + size(step.place) * (1 if step.onto is None else 2) + rows * _INDEX_BYTES
        before = Cost(0, size(left)) if step.rows is None else traversal(step.rows, writes=False)
        return Cost(flops + before.flops, moved + before.bytes)
    moved = size(step.place) + sum(size(at) for at in one.operands if not isinstance(program[at], Constant))
    over = one.over if isinstance(one, OuterSum | Reduce | Count) else one.domain
    rows = graph.count(over)
    if isinstance(step, Product | Outer):
        moved += _INDEX_BYTES * rows * sum(program[at].domain not in (over, Domain.ONE) for at in one.operands)
    return Cost(rows * _flops_of_a_row(lowered, one), moved)


def _closure(lowered: Lowered, step: Traversal) -> tuple[set[int], set[int]]:
    """Return the values that a traversal computes, and the stored ones that it reads."""
    program = lowered.program
    computed, read, stack = set(step.roots), set(), list(step.roots)
    while stack:
        for at in program[stack.pop()].operands:
            one = program[at]
            if isinstance(one, Constant) or at in computed:
                continue
            if at in lowered.stored:
                read.add(one.operands[0] if isinstance(one, SameRows) else at)
            else:
                computed.add(at)
                stack.append(at)
    return computed, read


def _flops_of_a_row(lowered: Lowered, one: Operation) -> int:
    program = lowered.program
    match one:
        case OuterSum():
            return 2 * math.prod(one.shape)
        case Matmul() | Dot():
            return 2 * program[one.operands[0]].shape[-1] * math.prod(one.shape)
        case SumTo():
            return math.prod(program[one.operands[0]].shape)
        case Map() | Reduce():
            return math.prod(one.shape)
        case _:
            return 0
