"""Long recordings made short enough for a page, keeping what a reader looks for: peaks, and who was there when."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.report._model import MOST_BARS, MOST_POINTS, MOST_ROWS, Row

_Floats = NDArray[np.float64]


def thin(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> tuple[tuple[float, float], ...]:
    """At most ``most`` of ``points``: the first, the last, and the lowest and highest of every stretch of x.

    What is no finite number is left out, since it has no place on an axis.
    """
    array = np.array(points, dtype=np.float64).reshape(-1, 2)
    array = array[np.isfinite(array).all(axis=1)]
    if len(array) > most:
        array = array[_extremes(array, (most - 2) // 2)]
    return tuple((_short(x), _short(y)) for x, y in array.tolist())


def thin_positions(positions: Iterable[float], most: int = MOST_POINTS) -> tuple[float, ...]:
    """At most ``most`` of ``positions``, ascending: one of every stretch."""
    array = np.sort(np.fromiter((one for one in positions if math.isfinite(one)), dtype=np.float64))
    if len(array) > most:
        stretches = _stretches(array, most)
        array = array[np.flatnonzero(np.diff(stretches, prepend=-1))]
    return tuple(map(_short, array.tolist()))


def thin_bars(rows: Sequence[tuple[str, Sequence[tuple[float, float, int]]]], most: int = MOST_BARS) -> tuple[Row, ...]:
    """Rows of ``(name, bars)`` with at most ``most`` bars in all.

    Beyond that every row is cut into short stretches of equal length, and each stretch belongs to the group that
    covers most of it. The first rows are taken where there are too many.
    """
    rows = rows[:MOST_ROWS]
    if sum(len(bars) for _, bars in rows) <= most:
        return tuple(Row(name=name, bars=tuple((_short(a), _short(b), g) for a, b, g in bars)) for name, bars in rows)
    arrays = [np.array(bars, dtype=np.float64).reshape(-1, 3) for _, bars in rows]
    begin = min(float(one[:, 0].min()) for one in arrays if len(one))
    end = max(float(one[:, 1].max()) for one in arrays if len(one))
    edges = np.linspace(begin, end, most // len(rows) + 1)
    return tuple(
        Row(name=name, bars=tuple(_joined(edges, _owners(edges, array))))
        for (name, _), array in zip(rows, arrays, strict=True)
    )


def traffic(events: Sequence[tuple[float, float, int]], begin: float, end: float, num: int = 200) -> _Floats:
    """Bytes a second in each of ``num`` equal stretches, of ``(begin, end, bytes)`` that were moved evenly."""
    edges = np.linspace(begin, end, num + 1)
    if not events:
        return np.zeros(num)
    array = np.array(events, dtype=np.float64)
    lengths = np.maximum(array[:, 1] - array[:, 0], 1e-9)
    moved = _covered(edges, array[:, 0], array[:, 0] + lengths, array[:, 2] / lengths)
    rates: _Floats = np.diff(moved) / max((end - begin) / num, 1e-12)
    return np.maximum(rates, 0.0)


def _extremes(array: _Floats, num: int) -> NDArray[np.int64]:
    """Positions of the first, the last, and of each stretch's lowest and highest."""
    stretches = _stretches(array[:, 0], num)
    order = np.lexsort((array[:, 1], stretches))
    starts = np.flatnonzero(np.diff(stretches[order], prepend=-1))
    ends = np.append(starts[1:], len(order)) - 1
    chosen = np.concatenate([order[starts], order[ends], [0, len(array) - 1]])
    return np.unique(chosen)


def _stretches(ascending: _Floats, num: int) -> NDArray[np.int64]:
    """In which of ``num`` equal stretches each number is."""
    begin, end = ascending[0], ascending[-1]
    scaled = (ascending - begin) * (num / max(end - begin, 1e-12))
    clipped: NDArray[np.int64] = np.clip(scaled.astype(np.int64), 0, num - 1)
    return clipped


def _owners(edges: _Floats, bars: _Floats) -> NDArray[np.int64]:
    """Per stretch the group that covers most of it, or -1."""
    best, owner = np.zeros(len(edges) - 1), np.full(len(edges) - 1, -1)
    bars = bars[np.argsort(bars[:, 2], kind="stable")]
    for own in np.split(bars, np.flatnonzero(np.diff(bars[:, 2])) + 1):
        if len(own):
            share = np.diff(_covered(edges, own[:, 0], own[:, 1], np.ones(len(own))))
            is_more = share > best + 1e-12
            best[is_more], owner[is_more] = share[is_more], int(own[0, 2])
    return owner


def _covered(edges: _Floats, begins: _Floats, ends: _Floats, weights: _Floats) -> _Floats:
    """Weighted length of all intervals that lies before each edge."""

    def ramps(starts: _Floats) -> _Floats:
        order = np.argsort(starts)
        weight = np.append(0.0, np.cumsum(weights[order]))
        moment = np.append(0.0, np.cumsum(weights[order] * (starts[order] - edges[0])))
        at = np.searchsorted(starts[order], edges)
        found: _Floats = weight[at] * (edges - edges[0]) - moment[at]
        return found

    return ramps(begins) - ramps(ends)


def _joined(edges: _Floats, owners: NDArray[np.int64]) -> Iterable[tuple[float, float, int]]:
    """Stretches of one owner, side by side, as one bar."""
    starts = np.flatnonzero(np.diff(owners, prepend=-2))
    ends = np.append(starts[1:], len(owners))
    for start, end in zip(starts, ends, strict=True):
        if owners[start] >= 0:
            yield _short(float(edges[start])), _short(float(edges[end])), int(owners[start])


def _short(number: float) -> float:
    """With ten digits, so that JSON is small."""
    return float(f"{number:.10g}")
