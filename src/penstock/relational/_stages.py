"""Programs cut where a value must be complete before others read it.

A layer on a block of edges has all edges of its targets, so its sums and maxima are complete there. Two things need
more: a sum that other nodes read at their sources, which needs all blocks, and the edges of one target that are too
many for a block, whose sums are complete when all its parts have been added. In both cases a program is cut into
stages. Each computes what the ones before did not, and gets their complete values as inputs. A stage only adds over
edges, so its gradients are sums over blocks, or parts, too: autograd goes backwards through the stages.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from penstock.relational._domain import Domain
from penstock.relational._ir import (
    Builder,
    Constant,
    Count,
    Input,
    Map,
    Operation,
    Program,
    Reduce,
    SameRows,
    rewritten,
)

AT_SOURCES = "for sources, {}"
"""Names of inputs that are sums over all blocks, which edges read at their sources."""
_HUGE = 1e30
"""Largest size of values through which the gradient of a maximum goes."""
OVER_PARTS = "over parts, {}"
"""Names of inputs that are sums or maxima over all parts of a target's edges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A program that computes values of a larger one."""

    program: Program
    """The program; its further inputs are values of earlier stages."""
    names: tuple[str, ...]
    """Name of each output, by which later stages read it."""
    is_combined: bool
    """Whether outputs are combined over edges, and not computed row by row from what was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """A program in stages."""

    stages: tuple[Stage, ...]
    """The stages in order."""
    outputs: tuple[str, ...]
    """Names of the values that are the program's outputs."""


def stages_at_sources(program: Program) -> Stages:
    """Cut a program before values of targets are read at sources."""
    complete = {operation.operands[0] for operation in program.operations if isinstance(operation, SameRows)}
    levels = _levels(program, lambda reader, _: isinstance(reader, SameRows))
    return _cut(program, complete, levels, AT_SOURCES)


def stages_over_parts(program: Program) -> Stages:
    """Cut a program before it reads what is combined over the edges of a target."""
    program = _with_gradients_of_maxima(program)
    complete = {place for place, operation in enumerate(program.operations) if _is_combined(operation)}
    levels = _levels(program, lambda _, operand: _is_combined(operand))
    return _cut(program, complete, levels, OVER_PARTS)


def is_max(operation: Operation) -> bool:
    """Return whether an operation is a maximum over rows of another domain."""
    return isinstance(operation, Reduce) and operation.kind == "max"


def _is_combined(operation: Operation) -> bool:
    return isinstance(operation, Reduce | Count) and operation.over is Domain.EDGE


def _levels(program: Program, is_cut: Callable[[Operation, Operation], bool]) -> list[int]:
    """Return the stage that computes each value: one after those of the operands that must be complete."""
    levels: list[int] = []
    for operation in program.operations:
        before = [levels[operand] + is_cut(operation, program[operand]) for operand in operation.operands]
        levels.append(max(before, default=0))
    return levels


def _cut(program: Program, complete: Collection[int], levels: list[int], name: str) -> Stages:
    names = {place: name.format(place) for place in (*complete, *program.outputs)}
    needed = {*complete, *program.outputs}
    stages: list[Stage] = []
    for level in range(max((levels[place] for place in needed), default=0) + 1):
        of_level = sorted(place for place in needed if levels[place] == level)
        for is_combined in (True, False):
            places = [place for place in of_level if _is_combined(program[place]) is is_combined]
            if places:
                cut = _program(program, places, complete, levels, level, name)
                called = tuple(names[place] for place in places)
                stages.append(Stage(program=cut, names=called, is_combined=is_combined))
    return Stages(stages=tuple(stages), outputs=tuple(names[place] for place in program.outputs))


def _program(
    program: Program, outputs: Collection[int], complete: Collection[int], levels: list[int], level: int, name: str
) -> Program:
    """Return the program of some values, which reads those that earlier stages completed."""
    builder, places = Builder(), list[int]()
    for place, operation in enumerate(program.operations):
        source = operation.operands[0] if isinstance(operation, SameRows) else place
        if source in complete and levels[source] < level:
            places.append(builder.add(Input(domain=operation.domain, shape=operation.shape, name=name.format(source))))
        else:
            places.append(builder.add(rewritten(operation, places)))
    return builder.program(places[place] for place in outputs)


def _with_gradients_of_maxima(program: Program) -> Program:
    """Give maxima their gradients by sums, since a maximum over all parts is only compared with."""
    readers = program.readers()
    builder, places = Builder(), list[int]()
    for place, operation in enumerate(program.operations):
        moved = builder.add(rewritten(operation, places))
        is_read = place in program.outputs or any(not _stops(program[reader]) for reader in readers[place])
        places.append(_with_gradient_of_largest(builder, moved) if is_max(operation) and is_read else moved)
    return builder.program(places[place] for place in program.outputs)


def _stops(operation: Operation) -> bool:
    return isinstance(operation, Map) and operation.function == "stop_gradient"


def _with_gradient_of_largest(builder: Builder, place: int) -> int:
    """Return the maximum plus a mean of the values that equal it, minus the same without gradient."""
    operation = builder[place]
    assert isinstance(operation, Reduce)
    (operand,) = operation.operands
    over, domain, shape = operation.over, operation.domain, operation.shape

    def number(value: float) -> int:
        return builder.add(Constant(domain=Domain.ONE, shape=(), value=value))

    def summed(value: int) -> int:
        return builder.add(Reduce(domain=domain, shape=shape, operands=(value,), over=over))

    largest = builder.map("stop_gradient", place, domain=domain)
    is_largest = builder.map("is_largest", operand, largest, domain=over)
    # infinities times 0 would be no numbers
    above = builder.map("maximum", operand, number(-_HUGE), domain=over)
    negative = builder.map("maximum", builder.map("negate", above, domain=over), number(-_HUGE), domain=over)
    chosen = builder.map("multiply", is_largest, builder.map("negate", negative, domain=over), domain=over)
    ties = builder.map("maximum", summed(is_largest), number(1.0), domain=domain)
    mean = builder.map("divide", summed(chosen), ties, domain=domain)
    nothing = builder.map("subtract", mean, builder.map("stop_gradient", mean, domain=domain), domain=domain)
    return builder.map("add", largest, nothing, domain=domain)
