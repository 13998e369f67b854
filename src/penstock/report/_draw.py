"""The layout of charts: where ticks, curves and bars go, in a box 1000 units wide that stretches to any width.

Labels are HTML next to the box, positioned in percent, so that text keeps its size on a phone.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from penstock.report._model import Bars, Curves, Mark, Row, Series, Unit, clipped
from penstock.units import format_bytes, format_duration, format_rate

WIDTH, HEIGHT, ROW_HEIGHT = 1000, 300, 10
_MOST_KEYS = 16
"""The largest number of entries in a legend."""
_MOST_HOVERS = 120
"""The most columns of a plot that show values under the pointer."""
_MOST_VALUES = 8
"""The most values that such a column shows."""
_MOST_OWN_BARS = 600
"""The most bars of a chart that each show their own value; those of more are joined by group, to keep pages small."""
_SCALES: dict[str, tuple[tuple[str, float], ...]] = {
    "bytes": (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1)),
    "bytes/s": (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3), ("B/s", 1)),
    "s": (("h", 3600), ("min", 60), ("s", 1), ("ms", 1e-3), ("µs", 1e-6)),
    "share": (("%", 0.01),),
    "": (("", 1),),
}


class Tick(NamedTuple):
    """A number on an axis."""

    percent: float
    text: str


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear scale from values to positions in percent."""

    low: float
    """The value at 0 percent."""
    high: float
    """The value at 100 percent."""
    unit: str
    """The unit of the tick labels; empty for plain numbers."""
    ticks: tuple[Tick, ...]
    """Ticks at round numbers, ascending."""
    label: str = ""
    """The label of the axis, with its unit."""

    def at(self, value: float, size: float = 100.0) -> float:
        """Return the position of ``value`` on an axis of length ``size``."""
        return round((value - self.low) / (self.high - self.low) * size, 2)


class Key(NamedTuple):
    """A line of a legend."""

    colour: str
    text: str


class Legend(NamedTuple):
    """The first entries of a legend, and the number of those left out."""

    keys: tuple[Key, ...]
    num_more: int


class Hover(NamedTuple):
    """A column of a plot with the values that a tooltip shows there."""

    left: float
    width: float
    text: str


class Path(NamedTuple):
    """An SVG path with its colour, title and style."""

    colour: str
    shape: str
    title: str
    style: str = ""
    area: str = ""


class Strip(NamedTuple):
    """A row of ticks or bars, with its name."""

    name: str
    title: str
    paths: tuple[Path, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Curves over a vertical axis, in a box of ``WIDTH`` by ``HEIGHT``."""

    y: Axis
    """The vertical axis."""
    paths: tuple[Path, ...]
    """The curves."""
    hovers: tuple[Hover, ...]
    """Columns that show the values below the pointer; they fill the box."""
    limit: Tick | None = None
    """A dashed line: its distance from the top in percent, and its label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """One chart, laid out: everything that the template needs."""

    title: str
    """The title of the chart."""
    reading: str
    """A sentence or two on how to read the chart."""
    alt: str
    """The chart described in words, for readers who cannot see it."""
    x: Axis
    """The horizontal axis."""
    legend: Legend
    """The names of the colors."""
    plot: Plot | None = None
    """The curves; ``None`` for rows of bars."""
    strips: tuple[Strip, ...] = ()
    """Rows of ticks or bars, each in a box of ``WIDTH`` by ``ROW_HEIGHT``."""
    is_empty: bool = False
    """Whether there is nothing to draw."""


def draw(chart: Curves | Bars) -> Drawing:
    """Lay out a chart."""
    return _draw_curves(chart) if isinstance(chart, Curves) else _draw_bars(chart)


def axis(label: str, unit: Unit, low: float, high: float, *, is_wide: bool = False, num_ticks: int = 5) -> Axis:
    """Return an axis from ``low`` to ``high`` with ticks at round numbers; ``is_wide`` extends it to the next tick."""
    if high <= low:
        high = low + (abs(low) or (0.01 if unit == "share" else 1.0))
    largest = max(abs(low), abs(high))
    name, factor = next((scale for scale in _SCALES[unit] if largest >= 1.5 * scale[1]), _SCALES[unit][-1])
    step = _round_step((high - low) / factor / num_ticks) * factor
    if is_wide:
        high = math.ceil(high / step - 1e-9) * step
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    ticks = [number * step for number in range(first, last + 1)]
    return Axis(
        low,
        high,
        name,
        tuple(Tick(round((value - low) / (high - low) * 100, 2), f"{value / factor:,.6g}") for value in ticks),
        f"{label} ({name})" if name else label,
    )


def said(unit: Unit, value: float) -> str:
    """Return a number as text, with its unit."""
    formats = {"bytes": format_bytes, "bytes/s": format_rate, "s": format_duration}
    if unit in formats:
        return formats[unit](value)
    return f"{value:.1%}" if unit == "share" else f"{value:.4g}"


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= least * 0.999)


