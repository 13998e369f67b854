"""Searches that lower a peak: the worst slot is repaired again and again, by the option that drops most."""

import heapq
from collections.abc import Sequence

import numpy as np

from penstock.remat._decision import Decision
from penstock.remat._simulate import Simulation
from penstock.remat._space import RECOMPUTE, Candidate, Space

_LOWEST_STARTS = 16
"""Limit of the starts that are lowered for the smallest peak; a quarter of it if swaps make each slow."""
START_OPERATORS = 20_000
"""Limit of the starts of a search: until their operators add up to this number."""
_MAX_REPAIRS = 200
_MOST_AT_ONCE = 64
"""Storages that one repair considers, the largest first."""


def lowest(space: Space, seeds: Sequence[Candidate]) -> Candidate:
    """Return the seed with the lowest peak after repairs, regardless of time.

    Without swaps only sizes decide, so the smallest budget does not depend on how fast operators were measured.
    """
    best = _lowest_of(space, seeds)
    if space.allows_swap and space.allows_recompute:  # with more choices a greedy search may end worse
        others = [seed for seed in seeds if not (seed.decisions == Decision.SWAP).any()]
        best = min(best, _lowest_of(space.without_swaps(), others), key=lambda start: start.peak_bytes)
    return best


def _lowest_of(space: Space, seeds: Sequence[Candidate]) -> Candidate:
    """Return the lowest result of repairing the lowest seeds. The very lowest seed may be a dead end."""
    most = _LOWEST_STARTS // 4 if space.may_swap.any() else _LOWEST_STARTS
    # Several starts, because the lowest seed is often a dead end: 38.0 MiB instead of 48.1 for a GPT of 8 blocks.
    num_starts = min(max(START_OPERATORS // max(1, space.graph.num_operators), 1), most)
    starts = {seed.peak_bytes: seed for seed in reversed(seeds)}.values()
    lowest_starts = heapq.nsmallest(num_starts, starts, key=lambda start: start.peak_bytes)
    return min((_lowered(space, start) for start in lowest_starts), key=lambda start: start.peak_bytes)


def _lowered(space: Space, start: Candidate) -> Candidate:
    best = start
    for target in np.linspace(start.peak_bytes, start.peak_bytes * 0.5, 6)[1:]:
        tried = repaired(space, best, int(target), weighs_time=False)
        if tried.peak_bytes >= best.peak_bytes:
            break
        best = tried
    return best


def repaired(space: Space, start: Candidate, budget_bytes: int, *, weighs_time: bool = True) -> Candidate:
    """Lower the peak step by step at its worst slot, by the option that drops most, per second or in total."""
    best = start
    for _ in range(_MAX_REPAIRS):
        better = _better(space, best, budget_bytes, weighs_time) if best.peak_bytes > budget_bytes else None
        if better is None:
            break
        best = better
    return best


def _better(space: Space, now: Candidate, budget_bytes: int, weighs_time: bool) -> Candidate | None:
    simulation = space.simulated(now.decisions)
    assert simulation is not None
    excess = _excess(simulation, budget_bytes)
    decisions = now.decisions.copy()
    better: tuple[float, Candidate] | None = None
    for storage in _live_at_worst(space, simulation):
        before = int(decisions[storage])
        for option in _options(space, storage, before):
            decisions[storage] = option
            tried = space.simulated(decisions)
            if tried is not None:
                drop = excess - _excess(tried, budget_bytes)
                cost_s = max(tried.extra_s - now.extra_s, 1e-9) if weighs_time else 1.0
                if drop > 0 and (better is None or drop / cost_s > better[0]):
                    better = (drop / cost_s, Candidate(decisions.copy(), tried.peak_bytes, tried.extra_s))
        decisions[storage] = before
    return None if better is None else better[1]


def _live_at_worst(space: Space, simulation: Simulation) -> list[int]:
    """Return forward storages that may be held at the slot with the peak, the largest first."""
    graph, worst = space.graph, int(np.argmax(simulation.live_bytes))
    slots = simulation.slots.tolist()
    first = np.full(graph.num_storages, len(slots), dtype=np.int64)
    last = np.full(graph.num_storages, -1, dtype=np.int64)
    for slot, operator in enumerate(slots):
        for storage in (*graph.inputs[operator], *graph.outputs[operator]):
            first[storage] = min(first[storage], slot)
            last[storage] = slot
    live = (first <= worst) & (last >= worst) & (graph.producers < graph.num_forward)
    ids = np.flatnonzero(live & (space.may_recompute | space.may_swap) & (graph.sizes > 0))
    return ids[np.argsort(-graph.sizes[ids], kind="stable")][:_MOST_AT_ONCE].tolist()  # type: ignore[no-any-return]


def _options(space: Space, storage: int, now: int) -> list[Decision]:
    """Return the other decisions to try for a storage, those that drop most first."""
    options = []
    if space.may_recompute[storage]:
        options += [way for way in reversed(RECOMPUTE) if way != now]
    if space.may_swap[storage] and now != Decision.SWAP:
        options.append(Decision.SWAP)
    if now in RECOMPUTE:
        options.append(Decision.KEEP)
    return options


def _excess(simulation: Simulation, budget_bytes: int) -> float:
    return float(np.maximum(simulation.live_bytes - budget_bytes, 0).sum())
