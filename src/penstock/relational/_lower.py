"""Lowering: from the inter-operator IR to steps, each an instance of a template.

- *Product*: gathered rows times the matrix of their type. *Outer*: its transpose, a sum per type. Both are loops over
  blocks of rows (`native/relational.c`).
- *Traversal*: goes through the rows of one domain, grouped by the row of another that they belong to. It computes row
  by row and combines the results in registers. Values that are computed row by row are not stored: every traversal that
  reads them computes them again. The exceptions are costly values (a dot product) that are read more than once, and
  values that a product reads.
- *BlockedPass*: products whose rows are only summed per node. A block of rows is multiplied and added at once, so that
  the products never exist as a whole. `_fuse` adds what else goes through the same rows.
- *WholeOperation*: operations that have rows only per type, or fit no template, run in PyTorch.

Sums that go through the same rows in the same order share one traversal, unless one needs the other's result.
"""

import math
from dataclasses import dataclass, field

from penstock.relational._domain import ENDS, OF_TYPES, Domain
from penstock.relational._ir import (
    Concat,
    Constant,
    Count,
    Dot,
    Dropout,
    Input,
    Map,
    Matmul,
    Operation,
    OuterSum,
    Program,
    Reduce,
    Reshape,
    SameRows,
    Slice,
    SumTo,
)
from penstock.relational._share import shared

ROW_BY_ROW = (Map, Dot, Reshape, SumTo, Slice, Concat, Dropout)
_SEGMENTED = {
    (Domain.SOURCE_AND_TYPE, Domain.EDGE_TYPE),
    (Domain.TARGET_AND_TYPE, Domain.EDGE_TYPE),
    (Domain.COVER_SOURCE, Domain.EDGE_TYPE),
    (Domain.COVER_TARGET, Domain.EDGE_TYPE),
    (Domain.SOURCE, Domain.SOURCE_TYPE),
    (Domain.TARGET, Domain.TARGET_TYPE),
    (Domain.EDGE, Domain.EDGE_TYPE),
}
"""Pairs of domains where the rows of the first are contiguous, or sorted, for each row of the second."""


@dataclass(frozen=True, slots=True)
class Product:
    """A `Matmul` by itself, or added to another value."""

    place: int
    """Place of the result: the `Matmul`, or the `Map` that adds it to ``onto``."""
    product: int
    """Place of the `Matmul`."""
    onto: int | None = None
    """Place of a value, read by nothing else, whose memory it adds into and takes over.

    ``None``: nothing is added.
    """


@dataclass(frozen=True, slots=True)
class Outer:
    """An `OuterSum` by itself."""

    place: int
    """Place of the `OuterSum`."""


@dataclass(frozen=True, slots=True)
class WholeOperation:
    """An operation that PyTorch runs."""

    place: int
    """Place of the operation."""


@dataclass(slots=True)
class Traversal:
    """A pass through the rows of ``over``, grouped by the rows of ``by`` that they belong to."""

    over: Domain
    """The domain of the rows."""
    by: Domain | None
    """The domain that rows are grouped by; ``None`` if nothing is combined."""
    roots: list[int] = field(default_factory=list)
    """Places of sums, and of values to store; the latter have rows per ``over``."""
    reads: set[int] = field(default_factory=set)
    """Places of the stored values that it reads."""

    def sums(self, program: Program) -> list[int]:
        """Return the roots that combine rows."""
        return [place for place in self.roots if isinstance(program[place], Reduce)]


@dataclass(frozen=True, slots=True)
class BlockedSum:
    """A `Reduce` of a `Matmul`, block by block."""

    place: int
    """Place of the `Reduce`."""
    product: int
    """Place of the `Matmul`."""
    onto: int | None = None
    """Place of a value, read by nothing else, whose memory it adds into and takes over.

    ``None``: it starts from zeros.
    """


