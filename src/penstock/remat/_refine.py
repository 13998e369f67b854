"""Searches that save time within a budget: give back what was dropped, exchange, anneal."""

import heapq
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.remat._decision import Decision
from penstock.remat._repair import START_OPERATORS
from penstock.remat._space import RECOMPUTE, Candidate, Decisions, Space, Tries, recomputed

MIN_STARTS, _MAX_STARTS = 2, 32
"""Limits of the starts to refine. Small graphs refine more."""
_SMALL_GRAPH, _ANNEAL_STEPS, _HEAT = 2000, 300, 0.02
"""Largest graph to anneal, in operators; steps per free decision; initial heat, as a share of the step's time."""
_LARGE_GRAPH = 1000
"""Number of operators from which a simulation takes so long that threads are worth it."""
Counts = NDArray[np.int64]
"""A number per operator."""
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_SEARCH_OPERATORS = 60_000_000
"""Limit of operators played in all simulations, for exchanges and for annealing each."""


def refined(space: Space, fitting: Sequence[Candidate], budget_bytes: int, before: Candidate | None) -> Candidate:
    """Give back from several starts, then exchange. A fast start with a high peak is often a dead end.

    ``before`` is the plan for the next smaller budget, which needs few changes: large graphs start from it alone.
    """
    num_starts = min(max(START_OPERATORS // max(1, space.graph.num_operators), MIN_STARTS), _MAX_STARTS)
    different = list({(start.peak_bytes, start.extra_s): start for start in fitting}.values())
    # Starts with lower peaks end better, although they are slower, so both count.
    different.sort(key=lambda start: start.peak_bytes * (space.graph.step_s + start.extra_s))
    starts = different[:num_starts] if before is None or num_starts > MIN_STARTS else [before]
    ends = _mapped(space, lambda start: given_back(space, start, budget_bytes), starts)
    best = min([*different, *ends], key=lambda start: start.extra_s)
    if num_starts > MIN_STARTS:
        best = _exchanged(space, best, budget_bytes)
    if space.graph.num_operators <= _SMALL_GRAPH:
        best = _annealed(space, best, budget_bytes)
    return best


def _mapped(space: Space, function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Return the function's results, in order; those of a large graph are computed by several threads."""
    num_threads = torch.get_num_threads() if space.graph.num_operators >= _LARGE_GRAPH else 1
    if num_threads == 1:
        return list(map(function, items))
    with ThreadPoolExecutor(num_threads, "penstock planner") as pool:
        return list(pool.map(function, items))


def relaxed(space: Space, start: Candidate, budget_bytes: int) -> Candidate:
    """Keep swapped storages if budget and time allow it, which saves wear of the disk."""
    best, decisions = start, start.decisions.copy()
    swapped = np.flatnonzero(decisions == Decision.SWAP)
    for storage in swapped[np.argsort(-space.graph.sizes[swapped], kind="stable")].tolist():
        decisions[storage] = Decision.KEEP
        tried = space.evaluated(decisions.copy())
        if tried is None or tried.peak_bytes > budget_bytes or tried.extra_s > best.extra_s:
            decisions[storage] = Decision.SWAP
        else:
            best = tried
    return best


def given_back(
    space: Space, start: Candidate, budget_bytes: int, most: int | None = None, tries: Tries | None = None
) -> Candidate:
    """Keep, hold or swap what was recomputed, most seconds per byte first, as long as all fits.

    Outputs of one operator go together: if one of them is missing, the operator runs again anyway. ``most`` limits
    the simulations; then only the operators that promise the most are considered.
    """
    tries = Tries() if tries is None else tries
    last = None if most is None else tries.count + most
    best, again = start, _times_again(space, start, tries)
    producers = np.unique(space.graph.producers[recomputed(best.decisions)]).tolist()
    if most is not None:
        producers = heapq.nlargest(most // 8, producers, key=lambda producer: _promise(space, producer))
    # Each gain depends on what was given back before, so it is computed again when it comes first.
    gains = _gains(space, best, again, producers, budget_bytes, tries)
    heap = [(-gain, producer) for gain, producer in zip(gains, producers, strict=True) if gain > 0]
    heapq.heapify(heap)
    while heap and best.extra_s > 0 and (last is None or tries.count < last):
        promised, producer = heapq.heappop(heap)
        gain, better = _gain(space, best, again, producer, budget_bytes, tries)
        if better is None:
            continue
        if heap and gain < min(-heap[0][0], -promised) * (1 - 1e-9):
            heapq.heappush(heap, (-gain, producer))
            continue
        best, again = better
        heapq.heappush(heap, (-gain, producer))  # what is held now may be kept next
    return best


def _promise(space: Space, producer: int) -> float:
    """Return the seconds of an operator per byte that it makes."""
    size_bytes = sum(int(space.graph.sizes[storage]) for storage in space.graph.outputs[producer])
    return float(space.graph.durations_s[producer]) / (1 + size_bytes)


def _gains(
    space: Space, best: Candidate, again: Counts, producers: Sequence[int], budget_bytes: int, tries: Tries
) -> list[float]:
    """Return the gain of each operator."""
    counts = [Tries() for _ in producers]

    def gain(number: int) -> float:
        return _gain(space, best, again, producers[number], budget_bytes, counts[number])[0]

    gains = _mapped(space, gain, range(len(producers)))
    tries.count += sum(count.count for count in counts)
    return gains


def _times_again(space: Space, candidate: Candidate, tries: Tries) -> Counts:
    """Return how often each operator runs in backward."""
    simulation = space.simulated(candidate.decisions, tries)
    assert simulation is not None
    return _counted(space, simulation.slots)


def _counted(space: Space, slots: NDArray[np.int32]) -> Counts:
    return np.bincount(slots[space.graph.num_forward :], minlength=space.graph.num_operators)


def _gain(
    space: Space, best: Candidate, again: Counts, producer: int, budget_bytes: int, tries: Tries
) -> tuple[float, tuple[Candidate, Counts] | None]:
    """Return the seconds saved per held byte by the best other decision that fits on an operator's results.

    ``again`` tells how often each operator runs in backward with the decisions of ``best``. Comes with the candidate,
    and the same for it.
    """
    graph = space.graph
    best_gain: tuple[float, tuple[Candidate, Counts] | None] = (0.0, None)
    group = np.array(graph.outputs[producer], dtype=np.int64)
    group = group[recomputed(best.decisions[group])]
    if not len(group):
        return best_gain
    for option in _options(space, group, int(best.decisions[group].max())):
        if option in RECOMPUTE and again[producer] <= 1:
            continue  # to hold the results longer saves only further runs
        decisions = _with(space, best.decisions, group, option)
        simulation = space.simulated(decisions, tries)
        if simulation is None or simulation.peak_bytes > budget_bytes:
            continue
        saved_s = best.extra_s - simulation.extra_s
        away = (simulation.gone[group] >= 0) if option == Decision.SWAP else np.zeros(len(group), dtype=bool)
        held = 1.0 + float((graph.sizes[group] * np.where(away, 0.5, 1.0)).sum())  # away for most of its life
        if saved_s / held > best_gain[0]:
            candidate = Candidate(decisions, simulation.peak_bytes, simulation.extra_s)
            best_gain = (saved_s / held, (candidate, _counted(space, simulation.slots)))
    return best_gain


def _with(space: Space, decisions: Decisions, group: NDArray[np.int64], option: Decision) -> Decisions:
    """Return a copy with another decision for a group; those of it that may not be swapped are kept instead."""
    changed = decisions.copy()
    changed[group] = option
    if option == Decision.SWAP:
        changed[group[~space.may_swap[group]]] = Decision.KEEP
    return changed


def _options(space: Space, group: NDArray[np.int64], now: int) -> list[Decision]:
    """Return the other decisions to try for the recomputed outputs of an operator."""
    options = [Decision.KEEP]
    if space.may_swap[group].any():
        options.append(Decision.SWAP)
    if now in RECOMPUTE:
        options += RECOMPUTE[: RECOMPUTE.index(Decision(now))]
    return options


def _exchanged(space: Space, best: Candidate, budget_bytes: int) -> Candidate:
    """Recompute one operator that is kept or swapped, then give back again, as long as that is faster."""
    graph, tries, improves = space.graph, Tries(), True
    most = _SEARCH_OPERATORS // max(1, graph.num_operators)
    while improves and best.extra_s > 0:
        improves = False
        held = np.flatnonzero(~recomputed(best.decisions) & space.may_recompute)
        for producer in np.unique(graph.producers[held]).tolist():
            if tries.count > most:
                return best
            decisions = best.decisions.copy()
            group = np.array(graph.outputs[producer], dtype=np.int64)
            decisions[group[space.may_recompute[group]]] = Decision.RECOMPUTE
            tried = space.evaluated(decisions, tries)
            if tried is None or tried.peak_bytes > budget_bytes or tried.peak_bytes >= best.peak_bytes:
                continue
            tried = given_back(space, tried, budget_bytes, tries=tries)
            if tried.extra_s < best.extra_s * (1 - 1e-9):
                best, improves = tried, True
    return best


def _annealed(space: Space, start: Candidate, budget_bytes: int) -> Candidate:
    """Anneal single decisions, from the best plan so far. Small graphs can afford it."""
    groups, choose = list(space.groups()), np.random.default_rng(0)  # a fixed seed: equal problems get equal plans
    if not groups:
        return start
    best, now, energy_s = start, start.decisions.copy(), start.extra_s
    num_steps = min(_ANNEAL_STEPS * len(groups), _SEARCH_OPERATORS // space.graph.num_operators)
    for step in range(num_steps):
        heat_s = _HEAT * space.graph.step_s * (1 - step / num_steps) ** 2
        group, choices = groups[int(choose.integers(len(groups)))]
        before = now[group].copy()
        now[group] = choices[int(choose.integers(len(choices)))]
        tried = space.simulated(now)
        if tried is not None:
            excess = max(0, tried.peak_bytes - budget_bytes)
            if not excess and tried.extra_s < best.extra_s * (1 - 1e-9):
                best = Candidate(now.copy(), tried.peak_bytes, tried.extra_s)
            tried_s = tried.extra_s + space.graph.step_s * excess / max(1, budget_bytes)
            if tried_s <= energy_s or choose.random() < math.exp((energy_s - tried_s) / heat_s):
                energy_s = tried_s
                continue
        now[group] = before
    return best
