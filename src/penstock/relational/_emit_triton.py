"""The Triton emitter: one kernel for each traversal.

A kernel's tiles have one dimension for rows and one for each dimension of a row, padded to powers of two. Values are
requested at index tiles, down to the tensors that they are read from, so that reshaping and slicing a row costs nothing
and needs no power of two. Values that do not depend on the current row are computed once, before the loop.

Groups are cut into tasks of bounded length (`_triton`). An instance takes either one task, many rows at a time, or many
tasks, one row of each at a time (``LANES``).
"""

import math
from dataclasses import dataclass, field

from penstock.errors import InternalError
from penstock.relational._domain import Domain
from penstock.relational._dropout import MASK, hashed, limit_of, scale_of
from penstock.relational._elementwise import FUNCTIONS
from penstock.relational._ir import (
    Concat,
    Constant,
    Dot,
    Dropout,
    Map,
    Operation,
    Program,
    Reduce,
    Reshape,
    SameRows,
    Shape,
    Slice,
    SumTo,
)
from penstock.relational._lower import Kernel, Lowered, Traversal

_HELPERS = sorted(
    {"dropped", "larger", *(record.triton_helper for record in FUNCTIONS.values() if record.triton_helper)}
)
HEADER = f"""\
import triton
import triton.language as tl

from penstock.relational._triton_kernels import {", ".join(_HELPERS)}
"""


@dataclass(frozen=True, slots=True)
class TritonKernel(Kernel):
    """A traversal's kernel in Triton."""

    tile: int
    """The most numbers of one row that are in registers at once."""


def emit(lowered: Lowered, dtype: str) -> tuple[str, dict[int, TritonKernel]]:
    """Return the source of a module with all traversals, and their kernels by step number.

    ``dtype`` is Triton's name of the dtype in which wide values are stored; the rows that equal a maximum are found by
    comparing rounded values.
    """
    header, names, kernels = f"{HEADER}\nSTORED = tl.constexpr(tl.{dtype})\n", dict[str, str](), {}
    for number, step in enumerate(lowered.steps):
        if isinstance(step, Traversal):
            writer = _KernelWriter(lowered, step)
            name = names.setdefault(writer.function(), f"step{number}")  # alike traversals share one kernel
            kernels[number] = TritonKernel(name, step, tuple(writer.domains), tuple(writer.inputs), tile=writer.tile)
    functions = [function.replace("@NAME", name) for function, name in names.items()]
    return "\n\n".join([header, *functions]), kernels


@dataclass(frozen=True, slots=True)
class _Index:
    """The position along one dimension of a row, as a tile."""

    text: str
    """The expression."""
    conditions: tuple[str, ...] = ()
    """Conditions that hold where the position is inside the dimension."""
    axes: frozenset[tuple[int, int]] = frozenset()
    """Dimensions of the tile along which it extends, with their sizes."""


@dataclass(frozen=True, slots=True)
class _Value:
    """A tile of numbers."""

    text: str
    """Name of the variable."""
    is_fixed: bool
    """Whether it is the same for all rows of a group."""


_ZERO = _Index("0")


class _Numbers(dict[int, int]):
    """The number of each value in the names of a kernel, which do not depend on its place in the program."""

    def __missing__(self, place: int) -> int:
        self[place] = len(self)
        return self[place]