@dataclass(frozen=True, slots=True)
class BlockedPass:
    """A pass through the rows of ``over``, pairs, that takes a block of them at a time."""

    over: Domain
    """The domain of the rows."""
    sums: tuple[BlockedSum, ...] = ()
    """Sums of products of the rows, in order."""
    outers: tuple[int, ...] = ()
    """Places of `OuterSum` by edge type."""
    rows: Traversal | None = None
    """The traversal that computes values of a block's rows first; ``None`` if all are stored."""


@dataclass(frozen=True, slots=True)
class ScatteredProduct:
    """A `Matmul` for pairs, a block of rows at a time, whose edges add its rows to those of nodes.

    Each thread computes some of the columns, so that no two add to the same number.
    """

    place: int
    """Place of the `Reduce` over edges."""
    product: int
    """Place of the `Matmul`."""
    rows: Traversal
    """The traversal of the edges of a block's pairs."""
    num_parts: int
    """Number of parts that columns are divided into."""

    @property
    def over(self) -> Domain:
        """The domain of the pairs."""
        assert self.rows.by is not None
        return self.rows.by

    def columns(self, program: Program) -> int:
        """Return the number of columns that a part has."""
        return program[self.product].shape[-1] // self.num_parts


Step = Product | Outer | WholeOperation | Traversal | BlockedPass | ScatteredProduct


@dataclass(frozen=True, slots=True)
class Lowered:
    """A program as steps."""

    program: Program
    """The program that the steps compute."""
    steps: tuple[Step, ...]
    """The steps, in order."""
    stored: frozenset[int]
    """Places of values that exist as tensors; the others are computed where they are read."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A traversal's function that an emitter wrote, and its arguments."""

    name: str
    """Name of the function."""
    traversal: Traversal
    """The traversal that it runs."""
    indexes: tuple[Domain, ...]
    """Domains for which it needs each position's row, in order of positions."""
    inputs: tuple[int, ...]
    """Places of the stored values that it reads; their buffers come before those of its roots."""


def lower(program: Program, *, blocked: bool) -> Lowered:
    """Return the steps of the program. ``blocked``: whether the emitter supports `BlockedPass`."""
    stored = _stored(program)
    sums = _blocked_sums(program, stored) if blocked else {}
    added = _added_up(program, stored, sums)
    products = _added_products(program, stored, sums)
    later = {place for pair in added.values() for place in pair if place in sums}
    later |= {product.product for product in products.values()}
    stored -= {product.product for product in products.values()}
    steps: list[Step] = []
    made_by: dict[int, int] = {}
    for place, operation in enumerate(program.operations):
        if place not in stored or place in later or isinstance(operation, Input | SameRows):
            continue
        if place in added:
            first, last = added[place]
            parts = [sums[first]] if first in sums else []
            for part in [*parts, BlockedSum(place, sums[last].product, onto=first)]:
                made_by[part.place] = len(steps)
                steps.append(BlockedPass(program[part.product].domain, (part,)))
            continue
        step: Step = products.get(place) or _template(operation, place, program)
        if place in sums:
            step = BlockedPass(program[sums[place].product].domain, (sums[place],))
        if isinstance(step, Traversal):
            step.reads = _reads(program, stored, place)
            joined = _join(program, steps, step, made_by)
            if joined is not None:
                made_by[place] = joined
                continue
        made_by[place] = len(steps)
        steps.append(step)
    return Lowered(program, tuple(steps), frozenset(stored))


def _blocked_sums(program: Program, stored: set[int]) -> dict[int, BlockedSum]:
    """Return the blocked sums by the place of their `Reduce`; remove their products from ``stored``."""
    readers, sums = program.readers(), {}
    for place, operation in enumerate(program.operations):
        if not isinstance(operation, Reduce) or operation.kind != "sum":
            continue
        (product,) = operation.operands
        matmul = program[product]
        if (
            not isinstance(matmul, Matmul)
            or matmul.domain is not operation.over
            or operation.domain is not ENDS.get(operation.over)
        ):
            continue
        is_by_type = program[matmul.operands[1]].domain is Domain.EDGE_TYPE and _has_plain_heads(program, matmul)
        if not is_by_type or readers[product] != [place] or product in program.outputs:
            continue
        stored.discard(product)
        sums[place] = BlockedSum(place, product)
    return sums


