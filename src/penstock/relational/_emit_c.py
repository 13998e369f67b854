"""The C emitter: one function for each traversal.

A traversal's rows are divided into runs of equal length, independent of groups, so that a hub does not keep one thread
busy while others wait. Sums are kept in local arrays. A group that spans several runs leaves partial sums, which are
added in order afterwards, so that results are bit-identical from run to run with the same number of threads.
"""

import math
from dataclasses import dataclass, field

from penstock.errors import InternalError
from penstock.relational._domain import Domain
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
    SameRows,
    Shape,
    Slice,
    SumTo,
)
from penstock.relational._lower import BlockedSum, Kernel, Lowered, Traversal

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

enum { AHEAD = 8 };

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
        if isinstance(step, BlockedSum) and step.rows is not None:
            writer = _Writer(lowered, step.rows, f"step{number}")
            functions.append(writer.function_of_groups())
            kernels[number] = writer.kernel()
        elif isinstance(step, Traversal):
            writer = _Writer(lowered, step, f"step{number}")
            functions.append(writer.function())
            kernels[number] = writer.kernel()
    return f"{_prelude(dtype)}\n" + "\n".join(functions), kernels


def _prelude(dtype: str) -> str:
    """Return what all functions of a source share."""
    real, suffix = _DTYPES[dtype]
    lines = [f"#define real {real}", *(f"#define {name.upper()} {name}{suffix}" for name in C_MATH)]
    helpers = "\n".join(one.c_helper for one in FUNCTIONS.values() if one.c_helper)
    return "\n".join(lines) + "\n" + PRELUDE.replace("@DROPOUT", C_SOURCE).replace("@HELPERS", helpers)


