"""The C emitter: one function for each traversal.

A traversal's rows are divided into runs of equal length, independent of groups, so that a hub does not keep one thread
busy while others wait. Sums are kept in local arrays. A group that spans several runs leaves partial sums, which are
added in order afterwards, so that results are bit-identical from run to run with the same number of threads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.errors import InternalError
from penstock.relational._domain import OF_TYPES, Domain
from penstock.relational._dropout import C_SOURCE, hashed, limit_of, scale_of
from penstock.relational._elementwise import C_MATH, FUNCTIONS
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
    Shape,
    Slice,
    SumTo,
)
from penstock.relational._lower import BlockedPass, Kernel, Lowered, ScatteredProduct, Traversal

_SIMD = '_Pragma("omp simd reduction(+:sum)")'
MOST_LOCAL = 16
"""Most numbers of a row that are kept in a local array; longer rows are computed where they are read."""

PRELUDE = """
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int64_t num_positions, num_groups, num_threads, seed;
    const int64_t *starts;
    const int32_t *positions;
    const int32_t *const *indexes;
    void *const *buffers;
} Context;

enum { AHEAD = 32 };

@DROPOUT
@HELPERS
static int64_t group_of(const int64_t *starts, int64_t num_groups, int64_t position) {
    int64_t low = 0, high = num_groups - 1;
    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (starts[middle] <= position)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}
"""
_DTYPES = {"float32": ("float", "f"), "float64": ("double", "")}
"""Types in C by dtype, and the suffix of the math library's functions for them."""


def emit(lowered: Lowered, dtype: str) -> tuple[str, dict[int, Kernel]]:
    """Return the C source of all traversals, and their kernels by step number. ``dtype``: float32 or float64."""
    functions, kernels = [], {}
    for number, step in enumerate(lowered.steps):
        if isinstance(step, BlockedPass) and step.rows is not None:
            writer = _FunctionWriter(_RowWriter(lowered, step.rows), f"step{number}")
            functions.append(writer.function_of_groups())
            kernels[number] = writer.kernel()
        elif isinstance(step, ScatteredProduct):
            writer = _FunctionWriter(_RowWriter(lowered, step.rows, scattered=step), f"step{number}")
            functions.append(writer.function_of_products())
            kernels[number] = writer.kernel()
        elif isinstance(step, Traversal):
            writer = _FunctionWriter(_RowWriter(lowered, step), f"step{number}")
            functions.append(writer.function())
            kernels[number] = writer.kernel()
    return f"{_prelude(dtype)}\n" + "\n".join(functions), kernels


def _prelude(dtype: str) -> str:
    """Return what all functions of a source share."""
    real, suffix = _DTYPES[dtype]
    lines = [f"#define real {real}", *(f"#define {name.upper()} {name}{suffix}" for name in C_MATH)]
    helpers = "\n".join(record.c_helper for record in FUNCTIONS.values() if record.c_helper)
    return "\n".join(lines) + "\n" + PRELUDE.replace("@DROPOUT", C_SOURCE).replace("@HELPERS", helpers)


