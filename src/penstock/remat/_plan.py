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

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.arguments import checked
from penstock.errors import BudgetError, InternalError
from penstock.remat._problem import Decision, Method, RematProblem
from penstock.remat._simulate import Graph, Simulation, simulate
from penstock.units import format_bytes

_NEARLY = 1.25
"""Factor of the smallest peak up to which a peak counts as nearly the smallest."""
MIN_SWAP_BYTES = 64 * 1024
"""Size below which storages are not worth a request."""
_NUM_CAPS = 28
_MIN_STARTS, _MAX_STARTS, _START_OPERATORS = 2, 32, 20_000
"""Limits of the starts to refine. Small graphs refine more: until their operators add up to the last number."""
_LOWEST_STARTS = 16
"""Limit of the starts that are lowered for the smallest peak; a quarter of it if swaps make each slow."""
_SMALL_GRAPH, _ANNEAL_STEPS, _HEAT = 2000, 300, 0.02
"""Largest graph to anneal, in operators; steps per free decision; initial heat, as a share of the step's time."""
_SEARCH_OPERATORS = 60_000_000
"""Limit of operators played in all simulations, for exchanges and for annealing each."""
_ADAPT_OPERATORS = 500_000
"""Limit of operators played in simulations that adapt a plan for other sizes."""
_MAX_REPAIRS = 200
_RECOMPUTE = [Decision.RECOMPUTE, Decision.RECOMPUTE_EACH_TIME, Decision.RECOMPUTE_EVERY_TIME]
"""Ways to recompute, from most held and least computed to the reverse."""
_Decisions = NDArray[np.uint8]


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
    made = None
    if like is not None and len(like) == len(problem.storages):
        made = _adapted(problem, budget_bytes, method, like)
    if made is None:
        (made,) = pareto(problem, [budget_bytes], method=method, refine=refine)
    if made is None:
        raise _refusal(problem, budget_bytes, method)
    return made


def leanest_plan(problem: RematProblem, budget_bytes: int, *, method: Method = "hybrid") -> RematPlan:
    """Return the plan that leaves the fewest bytes for backward of those that fit.

    If none fits, choose among those with nearly the smallest peak: later graphs of the step add to what it leaves.
    """
    planner = _Planner(problem, method)
    room_bytes = budget_bytes - problem.static_bytes
    if not any(one.peak_bytes <= room_bytes for one in planner.seeds):
        room_bytes = int(_NEARLY * min(one.peak_bytes for one in planner.seeds))
    fitting = [one for one in planner.seeds if one.peak_bytes <= room_bytes]
    return planner.finished(min(fitting, key=planner.saved_bytes))


def lowest_plan(problem: RematProblem, *, method: Method = "hybrid") -> RematPlan:
    """Return the plan with the smallest peak."""
    planner = _Planner(problem, method)
    return planner.finished(planner.lowest())


def plan_of(problem: RematProblem, decisions: Sequence[Decision]) -> RematPlan:
    """Return the plan of these decisions, one per storage. Raise ``InternalError`` if they recompute endlessly."""
    graph = Graph(problem)
    return _finished(graph, np.array(decisions, dtype=np.uint8))


def _adapted(problem: RematProblem, budget_bytes: int, method: Method, like: Sequence[Decision]) -> RematPlan | None:
    """Adapt a plan for other sizes: lower it if it does not fit, and give back what the budget allows."""
    planner = _Planner(problem, method, has_seeds=False)
    start = planner.evaluated(np.array(like, dtype=np.uint8))
    room_bytes = budget_bytes - problem.static_bytes
    if start is None or not planner.allows(start):
        return None
    if start.peak_bytes > room_bytes:
        start = planner.repaired(start, room_bytes)
        if start.peak_bytes > room_bytes:
            return None
    most = _ADAPT_OPERATORS // max(1, planner.graph.num_operators)
    return planner.finished(planner.relaxed(planner.given_back(start, room_bytes, most), room_bytes))


