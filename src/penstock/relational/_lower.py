"""Lowering: from the inter-operator IR to steps, each an instance of a template.

- *Product*: gathered rows times the matrix of their type. *Outer*: its transpose, a sum per type. Both are loops over a
  BLAS (`native/relational.c`).
- *Traversal*: goes through the rows of one domain, grouped by the row of another that they belong to. It computes row
  by row and combines the results in registers. Values that are computed row by row are not stored: every traversal that
  reads them computes them again. The exceptions are costly values (a dot product) that are read more than once, and
  values that a product reads.
- *BlockedSum*: a product whose rows are only summed per node. A block of rows is multiplied and added at once, so that
  the products never exist as a whole, nor do the sums that are multiplied, if nothing else reads them.
- *Whole*: operations that have rows only per type, or fit no template, run in PyTorch.

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
"""Pairs of domains where the rows of the first are contiguous, or sorted, for each row of the second."""


@dataclass(frozen=True, slots=True)
class Product:
    """A `Matmul` by BLAS."""

    place: int
    """Place of the `Matmul`."""


@dataclass(frozen=True, slots=True)
class Outer:
    """An `OuterSum` by BLAS."""

    place: int
    """Place of the `OuterSum`."""


@dataclass(frozen=True, slots=True)
class Whole:
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


@dataclass(frozen=True, slots=True)
class BlockedSum:
    """A `Reduce` of a `Matmul`, block by block."""

    place: int
    """Place of the `Reduce`."""
    product: int
    """Place of the `Matmul`."""
    rows: Traversal | None
    """The traversal that computes the rows of a block; ``None`` if they are stored."""
    onto: int | None = None
    """Place of a value, read by nothing else, whose memory it adds into and takes over.

    ``None``: it starts from zeros.
    """


Step = Product | Outer | Whole | Traversal | BlockedSum


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
    """Return the steps of the program. ``blocked``: whether the emitter supports `BlockedSum`."""
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
    """Return the blocked sums by the place of their `Reduce`; remove what they compute in blocks from ``stored``."""
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
    """Return the sums of two blocked sums that nothing else reads, by their place.

    The second blocked sum adds into the first's memory.
    """
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
    """Return whether leading dimensions are the same on both sides, or missing on one."""
    trailing = (1, 1) if isinstance(one, OuterSum) else (1, 2)
    result = 2 if isinstance(one, OuterSum) else 1
    heads = math.prod(one.shape[:-result])
    return all(
        math.prod(program[at].shape[:-last]) in (1, heads) for at, last in zip(one.operands, trailing, strict=True)
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
    made = made_by.get(read, -1)
    if made < number:
        return True
    assert isinstance(old, Traversal)
    return made == number and not isinstance(program[read], Reduce)


def _stored(program: Program) -> set[int]:
    """Return the values that exist as tensors."""
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
    """Return whether PyTorch computes the operation, and so reads tensors."""
    return one.domain in OF_TYPES and isinstance(one, ROW_BY_ROW)


def _is_worth_storing(program: Program, readers: list[list[int]], at: int) -> bool:
    """Return whether to store a value: dots and sums within rows that many rows or several sums would recompute."""
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
    """Return the stored values that are read to compute the value at ``at``, through values that are not stored."""
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