@dataclass
class _FunctionWriter:
    """A writer of one function: loops around the rows of a traversal."""

    row: "_RowWriter"
    """A row; complete before loops are written, since it says which indexes and buffers they need."""
    name: str
    """Name of the function."""

    def kernel(self) -> Kernel:
        """Return the function's arguments."""
        return Kernel(self.name, self.row.traversal, tuple(self.row.domains), tuple(self.row.inputs))

    def function_of_groups(self) -> str:
        """Return the function that computes the sums of some groups, each sum's results one after the other."""
        for root in self.row.traversal.roots:
            self.row.add_root(root)
        program, traversal = self.row.program, self.row.traversal
        sums = {place: math.prod(program[place].shape) for place in traversal.sums(program)}
        begin = "".join(
            f"real a{place}[{size}]; for (int j = 0; j < {size}; j++) a{place}[j] = {_neutral(program[place])};\n"
            for place, size in sums.items()
        )
        end = "".join(
            f"memcpy(results[{number}] + (group - begin) * {size}, a{place}, sizeof a{place});\n"
            for number, (place, size) in enumerate(sums.items())
        )
        body = "\n".join([self._row_of_position(), *self.row.body])
        return f"""int {self.name}(const Context *c, int64_t begin, int64_t end, real *const *results) {{
{self._declarations([root for root in traversal.roots if root not in sums])}
    for (int64_t group = begin; group < end; group++) {{
        {begin}
        for (int64_t p = c->starts[group]; p < c->starts[group + 1]; p++) {{
{body}
        }}
        {end}
    }}
    return 0;
}}
"""

    def function_of_products(self) -> str:
        """Return the function that adds some columns of the products of some groups to the sums of nodes."""
        for root in self.row.traversal.roots:
            self.row.add_root(root)
        body = "\n".join([self._row_of_position(), *self.row.body])
        return f"""int {self.name}(
    const Context *c, int64_t begin, int64_t end, const real *restrict rows, int64_t first) {{
{self._declarations(self.row.traversal.roots)}
    for (int64_t group = begin; group < end; group++) {{
        for (int64_t p = c->starts[group]; p < c->starts[group + 1]; p++) {{
{body}
        }}
    }}
    return 0;
}}
"""

    def function(self) -> str:
        """Return the function of any other traversal."""
        for root in self.row.traversal.roots:
            self.row.add_root(root)
        sums = self.row.traversal.sums(self.row.program)
        text = self._segmented(sums) if sums else self._plain()
        return f"int {self.name}(const Context *c) {{\n{text}\n    return 0;\n}}\n"

    def _declarations(self, roots: Sequence[int]) -> str:
        """Return the declarations of buffers: first those that are read, then those of ``roots``."""
        names = [*(f"const real *restrict const b{place}" for place in self.row.inputs)]
        names += [f"real *restrict const b{place}" for place in roots]
        return "\n".join(f"    {name} = c->buffers[{number}];" for number, name in enumerate(names))

    def _row_of_position(self) -> str:
        lines = ["const int64_t row = c->positions ? c->positions[p] : p; (void)row;"]
        for number, domain in enumerate(self.row.domains):
            lines.append(f"const int64_t r_{domain.name} = c->indexes[{number}][p];")
        lines += self._prefetches()
        return "\n".join(lines)

    def _prefetches(self) -> list[str]:
        """Return prefetches of what later rows look up and write, since the processor cannot predict where that is.

        Its own look-ahead is less than a row of 256 bytes.
        """
        step, program = self.row.traversal, self.row.program
        rows = {domain: f"c->indexes[{number}][p + AHEAD]" for number, domain in enumerate(self.row.domains)}
        if step.by is not None:
            rows[step.over] = "later"
        touched = dict.fromkeys(self.row.lookups, 0)
        touched |= {(root, step.over): 1 for root in step.roots if not isinstance(program[root], Reduce)}
        lines = []
        for (place, domain), is_written in touched.items():
            if domain in rows and domain not in OF_TYPES:
                size = math.prod(program[place].shape)
                row = f"b{place} + {rows[domain]} * (int64_t){size}"
                if self.row.scattered is not None and place in step.roots:
                    row, size, is_written = f"{row} + first", self.row.scattered.columns(program), 1
                lines += [
                    f"__builtin_prefetch({row} + {start}, {is_written});" for start in range(0, min(size, 128), 16)
                ]
        if any("later" in line for line in lines):
            lines.insert(0, "const int64_t later = c->positions ? c->positions[p + AHEAD] : p + AHEAD;")
        return ["if (p + AHEAD < c->num_positions) {", *lines, "}"] if lines else []

    def _plain(self) -> str:
        """Return the loop over rows without groups."""
        body = "\n".join([self._row_of_position(), *self.row.body])
        return (
            f"{self._declarations(self.row.traversal.roots)}\n"
            "#pragma omp parallel for num_threads((int)c->num_threads) schedule(static) if (c->num_positions > 4096)\n"
            f"    for (int64_t p = 0; p < c->num_positions; p++) {{\n{body}\n    }}"
        )

    def _of_sums(self, sums: list[int]) -> tuple[int, str, str, str, str, str]:
        """Return the numbers that all sums of a group have, and what the loop over groups does with them.

        That is to begin a group's sums, to write whole ones, to write parts, to join those, and to write zeros.
        """
        program = self.row.program
        sizes = {place: math.prod(program[place].shape) for place in sums}
        starts, offset = {}, 0
        for place in sums:
            starts[place] = offset
            offset += sizes[place]
        first = "".join(
            f"real a{place}[{sizes[place]}]; "
            f"for (int j = 0; j < {sizes[place]}; j++) a{place}[j] = {_neutral(program[place])};\n"
            for place in sums
        )
        whole = "".join(f"memcpy(b{place} + group * {sizes[place]}, a{place}, sizeof a{place});\n" for place in sums)
        part = "".join(
            f"memcpy(parts + slot * {offset} + {starts[place]}, a{place}, sizeof a{place});\n" for place in sums
        )
        join = "".join(
            f"for (int j = 0; j < {sizes[place]}; j++) {{ real *const to = b{place} + group * {sizes[place]} + j; "
            f"const real x = parts[slot * {offset} + {starts[place]} + j]; "
            f"*to = is_first ? x : {_joined(program[place])}; }}\n"
            for place in sums
        )
        empty = "".join(f"memset(b{place} + e * {sizes[place]}, 0, sizeof(real) * {sizes[place]});\n" for place in sums)
        return offset, first, whole, part, join, empty

    def _segmented(self, sums: list[int]) -> str:
        """Return the loop over runs of rows, with the groups inside each run."""
        offset, first, whole, part, join, empty = self._of_sums(sums)
        body = "\n".join([self._row_of_position(), *self.row.body])
        return f"""{self._declarations(self.row.traversal.roots)}
    const int64_t n = c->num_positions, runs = n > 4096 ? c->num_threads : 1;
    real *const parts = malloc((size_t)(2 * runs * {offset}) * sizeof(real));
    int64_t *const owners = malloc((size_t)(2 * runs) * sizeof(int64_t));
    if (!parts || !owners) {{ free(parts); free(owners); return 1; }}
    for (int64_t slot = 0; slot < 2 * runs; slot++) owners[slot] = -1;
#pragma omp parallel for num_threads((int)runs) schedule(static, 1) if (runs > 1)
    for (int64_t run = 0; run < runs; run++) {{
        int64_t p = n * run / runs;
        const int64_t end = n * (run + 1) / runs;
        int64_t group = p < end ? group_of(c->starts, c->num_groups, p) : 0;
        for (int64_t e = 0; run == 0 && e < group; e++) {{
            {empty}
        }}
        while (p < end) {{
            const int64_t begin = p, stop = c->starts[group + 1] < end ? c->starts[group + 1] : end;
            {first}
            for (; p < stop; p++) {{
{body}
            }}
            if (begin == c->starts[group] && stop == c->starts[group + 1]) {{
                {whole}
            }} else {{
                const int64_t slot = 2 * run + (begin == c->starts[group]);
                owners[slot] = group;
                {part}
            }}
            for (group++; group < c->num_groups && c->starts[group + 1] <= p; group++) {{
                const int64_t e = group;
                {empty}
            }}
        }}
    }}
    int64_t before = -1;
    for (int64_t slot = 0; slot < 2 * runs; slot++) {{
        const int64_t group = owners[slot];
        if (group < 0) continue;
        const int is_first = group != before;
        before = group;
        {join}
    }}
    free(parts);
    free(owners);"""