@dataclass
class _KernelWriter:
    """A writer of one kernel."""

    lowered: Lowered
    traversal: Traversal
    before: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    domains: dict[Domain, None] = field(default_factory=dict)
    inputs: dict[int, None] = field(default_factory=dict)
    axes: dict[tuple[int, int], None] = field(default_factory=dict)
    known: dict[tuple[int, tuple[_Index, ...]], _Value] = field(default_factory=dict)
    numbers: _Numbers = field(default_factory=_Numbers)
    tile: int = 1

    @property
    def program(self) -> Program:
        return self.lowered.program

    def function(self) -> str:
        roots = self.traversal.roots
        sums = [place for place in roots if isinstance(self.program[place], Reduce)]
        for root in roots:
            self._take(root)
        rank = 1 + max((slot + 1 for slot, _ in self.axes), default=0)
        text = self._grouped(sums, rank) if sums else self._plain(rank)
        return text.replace("@ONES", str([1] * rank))

    # What a row computes

    def _take(self, root: int) -> None:
        """Emit what a row contributes to a root."""
        operation, number = self.program[root], self.numbers[root]
        indices = self._indices(operation.shape)
        if not isinstance(operation, Reduce):
            value = self._computed(root, indices, len(indices))
            pointer = f"b{number} + row.to(tl.int64) * {math.prod(operation.shape)} + {_flat(indices, operation.shape)}"
            mask = " & ".join(["live", *_conditions(indices)])
            self.body.append(f"tl.store({pointer}, {value.text}, mask={mask})")
            return
        value = self._value(operation.operands[0], indices, len(indices))
        if operation.kind == "max":
            self.body += [
                f'm{number} = tl.where(live, {value.text}, float("-inf"))',
                "if LANES:",
                f"    a{number} = larger(a{number}, m{number})",
                "else:",
                f"    a{number} = larger(a{number}, tl.reduce(m{number}, 0, larger, keep_dims=True))",
            ]
        else:
            self.body += [
                f"m{number} = tl.where(live, {value.text}, 0.0)",
                "if LANES:",
                f"    a{number} = a{number} + m{number}",
                "else:",
                f"    a{number} = a{number} + tl.sum(m{number}, axis=0, keep_dims=True)",
            ]

    def _indices(self, shape: Shape) -> list[_Index]:
        return [self._axis(slot, size) for slot, size in enumerate(shape)]

    def _axis(self, slot: int, size: int) -> _Index:
        """Return all elements of a dimension, along the tile's dimension ``slot + 1``."""
        if size == 1:
            return _ZERO
        self.axes.setdefault((slot, size))
        name, padded = f"x{slot}_{size}", _padded(size)
        return _Index(name, () if padded == size else (f"({name} < {size})",), frozenset([(slot, size)]))

    def _value(self, place: int, indices: list[_Index], depth: int) -> _Value:
        """Return the value broadcast to a row with these indices; tile dimensions from ``depth`` on are free."""
        own = self.program[place].shape
        indices = indices[len(indices) - len(own) :]
        indices = [_ZERO if size == 1 else index for index, size in zip(indices, own, strict=True)]
        return self._computed(place, indices, depth)

    def _computed(self, place: int, indices: list[_Index], depth: int) -> _Value:
        key = place, tuple(indices)
        value = self.known.get(key)
        if value is None:
            self.tile = max(self.tile, _numbers(indices))
            is_read = place in self.lowered.stored and place not in self.traversal.roots
            value = self._load(place, indices) if is_read else self._compute(place, indices, depth)
            self.known[key] = value
        return value

    def _compute(self, place: int, indices: list[_Index], depth: int) -> _Value:
        operation = self.program[place]
        match operation:
            case Constant():
                return self._new(f"tl.full(@ONES, {_number(operation.value)}, tl.float32)", is_fixed=True)
            case Map():
                values = [self._value(operand, indices, depth) for operand in operation.operands]
                texts = [value.text for value in values]
                text = FUNCTIONS[operation.function].triton.format(*texts, p=_number(operation.parameter))
                return self._new(text, is_fixed=all(value.is_fixed for value in values))
            case Reshape():
                (operand,) = operation.operands
                shape = self.program[operand].shape
                return self._value(operand, _reshaped(indices, operation.shape, shape), depth)
            case Slice():
                last = indices[-1]
                moved = _Index(f"({last.text} + {operation.start})", last.conditions, last.axes)
                return self._value(operation.operands[0], [*indices[:-1], moved], depth)
            case Concat():
                return self._concat(operation, indices, depth)
            case Dropout():
                return self._dropout(operation, indices, depth)
            case Dot():
                width = self.program[operation.operands[0]].shape[-1]
                inner = self._axis(depth, width)
                left, right = (self._value(operand, [*indices, inner], depth + 1) for operand in operation.operands)
                fixed = left.is_fixed and right.is_fixed
                return self._sum(f"{left.text} * {right.text}", [inner], depth, is_fixed=fixed)
            case SumTo():
                return self._sum_to(operation, indices, depth)
            case _:
                raise InternalError(f"the Triton emitter does not know {type(operation).__name__} inside of a row")

    def _sum_to(self, operation: SumTo, indices: list[_Index], depth: int) -> _Value:
        (operand,) = operation.operands
        shape = self.program[operand].shape
        missing = len(shape) - len(operation.shape)
        wanted: list[_Index] = []
        added: list[_Index] = []
        for number, size in enumerate(shape):
            if number >= missing and operation.shape[number - missing] == size:
                wanted.append(indices[number - missing])
            else:
                wanted.append(self._axis(depth + len(added), size))
                added.append(wanted[-1])
        value = self._value(operand, wanted, depth + len(added))
        return self._sum(value.text, added, depth, is_fixed=value.is_fixed)

    def _sum(self, text: str, along: list[_Index], depth: int, *, is_fixed: bool) -> _Value:
        for number, index in enumerate(along):
            if not index.axes:
                continue
            inside = " & ".join(index.conditions) or f"{index.text} >= 0"
            text = f"tl.where({inside}, {text}, 0.0)"  # expands a value that is constant along the dimension
            text = f"tl.sum({text}, axis={depth + number + 1}, keep_dims=True)"
        return self._new(text, is_fixed=is_fixed)

    def _concat(self, operation: Concat, indices: list[_Index], depth: int) -> _Value:
        last, end = indices[-1], operation.shape[-1]
        result: _Value | None = None
        for operand in reversed(operation.operands):
            start = end - self.program[operand].shape[-1]
            inside = (*last.conditions, f"({last.text} >= {start})", f"({last.text} < {end})")
            moved = _Index(f"({last.text} - {start})", inside, last.axes)
            value = self._value(operand, [*indices[:-1], moved], depth)
            if result is not None:
                text = f"tl.where({last.text} < {end}, {value.text}, {result.text})"
                value = self._new(text, is_fixed=value.is_fixed and result.is_fixed)
            result, end = value, start
        assert result is not None
        return result

    def _dropout(self, operation: Dropout, indices: list[_Index], depth: int) -> _Value:
        value = self._value(operation.operands[0], indices, depth)
        row = self._row(operation.domain)
        limit, scale = limit_of(operation.probability), scale_of(operation.probability)
        column = f"{row} * 0 + {_flat(indices, operation.shape)}"
        text = f"{value.text} * dropped({row}, {column}, seed, {hashed(operation.stream & MASK)}, {limit}, {scale!r})"
        return self._new(text, is_fixed=False)

    def _load(self, place: int, indices: list[_Index]) -> _Value:
        source = place
        while isinstance(self.program[source], SameRows):
            (source,) = self.program[source].operands
        self.inputs.setdefault(source)
        domain, shape = self.program[place].domain, self.program[place].shape
        is_fixed = domain in (Domain.ONE, self.traversal.by) and domain is not self.traversal.over
        conditions = _conditions(indices)
        pointer = f"b{self.numbers[source]}"
        if domain is not Domain.ONE:
            conditions.insert(0, "alive" if is_fixed else "live")
            pointer += f" + {self._row(domain)}.to(tl.int64) * {math.prod(shape)}"
        flat = _flat(indices, shape)
        pointer += f" + {flat}" if flat != "0" else ""
        mask = f", mask={' & '.join(conditions)}, other=0.0" if conditions else ""
        return self._new(f"tl.load({pointer}{mask}).to(tl.float32)", is_fixed=is_fixed)

    def _row(self, domain: Domain) -> str:
        if domain is self.traversal.over:
            return "row"
        if domain is self.traversal.by:
            return "group"
        self.domains.setdefault(domain)
        return f"r{list(self.domains).index(domain)}"

    def _new(self, text: str, *, is_fixed: bool) -> _Value:
        lines = self.before if is_fixed else self.body
        name = f"v{len(self.before) + len(self.body)}"
        lines.append(f"{name} = {text}")
        return _Value(name, is_fixed)

    # Loops around rows

    def _axis_lines(self, rank: int) -> list[str]:
        return [f"x{slot}_{size} = tl.arange(0, {_padded(size)}){_spread(slot + 1, rank)}" for slot, size in self.axes]

    def _index_lines(self) -> list[str]:
        return [f"r{number} = tl.load(i{number} + p, mask=live, other=0)" for number in range(len(self.domains))]

    def _arguments(self) -> list[str]:
        return [
            *(f"i{number}" for number in range(len(self.domains))),
            *(f"b{self.numbers[place]}" for place in (*self.inputs, *self.traversal.roots)),
        ]

    def _plain(self, rank: int) -> str:
        """Return a kernel over rows without groups."""
        arguments = ", ".join(["num_rows", "seed", *self._arguments(), "ROWS: tl.constexpr"])
        lines = [
            f"p = tl.program_id(0) * ROWS + tl.arange(0, ROWS){_spread(0, rank)}",
            "row = p",
            "live = p < num_rows",
            *self._axis_lines(rank),
            *self._index_lines(),
            *self.before,
            *self.body,
        ]
        return _function(arguments, "num_rows", lines)

    def _grouped(self, sums: list[int], rank: int) -> str:
        """Return a kernel over the rows of one task, or over one row of each of many tasks."""
        parts = [f"q{self.numbers[place]}" for place in sums]
        flags = [f"{name}: tl.constexpr" for name in ("HAS_POSITIONS", "LANES", "ROWS")]
        arguments = ", ".join(
            ["groups", "begins", "ends", "part_numbers", "positions", "num_tasks", "seed"]
            + [*self._arguments(), *parts, *flags]
        )
        lines = [
            "NUM_GROUPS: tl.constexpr = ROWS if LANES else 1",
            "STEP: tl.constexpr = 1 if LANES else ROWS",
            f"task = tl.program_id(0) * NUM_GROUPS + tl.arange(0, NUM_GROUPS){_spread(0, rank)}",
            "alive = task < num_tasks",
            *(f"{name} = tl.load({name}s + task, mask=alive, other=0)" for name in ("group", "begin", "end")),
            *self._axis_lines(rank),
            *self.before,
        ]
        ends = []
        for place in sums:
            operation, number = self.program[place], self.numbers[place]
            indices = self._indices(operation.shape)
            sizes = [_padded(size) for size in operation.shape][: rank - 1]
            shape = ", ".join(["NUM_GROUPS", *map(str, sizes), *["1"] * (rank - 1 - len(sizes))])
            lines.append(f"a{number} = tl.full([{shape}], {_neutral(operation)}, tl.float32)")
            size, flat = math.prod(operation.shape), _flat(indices, operation.shape)
            inside = "".join(f" & {condition}" for condition in _conditions(indices))
            for buffer, row, whole in (
                (f"b{number}", "group", "part_number < 0"),
                (f"q{number}", "part_number", "part_number >= 0"),
            ):
                pointer = f"{buffer} + {row}.to(tl.int64) * {size} + {flat}"
                ends.append(f"tl.store({pointer}, a{number}, mask=alive & ({whole}){inside})")
        lines += [
            "for at in range(0, tl.max(end - begin), STEP):",
            f"    p = begin + at + tl.arange(0, ROWS){_spread(0, rank)} * (0 if LANES else 1)",
            "    live = p < end",
            "    if HAS_POSITIONS:",
            "        row = tl.load(positions + p, mask=live, other=0)",
            "    else:",
            "        row = p",
            *(f"    {line}" for line in [*self._index_lines(), *self.body]),
            "part_number = tl.load(part_numbers + task, mask=alive, other=0)",
            *ends,
        ]
        return _function(arguments, "num_tasks", lines)


