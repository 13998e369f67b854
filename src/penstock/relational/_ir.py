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

    def __getitem__(self, place: int) -> Operation:
        return self.operations[place]

    def __len__(self) -> int:
        return len(self.operations)

    @property
    def inputs(self) -> dict[int, Input]:
        """Inputs by their place."""
        return {place: operation for place, operation in enumerate(self.operations) if isinstance(operation, Input)}

    def readers(self) -> list[list[int]]:
        """Return, for each value, the operations that read it."""
        result: list[list[int]] = [[] for _ in self.operations]
        for place, operation in enumerate(self.operations):
            for operand in dict.fromkeys(operation.operands):
                result[operand].append(place)
        return result

    def names(self, place: int) -> list[int]:
        """Return the value, and those whose rows it shares, the last of which has its memory."""
        names = [place]
        while isinstance(alias := self[names[-1]], SameRows):
            names.append(alias.operands[0])
        return names

    def __str__(self) -> str:
        lines = [f"%{place:<3} {_line(operation)}" for place, operation in enumerate(self.operations)]
        return "\n".join([*lines, "return " + ", ".join(f"%{place}" for place in self.outputs)])


class Builder:
    """A builder of programs: it appends operations, and equal ones only once."""

    def __init__(self, operations: Sequence[Operation] = ()):
        self.operations: list[Operation] = []
        self._places: dict[Operation, int] = {}
        for operation in operations:
            self.add(operation)

    def __getitem__(self, place: int) -> Operation:
        return self.operations[place]

    def add(self, operation: Operation) -> int:
        """Return the value's place: a new one, or that of an equal operation."""
        place = self._places.get(operation)
        if place is None:
            place = self._places[operation] = len(self.operations)
            self.operations.append(operation)
        return place

    def map(self, function: str, *operands: int, domain: Domain, parameter: float = 0.0) -> int:
        """Add an element-wise function of values."""
        shape = broadcast(*(self[operand].shape for operand in operands))
        return self.add(Map(domain=domain, shape=shape, operands=operands, function=function, parameter=parameter))

    def widened(self, place: int, domain: Domain) -> int:
        """Return the value with a row for each row of ``domain``, which must be able to read it."""
        if self[place].domain is domain:
            return place
        return self.map("add", place, self.add(Constant(domain=Domain.ONE, shape=(), value=0.0)), domain=domain)

    def program(self, outputs: Iterable[int]) -> Program:
        """Return the program so far, without values that ``outputs`` do not need."""
        return pruned(Program(tuple(self.operations), tuple(outputs)))


def broadcast(*shapes: Shape) -> Shape:
    """Return the shape of an element-wise result. Raises ``ValueError`` if sizes differ and none is 1."""
    length = max((len(shape) for shape in shapes), default=0)
    result = []
    for dimension in range(-length, 0):
        sizes = {shape[dimension] for shape in shapes if len(shape) >= -dimension} - {1}
        if len(sizes) > 1:
            raise ValueError(f"shapes {' and '.join(str(shape) for shape in shapes)} do not broadcast")
        result.append(sizes.pop() if sizes else 1)
    return tuple(result)


def rewritten(operation: Operation, places: Mapping[int, int] | Sequence[int]) -> Operation:
    """Return the operation with its operands at other places."""
    return replace(operation, operands=tuple(places[operand] for operand in operation.operands))


def pruned(program: Program) -> Program:
    """Return the program without operations and inputs that no output needs."""
    needed = set(program.outputs)
    for place in reversed(range(len(program))):
        if place in needed:
            needed.update(program[place].operands)
    places: dict[int, int] = {}
    kept: list[Operation] = []
    for place, operation in enumerate(program.operations):
        if place in needed:
            places[place] = len(kept)
            kept.append(rewritten(operation, places))
    return Program(tuple(kept), tuple(places[place] for place in program.outputs))