@dataclass
class _RowWriter:
    """A writer of what one row of a traversal computes, which notes what the row needs."""

    lowered: Lowered
    """The program."""
    traversal: Traversal
    """The traversal."""
    scattered: ScatteredProduct | None = None
    """The step, if a block of products is given and sums are added up in memory."""
    body: list[str] = field(default_factory=list)
    """Statements, in order."""
    locals: set[int] = field(default_factory=set)
    """Places of the values in local arrays."""
    domains: dict[Domain, None] = field(default_factory=dict)
    """Domains whose rows are looked up, in order of first use."""
    inputs: dict[int, None] = field(default_factory=dict)
    """Places of the values read from buffers, in order of first use."""
    lookups: dict[tuple[int, Domain], None] = field(default_factory=dict)
    """The same with the domains by whose rows they are read."""

    @property
    def program(self) -> Program:
        """The operations."""
        return self.lowered.program

    def add_root(self, root: int) -> None:
        """Emit the values that a root needs, and what the row contributes to it."""
        self._prepare(root)
        self._accumulate(root)

    def _prepare(self, root: int) -> None:
        """Emit the values that the root reads and that no buffer holds, in order."""
        operation = self.program[root]
        wanted = list(operation.operands) if isinstance(operation, Reduce) else [root]
        for place in self._order(wanted):
            if self._is_local(place) and place not in self.locals:
                self._emit_local(place)
                self.locals.add(place)

    def _order(self, wanted: list[int]) -> list[int]:
        needed: set[int] = set()
        stack = list(wanted)
        while stack:
            place = stack.pop()
            if place in needed or self._is_read(place):
                continue
            needed.add(place)
            stack.extend(self.program[place].operands)
        return sorted(needed)

    def _is_read(self, place: int) -> bool:
        """Return whether the value comes from a buffer."""
        is_given = self.scattered is not None and place == self.scattered.product
        return is_given or (place in self.lowered.stored and place not in self.traversal.roots)

    def _is_local(self, place: int) -> bool:
        operation = self.program[place]
        if isinstance(operation, Constant | Reduce):
            return False
        return math.prod(operation.shape) <= MOST_LOCAL or isinstance(operation, Dot | SumTo)

    def _emit_local(self, place: int) -> None:
        operation = self.program[place]
        size = math.prod(operation.shape)
        self.body.append(f"real v{place}[{size}];")
        names = [f"i{number}" for number in range(len(operation.shape))]
        target = f"v{place}[{_flat(names, operation.shape)}]"
        if isinstance(operation, Dot):
            left, right = operation.operands
            width = self.program[left].shape[-1]
            product = f"{self._value(left, [*names, 'k'])} * {self._value(right, [*names, 'k'])}"
            inner = f"real sum = 0;\n{_SIMD}\nfor (int k = 0; k < {width}; k++) sum += {product};\n{target} = sum;"
        elif isinstance(operation, SumTo):
            inner = self._sum_to(operation, names, target)
        else:
            inner = f"{target} = {self._expression(place, names)};"
        self.body.append(_loops(names, operation.shape, inner))

    def _sum_to(self, operation: SumTo, names: list[str], target: str) -> str:
        (operand,) = operation.operands
        shape = self.program[operand].shape
        missing = len(shape) - len(operation.shape)
        indices, loops, sizes = [], [], []
        for number, size in enumerate(shape):
            kept = number >= missing and operation.shape[number - missing] == size
            indices.append(names[number - missing] if kept else f"k{number}")
            if not kept:
                loops.append(f"k{number}")
                sizes.append(size)
        value = self._value(operand, indices)
        if not loops:
            return f"{target} = {value};"
        last = f"{_SIMD}\nfor (int {loops[-1]} = 0; {loops[-1]} < {sizes[-1]}; {loops[-1]}++) "
        body = _loops(loops[:-1], tuple(sizes[:-1]), f"{last}sum += {value};")
        return f"real sum = 0;\n{body}\n{target} = sum;"

    def _value(self, place: int, indices: list[str]) -> str:
        """Return an element as seen from a row of a shape to which the value's row is broadcast."""
        own = self.program[place].shape
        indices = indices[len(indices) - len(own) :]
        indices = ["0" if size == 1 else index for index, size in zip(indices, own, strict=True)]
        operation = self.program[place]
        if self.scattered is not None and place == self.scattered.product:
            row = (*own[:-1], self.scattered.columns(self.program))
            return f"rows[(group - begin) * {math.prod(row)} + {_flat(indices, row)} - first]"
        if self._is_read(place):
            return f"{self._pointer(place)}[{_flat(indices, own)}]"
        if isinstance(operation, Constant):
            return f"((real){_number(operation.value)})"
        if self._is_local(place):
            return f"v{place}[{_flat(indices, own)}]"
        return self._expression(place, indices)

    def _expression(self, place: int, indices: list[str]) -> str:
        operation = self.program[place]
        match operation:
            case Map():
                values = [self._value(operand, indices) for operand in operation.operands]
                return FUNCTIONS[operation.function].c.format(*values, p=_number(operation.parameter))
            case Reshape():
                (operand,) = operation.operands
                shape = self.program[operand].shape
                return self._value(operand, _reshaped(indices, operation.shape, shape))
            case Slice():
                (operand,) = operation.operands
                moved = [*indices[:-1], f"({indices[-1]} + {operation.start})" if operation.start else indices[-1]]
                return self._value(operand, moved)
            case Concat():
                return self._concat(operation, indices)
            case Dropout():
                return self._dropout(operation, indices)
            case _:
                raise InternalError(f"the C emitter does not know {type(operation).__name__} inside of a row")

    def _concat(self, operation: Concat, indices: list[str]) -> str:
        end, text = operation.shape[-1], ""
        for operand in reversed(operation.operands):
            size = self.program[operand].shape[-1]
            start = end - size
            value = self._value(operand, [*indices[:-1], f"({indices[-1]} - {start})"])
            text = f"({indices[-1]} < {end} ? {value} : {text})" if text else value
            end = start
        return text

    def _dropout(self, operation: Dropout, indices: list[str]) -> str:
        value = self._value(operation.operands[0], indices)
        limit, scale = limit_of(operation.probability), scale_of(operation.probability)
        column = _flat(indices, operation.shape)
        return (
            f"({value} * dropped({self._row(operation.domain)}, {column}, (uint32_t)c->seed, "
            f"{hashed(operation.stream)}u, {limit}u, (real){scale!r}))"
        )

    def _pointer(self, place: int) -> str:
        """Return a pointer to the row of a buffer that the current row reads."""
        domain = self.program[place].domain
        source = self.program.names(place)[-1]
        self.inputs.setdefault(source)
        self.lookups.setdefault((source, domain))
        size = math.prod(self.program[place].shape)
        row = self._row(domain)
        if row == "0":
            return f"b{source}"
        return f"(b{source} + {row} * {size})"

    def _row(self, domain: Domain) -> str:
        if domain is Domain.ONE:
            return "0"
        if domain is self.traversal.over:
            return "row"
        if domain is self.traversal.by:
            return "group"
        self.domains.setdefault(domain)
        return f"r_{domain.name}"

    def _accumulate(self, root: int) -> None:
        """Emit what a row contributes to a root."""
        operation = self.program[root]
        names = [f"i{number}" for number in range(len(operation.shape))]
        if self.scattered is not None:
            self._scatter(operation, root, names, self.scattered.columns(self.program))
            return
        flat = _flat(names, operation.shape)
        if isinstance(operation, Reduce):
            value = self._value(operation.operands[0], names)
            update = f"a{root}[{flat}] += {value};"
            if operation.kind == "max":
                best = f"a{root}[{flat}]"
                update = f"{{ const real x = {value}; {best} = x > {best} || x != x ? x : {best}; }}"
        else:
            value = f"v{root}[{flat}]" if root in self.locals else self._expression(root, names)
            update = f"b{root}[row * {math.prod(operation.shape)} + {flat}] = {value};"
        self.body.append(_loops(names, operation.shape, update))

    def _scatter(self, operation: Operation, root: int, names: list[str], columns: int) -> None:
        """Emit what a row adds to some columns of a sum."""
        indices = [*names[:-1], f"(first + {names[-1]})"]
        value = self._value(operation.operands[0], indices)
        target = (
            f"b{root}[{self._row(operation.domain)} * {math.prod(operation.shape)} + {_flat(indices, operation.shape)}]"
        )
        self.lookups.setdefault((root, operation.domain))
        self.body.append(_loops(names, (*operation.shape[:-1], columns), f"{target} += {value};"))


