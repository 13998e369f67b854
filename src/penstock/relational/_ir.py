"""The inter-operator IR: what a layer computes, row by row, over domains and without any index.

A program is a sequence of operations in static single assignment. Each has a domain and a shape per row, and reads
values whose rows its own rows belong to. Reading costs nothing here: that a value per source is looked up for every
edge is what `Domain.tells` means, and no copy of it exists unless an emitter makes one. Rows are only ever brought
together by `Reduce` and `OuterSum`.

Programs are immutable; passes return new ones. `verify` says whether a program is sound, in terms of this file alone.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from penstock.errors import InternalError
from penstock.relational._domain import Domain

Shape = tuple[int, ...]
"""Of one row; ``()`` is a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One value: how it is computed, for which rows, and the shape of a row."""

    domain: Domain
    """What it has rows for."""
    shape: Shape
    """Of one row."""
    operands: tuple[int, ...] = ()
    """Values read, by their place in the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input(Operation):
    """A tensor that the caller gives, with one row for each of the domain's."""

    name: str
    """Of the argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant(Operation):
    """The same number everywhere."""

    value: float
    """The number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Count(Operation):
    """How many rows of ``over`` belong to each row."""

    over: Domain
    """The domain whose rows are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Map(Operation):
    """An element-wise function; rows of operands are broadcast against each other from the right."""

    function: str
    """A name in `FUNCTIONS`."""
    parameter: float = 0.0
    """For functions with one, such as the slope of ``leaky_relu``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropout(Operation):
    """The first operand times 0 or ``1 / (1 - probability)``, by a hash of row, column, ``stream`` and the second
    operand, a seed: backward finds the same zeros again without having kept them.
    """

    probability: float
    """Of 0."""
    stream: int
    """Which of a layer's dropouts it is."""


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
    """Sums, inside of each row, over the dimensions along which ``shape`` was broadcast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice(Operation):
    """Elements ``start`` and after of the last dimension."""

    start: int
    """The first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Concat(Operation):
    """Operands behind each other in the last dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduce(Operation):
    """Brings together the operand as read by those rows of ``over`` that belong to one row. None belong: 0."""

    over: Domain
    """The domain whose rows are gone through; the operand may have fewer."""
    kind: Literal["sum", "max"] = "sum"
    """How."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterSum(Operation):
    """The sum, over the rows ``over``, of the outer product of two operands' last dimensions: a weight's gradient."""

    over: Domain
    """The domain whose rows are summed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SameRows(Operation):
    """The operand's rows under the name of another domain: on graphs whose targets are its sources."""


FUNCTIONS: Mapping[str, int] = {
    "add": 2, "subtract": 2, "multiply": 2, "divide": 2, "negate": 1, "maximum": 2,
    "exp": 1, "log": 1, "sqrt": 1, "reciprocal": 1, "tanh": 1, "sigmoid": 1, "gelu": 1, "gelu_slope": 1,
    "relu": 1, "leaky_relu": 1, "leaky_relu_slope": 1, "abs": 1, "sign": 1, "equal": 2, "is_largest": 2, "greater": 2,
    "elu": 1, "elu_slope": 1, "stop_gradient": 1,
}  # fmt: skip
"""Element-wise functions by name, and how many operands they take. ``is_largest`` is ``equal`` with a maximum,
which may have fewer digits.
"""


@dataclass(frozen=True, slots=True)
class Program:
    """Operations in order, and which of them are asked for."""

    operations: tuple[Operation, ...]
    """Each reads only earlier ones."""
    outputs: tuple[int, ...]
    """Values that the caller gets."""

    def __getitem__(self, at: int) -> Operation:
        return self.operations[at]

    def __len__(self) -> int:
        return len(self.operations)

    @property
    def inputs(self) -> dict[int, Input]:
        """Inputs by their place."""
        return {at: one for at, one in enumerate(self.operations) if isinstance(one, Input)}

    def readers(self) -> list[list[int]]:
        """For each value, the operations that read it."""
        found: list[list[int]] = [[] for _ in self.operations]
        for at, one in enumerate(self.operations):
            for operand in dict.fromkeys(one.operands):
                found[operand].append(at)
        return found

    def __str__(self) -> str:
        lines = [f"%{at:<3} {_line(one)}" for at, one in enumerate(self.operations)]
        return "\n".join([*lines, "return " + ", ".join(f"%{at}" for at in self.outputs)])


class Builder:
    """Makes programs: appends operations, the same one once."""

    def __init__(self, operations: Sequence[Operation] = ()):
        self.operations: list[Operation] = []
        self._places: dict[Operation, int] = {}
        for one in operations:
            self.add(one)

    def __getitem__(self, at: int) -> Operation:
        return self.operations[at]

    def add(self, operation: Operation) -> int:
        """The value's place: a new one, or that of an equal operation."""
        place = self._places.get(operation)
        if place is None:
            place = self._places[operation] = len(self.operations)
            self.operations.append(operation)
        return place

    def map(self, function: str, *operands: int, domain: Domain, parameter: float = 0.0) -> int:
        """An element-wise function of values."""
        shape = broadcast(*(self[one].shape for one in operands))
        return self.add(Map(domain=domain, shape=shape, operands=operands, function=function, parameter=parameter))

    def widened(self, at: int, domain: Domain) -> int:
        """The value with rows per ``domain``, which may read it."""
        if self[at].domain is domain:
            return at
        return self.map("add", at, self.add(Constant(domain=Domain.ONE, shape=(), value=0.0)), domain=domain)

    def program(self, outputs: Iterable[int]) -> Program:
        """What was added, without what ``outputs`` do not need."""
        return pruned(Program(tuple(self.operations), tuple(outputs)))


def broadcast(*shapes: Shape) -> Shape:
    """The shape of an element-wise result. Raises ``ValueError`` where sizes differ and none is 1."""
    length = max((len(shape) for shape in shapes), default=0)
    found = []
    for at in range(-length, 0):
        sizes = {shape[at] for shape in shapes if len(shape) >= -at} - {1}
        if len(sizes) > 1:
            raise ValueError(f"shapes {' and '.join(str(shape) for shape in shapes)} do not broadcast")
        found.append(sizes.pop() if sizes else 1)
    return tuple(found)


def rewritten(operation: Operation, places: Mapping[int, int] | Sequence[int]) -> Operation:
    """The operation with operands at other places."""
    return replace(operation, operands=tuple(places[one] for one in operation.operands))


def pruned(program: Program) -> Program:
    """Without operations that no output needs; inputs that nobody reads go too."""
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
    """Raises ``InternalError`` unless every operand comes earlier, may be read where it is, and shapes agree."""
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
            return len(shapes) == FUNCTIONS[one.function] and broadcast(*shapes) == one.shape
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
    """Of a row's product. Raises ``ValueError`` where the inner sizes differ."""
    inner, outer = (right[-1], right[-2]) if transposed else (right[-2], right[-1])
    if left[-1] != inner:
        raise ValueError(f"a row of {left[-1]} does not fit a matrix of {inner} x {outer}")
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
