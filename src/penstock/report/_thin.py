"""Thinning of long recordings for a page; it keeps peaks, and which group covered most of each stretch of time."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.report._model import MOST_BARS, MOST_POINTS, MOST_ROWS, Row

_Floats = NDArray[np.float64]


def thin(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> tuple[tuple[float, float], ...]:
    """Return at most ``most`` of ``points``: the first, the last, and the lowest and highest of every stretch of x.

    Points that are not finite are left out, since they have no place on an axis.
    """
    array = np.array(points, dtype=np.float64).reshape(-1, 2)
    array = array[np.isfinite(array).all(axis=1)]
    if len(array) > most:
        array = array[_extremes(array, (most - 2) // 2)]
    return tuple((_short(x), _short(y)) for x, y in array.tolist())


def thin_positions(positions: Iterable[float], most: int = MOST_POINTS) -> tuple[float, ...]:
    """Return at most ``most`` of ``positions``, ascending: one per stretch."""
    array = np.sort(np.fromiter((position for position in positions if math.isfinite(position)), dtype=np.float64))
    if len(array) > most:
        stretches = _stretches(array, most)
        array = array[np.flatnonzero(np.diff(stretches, prepend=-1))]
    return tuple(map(_short, array.tolist()))


def thin_bars(rows: Sequence[tuple[str, Sequence[tuple[float, float, int]]]], most: int = MOST_BARS) -> tuple[Row, ...]:
    """Return rows of ``(name, bars)`` with at most ``most`` bars in total.

    If there are more, every row is cut into short stretches of equal length, and each stretch goes to the group that
    covers most of it. If there are too many rows, the first ones are kept.
    """
    rows = rows[:MOST_ROWS]
    if sum(len(bars) for _, bars in rows) <= most:
        return tuple(Row(name=name, bars=tuple((_short(a), _short(b), g) for a, b, g in bars)) for name, bars in rows)
    arrays = [np.array(bars, dtype=np.float64).reshape(-1, 3) for _, bars in rows]
    begin = min(float(array[:, 0].min()) for array in arrays if len(array))
    end = max(float(array[:, 1].max()) for array in arrays if len(array))
    edges = np.linspace(begin, end, most // len(rows) + 1)
    return tuple(
        Row(name=name, bars=tuple(_joined(edges, _owners(edges, array))))
        for (name, _), array in zip(rows, arrays, strict=True)
    )


def traffic(events: Sequence[tuple[float, float, int]], begin: float, end: float, num: int = 200) -> _Floats:
    """Return bytes per second in ``num`` equal stretches; ``(begin, end, bytes)`` events move at a constant rate."""
    edges = np.linspace(begin, end, num + 1)
    if not events:
        return np.zeros(num)
    array = np.array(events, dtype=np.float64)
    lengths = np.maximum(array[:, 1] - array[:, 0], 1e-9)
    moved = _covered(edges, array[:, 0], array[:, 0] + lengths, array[:, 2] / lengths)
    rates: _Floats = np.diff(moved) / max((end - begin) / num, 1e-12)
    return np.maximum(rates, 0.0)


def _extremes(array: _Floats, num: int) -> NDArray[np.int64]:
    """Return the indices of the first, the last, and the lowest and highest point of each stretch."""
    stretches = _stretches(array[:, 0], num)
    order = np.lexsort((array[:, 1], stretches))
    starts = np.flatnonzero(np.diff(stretches[order], prepend=-1))
    ends = np.append(starts[1:], len(order)) - 1
    chosen = np.concatenate([order[starts], order[ends], [0, len(array) - 1]])
    return np.unique(chosen)


def _stretches(ascending: _Floats, num: int) -> NDArray[np.int64]:
    """Return, for each number, which of ``num`` equal stretches it is in."""
    begin, end = ascending[0], ascending[-1]
    scaled = (ascending - begin) * (num / max(end - begin, 1e-12))
    clipped: NDArray[np.int64] = np.clip(scaled.astype(np.int64), 0, num - 1)
    return clipped


def _owners(edges: _Floats, bars: _Floats) -> NDArray[np.int64]:
    """Return, per stretch, the group that covers most of it, or -1."""
    best, owner = np.zeros(len(edges) - 1), np.full(len(edges) - 1, -1)
    bars = bars[np.argsort(bars[:, 2], kind="stable")]
    for own in np.split(bars, np.flatnonzero(np.diff(bars[:, 2])) + 1):
        if len(own):
            share = np.diff(_covered(edges, own[:, 0], own[:, 1], np.ones(len(own))))
            is_more = share > best + 1e-12
            best[is_more], owner[is_more] = share[is_more], int(own[0, 2])
    return owner


def _covered(edges: _Floats, begins: _Floats, ends: _Floats, weights: _Floats) -> _Floats:
    """Return, per edge, the weighted length of all intervals before it."""

    def ramps(starts: _Floats) -> _Floats:
        order = np.argsort(starts)
        weight = np.append(0.0, np.cumsum(weights[order]))
        moment = np.append(0.0, np.cumsum(weights[order] * (starts[order] - edges[0])))
        places = np.searchsorted(starts[order], edges)
        ramp: _Floats = weight[places] * (edges - edges[0]) - moment[places]
        return ramp

    return ramps(begins) - ramps(ends)


def _joined(edges: _Floats, owners: NDArray[np.int64]) -> Iterable[tuple[float, float, int]]:
    """Yield adjacent stretches of one owner as one bar."""
    starts = np.flatnonzero(np.diff(owners, prepend=-2))
    ends = np.append(starts[1:], len(owners))
    for start, end in zip(starts, ends, strict=True):
        if owners[start] >= 0:
            yield _short(float(edges[start])), _short(float(edges[end])), int(owners[start])


def _short(number: float) -> float:
    """Round to ten significant digits, so that JSON stays small."""
    return float(f"{number:.10g}")