def _number(value: float) -> str:
    if math.isnan(value):
        return "NAN"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    return repr(value)


def _neutral(operation: Operation) -> str:
    assert isinstance(operation, Reduce)
    return "0" if operation.kind == "sum" else "-INFINITY"


def _joined(operation: Operation) -> str:
    assert isinstance(operation, Reduce)
    return "*to + x" if operation.kind == "sum" else "(x > *to || x != x ? x : *to)"


def _loops(names: list[str], shape: Shape, inner: str) -> str:
    """Return loops that run ``inner`` for every index."""
    text = f"{{ {inner} }}"
    for name, size in reversed(list(zip(names, shape, strict=True))):
        text = f"for (int {name} = 0; {name} < {size}; {name}++) {text}"
    return text


def _flat(indices: list[str], shape: Shape) -> str:
    """Return the position of an element in a row."""
    text = ""
    for index, size in zip(indices, shape, strict=True):
        if size == 1:
            continue
        text = f"({text}) * {size} + {index}" if text else index
    return text or "0"


def _reshaped(indices: list[str], shape: Shape, wanted: Shape) -> list[str]:
    """Return the indices into ``wanted`` of the element at ``indices`` of ``shape``."""
    long = [(index, size) for index, size in zip(indices, shape, strict=True) if size != 1]
    if [size for _, size in long] == [size for size in wanted if size != 1]:
        rest = iter(index for index, _ in long)
        return ["0" if size == 1 else next(rest) for size in wanted]
    flat, result, below = _flat(indices, shape), [], 1
    for size in reversed(wanted):
        result.append("0" if size == 1 else f"(({flat}) / {below} % {size})")
        below *= size
    return result[::-1]
