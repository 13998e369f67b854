"""Lowering: from the inter-operator IR to steps, each an instance of a template.

- *Product*: rows, gathered, times the matrix of their type. *Outer*: its transpose, a sum per type. Both are loops over
  a BLAS (`native/relational.c`).
- *Traversal*: goes through the rows of one domain, grouped by the row of another that they belong to, computes what is
  asked for row by row and brings it together in registers. Values that are computed row by row are not stored: every
  traversal that reads them computes them again, but for what is dear (a dot product) and read more than once, and for
  what a product reads.
- *BlockedSum*: a product whose rows are only summed per node. A block of rows is multiplied and added at once, so that
  neither the products nor, if nobody else reads them, the sums that are multiplied ever exist as a whole.
- *Whole*: what has a row per type alone, or fits no template, goes to PyTorch.

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

ROW_BY_ROW = (Map, Dot, Reshape, SumTo, Slice, Concat, Dropout)
_SEGMENTED = {
    (Domain.SOURCE_AND_TYPE, Domain.EDGE_TYPE),
    (Domain.TARGET_AND_TYPE, Domain.EDGE_TYPE),
    (Domain.SOURCE, Domain.SOURCE_TYPE),
    (Domain.TARGET, Domain.TARGET_TYPE),
    (Domain.EDGE, Domain.EDGE_TYPE),
}
"""Rows of the first are found together for each row of the second: they lie so, or an order of edges is kept."""


@dataclass(frozen=True, slots=True)
class Product:
    """A `Matmul` by BLAS."""

    place: int
    """Of it."""


@dataclass(frozen=True, slots=True)
class Outer:
    """An `OuterSum` by BLAS."""

    place: int
    """Of it."""


@dataclass(frozen=True, slots=True)
class Whole:
    """An operation by PyTorch."""

    place: int
    """Of it."""


@dataclass(slots=True)
class Traversal:
    """Goes through rows of ``over``, grouped by the rows of ``by`` that they belong to."""

    over: Domain
    """What is gone through."""
    by: Domain | None
    """What rows are grouped by; ``None``: nothing is brought together."""
    roots: list[int] = field(default_factory=list)
    """Sums, and values to store; these have rows per ``over``."""
    reads: set[int] = field(default_factory=set)
    """Stored values that it reads."""


@dataclass(frozen=True, slots=True)
class BlockedSum:
    """A `Reduce` of a `Matmul`, block by block."""

    place: int
    """Of the `Reduce`."""
    product: int
    """Of the `Matmul`."""
    rows: Traversal | None
    """What computes the rows of a block; ``None``: they are stored."""
    onto: int | None = None
    """A value whose memory it adds into and takes over, since nobody else reads it; ``None``: it begins with zeros."""


Step = Product | Outer | Whole | Traversal | BlockedSum


@dataclass(frozen=True, slots=True)
class Lowered:
    """A program as steps."""

    program: Program
    """What they compute."""
    steps: tuple[Step, ...]
    """In order."""
    stored: frozenset[int]
    """Values that exist as tensors; the others are computed where they are read."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A traversal's function as an emitter wrote it, and what to call it with."""

    name: str
    """Of the function."""
    traversal: Traversal
    """What it does."""
    indexes: tuple[Domain, ...]
    """Which row of these each position belongs to, in order of positions."""
    inputs: tuple[int, ...]
    """Stored values that it reads; its buffers, before those of its roots."""


def lower(program: Program, *, blocked: bool) -> Lowered:
    """Steps for the program. ``blocked``: whether the emitter knows `BlockedSum`."""
    stored = _stored(program)
    sums = _blocked_sums(program, stored) if blocked else {}
    added = _added_up(program, stored, sums)
    later = {sums[at].place for pair in added.values() for at in pair}
    steps: list[Step] = []
    made_by: dict[int, int] = {}
    for at, one in enumerate(program.operations):
        if at not in stored or at in later or isinstance(one, Input | SameRows):
            continue
        if at in added:
            first, second = (sums[place] for place in added[at])
            made_by[first.place], made_by[at] = len(steps), len(steps) + 1
            steps += [first, BlockedSum(at, second.product, second.rows, onto=first.place)]
            continue
        step: Step = sums[at] if at in sums else _template(one, at, program)
        if isinstance(step, Traversal):
            step.reads = _reads(program, stored, at)
            joined = _join(program, steps, step, made_by)
            if joined is not None:
                made_by[at] = joined
                continue
        made_by[at] = len(steps)
        steps.append(step)
    return Lowered(program, tuple(steps), frozenset(stored))


def _blocked_sums(program: Program, stored: set[int]) -> dict[int, BlockedSum]:
    """By the place of the `Reduce`; what they compute in blocks is no longer stored."""
    readers, found = program.readers(), {}
    for at, one in enumerate(program.operations):
        if not isinstance(one, Reduce) or one.kind != "sum":
            continue
        (product,) = one.operands
        matmul = program[product]
        if not isinstance(matmul, Matmul) or matmul.domain is not one.over or one.domain is not ENDS.get(one.over):
            continue
        left, matrix = matmul.operands
        is_by_type = program[matrix].domain is Domain.EDGE_TYPE and _has_plain_heads(program, matmul)
        if not is_by_type or readers[product] != [at] or product in program.outputs:
            continue
        rows, summed = None, program[left]
        is_own = readers[left] == [product] and left not in program.outputs
        if isinstance(summed, Reduce) and is_own and summed.domain is matmul.domain and summed.over is Domain.EDGE:
            rows = Traversal(summed.over, summed.domain, [left], _reads(program, stored, left))
            stored.discard(left)
        stored.discard(product)
        found[at] = BlockedSum(at, product, rows)
    return found


