"""The choice of cheap edge values to store, because several traversals would compute them again.

A traversal computes element-wise values where it reads them. This is free for a product with a row in a register, but
not for a score's gradient: it takes an ``exp``, a division and six look-ups, and three traversals in different orders
need it. Such a value is stored by the first traversal that can compute it, and the others read one number per edge.

The choice is greedy: the value whose storing saves the most, then the next one given that. Counted are look-ups and
functions per edge.
"""

import math
from collections.abc import Collection

from penstock.relational._domain import OF_TYPES, Domain
from penstock.relational._elementwise import C_MATH
from penstock.relational._ir import Constant, Dot, Dropout, Input, Map, Operation, OuterSum, Program, Reduce, SumTo

MOST_NUMBERS = 16
"""Most numbers per edge of a value that is stored."""
_COSTS = {"divide": 2, **dict.fromkeys(C_MATH, 8), "gelu": 16}
"""Costs of functions in look-ups; the others are free."""
_ROWS_A_NODE = 2
"""Fewest edges to be expected for each row of another domain."""
_LEAST_SAVED = 4
"""Fewest look-ups per edge that storing a value must save."""


def shared(program: Program, stored: Collection[int], row_by_row: tuple[type[Operation], ...]) -> set[int]:
    """Return the values to store in addition to ``stored``. ``row_by_row``: operations that traversals compute."""
    added: set[int] = set()
    levels = _levels(program)
    while True:
        saved = {
            place: _saved(program, place, {*stored, *added}, levels, row_by_row)
            for place, operation in enumerate(program.operations)
            if isinstance(operation, row_by_row)
            and operation.domain not in OF_TYPES
            and math.prod(operation.shape) <= MOST_NUMBERS
            and place not in stored
            and place not in added
        }
        best = max(saved, key=lambda place: (saved[place], place), default=None)
        if best is None or saved[best] < _LEAST_SAVED:
            return added
        added.add(best)


def _levels(program: Program) -> list[dict[tuple[Domain, Domain], int]]:
    """Return, for each value, how many traversals of each kind must have ended before one can compute it."""
    levels: list[dict[tuple[Domain, Domain], int]] = []
    for operation in program.operations:
        level: dict[tuple[Domain, Domain], int] = {}
        for operand in operation.operands:
            for kind, count in levels[operand].items():
                level[kind] = max(level.get(kind, 0), count)
            below = program[operand]
            if isinstance(below, Reduce):
                kind = (below.over, below.domain)
                level[kind] = max(level.get(kind, 0), levels[operand].get(kind, 0) + 1)
        levels.append(level)
    return levels


def _saved(
    program: Program,
    place: int,
    stored: set[int],
    levels: list[dict[tuple[Domain, Domain], int]],
    row_by_row: tuple[type[Operation], ...],
) -> float:
    """Return the look-ups per edge that storing a value saves."""
    traversals = _traversals(program, place, stored, levels, row_by_row)
    times: float = len(traversals)
    if program[place].domain is not Domain.EDGE:
        times *= _ROWS_A_NODE if any(over is Domain.EDGE for over, _, _ in traversals) else 1
    return (times - 1) * _cost(program, place, stored) - times - 1


def _traversals(
    program: Program,
    place: int,
    stored: set[int],
    levels: list[dict[tuple[Domain, Domain], int]],
    row_by_row: tuple[type[Operation], ...],
) -> set[tuple[Domain, Domain, int]]:
    """Return the traversals that would compute a value, by what they go through and how many come before."""
    readers, result = program.readers(), set[tuple[Domain, Domain, int]]()
    stack, seen = [place], {place}
    while stack:
        for reader in readers[stack.pop()]:
            operation = program[reader]
            if isinstance(operation, Reduce):
                kind = (operation.over, operation.domain)
                result.add((*kind, levels[reader].get(kind, 0)))
            elif isinstance(operation, row_by_row) and reader in stored:
                if operation.domain is not program[place].domain:
                    result.add((operation.domain, operation.domain, 0))
            elif isinstance(operation, row_by_row) and reader not in seen:
                seen.add(reader)
                stack.append(reader)
    return result


def _cost(program: Program, place: int, stored: set[int]) -> float:
    """Return the look-ups per edge that computing a value takes, from stored ones."""
    cost, stack, seen = 0.0, [place], {place}
    while stack:
        operation = program[stack.pop()]
        numbers = math.prod(operation.shape)
        if isinstance(operation, Map):
            cost += _COSTS.get(operation.function, 0) * numbers
        elif isinstance(operation, Dropout):
            cost += numbers
        for operand in operation.operands:
            below = program[operand]
            if operand in seen or isinstance(below, Constant) or below.domain in OF_TYPES:
                continue
            seen.add(operand)
            if operand in stored or isinstance(below, Input | Reduce | OuterSum):
                cost += math.prod(below.shape) if isinstance(operation, Dot | SumTo) else 1
            else:
                stack.append(operand)
    return cost
