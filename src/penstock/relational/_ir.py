"""The inter-operator IR: what a layer computes, row by row, over domains and without any index.

A program is a sequence of operations in static single assignment form. Each operation has a domain and a shape per row,
and reads values to whose rows its own rows belong. A read costs nothing here: `Domain.tells` says that a value per
source can be looked up for every edge, and no copy of it exists unless an emitter makes one. Only `Reduce` and
`OuterSum` combine rows.

Programs are immutable; passes return new ones. `verify` checks that a program is sound, using only this file.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from penstock.errors import InternalError
from penstock.relational._domain import Domain
from penstock.relational._elementwise import FUNCTIONS

Shape = tuple[int, ...]
"""Shape of one row; ``()`` is a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One value: how it is computed, for which rows, and the shape of a row."""

    domain: Domain
    """The domain of its rows."""
    shape: Shape
    """Shape of one row."""
    operands: tuple[int, ...] = ()
    """Places in the program of the values that it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input(Operation):
    """A tensor that the caller gives, with one row for each row of the domain."""

    name: str
    """Name of the argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant(Operation):
    """The same number everywhere."""

    value: float
    """The number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Count(Operation):
    """The number of rows of ``over`` that belong to each row."""

    over: Domain
    """The domain whose rows are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Map(Operation):
    """An element-wise function; rows of operands are broadcast against each other from the right."""

    function: str
    """A name in `_elementwise.FUNCTIONS`."""
    parameter: float = 0.0
    """The parameter of functions that have one, such as the slope of ``leaky_relu``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropout(Operation):
    """The first operand times 0 or ``1 / (1 - probability)``, by a hash of row, column, ``stream`` and a seed.

    The seed is the second operand. Backward computes the same zeros again without storing them.
    """

    probability: float
    """Probability of 0."""
    stream: int
    """Number of the dropout within the layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul(Operation):
    """``[..., inner] @ [..., inner, outer]`` for every row, or with the second operand ``[..., outer, inner]``."""

    transposed: bool = False
    """Whether the second operand's last two dimensions are swapped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot(Operation):
    """The sum over the last dimension of the product of two operands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshape(Operation):
    """The same elements in another shape per row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SumTo(Operation):
    """Sums within each row, over the dimensions along which ``shape`` was broadcast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice(Operation):
    """A slice of the last dimension that begins at ``start``."""

    start: int
    """The first element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Concat(Operation):
    """The operands concatenated along the last dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduce(Operation):
    """The sum or maximum of the operand over the rows of ``over`` that belong to each row; 0 if none do."""

    over: Domain
    """The domain whose rows are combined; the operand may have fewer rows."""
    kind: Literal["sum", "max"] = "sum"
    """The operation that combines them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterSum(Operation):
    """The sum over the rows of ``over`` of the outer product of two operands' last dimensions: a weight's gradient."""

    over: Domain
    """The domain whose rows are summed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SameRows(Operation):
    """The operand's rows under the name of another domain, for graphs whose targets are its sources."""


@dataclass(frozen=True, slots=True)
class Program:
    """Operations in order, and which of them are outputs."""

    operations: tuple[Operation, ...]
    """The operations; each reads only earlier ones."""
    outputs: tuple[int, ...]
    """Places of the values that the caller gets."""

    def __getitem__(self, at: int) -> Operation:
        return self.operations[at]

    def __len__(self) -> int:
        return len(self.operations)

    @property
    def inputs(self) -> dict[int, Input]:
        """Inputs by their place."""
        return {at: one for at, one in enumerate(self.operations) if isinstance(one, Input)}

    def readers(self) -> list[list[int]]:
        """Return, for each value, the operations that read it."""
        found: list[list[int]] = [[] for _ in self.operations]
        for at, one in enumerate(self.operations):
            for operand in dict.fromkeys(one.operands):
                found[operand].append(at)
        return found

    def __str__(self) -> str:
        lines = [f"%{at:<3} {_line(one)}" for at, one in enumerate(self.operations)]
        return "\n".join([*lines, "return " + ", ".join(f"%{at}" for at in self.outputs)])


class Builder:
    """A builder of programs: it appends operations, and equal ones only once."""

    def __init__(self, operations: Sequence[Operation] = ()):
        self.operations: list[Operation] = []
        self._places: dict[Operation, int] = {}
        for one in operations:
            self.add(one)

    def __getitem__(self, at: int) -> Operation:
        return self.operations[at]

    def add(self, operation: Operation) -> int:
        """Return the value's place: a new one, or that of an equal operation."""
        place = self._places.get(operation)
        if place is None:
            place = self._places[operation] = len(self.operations)
            self.operations.append(operation)
        return place

    def map(self, function: str, *operands: int, domain: Domain, parameter: float = 0.0) -> int:
        """Add an element-wise function of values."""
        shape = broadcast(*(self[one].shape for one in operands))
        return self.add(Map(domain=domain, shape=shape, operands=operands, function=function, parameter=parameter))

    def widened(self, at: int, domain: Domain) -> int:
        """Return the value with a row for each row of ``domain``, which must be able to read it."""
        if self[at].domain is domain:
            return at
        return self.map("add", at, self.add(Constant(domain=Domain.ONE, shape=(), value=0.0)), domain=domain)

    def program(self, outputs: Iterable[int]) -> Program:
        """Return the program so far, without values that ``outputs`` do not need."""
        return pruned(Program(tuple(self.operations), tuple(outputs)))


