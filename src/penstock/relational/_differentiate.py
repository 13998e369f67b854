"""Reverse-mode differentiation on the IR.

There is one rule for domains: an operation that has rows per ``d`` and reads a value with rows per ``v`` contributes to
that value's gradient in ``d``, and the contributions are summed over ``d`` into ``v``. `_RULES` has the contributions
of each operation, row by row. The gradient of a matrix is an `OuterSum`, which never exists per row.

`differentiate` returns one program for forward and backward together. After the passes have run on it, `split` cuts it
into a forward program, which also returns values worth keeping, and a backward program, which takes them. Backward
recomputes cheap values: element-wise functions, in the kernels that read them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.errors import InternalError
from penstock.relational._domain import Domain, common
from penstock.relational._elementwise import FUNCTIONS, Application, Term
from penstock.relational._ir import (
    Builder,
    Concat,
    Constant,
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
    Shape,
    Slice,
    SumTo,
    broadcast,
    matmul_shape,
    rewritten,
)

GRADIENT = "gradient of output {}"
"""Names of the backward program's inputs for the gradients of outputs."""
KEPT = "kept {}"
"""Names of the values that forward passes to backward."""


@dataclass(frozen=True, slots=True)
class Derivative:
    """Forward and backward in one program."""

    program: Program
    """The program; its outputs are the layer's, then the gradients."""
    num_outputs: int
    """Number of the layer's outputs."""
    wanted: tuple[int, ...]
    """For each gradient, the place of its input in the layer's own program."""


def differentiate(program: Program, wanted: Sequence[int]) -> Derivative:
    """Differentiate a program: add gradients of the inputs at ``wanted`` (places in ``program``).

    The gradients of the outputs become further inputs.
    """
    builder = Builder(program.operations)
    chain = _Chain(builder)
    reached = _reached(program, wanted)
    for number, at in enumerate(program.outputs):
        one = program[at]
        given = builder.add(Input(domain=one.domain, shape=one.shape, name=GRADIENT.format(number)))
        chain.contribute(at, given)
    for at in reversed(range(len(program))):
        if at in chain.gradients and at in reached and program[at].operands:
            _RULES[type(program[at])](chain, program[at], at, chain.gradients[at])
    gradients = [chain.gradients.get(at) for at in wanted]
    places = [chain.zero(at) if found is None else found for at, found in zip(wanted, gradients, strict=True)]
    joint = Program(tuple(builder.operations), (*program.outputs, *places))
    return Derivative(joint, len(program.outputs), tuple(wanted))


def _reached(program: Program, wanted: Sequence[int]) -> set[int]:
    """Return the values that depend on a wanted input."""
    found = set(wanted)
    for at, one in enumerate(program.operations):
        if found & set(one.operands):
            found.add(at)
    return found


class _Chain:
    """The gradients found so far."""

    def __init__(self, builder: Builder):
        self.builder = builder
        self.gradients: dict[int, int] = {}

    def contribute(self, at: int, place: int, over: Domain | None = None) -> None:
        """Add the value at ``place``, read by rows of ``over``, to the gradient of the value at ``at``."""
        builder, value = self.builder, self.builder[at]
        over = builder[place].domain if over is None else over
        if builder[place].shape != value.shape:
            place = self.summed_to(place, value.shape)
        if over is not value.domain:
            shape = builder[place].shape
            place = builder.add(Reduce(domain=value.domain, shape=shape, operands=(place,), over=over))
        before = self.gradients.get(at)
        self.gradients[at] = place if before is None else self.map("add", before, place)

    def summed_to(self, place: int, shape: Shape) -> int:
        """Return the value summed over the dimensions that broadcasting added, or broadcast to those that it lacks."""
        builder = self.builder
        found = builder[place].shape
        if broadcast(found, shape) != found:  # smaller than the value it is the gradient of
            zero = builder.add(Constant(domain=Domain.ONE, shape=shape, value=0.0))
            return builder.map("add", place, zero, domain=builder[place].domain)
        return builder.add(SumTo(domain=builder[place].domain, shape=shape, operands=(place,)))

    def map(self, function: str, *operands: int, parameter: float = 0.0) -> int:
        """Add an element-wise function, for as few rows as its operands need."""
        narrow = common(self.builder[one].domain for one in operands)
        return self.builder.map(function, *operands, domain=narrow, parameter=parameter)

    def constant(self, value: float) -> int:
        """Add a constant."""
        return self.builder.add(Constant(domain=Domain.ONE, shape=(), value=value))

    def zero(self, at: int) -> int:
        """Add the zero gradient of a value that no output depends on."""
        one = self.builder[at]
        zero = self.builder.add(Constant(domain=Domain.ONE, shape=one.shape, value=0.0))
        return self.builder.map("add", zero, zero, domain=one.domain)

    def matmul(self, left: int, right: int, *, transposed: bool) -> int:
        """Add a matrix product, for as few rows as its operands need."""
        builder = self.builder
        shape = matmul_shape(builder[left].shape, builder[right].shape, transposed=transposed)
        domain = common([builder[left].domain, builder[right].domain])
        return builder.add(Matmul(domain=domain, shape=shape, operands=(left, right), transposed=transposed))


