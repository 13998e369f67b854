"""From a problem and a budget to a decision for every storage.

After Libra (Wang, NTHU 2024): recompute first, since it is cheap. If a chain of recomputed operators would itself make
a peak, break it: keep or swap a member, or recompute again later instead of holding. Then take back what the budget
does not need. Here the low end comes from structure rather than from evicting one storage at a time, which runs into
chains that materialize whole: forward is cut where little crosses, at 28 spacings, and only what crosses a cut is kept.
From the cheapest of these that fit, storages are given back in the order of seconds saved per byte. Each is simulated
first.

Cost: one simulation is O(n) for n operators (0.2 ms for 9,000 when compiled). A budget takes some thousands of them.
Guarantee: an accepted plan's peak is that of a simulation of the whole step, workspaces included, which `_verify.py`
checks from the order of operators alone. Time is monotone in the budget within one call of ``pareto``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.arguments import checked
from penstock.errors import BudgetError, InternalError
from penstock.remat._decision import Decision
from penstock.remat._problem import Method, RematProblem
from penstock.remat._refine import MIN_STARTS, given_back, refined, relaxed
from penstock.remat._repair import lowest, repaired
from penstock.remat._seeds import seeds
from penstock.remat._simulate import FlatProblem, simulate
from penstock.remat._space import Candidate, Decisions, Space
from penstock.units import format_bytes

_NEARLY = 1.25
"""Factor of the smallest peak up to which a peak counts as nearly the smallest."""
_ADAPT_OPERATORS = 500_000
"""Limit of operators played in simulations that adapt a plan for other sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RematPlan:
    """Decisions on every storage, and their costs. Sizes are bytes, times seconds."""

    decisions: tuple[Decision, ...]
    """Decisions, one per storage of the problem; for storages made in backward always ``KEEP``."""
    slots: tuple[int, ...]
    """Operators in the order in which they run, recomputed ones included; the first ``num_forward`` are forward."""
    gone_slots: dict[int, int]
    """Per swapped storage, the slot before which its device copy goes."""
    fetch_slots: dict[int, int]
    """Per swapped storage, the slot before which its copy in begins."""
    peak_bytes: int
    """Predicted peak, including static bytes."""
    keep_all_peak_bytes: int
    """The same if everything is kept."""
    extra_s: float
    """Predicted seconds beyond the plain step."""
    stall_s: float
    """Part of these seconds that waits for copies which are not hidden."""
    step_s: float
    """Seconds of the plain step's operators."""

    def is_dropped(self, problem: RematProblem, storage: int) -> bool:
        """Whether a forward storage is gone when backward begins, so that it must be computed again."""
        return self.decisions[storage].recomputes and not problem.storages[storage].is_output


@checked("penstock.remat.plan(problem, 6 * 2**30)")
def plan(
    problem: RematProblem,
    budget_bytes: int,
    *,
    method: Method = "hybrid",
    refine: bool = True,
    like: Sequence[Decision] | None = None,
) -> RematPlan:
    """Return the fastest plan found whose peak, including static bytes, is within ``budget_bytes``.

    ``method`` and ``refine`` leave out parts of the method, for comparison. ``like`` has the decisions of a plan for
    the same operators on other sizes: they are adapted in a tenth of the time of a new search. Raises ``BudgetError``,
    which names the smallest budget that works and the largest storages.
    """
    result = None
    if like is not None and len(like) == len(problem.storages):
        result = _adapted(problem, budget_bytes, method, like)
    if result is None:
        (result,) = pareto(problem, [budget_bytes], method=method, refine=refine)
    if result is None:
        raise _refusal(problem, budget_bytes, method)
    return result


def leanest_plan(problem: RematProblem, budget_bytes: int, *, method: Method = "hybrid") -> RematPlan:
    """Return the plan that leaves the fewest bytes for backward of those that fit.

    If none fits, choose among those with nearly the smallest peak: later graphs of the step add to what it leaves.
    """
    space = Space.of(problem, method)
    starts, room_bytes = seeds(space), budget_bytes - problem.static_bytes
    if not any(start.peak_bytes <= room_bytes for start in starts):
        room_bytes = int(_NEARLY * min(start.peak_bytes for start in starts))
    fitting = [start for start in starts if start.peak_bytes <= room_bytes]
    # Not the plan with the smallest peak, which saves more: over six blocks with breaks between them it took 1.08 of
    # the budget, the leanest 0.66.
    return _finished(space.graph, min(fitting, key=space.saved_bytes).decisions)


def lowest_plan(problem: RematProblem, *, method: Method = "hybrid") -> RematPlan:
    """Return the plan with the smallest peak."""
    space = Space.of(problem, method)
    return _finished(space.graph, lowest(space, seeds(space)).decisions)


