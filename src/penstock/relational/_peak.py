"""The memory that a compiled program takes on a graph, from its numbers of rows, without running it."""

import math
from collections import Counter
from collections.abc import Callable

from penstock.relational._domain import Domain
from penstock.relational._ir import Constant, Input, Operation, OuterSum, Program, Reduce
from penstock.relational._lower import Lowered, Outer
from penstock.relational._run import CompiledProgram, Executor
from penstock.relational._steps import Compiled, results_of, taken_over

RowCount = Callable[[Domain], int]
"""Number of rows of a domain."""


def step_bytes(compiled: CompiledProgram, rows: RowCount, num_threads: int) -> int:
    """Return the most bytes of values that forward and then backward hold at once, beside inputs and indexes."""
    item = compiled.dtype.itemsize
    forward = compiled.forward.program
    outputs = sum(_bytes(forward[place], rows, item) for place in forward.outputs)
    most = _peak_bytes(compiled.forward, rows, num_threads)
    if not compiled.wanted:
        return most
    # backward has the results' gradients too, and returns gradients of inputs
    gradients = sum(_bytes(forward[place], rows, item) for place in forward.outputs[: compiled.num_outputs])
    return max(most, outputs + gradients + _peak_bytes(compiled.backward, rows, num_threads))


def input_bytes(program: Program, rows: RowCount, item_bytes: int) -> int:
    """Return the bytes of a program's inputs that are copied for a block: those with rows for its nodes or edges."""
    return sum(_bytes(argument, rows, item_bytes) for argument in program.inputs.values() if _is_of_block(argument))


def _is_of_block(argument: Input) -> bool:
    return argument.domain in (
        Domain.SOURCE,
        Domain.TARGET,
        Domain.EDGE,
        Domain.SOURCE_AND_TYPE,
        Domain.TARGET_AND_TYPE,
    )


def _bytes(operation: Operation, rows: RowCount, item_bytes: int) -> int:
    return rows(operation.domain) * math.prod(operation.shape) * item_bytes


def _peak_bytes(executor: Executor, rows: RowCount, num_threads: int) -> int:
    """Return the most bytes of values that a program makes and holds at once."""
    if executor.compiled is None:
        return _peak_of_operations(executor.program, rows, executor.dtype.itemsize)
    return _peak_of_steps(executor.compiled, executor.compiled.lowered, rows, num_threads)


def _peak_of_steps(compiled: Compiled, lowered: Lowered, rows: RowCount, num_threads: int) -> int:
    program = lowered.program
    still_made = Counter(
        _bytes(program[place], rows, 1)
        for step in lowered.steps
        for place in results_of(step)
        if place in lowered.stored
    )
    held: dict[int, int] = {}
    pooled: Counter[int] = Counter()
    live = most = 0
    for number, step in enumerate(lowered.steps):
        beside = 0
        moved = taken_over(step)
        held |= {place: held.pop(source, 0) for source, place in moved}
        places = results_of(step) or ((step.place,) if hasattr(step, "place") and not moved else ())
        for place in places:
            size = _bytes(program[place], rows, 1)
            if place in held or place not in lowered.stored:
                continue
            still_made[size] -= 1
            held[place] = size
            if pooled[size]:
                pooled[size] -= 1
            else:
                live += size
            if isinstance(program[place], OuterSum) and not isinstance(step, Outer):
                beside += (num_threads - 1) * size  # a sum for each thread
        most = max(most, live + beside)
        for place in compiled.last_uses.get(number, ()):
            size = held.pop(place, 0)
            if size and pooled[size] < still_made[size]:
                pooled[size] += 1  # it is kept for a later value of the same size
            else:
                live -= size
    return most * compiled.dtype.itemsize


def _peak_of_operations(program: Program, rows: RowCount, item_bytes: int) -> int:
    """Return the peak if PyTorch runs one operation after the other, each on rows that it gathers first."""
    last = {operand: place for place, operation in enumerate(program.operations) for operand in operation.operands}
    last |= dict.fromkeys(program.outputs, len(program))
    live = most = 0
    for place, operation in enumerate(program.operations):
        if isinstance(operation, Input | Constant):
            continue
        size = _bytes(operation, rows, item_bytes)
        over = operation.over if isinstance(operation, Reduce | OuterSum) else operation.domain
        gathered = sum(rows(over) * math.prod(program[operand].shape) for operand in operation.operands) * item_bytes
        outer = rows(over) * math.prod(operation.shape) * item_bytes if isinstance(operation, OuterSum) else 0
        live += size
        most = max(most, live + gathered + outer)
        for operand in set(operation.operands):
            if last[operand] == place and not isinstance(program[operand], Input | Constant):
                live -= _bytes(program[operand], rows, item_bytes)
    return most