def _added_up(program: Program, stored: set[int], sums: dict[int, BlockedSum]) -> dict[int, tuple[int, int]]:
    """Return sums of two sums that nothing else reads, by their place; the second of them is blocked.

    It adds into the first's memory.
    """
    readers, added = program.readers(), {}
    for place, operation in enumerate(program.operations):
        if place not in stored or not isinstance(operation, Map) or operation.function != "add":
            continue
        parts = []
        for operand in operation.operands:
            path = program.names(operand)
            alone = all(len(readers[name]) == 1 and name not in program.outputs for name in path)
            fits = program[operand].domain is operation.domain and program[operand].shape == operation.shape
            if path[-1] in stored and isinstance(program[path[-1]], Reduce) and alone and fits:
                parts.append(path[-1])
        parts.sort(key=lambda part: part in sums)
        if len(parts) == 2 and parts[0] != parts[1] and parts[1] in sums:
            added[place] = (parts[0], parts[1])
    return added


def _added_products(program: Program, stored: set[int], sums: dict[int, BlockedSum]) -> dict[int, Product]:
    """Return products that are added to a value that nothing else reads, by the place of the addition."""
    readers, added = program.readers(), {}
    for place, operation in enumerate(program.operations):
        if place not in stored or place in program.outputs or not isinstance(operation, Map):
            continue
        if operation.function != "add":
            continue
        parts = [_alone_behind(program, readers, operand, operation) for operand in operation.operands]
        parts.sort(key=lambda part: part is not None and isinstance(program[part], Matmul))
        onto, product = parts
        if onto is None or product is None or onto == product or not {onto, product} <= stored - set(sums):
            continue
        is_product = isinstance(_template(program[product], product, program), Product)
        if is_product and not isinstance(program[onto], Input | SameRows):  # memory of the user's, or of another value
            added[place] = Product(place, product, onto)
    return added


def _alone_behind(program: Program, readers: list[list[int]], operand: int, reader: Operation) -> int | None:
    """Return the value whose memory an operand has; ``None`` if others read it, or rows differ from the reader's."""
    if program[operand].domain is not reader.domain or program[operand].shape != reader.shape:
        return None
    while len(readers[operand]) == 1 and operand not in program.outputs:
        if not isinstance(program[operand], Reshape):
            return operand
        (operand,) = program[operand].operands
    return None


def _template(operation: Operation, place: int, program: Program) -> Step:
    match operation:
        case Matmul():
            matrix = program[operation.operands[1]].domain
            is_typed = matrix is Domain.ONE or (operation.domain, matrix) in _SEGMENTED
            fits = is_typed and operation.domain not in OF_TYPES and _has_plain_heads(program, operation)
            return Product(place, place) if fits else WholeOperation(place)
        case OuterSum():
            is_typed = operation.domain is Domain.ONE or (operation.over, operation.domain) in _SEGMENTED
            fits = is_typed and operation.over not in OF_TYPES and _has_plain_heads(program, operation)
            return Outer(place) if fits else WholeOperation(place)
        case Reduce() if operation.over is not operation.domain and operation.over not in OF_TYPES:
            return Traversal(operation.over, operation.domain, [place])
        case Map() | Dot() | Reshape() | SumTo() | Slice() | Concat() | Dropout() if operation.domain not in OF_TYPES:
            return Traversal(operation.domain, None, [place])
        case _:
            return WholeOperation(place)


