"""A lower bound of the time that any plan adds to a step.

A plan that fits has to spare, while each operator runs for the first time, the bytes by which the step would exceed the
budget if everything were kept. A storage that is away then and is needed later costs a run of its producer, or its
bytes cross both lanes: the lane out before that operator, the lane back after it. At one operator this is a linear
program over the shares of storages that are away. It is a fractional knapsack, which sorting solves: the bytes that
lanes can carry in time are free, and the rest are those with the fewest seconds per byte. The bound is the largest
over many operators.

It leaves out that producers need inputs which may be away too, that storages can be needed more than once, and that
different operators may want different storages away. So the fastest plan may lie above it, but none lies below.
"""

import math

import numpy as np
from numpy.typing import NDArray

from penstock.arguments import checked
from penstock.remat._decision import Decision
from penstock.remat._problem import Method, RematProblem
from penstock.remat._simulate import FlatProblem, simulate

_MOST_OPERATORS = 64
"""The most operators at which the bound is computed, spread over those that exceed the budget."""
_HALVINGS = 60
"""Halvings of an interval of seconds, down to the precision of a float."""


@checked("penstock.remat.least_extra_s(problem, 6 * 2**30)", budget_bytes=0)
def least_extra_s(problem: RematProblem, budget_bytes: int, *, method: Method = "hybrid") -> float:
    """Return seconds that every plan within ``budget_bytes`` adds to the step; ``inf`` if no plan can be so small.

    ``budget_bytes`` includes static bytes, as in `plan`. Plans may be slower than that.
    """
    graph = FlatProblem(problem)
    kept = simulate(graph, np.full(graph.num_storages, Decision.KEEP, dtype=np.uint8))
    if kept is None or not len(kept.live_bytes):
        return 0.0
    excess = kept.live_bytes - (budget_bytes - problem.static_bytes)
    return max((_at(graph, index, int(excess[index]), method) for index in _chosen(excess)), default=0.0)


def _chosen(excess: NDArray[np.int64]) -> list[int]:
    """Return the operators to look at: the worst of each of several runs of operators that exceed the budget."""
    (over,) = np.nonzero(excess > 0)
    if not len(over):
        return []
    return [int(run[np.argmax(excess[run])]) for run in np.array_split(over, min(len(over), _MOST_OPERATORS))]


def _at(graph: FlatProblem, index: int, excess_bytes: int, method: Method) -> float:
    """Return the seconds without which ``excess_bytes`` cannot be away while operator ``index`` runs."""
    problem = graph.problem
    away = _may_be_away(graph, index)
    again = away if method != "swap" else np.zeros_like(away)
    runs_again = [not operator.must_run_once for operator in problem.operators]
    sizes = np.bincount(graph.producers[again], weights=graph.sizes[again], minlength=graph.num_operators)
    producers = np.flatnonzero((sizes > 0) & np.array(runs_again))
    sizes, seconds = sizes[producers], graph.durations_s[producers]
    swappable_bytes = 0
    if method != "recompute" and problem.can_swap:
        must_stay = np.array([storage.must_stay for storage in problem.storages])
        swappable_bytes = int(graph.sizes[away & ~must_stay].sum())
    order = np.argsort(seconds / sizes)
    ends_bytes = np.concatenate([[0.0], np.cumsum(sizes[order])])
    ends_s = np.concatenate([[0.0], np.cumsum(seconds[order])])
    before_s = float(np.sum(graph.durations_s[:index]))
    after_s = graph.step_s - before_s
    out, back = graph.bandwidths

    def is_possible(extra_s: float) -> bool:
        carried = min(swappable_bytes, out * (before_s + extra_s), back * (after_s + extra_s)) if swappable_bytes else 0
        rest = excess_bytes - carried
        return rest <= ends_bytes[-1] and (rest <= 0 or float(np.interp(rest, ends_bytes, ends_s)) <= extra_s)

    high = float(ends_s[-1]) + (swappable_bytes / min(out, back) if swappable_bytes else 0.0)
    if not is_possible(high):
        return math.inf
    low = 0.0
    if is_possible(low):
        return low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_possible(middle) else (middle, high)
    return low


def _may_be_away(graph: FlatProblem, index: int) -> NDArray[np.bool_]:
    """Return which storages that were made before an operator, and are needed after it, can be away while it runs."""
    away: NDArray[np.bool_] = (graph.producers < min(index, graph.num_forward)) & (graph.last_forward < index)
    away &= (graph.last_needs > index) & ~graph.is_output.astype(bool)
    away[list(graph.inputs[index])] = False
    return away