@checked("penstock.remat.pareto(problem, [4 * 2**30, 6 * 2**30])")
def pareto(
    problem: RematProblem, budgets_bytes: Sequence[int], *, method: Method = "hybrid", refine: bool = True
) -> list[RematPlan | None]:
    """Return a plan per budget, in order; ``None`` if none fits. A larger budget never gets a slower plan."""
    planner = _Planner(problem, method)
    found: dict[int, RematPlan | None] = {}
    for budget in sorted(set(budgets_bytes)):
        made = planner.solve(budget - problem.static_bytes, refine)
        found[budget] = None if made is None else planner.finished(made)
    return [found[budget] for budget in budgets_bytes]


@checked("penstock.remat.smallest_budget_bytes(problem)")
def smallest_budget_bytes(problem: RematProblem, *, method: Method = "hybrid") -> int:
    """Return the smallest peak that any plan reaches, including static bytes."""
    return _Planner(problem, method).lowest().peak_bytes + problem.static_bytes


@dataclass(slots=True)
class _Candidate:
    decisions: _Decisions
    peak_bytes: int
    extra_s: float


class _Planner:
    """The search over decisions for one problem."""

    def __init__(self, problem: RematProblem, method: Method, *, has_seeds: bool = True):
        self.problem = problem
        self.graph = graph = Graph(problem)
        self.allows_recompute = method != "swap"
        self.allows_swap = method != "recompute" and problem.can_swap
        self.num_played = 0
        """Number of simulations so far."""
        forward = graph.producers < problem.num_forward
        needed = np.array([bool(one) for one in graph.needs], dtype=bool)
        stays = graph.is_output.astype(bool)
        once = np.array([bool(problem.operators[one.producer].must_run_once) for one in problem.storages], dtype=bool)
        self.may_recompute = forward & ~stays & ~once & self.allows_recompute
        moves = np.array([not one.must_stay for one in problem.storages], dtype=bool)
        self.may_swap = forward & ~stays & moves & (graph.sizes >= MIN_SWAP_BYTES) & self.allows_swap
        self.is_needed = forward & needed & ~stays
        self.seeds = [one for one in map(self.evaluated, self._seeds()) if one is not None] if has_seeds else []
        self.found: list[_Candidate] = []

    def allows(self, candidate: _Candidate) -> bool:
        """Whether the candidate contains no decision that this problem forbids."""
        swapped = candidate.decisions == Decision.SWAP
        return bool((~_recomputed(candidate.decisions) | self.may_recompute).all() and (~swapped | self.may_swap).all())

    def saved_bytes(self, candidate: _Candidate) -> int:
        """Return the bytes that are held when backward begins."""
        simulation = simulate(self.graph, candidate.decisions)
        assert simulation is not None
        num_forward = self.problem.num_forward
        return int(simulation.live_bytes[num_forward]) if num_forward < len(simulation.live_bytes) else 0

    def lowest(self) -> _Candidate:
        """Return the seed with the lowest peak after repairs, regardless of time.

        Without swaps only sizes decide, so the smallest budget does not depend on how fast operators were measured.
        """
        best = self._lowest_of(self.seeds)
        if self.allows_swap and self.allows_recompute:  # with more choices a greedy search may end worse
            may_swap, self.may_swap = self.may_swap, np.zeros_like(self.may_swap)
            without = self._lowest_of([one for one in self.seeds if not (one.decisions == Decision.SWAP).any()])
            self.may_swap = may_swap
            best = min(best, without, key=lambda one: one.peak_bytes)
        return best

    def _lowest_of(self, seeds: list[_Candidate]) -> _Candidate:
        """Return the lowest result of repairing the lowest seeds. The very lowest seed may be a dead end."""
        most = _LOWEST_STARTS // 4 if self.may_swap.any() else _LOWEST_STARTS
        num_starts = min(max(_START_OPERATORS // max(1, self.graph.num_operators), 1), most)
        starts = {one.peak_bytes: one for one in reversed(seeds)}.values()
        lowest = heapq.nsmallest(num_starts, starts, key=lambda one: one.peak_bytes)
        return min(map(self._lowered, lowest), key=lambda one: one.peak_bytes)

    def _lowered(self, start: _Candidate) -> _Candidate:
        best = start
        for target in np.linspace(start.peak_bytes, start.peak_bytes * 0.5, 6)[1:]:
            repaired = self.repaired(best, int(target), weighs_time=False)
            if repaired.peak_bytes >= best.peak_bytes:
                break
            best = repaired
        return best

    def solve(self, budget_bytes: int, refine: bool) -> _Candidate | None:
        """Return the fastest candidate found that fits. Static bytes are already subtracted from the budget."""
        fitting = [one for one in self.seeds + self.found[-1:] if one.peak_bytes <= budget_bytes]
        if not fitting:
            for start in sorted(self.seeds, key=lambda one: (one.peak_bytes, one.extra_s))[:_MIN_STARTS]:
                repaired = self.repaired(start, budget_bytes)
                if repaired.peak_bytes <= budget_bytes:
                    fitting.append(repaired)
            fitting += [one for one in [self.lowest()] if one.peak_bytes <= budget_bytes]
            if not fitting:
                return None
        best = min(fitting, key=lambda one: one.extra_s)
        if refine and best.extra_s > 0:
            best = self._refined(fitting, budget_bytes)
        if refine:
            best = self.relaxed(best, budget_bytes)
        self.found.append(best)
        return best

    def _refined(self, fitting: list[_Candidate], budget_bytes: int) -> _Candidate:
        """Give back from several starts, then exchange. A fast start with a high peak is often a dead end."""
        num_starts = min(max(_START_OPERATORS // max(1, self.graph.num_operators), _MIN_STARTS), _MAX_STARTS)
        fitting = list({(one.peak_bytes, one.extra_s): one for one in fitting}.values())
        fitting.sort(key=lambda one: one.peak_bytes * (self.graph.step_s + one.extra_s))
        starts = fitting[:num_starts]
        if self.found and num_starts == _MIN_STARTS:
            starts = [self.found[-1]]  # the plan for the next smaller budget needs few changes
        refined = [self.given_back(start, budget_bytes) for start in starts]
        best = min([*fitting, *refined], key=lambda one: one.extra_s)
        if num_starts > _MIN_STARTS:
            best = self._exchanged(best, budget_bytes)
        if self.graph.num_operators <= _SMALL_GRAPH:
            best = self._annealed(best, budget_bytes)
        return best

    def _groups(self) -> list[NDArray[np.int64]]:
        """Return, per forward operator, its storages that may be recomputed, or swapped if backward needs them."""
        free = self.may_recompute | (self.may_swap & self.is_needed)
        return [np.flatnonzero(free & (self.graph.producers == one)) for one in np.unique(self.graph.producers[free])]

    def _annealed(self, start: _Candidate, budget_bytes: int) -> _Candidate:
        """Anneal single decisions, from the best plan so far. Small graphs can afford it."""
        groups, choose = self._groups(), np.random.default_rng(0)
        if not groups:
            return start
        choices = [self._choices(one) for one in groups]
        best, now, energy_s = start, start.decisions.copy(), start.extra_s
        num_steps = min(_ANNEAL_STEPS * len(groups), _SEARCH_OPERATORS // self.graph.num_operators)
        for step in range(num_steps):
            heat_s = _HEAT * self.graph.step_s * (1 - step / num_steps) ** 2
            at = int(choose.integers(len(groups)))
            before = now[groups[at]].copy()
            now[groups[at]] = choices[at][int(choose.integers(len(choices[at])))]
            tried = simulate(self.graph, now)
            if tried is not None:
                excess = max(0, tried.peak_bytes - budget_bytes)
                if not excess and tried.extra_s < best.extra_s * (1 - 1e-9):
                    best = _Candidate(now.copy(), tried.peak_bytes, tried.extra_s)
                tried_s = tried.extra_s + self.graph.step_s * excess / max(1, budget_bytes)
                if tried_s <= energy_s or choose.random() < math.exp((energy_s - tried_s) / heat_s):
                    energy_s = tried_s
                    continue
            now[groups[at]] = before
        return best

    def _choices(self, group: NDArray[np.int64]) -> list[Decision]:
        choices = [Decision.KEEP]
        if self.may_recompute[group].all():
            choices += _RECOMPUTE
        if (self.may_swap & self.is_needed)[group].all():
            choices.append(Decision.SWAP)
        return choices

    def relaxed(self, start: _Candidate, budget_bytes: int) -> _Candidate:
        """Keep swapped storages if budget and time allow it, which saves wear of the disk."""
        best = _Candidate(start.decisions.copy(), start.peak_bytes, start.extra_s)
        swapped = np.flatnonzero(best.decisions == Decision.SWAP)
        for storage in swapped[np.argsort(-self.graph.sizes[swapped], kind="stable")].tolist():
            best.decisions[storage] = Decision.KEEP
            simulation = simulate(self.graph, best.decisions)
            if simulation is None or simulation.peak_bytes > budget_bytes or simulation.extra_s > best.extra_s:
                best.decisions[storage] = Decision.SWAP
            else:
                best.peak_bytes, best.extra_s = simulation.peak_bytes, simulation.extra_s
        return best

    def _exchanged(self, best: _Candidate, budget_bytes: int) -> _Candidate:
        """Recompute one operator that is kept or swapped, then give back again, as long as that is faster."""
        improves, most = True, self.num_played + _SEARCH_OPERATORS // max(1, self.graph.num_operators)
        while improves and best.extra_s > 0:
            improves = False
            held = np.flatnonzero(~_recomputed(best.decisions) & self.may_recompute)
            for producer in np.unique(self.graph.producers[held]).tolist():
                if self.num_played > most:
                    return best
                decisions = best.decisions.copy()
                group = np.array(self.graph.outputs[producer], dtype=np.int64)
                decisions[group[self.may_recompute[group]]] = Decision.RECOMPUTE
                tried = self.evaluated(decisions)
                if tried is None or tried.peak_bytes > budget_bytes or tried.peak_bytes >= best.peak_bytes:
                    continue
                tried = self.given_back(tried, budget_bytes)
                if tried.extra_s < best.extra_s * (1 - 1e-9):
                    best, improves = tried, True
        return best

    def finished(self, made: _Candidate) -> RematPlan:
        """Return the plan of a candidate."""
        return _finished(self.graph, made.decisions)

    def evaluated(self, decisions: _Decisions) -> _Candidate | None:
        """Return the candidate with the costs of ``decisions``; ``None`` if they recompute endlessly."""
        simulation = simulate(self.graph, decisions)
        self.num_played += 1
        if simulation is None:
            return None
        return _Candidate(decisions, simulation.peak_bytes, simulation.extra_s)

    def _seeds(self) -> Iterator[_Decisions]:
        keep = np.zeros(self.graph.num_storages, dtype=np.uint8)
        yield keep
        swap = np.where(self.may_swap & self.is_needed, np.uint8(Decision.SWAP), keep)
        if self.allows_swap:
            yield swap
        if not self.allows_recompute:
            return
        for kept in self._cuts():
            drop = self.may_recompute & ~kept
            for how in (Decision.RECOMPUTE, Decision.RECOMPUTE_EACH_TIME):
                decisions = np.where(drop, np.uint8(how), keep)
                yield decisions
                if self.allows_swap:
                    yield np.where(self.may_swap & ~drop, np.uint8(Decision.SWAP), decisions)

    def _cuts(self) -> Iterator[NDArray[np.bool_]]:
        """Yield sets of storages to keep: those that cross forward's cheapest cuts, at various spacings."""
        graph, num_forward = self.graph, self.problem.num_forward
        if not num_forward:
            return
        forward = np.flatnonzero(graph.producers < num_forward)
        crossing = np.zeros(num_forward + 1, dtype=np.int64)
        saved = np.zeros(num_forward, dtype=np.int64)
        np.add.at(crossing, graph.producers[forward], graph.sizes[forward])
        np.add.at(crossing, graph.last_forward[forward], -graph.sizes[forward])
        cut = np.cumsum(crossing)[:num_forward]
        np.add.at(saved, graph.producers[forward], graph.sizes[forward] * self.is_needed[forward])
        total = int(saved.sum())
        if not total:
            return
        seen: set[tuple[int, ...]] = set()
        for cap in np.geomspace(max(1.0, 4 * total / num_forward), total, _NUM_CAPS):
            for boundaries in (_boundaries(cut, saved, float(cap)), self._fresh_boundaries(cut, saved, float(cap))):
                if boundaries in seen:
                    continue
                seen.add(boundaries)
                kept = np.zeros(graph.num_storages, dtype=bool)
                for boundary in boundaries:
                    kept |= (graph.producers <= boundary) & (graph.last_forward > boundary)
                yield kept

    def _fresh_boundaries(self, cut: NDArray[np.int64], saved: NDArray[np.int64], cap: float) -> tuple[int, ...]:
        """Return boundaries like `_boundaries`, but count only what no earlier one keeps, in each stretch's later half.

        If something crosses all of forward (outputs of all time steps), the cheapest cut is always the next one.
        """
        graph, total = self.graph, np.concatenate([[0.0], np.cumsum(saved)])
        order = np.argsort(graph.producers, kind="stable")
        producers, last_forward, sizes = graph.producers[order], graph.last_forward[order], graph.sizes[order]
        ends = np.zeros(len(cut), dtype=np.int64)
        """Kept bytes that forward uses for the last time at each operator."""
        boundaries: list[int] = []
        begin, kept_bytes = 0, 0
        while total[-1] - total[begin] > cap:
            end = int(np.searchsorted(total, total[begin] + cap, side="right"))
            middle = min(int(np.searchsorted(total, total[begin] + cap / 2, side="right")), end - 1)
            fresh = cut[begin:end] - (kept_bytes - np.cumsum(ends[begin:end]))
            boundary = end - 1 - int(np.argmin(fresh[middle - begin :][::-1]))
            kept_bytes -= int(ends[begin : boundary + 1].sum())
            made = slice(*np.searchsorted(producers, [begin, boundary + 1]))
            crosses = last_forward[made] > boundary
            np.add.at(ends, last_forward[made][crosses], sizes[made][crosses])
            kept_bytes += int(sizes[made][crosses].sum())
            boundaries.append(boundary)
            begin = boundary + 1
        return tuple(boundaries)

    def _options(self, group: NDArray[np.int64], now: int) -> list[Decision]:
        """Return the other decisions to try for the recomputed outputs of an operator."""
        options = [Decision.KEEP]
        if self.may_swap[group].any():
            options.append(Decision.SWAP)
        if now in _RECOMPUTE:
            options += _RECOMPUTE[: _RECOMPUTE.index(Decision(now))]
        return options

    def given_back(self, start: _Candidate, budget_bytes: int, most: int | None = None) -> _Candidate:
        """Keep, hold or swap what was recomputed, most seconds per byte first, as long as all fits.

        Outputs of one operator go together: if one of them is missing, the operator runs again anyway. ``most`` limits
        the simulations; then only the operators that promise the most are considered.
        """
        best = _Candidate(start.decisions.copy(), start.peak_bytes, start.extra_s)
        dropped = np.flatnonzero(_recomputed(best.decisions))
        heap: list[tuple[float, int]] = []
        producers = np.unique(self.graph.producers[dropped]).tolist()
        if most is not None:
            producers = heapq.nlargest(most // 8, producers, key=self._promise)
            most += self.num_played
        for producer in producers:
            gain, _, _ = self._gain(best, producer, budget_bytes)
            if gain > 0:
                heap.append((-gain, producer))
        heapq.heapify(heap)
        while heap and best.extra_s > 0 and (most is None or self.num_played < most):
            promised, producer = heapq.heappop(heap)
            gain, decisions, outcome = self._gain(best, producer, budget_bytes)
            if outcome is None:
                continue
            if heap and gain < min(-heap[0][0], -promised) * (1 - 1e-9):
                heapq.heappush(heap, (-gain, producer))
                continue
            best.decisions = decisions
            best.peak_bytes, best.extra_s = outcome
            heapq.heappush(heap, (-gain, producer))  # what is held now may be kept next
        return best

    def _promise(self, producer: int) -> float:
        """Return the seconds of an operator per byte that it makes."""
        made = sum(int(self.graph.sizes[one]) for one in self.graph.outputs[producer])
        return float(self.graph.durations_s[producer]) / (1 + made)

    def _gain(
        self, best: _Candidate, producer: int, budget_bytes: int
    ) -> tuple[float, _Decisions, tuple[int, float] | None]:
        """Return the seconds saved per held byte by the best other decision that fits on an operator's results."""
        graph = self.graph
        found: tuple[float, _Decisions, tuple[int, float] | None] = (0.0, best.decisions, None)
        group = np.array(graph.outputs[producer], dtype=np.int64)
        group = group[_recomputed(best.decisions[group])]
        if not len(group):
            return found
        for option in self._options(group, int(best.decisions[group].max())):
            decisions = best.decisions.copy()
            decisions[group] = option
            if option == Decision.SWAP:
                decisions[group[~self.may_swap[group]]] = Decision.KEEP
            simulation = simulate(graph, decisions)
            self.num_played += 1
            if simulation is None or simulation.peak_bytes > budget_bytes:
                continue
            saved_s = best.extra_s - simulation.extra_s
            away = (simulation.gone[group] >= 0) if option == Decision.SWAP else np.zeros(len(group), dtype=bool)
            held = 1.0 + float((graph.sizes[group] * np.where(away, 0.5, 1.0)).sum())  # away for most of its life
            if saved_s / held > found[0]:
                found = (saved_s / held, decisions, (simulation.peak_bytes, simulation.extra_s))
        return found

    def repaired(self, start: _Candidate, budget_bytes: int, weighs_time: bool = True) -> _Candidate:
        """Lower the peak step by step at its worst slot, by the option that drops most, per second or in total."""
        best = _Candidate(start.decisions.copy(), start.peak_bytes, start.extra_s)
        for _ in range(_MAX_REPAIRS):
            if best.peak_bytes <= budget_bytes:
                break
            better = self._repair(best, budget_bytes, weighs_time)
            if better is None:
                break
            best = better
        return best

    def _repair(self, now: _Candidate, budget_bytes: int, weighs_time: bool) -> _Candidate | None:
        simulation = simulate(self.graph, now.decisions)
        assert simulation is not None
        excess = _excess(simulation, budget_bytes)
        found: tuple[float, _Candidate] | None = None
        for storage in self._live_at_worst(simulation):
            before = int(now.decisions[storage])
            for option in self._repairs(storage, before):
                now.decisions[storage] = option
                tried = simulate(self.graph, now.decisions)
                if tried is not None:
                    drop = excess - _excess(tried, budget_bytes)
                    cost_s = max(tried.extra_s - now.extra_s, 1e-9) if weighs_time else 1.0
                    if drop > 0 and (found is None or drop / cost_s > found[0]):
                        candidate = _Candidate(now.decisions.copy(), tried.peak_bytes, tried.extra_s)
                        found = (drop / cost_s, candidate)
            now.decisions[storage] = before
        return None if found is None else found[1]

    def _live_at_worst(self, simulation: Simulation) -> list[int]:
        """Return forward storages that may be held at the slot with the peak, the largest first."""
        graph, worst = self.graph, int(np.argmax(simulation.live_bytes))
        slots = simulation.slots.tolist()
        first = np.full(graph.num_storages, len(slots), dtype=np.int64)
        last = np.full(graph.num_storages, -1, dtype=np.int64)
        for slot, operator in enumerate(slots):
            for storage in (*graph.inputs[operator], *graph.outputs[operator]):
                first[storage] = min(first[storage], slot)
                last[storage] = slot
        live = (first <= worst) & (last >= worst) & (graph.producers < graph.num_forward)
        ids = np.flatnonzero(live & (self.may_recompute | self.may_swap) & (graph.sizes > 0))
        return ids[np.argsort(-graph.sizes[ids], kind="stable")][:64].tolist()  # type: ignore[no-any-return]

    def _repairs(self, storage: int, now: int) -> list[Decision]:
        options = []
        if self.may_recompute[storage]:
            options += [one for one in reversed(_RECOMPUTE) if one != now]
        if self.may_swap[storage] and now != Decision.SWAP:
            options.append(Decision.SWAP)
        if now in _RECOMPUTE:
            options.append(Decision.KEEP)
        return options


def _finished(graph: Graph, decisions: _Decisions) -> RematPlan:
    static_bytes = graph.problem.static_bytes
    keep_all = simulate(graph, np.zeros(graph.num_storages, dtype=np.uint8))
    simulation = simulate(graph, decisions)
    if keep_all is None or simulation is None:
        raise InternalError("the decisions of a plan lead to endless recomputation")
    swapped = np.flatnonzero(simulation.gone >= 0).tolist()
    return RematPlan(
        decisions=tuple(Decision(int(one)) for one in decisions),
        slots=tuple(simulation.slots.tolist()),
        gone_slots={one: int(simulation.gone[one]) for one in swapped},
        fetch_slots={one: int(simulation.fetch[one]) for one in swapped},
        peak_bytes=simulation.peak_bytes + static_bytes,
        keep_all_peak_bytes=keep_all.peak_bytes + static_bytes,
        extra_s=simulation.extra_s,
        stall_s=simulation.stall_s,
        step_s=graph.step_s,
    )


def _boundaries(cut: NDArray[np.int64], saved: NDArray[np.int64], cap: float) -> tuple[int, ...]:
    """Return positions in forward at which little crosses, with at most about ``cap`` bytes saved between two."""
    boundaries: list[int] = []
    begin, held = 0, 0.0
    index = 0
    while index < len(cut):
        held += float(saved[index])
        if held > cap and index > begin:
            window = cut[begin:index]
            boundary = begin + len(window) - 1 - int(np.argmin(window[::-1]))
            boundaries.append(boundary)
            begin = boundary + 1
            held = float(saved[begin : index + 1].sum())
        index += 1
    return tuple(boundaries)


def _recomputed(decisions: _Decisions) -> NDArray[np.bool_]:
    recomputed: NDArray[np.bool_] = (decisions != Decision.KEEP) & (decisions != Decision.SWAP)
    return recomputed


def _excess(simulation: Simulation, budget_bytes: int) -> float:
    return float(np.maximum(simulation.live_bytes - budget_bytes, 0).sum())


def _refusal(problem: RematProblem, budget_bytes: int, method: Method) -> BudgetError:
    smallest = smallest_budget_bytes(problem, method=method)
    largest = sorted(problem.storages, key=lambda one: -one.size_bytes)[:3]
    holders = ", ".join(f"{one.name} ({format_bytes(one.size_bytes)})" for one in largest)
    return BudgetError(
        f"the budget of {format_bytes(budget_bytes)} cannot be met: this step needs at least {smallest} bytes "
        f"({format_bytes(smallest)}), of which {format_bytes(problem.static_bytes)} are parameters, gradients, "
        f"optimizer state and inputs; the largest storages are {holders}. Give budget={smallest} or a smaller batch."
    )