def _added_up(program: Program, stored: set[int], sums: dict[int, BlockedSum]) -> dict[int, tuple[int, int]]:
    """Sums of two blocked sums that nobody else reads, by their place: the second adds into the first's memory."""
    readers, found = program.readers(), {}
    for at, one in enumerate(program.operations):
        if at not in stored or not isinstance(one, Map) or one.function != "add":
            continue
        parts = []
        for operand in one.operands:
            path = [operand]
            while isinstance(alias := program[path[-1]], SameRows):
                path.append(alias.operands[0])
            alone = all(len(readers[place]) == 1 and place not in program.outputs for place in path)
            fits = program[operand].domain is one.domain and program[operand].shape == one.shape
            if path[-1] in sums and alone and fits:
                parts.append(path[-1])
        if len(parts) == 2 and parts[0] != parts[1]:
            found[at] = (parts[0], parts[1])
    return found


def _template(one: Operation, at: int, program: Program) -> Step:
    match one:
        case Matmul():
            matrix = program[one.operands[1]].domain
            is_typed = matrix is Domain.ONE or (one.domain, matrix) in _SEGMENTED
            fits = is_typed and one.domain not in OF_TYPES and _has_plain_heads(program, one)
            return Product(at) if fits else Whole(at)
        case OuterSum():
            is_typed = one.domain is Domain.ONE or (one.over, one.domain) in _SEGMENTED
            fits = is_typed and one.over not in OF_TYPES and _has_plain_heads(program, one)
            return Outer(at) if fits else Whole(at)
        case Reduce() if one.over is not one.domain and one.over not in OF_TYPES:
            return Traversal(one.over, one.domain, [at])
        case Map() | Dot() | Reshape() | SumTo() | Slice() | Concat() | Dropout() if one.domain not in OF_TYPES:
            return Traversal(one.domain, None, [at])
        case _:
            return Whole(at)


def _has_plain_heads(program: Program, one: Operation) -> bool:
    """Whether leading dimensions are the same on both sides, or missing on one."""
    trailing = (1, 1) if isinstance(one, OuterSum) else (1, 2)
    result = 2 if isinstance(one, OuterSum) else 1
    heads = math.prod(one.shape[:-result])
    return all(
        math.prod(program[at].shape[:-last]) in (1, heads) for at, last in zip(one.operands, trailing, strict=True)
    )


def _join(program: Program, steps: list[Step], new: Traversal, made_by: dict[int, int]) -> int | None:
    """The number of the last step that goes the same way and may take the new root, which it is given."""
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
    """Whether a value exists before the step, or is one that it computes for the row at hand."""
    made = made_by.get(read, -1)
    if made < number:
        return True
    assert isinstance(old, Traversal)
    return made == number and not isinstance(program[read], Reduce)


def _stored(program: Program) -> set[int]:
    """Values that exist as tensors."""
    readers = program.readers()
    found = set(program.outputs)
    for at, one in enumerate(program.operations):
        if isinstance(one, Input | Matmul | OuterSum | Reduce | Count):
            found.add(at)
        if isinstance(one, Matmul | OuterSum | SameRows) or _is_whole(one):
            found.update(operand for operand in one.operands if not isinstance(program[operand], Constant))
    for at, one in enumerate(program.operations):
        if isinstance(one, ROW_BY_ROW) and at not in found and _is_worth_storing(program, readers, at):
            found.add(at)
    return found | {at for at, one in enumerate(program.operations) if isinstance(one, SameRows)}


def _is_whole(one: Operation) -> bool:
    """Whether PyTorch computes it, and so reads tensors."""
    return one.domain in OF_TYPES and isinstance(one, ROW_BY_ROW)


def _is_worth_storing(program: Program, readers: list[list[int]], at: int) -> bool:
    """Dots and sums inside of rows that would be computed again: for more rows, or by several sums."""
    one = program[at]
    if one.domain in OF_TYPES:
        return True
    if not isinstance(one, Dot | SumTo):
        return False
    if any(_row_domain(program[reader]) is not one.domain for reader in readers[at]):
        return True
    return len(_sums_that_read(program, readers, at)) > 1


def _row_domain(one: Operation) -> Domain:
    return one.over if isinstance(one, Reduce | OuterSum) else one.domain


def _sums_that_read(program: Program, readers: list[list[int]], at: int) -> set[int]:
    found: set[int] = set()
    stack = list(readers[at])
    while stack:
        reader = stack.pop()
        if isinstance(program[reader], ROW_BY_ROW) and reader not in program.outputs:
            stack.extend(readers[reader])
        else:
            found.add(reader)
    return found


def _reads(program: Program, stored: set[int], at: int) -> set[int]:
    """Stored values that computing the value at ``at`` reads, through what is not stored."""
    found: set[int] = set()
    stack = list(program[at].operands)
    while stack:
        one = stack.pop()
        if one in stored:
            found.add(one)
            if isinstance(program[one], SameRows):
                stack.extend(program[one].operands)
        else:
            stack.extend(program[one].operands)
    return found