def broadcast(*shapes: Shape) -> Shape:
    """Return the shape of an element-wise result. Raises ``ValueError`` if sizes differ and none is 1."""
    length = max((len(shape) for shape in shapes), default=0)
    found = []
    for at in range(-length, 0):
        sizes = {shape[at] for shape in shapes if len(shape) >= -at} - {1}
        if len(sizes) > 1:
            raise ValueError(f"shapes {' and '.join(str(shape) for shape in shapes)} do not broadcast")
        found.append(sizes.pop() if sizes else 1)
    return tuple(found)


def rewritten(operation: Operation, places: Mapping[int, int] | Sequence[int]) -> Operation:
    """Return the operation with its operands at other places."""
    return replace(operation, operands=tuple(places[one] for one in operation.operands))


def pruned(program: Program) -> Program:
    """Return the program without operations and inputs that no output needs."""
    needed = set(program.outputs)
    for at in reversed(range(len(program))):
        if at in needed:
            needed.update(program[at].operands)
    places: dict[int, int] = {}
    kept: list[Operation] = []
    for at, one in enumerate(program.operations):
        if at in needed:
            places[at] = len(kept)
            kept.append(rewritten(one, places))
    return Program(tuple(kept), tuple(places[at] for at in program.outputs))


def verify(program: Program) -> None:
    """Raise ``InternalError`` unless every operand comes earlier and may be read there, and shapes agree."""
    for at, one in enumerate(program.operations):
        if any(operand >= at for operand in one.operands):
            raise InternalError(f"%{at} reads a later value:\n{program}")
        operands = [program[operand] for operand in one.operands]
        if not _domains_agree(one, operands):
            raise InternalError(f"%{at} has rows per {one.domain.value} and cannot read all its operands:\n{program}")
        if not _shapes_agree(one, [operand.shape for operand in operands]):
            raise InternalError(f"%{at} has the wrong shape, {one.shape}:\n{program}")


def _domains_agree(one: Operation, operands: list[Operation]) -> bool:
    if isinstance(one, Reduce | OuterSum):
        return one.over.tells(one.domain) and all(one.over.tells(operand.domain) for operand in operands)
    if isinstance(one, SameRows | Count):
        return not isinstance(one, Count) or one.over.tells(one.domain)
    return all(one.domain.tells(operand.domain) for operand in operands)


def _shapes_agree(one: Operation, shapes: list[Shape]) -> bool:
    match one:
        case Map():
            return len(shapes) == FUNCTIONS[one.function].num_operands and broadcast(*shapes) == one.shape
        case Matmul():
            return matmul_shape(shapes[0], shapes[1], transposed=one.transposed) == one.shape
        case Dot():
            return shapes[0][-1] == shapes[1][-1] and broadcast(*shapes)[:-1] == one.shape
        case Reshape():
            return math.prod(shapes[0]) == math.prod(one.shape)
        case SumTo():
            return broadcast(shapes[0], one.shape) == shapes[0]
        case Slice():
            return shapes[0][:-1] == one.shape[:-1] and one.start + one.shape[-1] <= shapes[0][-1]
        case Concat():
            return sum(shape[-1] for shape in shapes) == one.shape[-1]
        case Reduce() | SameRows() | Dropout():
            return shapes[0] == one.shape
        case OuterSum():
            return (*broadcast(shapes[0][:-1], shapes[1][:-1]), shapes[0][-1], shapes[1][-1]) == one.shape
        case _:
            return not shapes


def matmul_shape(left: Shape, right: Shape, *, transposed: bool) -> Shape:
    """Return the shape of a row's product. Raises ``ValueError`` if the inner sizes differ."""
    inner, outer = (right[-1], right[-2]) if transposed else (right[-2], right[-1])
    if left[-1] != inner:
        raise ValueError(f"a row of size {left[-1]} cannot be multiplied by a matrix of {inner} x {outer}")
    return (*broadcast(left[:-1], right[:-2]), outer)


def _line(one: Operation) -> str:
    operands = ", ".join(f"%{at}" for at in one.operands)
    match one:
        case Input():
            what = f"input {one.name!r}"
        case Constant():
            what = f"{one.value:g}"
        case Count():
            what = f"number of {one.over.value} rows"
        case Map():
            extra = f", {one.parameter:g}" if one.parameter else ""
            what = f"{one.function}({operands}{extra})"
        case Matmul():
            what = f"%{one.operands[0]} @ %{one.operands[1]}" + (".T" if one.transposed else "")
        case Reduce():
            what = f"{one.kind} of {operands} over {one.over.value} rows"
        case Dropout():
            what = f"dropout {one.probability:g} of {operands}, stream {one.stream}"
        case OuterSum():
            what = f"sum of {operands.replace(', ', ' outer ')} over {one.over.value}"
        case Slice():
            what = f"{operands}[..., {one.start}:{one.start + one.shape[-1]}]"
        case _:
            what = f"{type(one).__name__.lower()}({operands})"
    return f"{one.domain.value:<22} {list(one.shape)!s:<12} {what}"