def _draw_curves(chart: Curves) -> Drawing:
    drawn = [series for series in chart.series if series.points]
    xs = [x for series in drawn for x in (series.points[0][0], series.points[-1][0])]
    xs += [position for mark in chart.marks for position in mark.positions[:1] + mark.positions[-1:]]
    ys = [y for series in drawn for _, y in series.points] + ([] if chart.limit is None else [chart.limit])
    low = min([0.0, *ys]) if chart.from_zero else min(ys, default=0.0)
    x = axis(chart.x_label, chart.x_unit, min(xs, default=0.0), max(xs, default=1.0))
    y = axis(chart.y_label, chart.y_unit, low, max(ys, default=1.0), is_wide=True)
    if not chart.from_zero:
        low = max(0.0, low - 0.08 * (y.high - low)) if low >= 0 else low
        y = axis(chart.y_label, chart.y_unit, low, y.high, is_wide=True)
    limit = None
    if chart.limit is not None:
        limit = Tick(100 - y.at(chart.limit), f"{chart.limit_label}: {said(chart.y_unit, chart.limit)}")
    return Drawing(
        title=chart.title,
        reading=chart.reading,
        alt=_curves_in_words(chart, drawn),
        x=x,
        legend=_legend([Key(series.colour, clipped(series.name, 60)) for series in drawn]),
        plot=Plot(
            y=y,
            paths=tuple(path for series in drawn for path in _paths(series, x, y, has_area=len(drawn) == 1)),
            hovers=tuple(_hovers(chart, drawn, x)),
            limit=limit,
        ),
        strips=tuple(_mark_strip(mark, x) for mark in chart.marks),
        is_empty=not drawn,
    )


def _legend(keys: list[Key]) -> Legend:
    return Legend(tuple(keys[:_MOST_KEYS]), max(0, len(keys) - _MOST_KEYS))


def _paths(series: Series, x: Axis, y: Axis, *, has_area: bool) -> list[Path]:
    positions = [(x.at(point[0], WIDTH), round(HEIGHT - y.at(point[1], HEIGHT), 1)) for point in series.points]
    title = clipped(series.name, 120)
    paths = []
    if series.style != "points" and len(positions) > 1:
        form = "H{:g}V{:g}" if series.style == "step" else "L{:g} {:g}"
        start = positions[0]
        shape = f"M{start[0]:g} {start[1]:g}" + "".join(form.format(*position) for position in positions[1:])
        area = f"{shape}V{HEIGHT}H{start[0]:g}z" if has_area and series.style == "step" else ""
        paths.append(Path(series.colour, shape, title, "line", area))
    if series.style in ("points", "both") or len(positions) == 1:
        dots = "".join(f"M{left:g} {top:g}h0" for left, top in positions)
        paths.append(Path(series.colour, dots, title, "dots"))
    return paths


def _hovers(chart: Curves, drawn: Sequence[Series], x: Axis) -> list[Hover]:
    """Return adjacent columns over the whole plot: one per x of a point if they are few, else of equal width.

    The page runs no script, so the columns are what knows where the pointer is.
    """
    xs = sorted({point[0] for series in drawn for point in series.points})
    if len(xs) > _MOST_HOVERS:
        step = (x.high - x.low) / _MOST_HOVERS
        xs = [x.low + (number + 0.5) * step for number in range(_MOST_HOVERS)]
    edges = [x.low, *((left + right) / 2 for left, right in pairwise(xs)), x.high]
    hovers = []
    for value, (begin, end) in zip(xs, pairwise(edges), strict=True):
        left = x.at(begin, WIDTH)
        lines = [f"{chart.x_label}: {said(chart.x_unit, value)}"]
        for series in drawn[:_MOST_VALUES]:
            height = _height_at(series, value)
            if height is not None:
                lines.append(f"{said(chart.y_unit, height)}, {clipped(series.name, 60)}")
        hovers.append(Hover(left, round(x.at(end, WIDTH) - left, 2), "\n".join(lines)))
    return hovers


