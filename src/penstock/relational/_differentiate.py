"""Reverse-mode differentiation on the IR.

There is one rule for domains: an operation that has rows per ``d`` and reads a value with rows per ``v`` contributes to
that value's gradient in ``d``, and the contributions are summed over ``d`` into ``v``. `_RULES` has the contributions
of each operation, row by row. The gradient of a matrix is an `OuterSum`, which never exists per row.

`differentiate` returns one program for forward and backward together. After the passes have run on it, `split` cuts it
into a forward program, which also returns values worth keeping, and a backward program, which takes them. Backward
recomputes cheap values: element-wise functions, in the kernels that read them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock.errors import InternalError
from penstock.relational._domain import OF_COVERS, Domain, common
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
    for number, place in enumerate(program.outputs):
        operation = program[place]
        gradient = builder.add(Input(domain=operation.domain, shape=operation.shape, name=GRADIENT.format(number)))
        chain.contribute(place, gradient)
    for place in reversed(range(len(program))):
        if place in chain.gradients and place in reached and program[place].operands:
            _RULES[type(program[place])](chain, program[place], place, chain.gradients[place])
    gradients = [chain.gradients.get(place) for place in wanted]
    places = [
        chain.zero(place) if gradient is None else gradient for place, gradient in zip(wanted, gradients, strict=True)
    ]
    joint = Program(tuple(builder.operations), (*program.outputs, *places))
    return Derivative(joint, len(program.outputs), tuple(wanted))


def _reached(program: Program, wanted: Sequence[int]) -> set[int]:
    """Return the values that depend on a wanted input."""
    reached = set(wanted)
    for place, operation in enumerate(program.operations):
        if reached & set(operation.operands):
            reached.add(place)
    return reached


class _Chain:
    """The gradients found so far."""

    def __init__(self, builder: Builder):
        self.builder = builder
        self.gradients: dict[int, int] = {}

    def contribute(self, operand: int, place: int, over: Domain | None = None) -> None:
        """Add the value at ``place``, read by rows of ``over``, to the gradient of ``operand``."""
        builder, value = self.builder, self.builder[operand]
        over = builder[place].domain if over is None else over
        if builder[place].shape != value.shape:
            place = self.summed_to(place, value.shape)
        if over is not value.domain:
            shape = builder[place].shape
            place = builder.add(Reduce(domain=value.domain, shape=shape, operands=(place,), over=over))
        before = self.gradients.get(operand)
        self.gradients[operand] = place if before is None else self.map("add", before, place)

    def summed_to(self, place: int, shape: Shape) -> int:
        """Return the value summed over the dimensions that broadcasting added, or broadcast to those that it lacks."""
        builder = self.builder
        current = builder[place].shape
        if broadcast(current, shape) != current:  # smaller than the value it is the gradient of
            zero = builder.add(Constant(domain=Domain.ONE, shape=shape, value=0.0))
            return builder.map("add", place, zero, domain=builder[place].domain)
        return builder.add(SumTo(domain=builder[place].domain, shape=shape, operands=(place,)))

    def map(self, function: str, *operands: int, parameter: float = 0.0) -> int:
        """Add an element-wise function, for as few rows as its operands need."""
        narrow = common(self.builder[operand].domain for operand in operands)
        return self.builder.map(function, *operands, domain=narrow, parameter=parameter)

    def constant(self, value: float) -> int:
        """Add a constant."""
        return self.builder.add(Constant(domain=Domain.ONE, shape=(), value=value))

    def zero(self, place: int) -> int:
        """Add the zero gradient of a value that no output depends on."""
        operation = self.builder[place]
        zero = self.builder.add(Constant(domain=Domain.ONE, shape=operation.shape, value=0.0))
        return self.builder.map("add", zero, zero, domain=operation.domain)

    def matmul(self, left: int, right: int, *, transposed: bool) -> int:
        """Add a matrix product, for as few rows as its operands need."""
        builder = self.builder
        shape = matmul_shape(builder[left].shape, builder[right].shape, transposed=transposed)
        domain = common([builder[left].domain, builder[right].domain])
        return builder.add(Matmul(domain=domain, shape=shape, operands=(left, right), transposed=transposed))


def _map(chain: _Chain, operation: Operation, result: int, gradient: int) -> None:
    assert isinstance(operation, Map)
    derivative = FUNCTIONS[operation.function].derivative
    if derivative is None:
        raise InternalError(f"{operation.function} has no derivative")
    operands = tuple(Term(chain, operand) for operand in operation.operands)
    parts = derivative(Application(Term(chain, gradient), Term(chain, result), operands, operation.parameter))
    if parts:
        for operand, part in zip(operation.operands, parts, strict=True):
            chain.contribute(operand, part.place, operation.domain)


def _matmul(chain: _Chain, operation: Operation, result: int, gradient: int) -> None:
    assert isinstance(operation, Matmul)
    del result
    row, matrix = operation.operands
    moved = chain.matmul(gradient, matrix, transposed=not operation.transposed)
    if operation.domain in OF_COVERS:  # not for all pairs
        moved = chain.builder.add(replace(chain.builder[moved], domain=operation.domain))
    chain.contribute(row, moved, operation.domain)
    left, right = (gradient, row) if operation.transposed else (row, gradient)
    builder = chain.builder
    shapes = builder[left].shape, builder[right].shape
    full = (*broadcast(shapes[0][:-1], shapes[1][:-1]), shapes[0][-1], shapes[1][-1])
    domain = builder[matrix].domain
    place = builder.add(OuterSum(domain=domain, shape=full, operands=(left, right), over=operation.domain))
    chain.contribute(matrix, place, domain)


def _dot(chain: _Chain, operation: Operation, result: int, gradient: int) -> None:
    del result
    builder = chain.builder
    shape = builder[gradient].shape
    column = builder.add(Reshape(domain=builder[gradient].domain, shape=(*shape, 1), operands=(gradient,)))
    left, right = operation.operands
    chain.contribute(left, chain.map("multiply", column, right), operation.domain)
    chain.contribute(right, chain.map("multiply", column, left), operation.domain)


def _reshape(chain: _Chain, operation: Operation, result: int, gradient: int) -> None:
    del result
    (operand,) = operation.operands
    shape = chain.builder[operand].shape
    domain = chain.builder[gradient].domain
    chain.contribute(
        operand, chain.builder.add(Reshape(domain=domain, shape=shape, operands=(gradient,))), operation.domain
    )


def _sum_to(chain: _Chain, operation: Operation, result: int, gradient: int) -> None:
    del result
    chain.contribute(operation.operands[0], gradient, operation.domain)


def _slice(chain: _Chain, operation: Operation, result: int, gradient: int) -> None:
    assert isinstance(operation, Slice)
    del result
    builder = chain.builder
    (operand,) = operation.operands
    shape = builder[operand].shape
    before, after = operation.start, shape[-1] - operation.start - operation.shape[-1]
    parts = [
        builder.add(Constant(domain=Domain.ONE, shape=(*shape[:-1], size), value=0.0)) if size else None
        for size in (before, after)
    ]
    places = tuple(place for place in (parts[0], gradient, parts[1]) if place is not None)
    domain = builder[gradient].domain
    chain.contribute(operand, builder.add(Concat(domain=domain, shape=shape, operands=places)), operation.domain)


def _concat(chain: _Chain, operation: Operation, result: int, gradient: int) -> None:
    del result
    builder, start = chain.builder, 0
    domain = builder[gradient].domain
    for operand in operation.operands:
        shape = builder[operand].shape
        part = builder.add(Slice(domain=domain, shape=shape, operands=(gradient,), start=start))
        chain.contribute(operand, part, operation.domain)
        start += shape[-1]


def _reduce(chain: _Chain, operation: Operation, result: int, gradient: int) -> None:
    assert isinstance(operation, Reduce)
    (operand,) = operation.operands
    if operation.kind == "sum":
        chain.contribute(operand, gradient, operation.over)
        return
    builder = chain.builder
    is_largest = builder.map("is_largest", operand, result, domain=operation.over)
    shape = builder[is_largest].shape
    ties = builder.add(Reduce(domain=operation.domain, shape=shape, operands=(is_largest,), over=operation.over))
    one_at_least = builder.map(
        "maximum", ties, builder.add(Constant(domain=Domain.ONE, shape=(), value=1.0)), domain=operation.domain
    )
    share = chain.map("divide", gradient, one_at_least)
    chain.contribute(operand, builder.map("multiply", is_largest, share, domain=operation.over), operation.over)


def _same_rows(chain: _Chain, operation: Operation, result: int, gradient: int) -> None:
    del result
    (operand,) = operation.operands
    builder = chain.builder
    domain = builder[operand].domain
    place = builder.add(
        SameRows(domain=domain, shape=operation.shape, operands=(builder.widened(gradient, operation.domain),))
    )
    chain.contribute(operand, place, domain)


def _dropout(chain: _Chain, operation: Operation, result: int, gradient: int) -> None:
    assert isinstance(operation, Dropout)
    del result
    operand, seed = operation.operands
    again = Dropout(
        domain=operation.domain,
        shape=chain.builder[gradient].shape,
        operands=(gradient, seed),
        probability=operation.probability,
        stream=operation.stream,
    )
    chain.contribute(operand, chain.builder.add(again), operation.domain)


def _outer_sum(chain: _Chain, operation: Operation, result: int, gradient: int) -> None:
    del chain, operation, result, gradient
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
class SplitDerivative:
    """A derivative, split into two programs."""

    forward: Program
    """The forward program: it returns the layer's outputs, then the kept values."""
    backward: Program
    """The backward program, which returns the wanted gradients.

    It takes the layer's inputs, the kept values and the gradients of outputs.
    """
    num_outputs: int
    """Number of the layer's outputs."""
    kept: tuple[int, ...]
    """Number of the forward program's output that each kept value is."""