def _map(chain: _Chain, one: Operation, at: int, gradient: int) -> None:
    assert isinstance(one, Map)
    derivative = FUNCTIONS[one.function].derivative
    if derivative is None:
        raise InternalError(f"{one.function} has no derivative")
    operands = tuple(Term(chain, operand) for operand in one.operands)
    parts = derivative(Application(Term(chain, gradient), Term(chain, at), operands, one.parameter))
    if parts:
        for operand, part in zip(one.operands, parts, strict=True):
            chain.contribute(operand, part.place, one.domain)


def _matmul(chain: _Chain, one: Operation, at: int, gradient: int) -> None:
    assert isinstance(one, Matmul)
    del at
    row, matrix = one.operands
    chain.contribute(row, chain.matmul(gradient, matrix, transposed=not one.transposed), one.domain)
    left, right = (gradient, row) if one.transposed else (row, gradient)
    builder = chain.builder
    shapes = builder[left].shape, builder[right].shape
    full = (*broadcast(shapes[0][:-1], shapes[1][:-1]), shapes[0][-1], shapes[1][-1])
    domain = builder[matrix].domain
    place = builder.add(OuterSum(domain=domain, shape=full, operands=(left, right), over=one.domain))
    chain.contribute(matrix, place, domain)


def _dot(chain: _Chain, one: Operation, at: int, gradient: int) -> None:
    del at
    builder = chain.builder
    shape = builder[gradient].shape
    column = builder.add(Reshape(domain=builder[gradient].domain, shape=(*shape, 1), operands=(gradient,)))
    left, right = one.operands
    chain.contribute(left, chain.map("multiply", column, right), one.domain)
    chain.contribute(right, chain.map("multiply", column, left), one.domain)


def _reshape(chain: _Chain, one: Operation, at: int, gradient: int) -> None:
    del at
    (operand,) = one.operands
    shape = chain.builder[operand].shape
    domain = chain.builder[gradient].domain
    chain.contribute(operand, chain.builder.add(Reshape(domain=domain, shape=shape, operands=(gradient,))), one.domain)


def _sum_to(chain: _Chain, one: Operation, at: int, gradient: int) -> None:
    del at
    chain.contribute(one.operands[0], gradient, one.domain)


def _slice(chain: _Chain, one: Operation, at: int, gradient: int) -> None:
    assert isinstance(one, Slice)
    del at
    builder = chain.builder
    (operand,) = one.operands
    shape = builder[operand].shape
    before, after = one.start, shape[-1] - one.start - one.shape[-1]
    parts = [
        builder.add(Constant(domain=Domain.ONE, shape=(*shape[:-1], size), value=0.0)) if size else None
        for size in (before, after)
    ]
    places = tuple(place for place in (parts[0], gradient, parts[1]) if place is not None)
    domain = builder[gradient].domain
    chain.contribute(operand, builder.add(Concat(domain=domain, shape=shape, operands=places)), one.domain)


def _concat(chain: _Chain, one: Operation, at: int, gradient: int) -> None:
    del at
    builder, start = chain.builder, 0
    domain = builder[gradient].domain
    for operand in one.operands:
        shape = builder[operand].shape
        part = builder.add(Slice(domain=domain, shape=shape, operands=(gradient,), start=start))
        chain.contribute(operand, part, one.domain)
        start += shape[-1]