def _height_at(series: Series, value: float) -> float | None:
    """Return the y of a curve at an x; ``None`` where it has none."""
    index = bisect_right(series.points, (value, math.inf)) - 1
    if index < 0:
        return None
    x, y = series.points[index]
    if x == value or (series.style == "step" and index + 1 < len(series.points)):
        return y
    if series.style in ("step", "points") or index + 1 == len(series.points):
        return None
    next_x, next_y = series.points[index + 1]
    return y + (next_y - y) * (value - x) / (next_x - x)


def _mark_strip(mark: Mark, x: Axis) -> Strip:
    shape = "".join(f"M{x.at(position, WIDTH):g} 1v{ROW_HEIGHT - 2}" for position in mark.positions)
    title = f"{mark.name}: {mark.num_events:,}"
    return Strip(mark.name, title, (Path(mark.colour, shape, title, "ticks"),))


def _draw_bars(chart: Bars) -> Drawing:
    bounds = [bound for row in chart.rows for begin, end, _ in row.bars for bound in (begin, end)]
    ends = bounds + ([] if chart.end is None else [chart.end])
    begin = min([*bounds, *([0.0] if chart.end is not None else [])], default=0.0)
    x = axis(chart.x_label, chart.x_unit, begin, max(ends, default=1))
    used = {group for row in chart.rows for _, _, group in row.bars}
    keys = [Key(group.colour, clipped(group.name, 40)) for number, group in enumerate(chart.groups) if number in used]
    has_own_values = sum(len(row.bars) for row in chart.rows) <= _MOST_OWN_BARS
    return Drawing(
        title=chart.title,
        reading=chart.reading,
        alt=_bars_in_words(chart),
        x=x,
        legend=_legend(keys),
        strips=tuple(_bar_strip(row, chart, x, has_own_values) for row in chart.rows),
        is_empty=not bounds,
    )


def _bar_strip(row: Row, chart: Bars, x: Axis, has_own_values: bool) -> Strip:
    """Return a row with a path per bar, which shows its value, or a path per group, which shows the group's sum."""
    shapes: dict[int, list[str]] = defaultdict(list)
    sums: dict[int, float] = defaultdict(float)
    for begin, end, group in row.bars:
        left = x.at(begin, WIDTH)
        wide = max(0.6, round(x.at(end, WIDTH) - left, 2))
        shapes[group].append(f"M{left:g} 0h{wide:g}v{ROW_HEIGHT}h-{wide:g}z")
        sums[group] += end - begin

    def path(group: int, shape: str, value: str) -> Path:
        name = clipped(chart.groups[group].name, 120)
        return Path(chart.groups[group].colour, shape, f"{name}: {value}", "bars")

    if has_own_values:
        own = {group: iter(shapes[group]) for group in shapes}
        paths = [
            path(bar[2], next(own[bar[2]]), _bar_in_words(bar, chart.x_unit, sums[bar[2]], len(shapes[bar[2]])))
            for bar in row.bars
        ]
    else:
        paths = [path(group, "".join(shapes[group]), said(chart.x_unit, sums[group])) for group in shapes]
    return Strip(clipped(row.name, 60), row.text or clipped(row.name, 120), tuple(paths))


def _bar_in_words(bar: tuple[float, float, int], unit: Unit, sum_of_group: float, num_of_group: int) -> str:
    begin, end, _ = bar
    whole = f" of {said(unit, sum_of_group)} in this row" if num_of_group > 1 else ""
    span = f", {said(unit, begin)} to {said(unit, end)}" if unit == "s" else ""
    return f"{said(unit, end - begin)}{whole}{span}"


def _curves_in_words(chart: Curves, drawn: Iterable[Series]) -> str:
    parts = [f"{chart.title}."]
    for series in list(drawn)[:6]:
        values = [y for _, y in series.points]
        low, high = said(chart.y_unit, min(values)), said(chart.y_unit, max(values))
        parts.append(f"{clipped(series.name, 80)}: from {low} to {high}.")
    if chart.limit is not None:
        parts.append(f"{chart.limit_label}: {said(chart.y_unit, chart.limit)}.")
    parts += [f"{mark.name}: {mark.num_events:,} times." for mark in chart.marks]
    return " ".join(parts)


def _bars_in_words(chart: Bars) -> str:
    parts = [f"{chart.title}."]
    for row in chart.rows[:8]:
        lengths: dict[int, float] = defaultdict(float)
        for begin, end, group in row.bars:
            lengths[group] += end - begin
        most = sorted(lengths, key=lambda group: -lengths[group])[:3]
        told = ", ".join(
            f"{clipped(chart.groups[group].name, 40)} {said(chart.x_unit, lengths[group])}" for group in most
        )
        parts.append(f"{clipped(row.name, 60)}: {told or 'nothing'}.")
    return " ".join(parts)
