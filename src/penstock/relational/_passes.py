"""Passes on the inter-operator IR, each a function from a program to an equivalent one with less work.

- `materialise` and `compact`: compute values that depend only on one end and the type of an edge for every edge, or
  once for every pair that occurs (Hector, section 3.2: compact materialization).
- `reorder`: replaces a dot with a transformed row by a dot of the row with a transformed vector (Hector: linear
  operator reordering); the row's product disappears if nothing else needs it.
- `dot_at_targets`: replaces a dot of a transformed source with a target by one of the source with a transformed target,
  if that leaves fewer rows to transform.
- `sum_first`: replaces a sum of transformed rows by a transformed sum, if that leaves fewer rows to transform.
- `unify`: on graphs whose targets are its sources, computes once what is the same for both ends.

Common subexpressions disappear while programs are built (`Builder.add`), and dead code when they are finished
(`pruned`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.relational._domain import OF_COVERS, OF_TYPES, Domain, common
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

RowCounts = Callable[[Domain], int]
"""Number of rows of a domain of a graph."""
_ROW_BY_ROW = (Map, Matmul, Dot, Reshape, SumTo, Slice, Concat)
_PAIRS = {Domain.SOURCE_AND_TYPE: "source", Domain.TARGET_AND_TYPE: "target"}


def compact(program: Program) -> Program:
    """Compute every value for as few rows as distinguish its operands."""
    return _placed(program, common)


def materialise(program: Program) -> Program:
    """Compute values of an end and a type for every edge: the opposite of `compact`, for comparison."""

    def place(domains: list[Domain]) -> Domain:
        domain = common(domains)
        return Domain.EDGE if domain in _PAIRS else domain

    return _placed(program, place)


def _placed(program: Program, place: Callable[[list[Domain]], Domain]) -> Program:
    builder = Builder()
    places: list[int] = []
    for operation in program.operations:
        moved = rewritten(operation, places)
        if isinstance(operation, _ROW_BY_ROW) and not (isinstance(operation, Matmul) and operation.domain in OF_COVERS):
            moved = replace(moved, domain=place([builder[operand].domain for operand in moved.operands]))
        places.append(builder.add(moved))
    return builder.program(places[output] for output in program.outputs)


def reorder(program: Program) -> Program:
    """Rewrite ``dot(x @ w, a)`` as ``dot(x, w @ a)``, and ``(x @ w) @ q`` as ``x @ (w @ q)``.

    This is done only if ``w @ a`` has a row per type and no reader of ``x @ w`` needs that product.
    """
    readers = program.readers()
    builder = Builder()
    places: list[int] = []
    for operation in program.operations:
        place = None
        for product in operation.operands:
            if is_reorderable(program, operation, product) and all(
                is_reorderable(program, program[reader], product) for reader in readers[product]
            ):
                place = _reordered(program, builder, operation, product, places)
                break
        places.append(builder.add(rewritten(operation, places)) if place is None else place)
    return builder.program(places[output] for output in program.outputs)


def is_reorderable(program: Program, reader: Operation, product: int) -> bool:
    """Return whether the reader multiplies the product by a value that, with its matrix, has a row per type."""
    operation = program[product]
    if not isinstance(operation, Matmul) or product in program.outputs or operation.domain in OF_TYPES:
        return False
    match reader:
        case Dot():
            if reader.operands.count(product) != 1:
                return False
            factor = next(operand for operand in reader.operands if operand != product)
        case Matmul():
            factor = reader.operands[1]
            if (
                operation.transposed
                or reader.transposed
                or reader.operands[0] != product
                or len(program[factor].shape) != 2
            ):
                return False
        case _:
            return False
    return common([program[operation.operands[1]].domain, program[factor].domain]) in OF_TYPES


def _reordered(program: Program, builder: Builder, reader: Operation, place: int, places: list[int]) -> int:
    product = program[place]
    assert isinstance(product, Matmul)
    row, matrix = (places[operand] for operand in product.operands)
    if isinstance(reader, Matmul):
        combined = _matmul(builder, matrix, places[reader.operands[1]], transposed=False)
        result = _matmul(builder, row, combined, transposed=False)
        return builder.add(replace(builder[result], domain=_as_wide(reader.domain, builder[result].domain)))
    vector = places[next(operand for operand in reader.operands if operand != place)]
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


def dot_at_targets(program: Program) -> Program:
    """Rewrite ``dot(x @ w, y)`` as ``dot(x, y @ w.T)``, where ``x`` belongs to sources and ``y`` to targets.

    Then there is a product for each target and type, instead of each source and type. It is done if nothing else reads
    ``x @ w``.
    """
    readers, builder, places = program.readers(), Builder(), list[int]()
    for place, operation in enumerate(program.operations):
        product = _product_of_dot(program, readers, place)
        if product is None:
            places.append(builder.add(rewritten(operation, places)))
        else:
            places.append(_dot_at_target(program, builder, operation, product, places))
    return builder.program(places[output] for output in program.outputs)


def _product_of_dot(program: Program, readers: list[list[int]], place: int) -> int | None:
    """Return the operand of a dot that is a product at sources, and may be one at targets."""
    operation = program[place]
    if not isinstance(operation, Dot) or operation.operands[0] == operation.operands[1]:
        return None
    for product, other in (operation.operands, operation.operands[::-1]):
        matmul, vector = program[product], program[other]
        if (
            isinstance(matmul, Matmul)
            and matmul.domain is Domain.SOURCE_AND_TYPE
            and readers[product] == [place]
            and product not in program.outputs
            and vector.domain is Domain.TARGET
            and program[matmul.operands[1]].domain in OF_TYPES
            and len(vector.shape) == len(matmul.shape)
        ):
            return product
    return None


def _dot_at_target(program: Program, builder: Builder, operation: Operation, product: int, places: list[int]) -> int:
    matmul = program[product]
    assert isinstance(matmul, Matmul)
    row, matrix = (places[operand] for operand in matmul.operands)
    vector = places[next(operand for operand in operation.operands if operand != product)]
    moved = _matmul(builder, vector, matrix, transposed=not matmul.transposed)
    shape = broadcast(builder[row].shape, builder[moved].shape)[:-1]
    return builder.add(Dot(domain=operation.domain, shape=shape, operands=(row, moved)))


def thin(program: Program) -> Program:
    """Replace products of single numbers with a row by element-wise ones, unless a `Reduce` is the only reader."""
    readers, builder, places = program.readers(), Builder(), list[int]()
    for place, operation in enumerate(program.operations):
        # Products that are only summed become blocked sums, which never hold them as a whole.
        is_summed = [isinstance(program[reader], Reduce) for reader in readers[place]] == [True]
        if not isinstance(operation, Matmul) or program[operation.operands[0]].shape[-1] != 1 or is_summed:
            places.append(builder.add(rewritten(operation, places)))
            continue
        left, matrix = (places[operand] for operand in operation.operands)
        of = builder[matrix]
        row = (*of.shape[:-2], of.shape[-2] if operation.transposed else of.shape[-1])
        flat = builder.add(Reshape(domain=of.domain, shape=row, operands=(matrix,)))
        places.append(builder.map("multiply", left, flat, domain=operation.domain))
    return builder.program(places[output] for output in program.outputs)


def sum_first(program: Program, rows: RowCounts, pays: float = 1.0) -> Program:
    """Rewrite ``sum(s * (x @ w))`` as ``sum(sum(s * x) @ w)``, if that leaves few rows for ``@``.

    The inner sum is per type. ``pays`` is the largest ratio of rows that counts as few. The product's other readers may
    only be dots, which `reorder` rewrites; otherwise the product is needed anyway.
    """
    readers = program.readers()
    builder = Builder()
    places: list[int] = []
    for operation in program.operations:
        match = _summed_product(program, readers, operation, rows, pays) if isinstance(operation, Reduce) else None
        if match is None:
            places.append(builder.add(rewritten(operation, places)))
            continue
        assert isinstance(operation, Reduce)
        product, factor = match
        row, matrix = (places[operand] for operand in program[product].operands)
        places.append(
            _summed_first(builder, operation, row, matrix, None if factor is None else places[factor], program[product])
        )
    return builder.program(places[output] for output in program.outputs)


def _summed_product(
    program: Program, readers: list[list[int]], operation: Reduce, rows: RowCounts, pays: float
) -> tuple[int, int | None] | None:
    """Return the product under the sum, and its factor, if summing first pays."""
    if operation.kind != "sum" or operation.over is not Domain.EDGE:
        return None
    (place,) = operation.operands
    factor = None
    top = program[place]
    if isinstance(top, Map) and top.function == "multiply":
        for side in (0, 1):
            candidate = program[top.operands[side]]
            if isinstance(candidate, Matmul) and _scales_rows(program, top.operands[1 - side], candidate):
                place, factor = top.operands[side], top.operands[1 - side]
                break
    product = program[place]
    if not isinstance(product, Matmul):
        return None
    matrix = program[product.operands[1]]
    between = common([operation.domain, matrix.domain])
    if matrix.domain not in OF_TYPES or between is operation.over or not operation.over.tells(between):
        return None
    row = program[product.operands[0]].shape
    widening = 1 if factor is None else math.prod(broadcast(program[factor].shape, row)) // max(1, math.prod(row))
    if rows(between) * widening > pays * rows(product.domain):
        return None
    summed = program[operation.operands[0]] if factor is not None else None
    for reader in readers[place]:
        is_this = program[reader] is operation or program[reader] is summed
        if not is_this and not is_reorderable(program, program[reader], place):
            return None
    if place in program.outputs or (factor is not None and len(readers[operation.operands[0]]) > 1):
        return None
    return place, factor


def _scales_rows(program: Program, factor: int, product: Operation) -> bool:
    """Return whether the factor is one number for each vector that is transformed."""
    shape = program[factor].shape
    return (not shape or shape[-1] == 1) and len(shape) <= len(product.shape)


def _summed_first(
    builder: Builder, operation: Reduce, row: int, matrix: int, factor: int | None, product: Operation
) -> int:
    assert isinstance(product, Matmul)
    between = common([operation.domain, builder[matrix].domain])
    if factor is not None:
        row = builder.map("multiply", factor, row, domain=operation.over)
    shape: Shape = builder[row].shape
    inner = builder.add(Reduce(domain=between, shape=shape, operands=(row,), over=operation.over))
    transformed = _matmul(builder, inner, matrix, transposed=product.transposed)
    if between is operation.domain:
        return transformed
    return builder.add(
        Reduce(domain=operation.domain, shape=builder[transformed].shape, operands=(transformed,), over=between)
    )


def widened(program: Program, domains: Sequence[Domain]) -> Program:
    """Give outputs rows for ``domains``, even if fewer would distinguish them."""
    builder = Builder(program.operations)
    return builder.program(
        [builder.widened(place, domain) for place, domain in zip(program.outputs, domains, strict=True)]
    )


def unify(program: Program) -> Program:
    """Compute what is the same for sources and targets once, for sources, and let targets look it up."""
    builder = Builder()
    places: list[int] = []
    for operation in program.operations:
        moved = rewritten(operation, places)
        twin = _SAME.get(operation.domain)
        if twin is not None and isinstance(operation, Input | Map | Matmul | Dot | Reshape | SumTo | Slice | Concat):
            sources = [_at_source(builder, operand) for operand in moved.operands]
            if isinstance(operation, Input) or all(operand is not None for operand in sources):
                at_source = replace(
                    moved, domain=twin, operands=tuple(operand for operand in sources if operand is not None)
                )
                moved = SameRows(domain=operation.domain, shape=operation.shape, operands=(builder.add(at_source),))
        elif isinstance(operation, SameRows) and isinstance(builder[moved.operands[0]], SameRows):
            places.append(builder[moved.operands[0]].operands[0])
            continue
        places.append(builder.add(moved))
    return builder.program(places[output] for output in program.outputs)


def _at_source(builder: Builder, place: int) -> int | None:
    """Return the same value for sources, if there is one."""
    operation = builder[place]
    if isinstance(operation, SameRows):
        return operation.operands[0]
    return place if operation.domain not in _SAME else None


_SAME = {Domain.TARGET: Domain.SOURCE, Domain.TARGET_TYPE: Domain.SOURCE_TYPE}