def _reduce(chain: _Chain, one: Operation, at: int, gradient: int) -> None:
    assert isinstance(one, Reduce)
    (operand,) = one.operands
    if one.kind == "sum":
        chain.contribute(operand, gradient, one.over)
        return
    builder = chain.builder
    is_largest = builder.map("is_largest", operand, at, domain=one.over)
    shape = builder[is_largest].shape
    ties = builder.add(Reduce(domain=one.domain, shape=shape, operands=(is_largest,), over=one.over))
    one_at_least = builder.map(
        "maximum", ties, builder.add(Constant(domain=Domain.ONE, shape=(), value=1.0)), domain=one.domain
    )
    share = chain.map("divide", gradient, one_at_least)
    chain.contribute(operand, builder.map("multiply", is_largest, share, domain=one.over), one.over)


def _same_rows(chain: _Chain, one: Operation, at: int, gradient: int) -> None:
    del at
    (operand,) = one.operands
    builder = chain.builder
    domain = builder[operand].domain
    place = builder.add(SameRows(domain=domain, shape=one.shape, operands=(builder.widened(gradient, one.domain),)))
    chain.contribute(operand, place, domain)


def _dropout(chain: _Chain, one: Operation, at: int, gradient: int) -> None:
    assert isinstance(one, Dropout)
    del at
    operand, seed = one.operands
    again = Dropout(
        domain=one.domain,
        shape=chain.builder[gradient].shape,
        operands=(gradient, seed),
        probability=one.probability,
        stream=one.stream,
    )
    chain.contribute(operand, chain.builder.add(again), one.domain)


def _outer_sum(chain: _Chain, one: Operation, at: int, gradient: int) -> None:
    del chain, one, at, gradient
    raise InternalError("a gradient cannot be differentiated again")


_RULES: dict[type[Operation], Callable[[_Chain, Operation, int, int], None]] = {
    Map: _map,
    Matmul: _matmul,
    Dot: _dot,
    Reshape: _reshape,
    SumTo: _sum_to,
    Slice: _slice,
    Concat: _concat,
    Reduce: _reduce,
    SameRows: _same_rows,
    Dropout: _dropout,
    OuterSum: _outer_sum,
}


@dataclass(frozen=True, slots=True)
class Halves:
    """A derivative, split into two programs."""

    forward: Program
    """The forward program: it returns the layer's outputs, then the kept values."""
    backward: Program
    """The backward program, which returns the wanted gradients.

    It takes the layer's inputs, the kept values and the gradients of outputs.
    """
    num_outputs: int
    """Number of the layer's outputs."""


def split(derivative: Derivative) -> Halves:
    """Split forward from backward; backward recomputes cheap values."""
    program = derivative.program
    needs_gradient = _depends_on_gradients(program)
    gradients = program.outputs[derivative.num_outputs :]
    kept = _kept(program, needs_gradient, gradients)
    results = program.outputs[: derivative.num_outputs]
    forward = Builder(program.operations).program([*results, *kept])
    builder, places = Builder(), []
    for at, one in enumerate(program.operations):
        if at in kept:
            name = KEPT.format(kept.index(at))
            places.append(builder.add(Input(domain=one.domain, shape=one.shape, name=name)))
        else:
            places.append(builder.add(rewritten(one, places)))
    return Halves(forward, builder.program(places[at] for at in gradients), derivative.num_outputs)


def _depends_on_gradients(program: Program) -> set[int]:
    prefix = GRADIENT.split("{", maxsplit=1)[0]
    found = {at for at, one in program.inputs.items() if one.name.startswith(prefix)}
    for at, one in enumerate(program.operations):
        if found & set(one.operands):
            found.add(at)
    return found


def _kept(program: Program, needs_gradient: set[int], gradients: Sequence[int]) -> list[int]:
    """Return the costly values of forward that backward needs, either directly or to recompute a cheap value."""
    kept: dict[int, None] = {}
    seen: set[int] = set()
    stack = [operand for at in needs_gradient for operand in program[at].operands if operand not in needs_gradient]
    stack += [at for at in gradients if at not in needs_gradient]
    while stack:
        at = stack.pop()
        if at in seen:
            continue
        seen.add(at)
        if isinstance(program[at], Matmul | Reduce | Dot | OuterSum):
            kept[at] = None
        else:
            stack.extend(program[at].operands)
    return sorted(kept)