@dataclass
class _Writer:
    """A writer of one function."""

    lowered: Lowered
    traversal: Traversal
    name: str
    body: list[str] = field(default_factory=list)
    locals: set[int] = field(default_factory=set)
    domains: dict[Domain, None] = field(default_factory=dict)
    inputs: dict[int, None] = field(default_factory=dict)

    @property
    def program(self) -> Program:
        return self.lowered.program

    def kernel(self) -> Kernel:
        return Kernel(self.name, self.traversal, tuple(self.domains), tuple(self.inputs))

    def function_of_groups(self) -> str:
        """Return the function of a traversal with one sum: the results of some groups, one after the other."""
        (root,) = self.traversal.roots
        one = self.program[root]
        self._prepare(root)
        self._accumulate(root)
        size = math.prod(one.shape)
        body = "\n".join([self._row_of_position(), *self.body])
        return f"""int {self.name}(const Context *c, int64_t begin, int64_t end, real *results) {{
{self._declarations(with_roots=False)}
    for (int64_t group = begin; group < end; group++) {{
        real a{root}[{size}];
        for (int j = 0; j < {size}; j++) a{root}[j] = {_neutral(one)};
        for (int64_t p = c->starts[group]; p < c->starts[group + 1]; p++) {{
{body}
        }}
        memcpy(results + (group - begin) * {size}, a{root}, sizeof a{root});
    }}
    return 0;
}}
"""

    def function(self) -> str:
        for root in self.traversal.roots:
            self._prepare(root)
            self._accumulate(root)
        sums = [at for at in self.traversal.roots if isinstance(self.program[at], Reduce)]
        text = self._segmented(sums) if sums else self._plain()
        return f"int {self.name}(const Context *c) {{\n{text}\n    return 0;\n}}\n"

    # What a row computes

    def _prepare(self, root: int) -> None:
        """Emit the values that the root reads and that no buffer holds, in order."""
        one = self.program[root]
        wanted = list(one.operands) if isinstance(one, Reduce) else [root]
        for at in self._order(wanted):
            if self._is_local(at) and at not in self.locals:
                self._emit_local(at)
                self.locals.add(at)

    def _order(self, wanted: list[int]) -> list[int]:
        found: set[int] = set()
        stack = list(wanted)
        while stack:
            at = stack.pop()
            if at in found or self._is_read(at):
                continue
            found.add(at)
            stack.extend(self.program[at].operands)
        return sorted(found)

    def _is_read(self, at: int) -> bool:
        """Return whether the value comes from a buffer."""
        return at in self.lowered.stored and at not in self.traversal.roots

    def _is_local(self, at: int) -> bool:
        one = self.program[at]
        if isinstance(one, Constant | Reduce):
            return False
        return math.prod(one.shape) <= MOST_LOCAL or isinstance(one, Dot | SumTo)

    def _emit_local(self, at: int) -> None:
        one = self.program[at]
        size = math.prod(one.shape)
        self.body.append(f"real v{at}[{size}];")
        names = [f"i{number}" for number in range(len(one.shape))]
        target = f"v{at}[{_flat(names, one.shape)}]"
        if isinstance(one, Dot):
            left, right = one.operands
            width = self.program[left].shape[-1]
            product = f"{self._value(left, [*names, 'k'])} * {self._value(right, [*names, 'k'])}"
            inner = f"real sum = 0;\n{_SIMD}\nfor (int k = 0; k < {width}; k++) sum += {product};\n{target} = sum;"
        elif isinstance(one, SumTo):
            inner = self._sum_to(one, names, target)
        else:
            inner = f"{target} = {self._expression(at, names)};"
        self.body.append(_loops(names, one.shape, inner))

    def _sum_to(self, one: SumTo, names: list[str], target: str) -> str:
        (operand,) = one.operands
        shape = self.program[operand].shape
        missing = len(shape) - len(one.shape)
        indices, loops, sizes = [], [], []
        for number, size in enumerate(shape):
            kept = number >= missing and one.shape[number - missing] == size
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

    def _value(self, at: int, indices: list[str]) -> str:
        """Return an element as seen from a row of a shape to which the value's row is broadcast."""
        own = self.program[at].shape
        indices = indices[len(indices) - len(own) :]
        indices = ["0" if size == 1 else index for index, size in zip(indices, own, strict=True)]
        one = self.program[at]
        if self._is_read(at):
            return f"{self._pointer(at)}[{_flat(indices, own)}]"
        if isinstance(one, Constant):
            return f"((real){_number(one.value)})"
        if self._is_local(at):
            return f"v{at}[{_flat(indices, own)}]"
        return self._expression(at, indices)

    def _expression(self, at: int, indices: list[str]) -> str:
        one = self.program[at]
        match one:
            case Map():
                values = [self._value(operand, indices) for operand in one.operands]
                return FUNCTIONS[one.function].c.format(*values, p=_number(one.parameter))
            case Reshape():
                (operand,) = one.operands
                shape = self.program[operand].shape
                return self._value(operand, _reshaped(indices, one.shape, shape))
            case Slice():
                (operand,) = one.operands
                moved = [*indices[:-1], f"({indices[-1]} + {one.start})" if one.start else indices[-1]]
                return self._value(operand, moved)
            case Concat():
                return self._concat(one, indices)
            case Dropout():
                return self._dropout(one, indices)
            case _:
                raise InternalError(f"the C emitter does not know {type(one).__name__} inside of a row")

    def _concat(self, one: Concat, indices: list[str]) -> str:
        end, found = one.shape[-1], ""
        for operand in reversed(one.operands):
            size = self.program[operand].shape[-1]
            start = end - size
            value = self._value(operand, [*indices[:-1], f"({indices[-1]} - {start})"])
            found = f"({indices[-1]} < {end} ? {value} : {found})" if found else value
            end = start
        return found

    def _dropout(self, one: Dropout, indices: list[str]) -> str:
        value = self._value(one.operands[0], indices)
        limit, scale = limit_of(one.probability), scale_of(one.probability)
        column = _flat(indices, one.shape)
        return (
            f"({value} * dropped({self._row(one.domain)}, {column}, (uint32_t)c->seed, "
            f"{hashed(one.stream)}u, {limit}u, (real){scale!r}))"
        )

    def _pointer(self, at: int) -> str:
        """Return a pointer to the row of a buffer that the current row reads."""
        domain = self.program[at].domain
        source = at
        while isinstance(self.program[source], SameRows):
            (source,) = self.program[source].operands
        self.inputs.setdefault(source)
        size = math.prod(self.program[at].shape)
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
        one = self.program[root]
        names = [f"i{number}" for number in range(len(one.shape))]
        flat = _flat(names, one.shape)
        if isinstance(one, Reduce):
            value = self._value(one.operands[0], names)
            update = f"a{root}[{flat}] += {value};"
            if one.kind == "max":
                best = f"a{root}[{flat}]"
                update = f"{{ const real x = {value}; {best} = x > {best} || x != x ? x : {best}; }}"
        else:
            value = f"v{root}[{flat}]" if root in self.locals else self._expression(root, names)
            update = f"b{root}[row * {math.prod(one.shape)} + {flat}] = {value};"
        self.body.append(_loops(names, one.shape, update))

    # Loops around rows

    def _declarations(self, *, with_roots: bool = True) -> str:
        lines = []
        inputs = list(self.inputs)
        for number, at in enumerate(inputs):
            lines.append(f"    const real *restrict const b{at} = c->buffers[{number}];")
        for number, at in enumerate(self.traversal.roots if with_roots else (), start=len(inputs)):
            lines.append(f"    real *restrict const b{at} = c->buffers[{number}];")
        return "\n".join(lines)

    def _row_of_position(self) -> str:
        lines = ["const int64_t row = c->positions ? c->positions[p] : p; (void)row;"]
        for number, domain in enumerate(self.domains):
            lines.append(f"const int64_t r_{domain.name} = c->indexes[{number}][p];")
        lines += self._prefetches()
        return "\n".join(lines)

    def _prefetches(self) -> list[str]:
        """Return prefetches of rows that are looked up, since the processor cannot predict where the next ones lie."""
        lines = []
        for number, domain in enumerate(self.domains):
            rows = [(at, math.prod(self.program[at].shape)) for at in self.inputs if self.program[at].domain is domain]
            for at, size in rows:
                if size < MOST_LOCAL:
                    continue
                lines.append(f"const real *const next{at} = b{at} + (int64_t)c->indexes[{number}][p + AHEAD] * {size};")
                lines += [f"__builtin_prefetch(next{at} + {start});" for start in range(0, min(size, 128), 16)]
        return ["if (p + AHEAD < c->num_positions) {", *lines, "}"] if lines else []

    def _plain(self) -> str:
        """Return the loop over rows without groups."""
        body = "\n".join([self._row_of_position(), *self.body])
        return (
            f"{self._declarations()}\n"
            "#pragma omp parallel for num_threads((int)c->num_threads) schedule(static) if (c->num_positions > 4096)\n"
            f"    for (int64_t p = 0; p < c->num_positions; p++) {{\n{body}\n    }}"
        )

    def _segmented(self, sums: list[int]) -> str:
        """Return the loop over runs of rows, with the groups inside each run."""
        sizes = {at: math.prod(self.program[at].shape) for at in sums}
        starts, offset = {}, 0
        for at in sums:
            starts[at] = offset
            offset += sizes[at]
        first = "".join(
            f"real a{at}[{sizes[at]}]; for (int j = 0; j < {sizes[at]}; j++) a{at}[j] = {_neutral(self.program[at])};\n"
            for at in sums
        )
        whole = "".join(f"memcpy(b{at} + group * {sizes[at]}, a{at}, sizeof a{at});\n" for at in sums)
        part = "".join(f"memcpy(parts + slot * {offset} + {starts[at]}, a{at}, sizeof a{at});\n" for at in sums)
        join = "".join(
            f"for (int j = 0; j < {sizes[at]}; j++) {{ real *const to = b{at} + group * {sizes[at]} + j; "
            f"const real x = parts[slot * {offset} + {starts[at]} + j]; "
            f"*to = is_first ? x : {_joined(self.program[at])}; }}\n"
            for at in sums
        )
        body = "\n".join([self._row_of_position(), *self.body])
        return f"""{self._declarations()}
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
            do group++; while (p < end && c->starts[group + 1] <= p);
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


def _number(value: float) -> str:
    if math.isnan(value):
        return "NAN"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    return repr(value)


def _neutral(one: Operation) -> str:
    assert isinstance(one, Reduce)
    return "0" if one.kind == "sum" else "-INFINITY"


def _joined(one: Operation) -> str:
    assert isinstance(one, Reduce)
    return "*to + x" if one.kind == "sum" else "(x > *to || x != x ? x : *to)"


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


def _reshaped(indices: list[str], given: Shape, wanted: Shape) -> list[str]:
    """Return the indices into ``wanted`` of the element at ``indices`` of ``given``."""
    long = [(index, size) for index, size in zip(indices, given, strict=True) if size != 1]
    if [size for _, size in long] == [size for size in wanted if size != 1]:
        rest = iter(index for index, _ in long)
        return ["0" if size == 1 else next(rest) for size in wanted]
    flat, found, below = _flat(indices, given), [], 1
    for size in reversed(wanted):
        found.append("0" if size == 1 else f"(({flat}) / {below} % {size})")
        below *= size
    return found[::-1]