def _has_plain_heads(program: Program, operation: Operation) -> bool:
    """Return whether leading dimensions are the same on both sides, or missing on one."""
    trailing = (1, 1) if isinstance(operation, OuterSum) else (1, 2)
    result = 2 if isinstance(operation, OuterSum) else 1
    heads = math.prod(operation.shape[:-result])
    return all(
        math.prod(program[operand].shape[:-last]) in (1, heads)
        for operand, last in zip(operation.operands, trailing, strict=True)
    )


def _join(program: Program, steps: list[Step], new: Traversal, made_by: dict[int, int]) -> int | None:
    """Add the new traversal's root to the last earlier one that can take it; return that step's number, or ``None``."""
    for number in range(len(steps) - 1, -1, -1):
        old = steps[number]
        goes_so = (
            isinstance(old, Traversal)
            and old.over is new.over
            and (old.by is None or new.by is None or old.by is new.by)
        )
        if goes_so and all(_is_at_hand(program, old, read, number, made_by) for read in new.reads):
            assert isinstance(old, Traversal)
            old.by = old.by or new.by
            old.roots += new.roots
            old.reads |= new.reads
            return number
        if any(made_by.get(read, -1) >= number for read in new.reads):
            return None
    return None


def _is_at_hand(program: Program, old: Step, read: int, number: int, made_by: dict[int, int]) -> bool:
    """Return whether a value exists before the step, or the step computes it for the current row."""
    maker = made_by.get(read, -1)
    if maker < number:
        return True
    assert isinstance(old, Traversal)
    return maker == number and not isinstance(program[read], Reduce)


def _stored(program: Program) -> set[int]:
    """Return the values that exist as tensors."""
    readers = program.readers()
    stored = set(program.outputs)
    for place, operation in enumerate(program.operations):
        if isinstance(operation, Input | Matmul | OuterSum | Reduce | Count):
            stored.add(place)
        if isinstance(operation, Matmul | OuterSum | SameRows) or _is_whole(operation):
            stored.update(operand for operand in operation.operands if not isinstance(program[operand], Constant))
    stored |= shared(program, stored, ROW_BY_ROW)
    for place, operation in enumerate(program.operations):
        is_open = isinstance(operation, ROW_BY_ROW) and place not in stored
        if is_open and _is_worth_storing(program, readers, stored, place):
            stored.add(place)
    return stored | {place for place, operation in enumerate(program.operations) if isinstance(operation, SameRows)}


def _is_whole(operation: Operation) -> bool:
    """Return whether PyTorch computes the operation, and so reads tensors."""
    return operation.domain in OF_TYPES and isinstance(operation, ROW_BY_ROW)


def _is_worth_storing(program: Program, readers: list[list[int]], stored: set[int], place: int) -> bool:
    """Return whether to store a value: dots and sums within rows that many rows or several sums would recompute."""
    operation = program[place]
    if operation.domain in OF_TYPES:
        return True
    if not isinstance(operation, Dot | SumTo):
        return False
    if any(_row_domain(program[reader]) is not operation.domain for reader in readers[place]):
        return True
    return len(_sums_that_read(program, readers, stored, place)) > 1


def _row_domain(operation: Operation) -> Domain:
    return operation.over if isinstance(operation, Reduce | OuterSum) else operation.domain


def _sums_that_read(program: Program, readers: list[list[int]], stored: set[int], place: int) -> set[int]:
    sums: set[int] = set()
    stack = list(readers[place])
    while stack:
        reader = stack.pop()
        if isinstance(program[reader], ROW_BY_ROW) and reader not in stored:
            stack.extend(readers[reader])
        else:
            sums.add(reader)
    return sums


def _reads(program: Program, stored: set[int], place: int) -> set[int]:
    """Return the stored values that are read to compute the value at ``place``, through values that are not stored."""
    reads: set[int] = set()
    stack = list(program[place].operands)
    while stack:
        read = stack.pop()
        if read in stored:
            reads.add(read)
            if isinstance(program[read], SameRows):
                stack.extend(program[read].operands)
        else:
            stack.extend(program[read].operands)
    return reads