def _function(arguments: str, count: str, lines: list[str]) -> str:
    body = "\n".join(f"    {line}" for line in lines)
    return f'@triton.jit(do_not_specialize=["{count}", "seed"])\ndef @NAME({arguments}):\n{body}\n'


def _spread(dimension: int, rank: int) -> str:
    """Return subscripts that put a vector along one dimension of a tile."""
    if rank == 1:
        return ""
    return f"[{', '.join(':' if axis == dimension else 'None' for axis in range(rank))}]"


def _padded(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _numbers(indices: list[_Index]) -> int:
    """Return the numbers in a tile with these indices, not counting rows."""
    return math.prod(
        _padded(size) for _, size in frozenset[tuple[int, int]]().union(*(index.axes for index in indices))
    )


def _conditions(indices: list[_Index]) -> list[str]:
    return list(dict.fromkeys(condition for index in indices for condition in index.conditions))


def _number(value: float) -> str:
    return repr(value) if math.isfinite(value) else f'float("{value}")'


def _neutral(operation: Operation) -> str:
    assert isinstance(operation, Reduce)
    return "0.0" if operation.kind == "sum" else 'float("-inf")'


def _flat(indices: list[_Index], shape: Shape) -> str:
    """Return the position of an element in a row."""
    text = ""
    for index, size in zip(indices, shape, strict=True):
        if size != 1:
            text = f"({text} * {size} + {index.text})" if text else index.text
    return text or "0"


def _reshaped(indices: list[_Index], shape: Shape, wanted: Shape) -> list[_Index]:
    """Return the indices into ``wanted`` of the element at ``indices`` of ``shape``."""
    long = [(index, size) for index, size in zip(indices, shape, strict=True) if size != 1]
    if [size for _, size in long] == [size for size in wanted if size != 1]:
        rest = iter(index for index, _ in long)
        return [_ZERO if size == 1 else next(rest) for size in wanted]
    flat, conditions = _flat(indices, shape), tuple(_conditions(indices))
    axes, result, below = frozenset[tuple[int, int]]().union(*(index.axes for index in indices)), [], 1
    for size in reversed(wanted):
        result.append(_ZERO if size == 1 else _Index(f"({flat} // {below} % {size})", conditions, axes))
        below *= size
    return result[::-1]
