"""Fusion of steps that go through the same pairs: rows are computed, multiplied and summed a block at a time.

The backward of a layer sums gradients over the edges of each pair of a node and a type, multiplies these rows by a
matrix, and sums their outer products with the features of nodes, for the matrix's gradient. There are as many rows as
pairs, often several times as many as nodes. If a block of them is computed when it is needed and dropped afterwards, it
stays in cache, and the whole table never exists.
"""

from collections.abc import Sequence

from penstock.relational._domain import EDGES, ENDS, Domain
from penstock.relational._ir import Map, OuterSum, Program, Reduce
from penstock.relational._lower import BlockedPass, Lowered, Outer, Product, ScatteredProduct, Step, Traversal
from penstock.relational._narrow import is_narrow_outer, is_narrow_sum

LEAST_COLUMNS = 16
"""Fewest columns for a thread: a cache line of float32."""
MOST_EDGES_A_PRODUCT = 16
"""Most edges for each pair with which adding products up at once is no slower, by measurement.

``python -m benchmarks.relational --part variants`` compares both.
"""

LEAST_ROWS_A_MATRIX = 64
"""Fewest rows for each matrix of a thread: with 64 columns, they take as much memory."""


def fuse(lowered: Lowered, num_parts: int, *, with_outers: bool) -> Lowered:
    """Let traversals by pairs compute their rows block by block, inside of the steps that multiply these rows.

    ``num_parts``: into how many parts columns are divided, so that products can be added up a block at a time where
    edges read them; 0 if that does not pay. ``with_outers``: whether sums of outer products are among these steps.
    """
    program, steps = lowered.program, list(lowered.steps)
    for step in lowered.steps:
        if isinstance(step, Traversal) and step.by in ENDS and step.over is EDGES[step.by]:
            steps = _fused(program, steps, step, step.by, with_outers=with_outers)
    for step in lowered.steps:
        if isinstance(step, Traversal) and num_parts:
            steps = _scattered(program, steps, step, num_parts)
    return Lowered(program, tuple(steps), lowered.stored - _dropped(program, steps))


def column_parts(num_edges: int, num_pairs: int, num_threads: int) -> int:
    """Return into how many parts `fuse` should divide columns; 0 if products had better be stored.

    Every thread goes through all edges for its part, and adds to memory instead of to registers. That is cheaper than
    writing the products and reading them again unless a product has very many edges, or the parts become narrow.
    """
    pays = num_edges <= MOST_EDGES_A_PRODUCT * num_pairs
    return num_threads if pays and num_threads in (1, 2, 4) else 0


def has_room_for_outers(num_pairs: int, num_types: int, num_threads: int) -> bool:
    """Return whether `fuse` should take sums of outer products.

    Each thread but the first has a matrix per type for them, which must not take more memory than the rows would.
    """
    return num_pairs >= LEAST_ROWS_A_MATRIX * num_types * (num_threads - 1)


def _fused(program: Program, steps: list[Step], traversal: Traversal, by: Domain, *, with_outers: bool) -> list[Step]:
    """Return the steps, with as many of those that read the traversal's rows as possible in one pass with it."""
    start = next(number for number, step in enumerate(steps) if step is traversal)
    roots = set(traversal.roots)
    readers = [number for number, step in enumerate(steps) if reads(program, step) & roots]
    fitting = [number for number in readers if _fits(program, steps[number], by)]
    fitting = [number for number in fitting if not _is_narrow(program, steps[number])]
    fitting = [number for number in fitting if with_outers or not isinstance(steps[number], Outer)]
    candidates = [(number, _ready(program, steps, fitting, roots, number)) for number in (start, *fitting)]
    possible = [pair for pair in candidates if _may_wait(program, steps, start, *pair)]
    place, chosen = max(possible, key=lambda pair: len(pair[1]))
    if not chosen:
        return steps
    joined = BlockedPass(
        over=by,
        sums=tuple(part for number in chosen if isinstance(step := steps[number], BlockedPass) for part in step.sums),
        outers=tuple(step.place for number in chosen if isinstance(step := steps[number], Outer)),
        rows=traversal,
    )
    return [
        joined if number == place else step
        for number, step in enumerate(steps)
        if number == place or number not in (start, *chosen)
    ]


def _may_wait(program: Program, steps: Sequence[Step], start: int, place: int, chosen: Sequence[int]) -> bool:
    """Return whether the traversal at ``start`` and the chosen steps may run at ``place``.

    They may if no other step before reads their values.
    """
    moved = [start, *chosen]
    values = set[int]().union(*(makes(steps[number]) for number in moved))
    return not any(number not in moved and reads(program, steps[number]) & values for number in range(start, place))