def verify(program: Program) -> None:
    """Raise ``InternalError`` unless every operand comes earlier and may be read there, and shapes agree."""
    for place, operation in enumerate(program.operations):
        if any(operand >= place for operand in operation.operands):
            raise InternalError(f"%{place} reads a later value:\n{program}")
        operands = [program[operand] for operand in operation.operands]
        if not _domains_agree(operation, operands):
            raise InternalError(
                f"%{place} has rows per {operation.domain.value} and cannot read all its operands:\n{program}"
            )
        if not _shapes_agree(operation, [operand.shape for operand in operands]):
            raise InternalError(f"%{place} has the wrong shape, {operation.shape}:\n{program}")


def _domains_agree(operation: Operation, operands: list[Operation]) -> bool:
    if isinstance(operation, Reduce | OuterSum):
        return operation.over.tells(operation.domain) and all(
            operation.over.tells(operand.domain) for operand in operands
        )
    if isinstance(operation, SameRows | Count):
        return not isinstance(operation, Count) or operation.over.tells(operation.domain)
    return all(operation.domain.tells(operand.domain) for operand in operands)


def _shapes_agree(operation: Operation, shapes: list[Shape]) -> bool:
    match operation:
        case Map():
            return len(shapes) == FUNCTIONS[operation.function].num_operands and broadcast(*shapes) == operation.shape
        case Matmul():
            return matmul_shape(shapes[0], shapes[1], transposed=operation.transposed) == operation.shape
        case Dot():
            return shapes[0][-1] == shapes[1][-1] and broadcast(*shapes)[:-1] == operation.shape
        case Reshape():
            return math.prod(shapes[0]) == math.prod(operation.shape)
        case SumTo():
            return broadcast(shapes[0], operation.shape) == shapes[0]
        case Slice():
            return shapes[0][:-1] == operation.shape[:-1] and operation.start + operation.shape[-1] <= shapes[0][-1]
        case Concat():
            return sum(shape[-1] for shape in shapes) == operation.shape[-1]
        case Reduce() | SameRows() | Dropout():
            return shapes[0] == operation.shape
        case OuterSum():
            return (*broadcast(shapes[0][:-1], shapes[1][:-1]), shapes[0][-1], shapes[1][-1]) == operation.shape
        case _:
            return not shapes


def matmul_shape(left: Shape, right: Shape, *, transposed: bool) -> Shape:
    """Return the shape of a row's product. Raises ``ValueError`` if the inner sizes differ."""
    inner, outer = (right[-1], right[-2]) if transposed else (right[-2], right[-1])
    if left[-1] != inner:
        raise ValueError(f"a row of size {left[-1]} cannot be multiplied by a matrix of {inner} x {outer}")
    return (*broadcast(left[:-1], right[:-2]), outer)


def _line(operation: Operation) -> str:
    operands = ", ".join(f"%{operand}" for operand in operation.operands)
    match operation:
        case Input():
            what = f"input {operation.name!r}"
        case Constant():
            what = f"{operation.value:g}"
        case Count():
            what = f"number of {operation.over.value} rows"
        case Map():
            extra = f", {operation.parameter:g}" if operation.parameter else ""
            what = f"{operation.function}({operands}{extra})"
        case Matmul():
            what = f"%{operation.operands[0]} @ %{operation.operands[1]}" + (".T" if operation.transposed else "")
        case Reduce():
            what = f"{operation.kind} of {operands} over {operation.over.value} rows"
        case Dropout():
            what = f"dropout {operation.probability:g} of {operands}, stream {operation.stream}"
        case OuterSum():
            what = f"sum of {operands.replace(', ', ' outer ')} over {operation.over.value}"
        case Slice():
            what = f"{operands}[..., {operation.start}:{operation.start + operation.shape[-1]}]"
        case _:
            what = f"{type(operation).__name__.lower()}({operands})"
    return f"{operation.domain.value:<22} {list(operation.shape)!s:<12} {what}"
