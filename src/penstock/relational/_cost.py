"""The cost of a step: its floating-point operations, and the bytes that it has to move at least."""

import math
from collections.abc import Collection
from dataclasses import dataclass

from penstock.relational._domain import Domain
from penstock.relational._graph import RelationalGraph
from penstock.relational._ir import Constant, Count, Dot, Map, Matmul, Operation, OuterSum, Reduce, SameRows, SumTo
from penstock.relational._lower import BlockedPass, Lowered, Outer, Product, ScatteredProduct, Traversal
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
    program, step, indexes = lowered.program, lowered.steps[number], graph.indexes

    def size(place: int) -> int:
        operation = program[place]
        return indexes.count(operation.domain) * math.prod(operation.shape) * element_bytes

    def cost_of(traversal: Traversal, written: Collection[int], given: Collection[int] = ()) -> Cost:
        rows = indexes.count(traversal.over)
        computed, read = _closure(lowered, traversal, given)
        looked_up = {program[place].domain for place in read} - {traversal.over, traversal.by, Domain.ONE}
        moved = sum(map(size, {*read, *written}))
        moved += rows * _INDEX_BYTES * (len(looked_up) + (traversal.by is not None))
        return Cost(rows * sum(_flops_of_a_row(lowered, program[place]) for place in computed), moved)

    if isinstance(step, Traversal):
        return cost_of(step, step.roots)
    if isinstance(step, BlockedPass):
        rows, products = indexes.count(step.over), [part.product for part in step.sums]
        before = Cost(0, 0) if step.rows is None else cost_of(step.rows, lowered.stored.intersection(step.rows.roots))
        results = [*(part.place for part in step.sums), *step.outers]
        operands = {program[product].operands[0] for product in products}
        operands.update(*(program[place].operands for place in step.outers))
        operands -= set() if step.rows is None else set(step.rows.roots)
        indexed = {program[place].domain for place in operands} - {step.over, Domain.ONE}
        matrices = {program[product].operands[1] for product in products}
        onto = [part.onto for part in step.sums if part.onto is not None]
        moved = sum(map(size, [*operands, *matrices, *results, *onto]))
        moved += rows * _INDEX_BYTES * (len(indexed) + (1 if step.sums else 0))
        flops = rows * sum(_flops_of_a_row(lowered, program[place]) for place in (*products, *results))
        return Cost(before.flops + flops, before.bytes + moved)
    operation = program[step.product if isinstance(step, Product) else step.place]
    if isinstance(step, ScatteredProduct):
        added, rows = cost_of(step.rows, step.rows.roots, [step.product]), indexes.count(step.over)
        left, matrix = program[step.product].operands
        looked_up = program[left].domain is not step.over
        moved = size(left) + size(matrix) + looked_up * rows * _INDEX_BYTES
        return Cost(added.flops + rows * _flops_of_a_row(lowered, program[step.product]), added.bytes + moved)
    moved = size(step.place) + sum(
        size(place) for place in operation.operands if not isinstance(program[place], Constant)
    )
    over = operation.over if isinstance(operation, OuterSum | Reduce | Count) else operation.domain
    rows = indexes.count(over)
    if isinstance(step, Product) and step.onto is not None:
        moved += size(step.onto)
    if isinstance(step, Product | Outer):
        moved += (
            _INDEX_BYTES * rows * sum(program[place].domain not in (over, Domain.ONE) for place in operation.operands)
        )
    return Cost(rows * _flops_of_a_row(lowered, operation), moved)


def _closure(lowered: Lowered, step: Traversal, given: Collection[int]) -> tuple[set[int], set[int]]:
    """Return the values that a traversal computes, and the stored ones that it reads, without ``given`` ones."""
    program = lowered.program
    computed, read, stack = set(step.roots), set(), list(step.roots)
    while stack:
        for place in program[stack.pop()].operands:
            operation = program[place]
            if isinstance(operation, Constant) or place in computed or place in given:
                continue
            if place in lowered.stored:
                read.add(operation.operands[0] if isinstance(operation, SameRows) else place)
            else:
                computed.add(place)
                stack.append(place)
    return computed, read


def _flops_of_a_row(lowered: Lowered, operation: Operation) -> int:
    program = lowered.program
    match operation:
        case OuterSum():
            return 2 * math.prod(operation.shape)
        case Matmul() | Dot():
            return 2 * program[operation.operands[0]].shape[-1] * math.prod(operation.shape)
        case SumTo():
            return math.prod(program[operation.operands[0]].shape)
        case Map() | Reduce():
            return math.prod(operation.shape)
        case _:
            return 0
