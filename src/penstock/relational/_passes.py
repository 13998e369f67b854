"""Passes on the inter-operator IR, each a function from a program to an equivalent one with less work.

- `materialise` and `compact`: compute values that depend only on one end and the type of an edge for every edge, or
  once for every pair that occurs (Hector, section 3.2: compact materialization).
- `reorder`: replaces a dot with a transformed row by a dot of the row with a transformed vector (Hector: linear
  operator reordering); the row's product disappears if nothing else needs it.
- `sum_first`: replaces a sum of transformed rows by a transformed sum, if that leaves fewer rows to transform.
- `unify`: on graphs whose targets are its sources, computes once what is the same for both ends.

Common subexpressions disappear while programs are built (`Builder.add`), and dead code when they are finished
(`pruned`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from penstock.relational._domain import OF_TYPES, Domain, common
from penstock.relational._ir import (
    Builder,
    Concat,
    Dot,
    Input,
    Map,
    Matmul,
    Operation,
    Program,
    Reduce,
    Reshape,
    SameRows,
    Shape,
    Slice,
    SumTo,
    broadcast,
    matmul_shape,
    rewritten,
)

RowCounts = Mapping[Domain, int]
"""Number of rows of a graph by domain."""
_ROW_BY_ROW = (Map, Matmul, Dot, Reshape, SumTo, Slice, Concat)
_PAIRS = {Domain.SOURCE_AND_TYPE: "source", Domain.TARGET_AND_TYPE: "target"}


def compact(program: Program) -> Program:
    """Compute every value for as few rows as distinguish its operands."""
    return _placed(program, common)


def materialise(program: Program) -> Program:
    """Compute values of an end and a type for every edge: the opposite of `compact`, for comparison."""

    def place(domains: list[Domain]) -> Domain:
        found = common(domains)
        return Domain.EDGE if found in _PAIRS else found

    return _placed(program, place)


def _placed(program: Program, place: Callable[[list[Domain]], Domain]) -> Program:
    builder = Builder()
    places: list[int] = []
    for one in program.operations:
        moved = rewritten(one, places)
        if isinstance(one, _ROW_BY_ROW):
            moved = replace(moved, domain=place([builder[at].domain for at in moved.operands]))
        places.append(builder.add(moved))
    return builder.program(places[at] for at in program.outputs)


def reorder(program: Program) -> Program:
    """Rewrite ``dot(x @ w, a)`` as ``dot(x, w @ a)``, and ``(x @ w) @ q`` as ``x @ (w @ q)``.

    This is done only if ``w @ a`` has a row per type and no reader of ``x @ w`` needs that product.
    """
    readers = program.readers()
    builder = Builder()
    places: list[int] = []
    for one in program.operations:
        place = None
        for product in one.operands:
            if _is_reorderable(program, one, product) and all(
                _is_reorderable(program, program[reader], product) for reader in readers[product]
            ):
                place = _reordered(program, builder, one, product, places)
                break
        places.append(builder.add(rewritten(one, places)) if place is None else place)
    return builder.program(places[at] for at in program.outputs)


def _is_reorderable(program: Program, reader: Operation, product: int) -> bool:
    """Return whether the reader multiplies the product by a value that, with its matrix, has a row per type."""
    one = program[product]
    if not isinstance(one, Matmul) or product in program.outputs or one.domain in OF_TYPES:
        return False
    match reader:
        case Dot():
            if reader.operands.count(product) != 1:
                return False
            other = next(at for at in reader.operands if at != product)
        case Matmul():
            other = reader.operands[1]
            if one.transposed or reader.transposed or reader.operands[0] != product or len(program[other].shape) != 2:
                return False
        case _:
            return False
    return common([program[one.operands[1]].domain, program[other].domain]) in OF_TYPES


def _reordered(program: Program, builder: Builder, reader: Operation, at: int, places: list[int]) -> int:
    product = program[at]
    assert isinstance(product, Matmul)
    row, matrix = (places[operand] for operand in product.operands)
    if isinstance(reader, Matmul):
        combined = _matmul(builder, matrix, places[reader.operands[1]], transposed=False)
        found = _matmul(builder, row, combined, transposed=False)
        return builder.add(replace(builder[found], domain=_as_wide(reader.domain, builder[found].domain)))
    vector = places[next(operand for operand in reader.operands if operand != at)]
    moved = _matmul(builder, vector, matrix, transposed=not product.transposed)
    shape = broadcast(builder[row].shape, builder[moved].shape)[:-1]
    domain = _as_wide(reader.domain, common([builder[row].domain, builder[moved].domain]))
    return builder.add(Dot(domain=domain, shape=shape, operands=(row, moved)))


def _as_wide(before: Domain, after: Domain) -> Domain:
    """Return the domain in which an operation stays if `compact` has not run."""
    return before if before is Domain.EDGE and after in _PAIRS else after


def _matmul(builder: Builder, left: int, right: int, *, transposed: bool) -> int:
    shape = matmul_shape(builder[left].shape, builder[right].shape, transposed=transposed)
    domain = common([builder[left].domain, builder[right].domain])
    return builder.add(Matmul(domain=domain, shape=shape, operands=(left, right), transposed=transposed))


def thin(program: Program) -> Program:
    """Replace products of single numbers with a row by element-wise ones, unless a `Reduce` is the only reader."""
    readers, builder, places = program.readers(), Builder(), list[int]()
    for at, one in enumerate(program.operations):
        is_summed = [isinstance(program[reader], Reduce) for reader in readers[at]] == [True]
        if not isinstance(one, Matmul) or program[one.operands[0]].shape[-1] != 1 or is_summed:
            places.append(builder.add(rewritten(one, places)))
            continue
        left, matrix = (places[operand] for operand in one.operands)
        of = builder[matrix]
        row = (*of.shape[:-2], of.shape[-2] if one.transposed else of.shape[-1])
        flat = builder.add(Reshape(domain=of.domain, shape=row, operands=(matrix,)))
        places.append(builder.map("multiply", left, flat, domain=one.domain))
    return builder.program(places[at] for at in program.outputs)


def sum_first(program: Program, rows: RowCounts, pays: float = 1.0) -> Program:
    """Rewrite ``sum(s * (x @ w))`` as ``sum(sum(s * x) @ w)``, if that leaves few rows for ``@``.

    The inner sum is per type. ``pays`` is the largest ratio of rows that counts as few. The product's other readers may
    only be dots, which `reorder` rewrites; otherwise the product is needed anyway.
    """
    readers = program.readers()
    builder = Builder()
    places: list[int] = []
    for one in program.operations:
        found = _summed_product(program, readers, one, rows, pays) if isinstance(one, Reduce) else None
        if found is None:
            places.append(builder.add(rewritten(one, places)))
            continue
        assert isinstance(one, Reduce)
        product, factor = found
        row, matrix = (places[at] for at in program[product].operands)
        places.append(
            _summed_first(builder, one, row, matrix, None if factor is None else places[factor], program[product])
        )
    return builder.program(places[at] for at in program.outputs)


def _summed_product(
    program: Program, readers: list[list[int]], one: Reduce, rows: RowCounts, pays: float
) -> tuple[int, int | None] | None:
    """Return the product under the sum, and its factor, if summing first pays."""
    if one.kind != "sum":
        return None
    (at,) = one.operands
    factor = None
    top = program[at]
    if isinstance(top, Map) and top.function == "multiply":
        for side in (0, 1):
            candidate = program[top.operands[side]]
            if isinstance(candidate, Matmul) and _scales_rows(program, top.operands[1 - side], candidate):
                at, factor = top.operands[side], top.operands[1 - side]
                break
    product = program[at]
    if not isinstance(product, Matmul):
        return None
    matrix = program[product.operands[1]]
    between = common([one.domain, matrix.domain])
    if matrix.domain not in OF_TYPES or between is one.over or not one.over.tells(between):
        return None
    row = program[product.operands[0]].shape
    widening = 1 if factor is None else math.prod(broadcast(program[factor].shape, row)) // max(1, math.prod(row))
    if rows[between] * widening > pays * rows[product.domain]:
        return None
    summed = program[one.operands[0]] if factor is not None else None
    for reader in readers[at]:
        is_this = program[reader] is one or program[reader] is summed
        if not is_this and not _is_reorderable(program, program[reader], at):
            return None
    if at in program.outputs or (factor is not None and len(readers[one.operands[0]]) > 1):
        return None
    return at, factor


def _scales_rows(program: Program, factor: int, product: Operation) -> bool:
    """Return whether the factor is one number for each vector that is transformed."""
    shape = program[factor].shape
    return (not shape or shape[-1] == 1) and len(shape) <= len(product.shape)


def _summed_first(builder: Builder, one: Reduce, row: int, matrix: int, factor: int | None, product: Operation) -> int:
    assert isinstance(product, Matmul)
    between = common([one.domain, builder[matrix].domain])
    if factor is not None:
        row = builder.map("multiply", factor, row, domain=one.over)
    shape: Shape = builder[row].shape
    inner = builder.add(Reduce(domain=between, shape=shape, operands=(row,), over=one.over))
    transformed = _matmul(builder, inner, matrix, transposed=product.transposed)
    if between is one.domain:
        return transformed
    return builder.add(
        Reduce(domain=one.domain, shape=builder[transformed].shape, operands=(transformed,), over=between)
    )


def widened(program: Program, domains: Sequence[Domain]) -> Program:
    """Give outputs rows for ``domains``, even if fewer would distinguish them."""
    builder = Builder(program.operations)
    return builder.program([builder.widened(at, one) for at, one in zip(program.outputs, domains, strict=True)])


def unify(program: Program) -> Program:
    """Compute what is the same for sources and targets once, for sources, and let targets look it up."""
    builder = Builder()
    places: list[int] = []
    for one in program.operations:
        moved = rewritten(one, places)
        twin = _SAME.get(one.domain)
        if twin is not None and isinstance(one, Input | Map | Matmul | Dot | Reshape | SumTo | Slice | Concat):
            sources = [_at_source(builder, at) for at in moved.operands]
            if isinstance(one, Input) or all(at is not None for at in sources):
                at_source = replace(moved, domain=twin, operands=tuple(at for at in sources if at is not None))
                moved = SameRows(domain=one.domain, shape=one.shape, operands=(builder.add(at_source),))
        elif isinstance(one, SameRows) and isinstance(builder[moved.operands[0]], SameRows):
            places.append(builder[moved.operands[0]].operands[0])
            continue
        places.append(builder.add(moved))
    return builder.program(places[at] for at in program.outputs)


def _at_source(builder: Builder, at: int) -> int | None:
    """Return the same value for sources, if there is one."""
    one = builder[at]
    if isinstance(one, SameRows):
        return one.operands[0]
    return at if one.domain not in _SAME else None


_SAME = {Domain.TARGET: Domain.SOURCE, Domain.TARGET_TYPE: Domain.SOURCE_TYPE}