def _fits(program: Program, step: Step, by: Domain) -> bool:
    """Return whether a step goes through the rows of pairs type by type, and computes none itself."""
    if isinstance(step, Outer):
        operation = program[step.place]
        assert isinstance(operation, OuterSum)
        return operation.over is by and operation.domain is Domain.EDGE_TYPE
    return isinstance(step, BlockedPass) and step.over is by and step.rows is None


def _is_narrow(program: Program, step: Step) -> bool:
    """Return whether a step is faster node by node, beside rows that are stored because they are a few numbers."""
    if isinstance(step, Outer):
        return is_narrow_outer(program, step.place)
    return isinstance(step, BlockedPass) and all(is_narrow_sum(program, part.product) for part in step.sums)


def _ready(program: Program, steps: Sequence[Step], fitting: Sequence[int], roots: set[int], start: int) -> list[int]:
    """Return which steps may run at ``start`` instead, after a traversal that computes ``roots``."""
    exists = set(program.inputs) | roots
    for step in steps[:start]:
        exists |= makes(step)
    chosen = []
    for number in fitting:
        if all(program.names(place)[-1] in exists for place in reads(program, steps[number])):
            chosen.append(number)
            exists |= makes(steps[number])
    return chosen


def _scattered(program: Program, steps: list[Step], traversal: Traversal, num_parts: int) -> list[Step]:
    """Return the steps, with a product that only one sum over edges reads as one step with that sum."""
    if traversal.by not in ENDS.values() or len(traversal.roots) > 1:
        return steps
    (root,) = traversal.roots
    for step in steps:
        if not isinstance(step, Product) or step.onto is not None or step.place in program.outputs:
            continue
        readers = [other for other in steps if step.place in reads(program, other)]
        if readers == [traversal] and _is_summed_by_column(program, root, step.place, num_parts):
            rows = Traversal(traversal.over, program[step.place].domain, [root], traversal.reads - {step.place})
            joined = ScatteredProduct(root, step.place, rows, num_parts)
            return [joined if other is traversal else other for other in steps if other is not step]
    return steps


def _is_summed_by_column(program: Program, root: int, product: int, num_parts: int) -> bool:
    """Return whether each column of a sum over edges reads that column alone of a product with the matrix of a type."""
    matmul, total = program[product], program[root]
    if (
        not isinstance(total, Reduce)
        or total.kind != "sum"
        or total.over is not EDGES.get(matmul.domain)
        or program[matmul.operands[1]].domain is not Domain.EDGE_TYPE
    ):
        return False
    width, stack, seen = matmul.shape[-1], [total.operands[0]], set[int]()
    while stack:
        place = stack.pop()
        if place == product or place in seen:
            continue
        seen.add(place)
        operation = program[place]
        if isinstance(operation, Map) and operation.domain is total.over and operation.shape[-1:] == (width,):
            stack += operation.operands
        elif product in _needed(program, place):
            return False
    return width % num_parts == 0 and width // num_parts >= LEAST_COLUMNS


def _needed(program: Program, place: int) -> set[int]:
    """Return the values from which a value is computed."""
    needed, stack = set[int](), [place]
    while stack:
        operands = set(program[stack.pop()].operands) - needed
        needed |= operands
        stack += operands
    return needed


def _dropped(program: Program, steps: Sequence[Step]) -> set[int]:
    """Return the rows that nothing but the pass that computes them reads."""
    dropped = {step.product for step in steps if isinstance(step, ScatteredProduct)}
    for step in steps:
        if isinstance(step, BlockedPass) and step.rows is not None:
            others = set(program.outputs).union(*(reads(program, other) for other in steps if other is not step))
            dropped |= {root for root in step.rows.roots if isinstance(program[root], Reduce)} - others
    return dropped


def makes(step: Step) -> set[int]:
    """Return the values that a step computes."""
    match step:
        case Traversal():
            return set(step.roots)
        case BlockedPass():
            rows = set() if step.rows is None else set(step.rows.roots)
            return rows | {part.place for part in step.sums} | set(step.outers)
        case _:
            return {step.place}


def reads(program: Program, step: Step) -> set[int]:
    """Return the values that a step reads, and those whose rows they share, without what it computes itself."""
    match step:
        case Traversal():
            places = set(step.reads)
        case BlockedPass():
            places = set() if step.rows is None else set(step.rows.reads)
            for part in step.sums:
                places |= {*program[part.product].operands, *(() if part.onto is None else (part.onto,))}
            for place in step.outers:
                places |= set(program[place].operands)
        case ScatteredProduct():
            places = {*step.rows.reads, *program[step.product].operands}
        case Product():
            places = {*program[step.product].operands, *(() if step.onto is None else (step.onto,))}
        case _:
            places = set(program[step.place].operands)
    return {name for place in places for name in program.names(place)} - makes(step)