def split(derivative: Derivative, *, shares_results: bool) -> SplitDerivative:
    """Split forward from backward; backward recomputes cheap values.

    ``shares_results``: whether a kept value that is a result is returned only once.
    """
    program = derivative.program
    needs_gradient = _depends_on_gradients(program)
    gradients = program.outputs[derivative.num_outputs :]
    kept = _kept(program, needs_gradient, gradients)
    results = program.outputs[: derivative.num_outputs]
    more = [place for place in kept if not (shares_results and place in results)]
    forward = Builder(program.operations).program([*results, *more])
    returned = [*(results if shares_results else [-1] * len(results)), *more]
    builder, places = Builder(), []
    for place, operation in enumerate(program.operations):
        if place in kept:
            name = KEPT.format(kept.index(place))
            places.append(builder.add(Input(domain=operation.domain, shape=operation.shape, name=name)))
        else:
            places.append(builder.add(rewritten(operation, places)))
    backward = builder.program(places[place] for place in gradients)
    return SplitDerivative(forward, backward, derivative.num_outputs, tuple(map(returned.index, kept)))


def _depends_on_gradients(program: Program) -> set[int]:
    prefix = GRADIENT.split("{", maxsplit=1)[0]
    dependent = {place for place, operation in program.inputs.items() if operation.name.startswith(prefix)}
    for place, operation in enumerate(program.operations):
        if dependent & set(operation.operands):
            dependent.add(place)
    return dependent


def _kept(program: Program, needs_gradient: set[int], gradients: Sequence[int]) -> list[int]:
    """Return the costly values of forward that backward needs, either directly or to recompute a cheap value."""
    kept: dict[int, None] = {}
    seen: set[int] = set()
    stack = [
        operand for place in needs_gradient for operand in program[place].operands if operand not in needs_gradient
    ]
    stack += [place for place in gradients if place not in needs_gradient]
    while stack:
        place = stack.pop()
        if place in seen:
            continue
        seen.add(place)
        if isinstance(program[place], Matmul | Reduce | Dot | OuterSum):
            kept[place] = None
        else:
            stack.extend(program[place].operands)
    return sorted(kept)
