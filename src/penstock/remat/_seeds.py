"""Starts of the search: forward is cut where little crosses, and only what crosses a cut is kept."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from penstock.remat._decision import Decision
from penstock.remat._space import Candidate, Decisions, Space

_NUM_CAPS = 28


def seeds(space: Space) -> list[Candidate]:
    """Return all starts with their costs: keep all, swap all, and the cuts at all spacings, recomputed in two ways."""
    return [seed for seed in map(space.evaluated, _decisions(space)) if seed is not None]


def _decisions(space: Space) -> Iterator[Decisions]:
    keep = np.zeros(space.graph.num_storages, dtype=np.uint8)
    yield keep
    if space.allows_swap:
        yield np.where(space.may_swap & space.is_needed, np.uint8(Decision.SWAP), keep)
    if not space.allows_recompute:
        return
    for kept in _cuts(space):
        drop = space.may_recompute & ~kept
        for how in (Decision.RECOMPUTE, Decision.RECOMPUTE_PER_GROUP):
            decisions = np.where(drop, np.uint8(how), keep)
            yield decisions
            if space.allows_swap:
                yield np.where(space.may_swap & ~drop, np.uint8(Decision.SWAP), decisions)


def _cuts(space: Space) -> Iterator[NDArray[np.bool_]]:
    """Yield sets of storages to keep: those that cross forward's cheapest cuts, at various spacings."""
    graph, num_forward = space.graph, space.graph.num_forward
    if not num_forward:
        return
    forward = np.flatnonzero(graph.producers < num_forward)
    crossing = np.zeros(num_forward + 1, dtype=np.int64)
    saved = np.zeros(num_forward, dtype=np.int64)
    np.add.at(crossing, graph.producers[forward], graph.sizes[forward])
    np.add.at(crossing, graph.last_forward[forward], -graph.sizes[forward])
    cut = np.cumsum(crossing)[:num_forward]
    np.add.at(saved, graph.producers[forward], graph.sizes[forward] * space.is_needed[forward])
    total = int(saved.sum())
    if not total:
        return
    seen: set[tuple[int, ...]] = set()
    for cap in np.geomspace(max(1.0, 4 * total / num_forward), total, _NUM_CAPS):
        # The second kind finds the time steps of an unrolled LSTM, whose outputs cross all later operators. At the peak
        # of a checkpoint per step it cost 12.7% of operator time, where the first kind alone cost 33.5%.
        for boundaries in (_boundaries(cut, saved, float(cap)), _fresh_boundaries(space, cut, saved, float(cap))):
            if boundaries in seen:
                continue
            seen.add(boundaries)
            kept = np.zeros(graph.num_storages, dtype=bool)
            for boundary in boundaries:
                kept |= (graph.producers <= boundary) & (graph.last_forward > boundary)
            yield kept


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


def _fresh_boundaries(space: Space, cut: NDArray[np.int64], saved: NDArray[np.int64], cap: float) -> tuple[int, ...]:
    """Return boundaries like `_boundaries`, but count only what no earlier one keeps, in each stretch's later half.

    If something crosses all of forward (outputs of all time steps), the cheapest cut is always the next one.
    """
    graph, total = space.graph, np.concatenate([[0.0], np.cumsum(saved)])
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
        stretch = slice(*np.searchsorted(producers, [begin, boundary + 1]))
        crosses = last_forward[stretch] > boundary
        np.add.at(ends, last_forward[stretch][crosses], sizes[stretch][crosses])
        kept_bytes += int(sizes[stretch][crosses].sum())
        boundaries.append(boundary)
        begin = boundary + 1
    return tuple(boundaries)