def plan_of(problem: RematProblem, decisions: Sequence[Decision]) -> RematPlan:
    """Return the plan of these decisions, one per storage. Raise ``InternalError`` if they recompute endlessly."""
    return _finished(FlatProblem(problem), np.array(decisions, dtype=np.uint8))


@checked("penstock.remat.pareto(problem, [4 * 2**30, 6 * 2**30])")
def pareto(
    problem: RematProblem, budgets_bytes: Sequence[int], *, method: Method = "hybrid", refine: bool = True
) -> list[RematPlan | None]:
    """Return a plan per budget, in order; ``None`` if none fits. A larger budget never gets a slower plan."""
    space = Space.of(problem, method)
    starts = seeds(space)
    plans: dict[int, RematPlan | None] = {}
    before: Candidate | None = None
    for budget in sorted(set(budgets_bytes)):
        best = _fastest(space, starts, before, budget - problem.static_bytes, refine=refine)
        plans[budget] = None if best is None else _finished(space.graph, best.decisions)
        before = best or before
    return [plans[budget] for budget in budgets_bytes]


@checked("penstock.remat.smallest_budget_bytes(problem)")
def smallest_budget_bytes(problem: RematProblem, *, method: Method = "hybrid") -> int:
    """Return the smallest peak that any plan reaches, including static bytes."""
    space = Space.of(problem, method)
    return lowest(space, seeds(space)).peak_bytes + problem.static_bytes


def _fastest(
    space: Space, starts: Sequence[Candidate], before: Candidate | None, budget_bytes: int, *, refine: bool
) -> Candidate | None:
    """Return the fastest candidate found that fits; ``before`` is the one for the next smaller budget.

    Static bytes are already subtracted from the budget.
    """
    known = [*starts, before] if before is not None else starts
    fitting = [start for start in known if start.peak_bytes <= budget_bytes]
    if not fitting:
        for start in sorted(starts, key=lambda start: (start.peak_bytes, start.extra_s))[:MIN_STARTS]:
            tried = repaired(space, start, budget_bytes)
            if tried.peak_bytes <= budget_bytes:
                fitting.append(tried)
        fitting += [start for start in [lowest(space, starts)] if start.peak_bytes <= budget_bytes]
        if not fitting:
            return None
    best = min(fitting, key=lambda start: start.extra_s)
    if not refine:
        return best
    if best.extra_s > 0:
        best = refined(space, fitting, budget_bytes, before)
    return relaxed(space, best, budget_bytes)


def _adapted(problem: RematProblem, budget_bytes: int, method: Method, like: Sequence[Decision]) -> RematPlan | None:
    """Adapt a plan for other sizes: lower it if it does not fit, and give back what the budget allows."""
    space = Space.of(problem, method)
    start = space.evaluated(np.array(like, dtype=np.uint8))
    room_bytes = budget_bytes - problem.static_bytes
    if start is None or not space.allows(start):
        return None
    if start.peak_bytes > room_bytes:
        start = repaired(space, start, room_bytes)
        if start.peak_bytes > room_bytes:
            return None
    most = _ADAPT_OPERATORS // max(1, space.graph.num_operators)
    best = relaxed(space, given_back(space, start, room_bytes, most), room_bytes)
    return _finished(space.graph, best.decisions)


def _finished(graph: FlatProblem, decisions: Decisions) -> RematPlan:
    static_bytes = graph.problem.static_bytes
    keep_all = simulate(graph, np.zeros(graph.num_storages, dtype=np.uint8))
    simulation = simulate(graph, decisions)
    if keep_all is None or simulation is None:
        raise InternalError("the decisions of a plan lead to endless recomputation")
    swapped = np.flatnonzero(simulation.gone >= 0).tolist()
    return RematPlan(
        decisions=tuple(Decision(int(decision)) for decision in decisions),
        slots=tuple(simulation.slots.tolist()),
        gone_slots={storage: int(simulation.gone[storage]) for storage in swapped},
        fetch_slots={storage: int(simulation.fetch[storage]) for storage in swapped},
        peak_bytes=simulation.peak_bytes + static_bytes,
        keep_all_peak_bytes=keep_all.peak_bytes + static_bytes,
        extra_s=simulation.extra_s,
        stall_s=simulation.stall_s,
        step_s=graph.step_s,
    )


def _refusal(problem: RematProblem, budget_bytes: int, method: Method) -> BudgetError:
    smallest = smallest_budget_bytes(problem, method=method)
    largest = sorted(problem.storages, key=lambda storage: -storage.size_bytes)[:3]
    holders = ", ".join(f"{storage.name} ({format_bytes(storage.size_bytes)})" for storage in largest)
    return BudgetError(
        f"the budget of {format_bytes(budget_bytes)} cannot be met: this step needs at least {smallest} bytes "
        f"({format_bytes(smallest)}), of which {format_bytes(problem.static_bytes)} are parameters, gradients, "
        f"optimizer state and inputs; the largest storages are {holders}. Give budget={smallest} or a smaller batch."
    )
