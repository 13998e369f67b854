"""The layout of charts: where ticks, curves and bars go, in a box 1000 units wide that stretches to any width.

Labels are HTML next to the box, positioned in percent, so that text keeps its size on a phone.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from penstock.report._model import Bars, Curves, Mark, Row, Series, Unit, clipped
from penstock.units import format_bytes, format_duration, format_rate

WIDTH, HEIGHT, ROW_HEIGHT = 1000, 300, 10
_MOST_KEYS = 16
"""The largest number of entries in a legend."""
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

    def at(self, value: float, size: float = 100.0) -> float:
        """Return the position of ``value`` on an axis of length ``size``."""
        return round((value - self.low) / (self.high - self.low) * size, 2)


class Key(NamedTuple):
    """A line of a legend."""

    colour: str
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
class Drawing:
    """One chart, laid out: everything that the template needs."""

    title: str
    """The title of the chart."""
    reading: str
    """A sentence or two on how to read the chart."""
    alt: str
    """The chart described in words, for readers who cannot see it."""
    x_label: str
    """The label of the x axis, with its unit."""
    x: Axis
    """The horizontal axis."""
    y_label: str = ""
    """The label of the y axis, with its unit."""
    y: Axis | None = None
    """The vertical axis; ``None`` for rows of bars."""
    keys: tuple[Key, ...] = ()
    """The entries of the legend."""
    num_more_keys: int = 0
    """Number of entries left out of the legend."""
    paths: tuple[Path, ...] = ()
    """Paths in the box of ``WIDTH`` by ``HEIGHT``."""
    limit: Tick | None = None
    """A dashed line: its distance from the top in percent, and its label."""
    strips: tuple[Strip, ...] = ()
    """Rows of ticks or bars, each in a box of ``WIDTH`` by ``ROW_HEIGHT``."""
    is_empty: bool = False
    """Whether there is nothing to draw."""


def draw(chart: Curves | Bars) -> Drawing:
    """Lay out a chart."""
    return _draw_curves(chart) if isinstance(chart, Curves) else _draw_bars(chart)


def axis(unit: Unit, low: float, high: float, *, is_wide: bool = False, num_ticks: int = 5) -> Axis:
    """Return an axis from ``low`` to ``high`` with ticks at round numbers; ``is_wide`` extends it to the next tick."""
    if high <= low:
        high = low + (abs(low) or (0.01 if unit == "share" else 1.0))
    largest = max(abs(low), abs(high))
    name, factor = next((one for one in _SCALES[unit] if largest >= 1.5 * one[1]), _SCALES[unit][-1])
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
        tuple(Tick(round((one - low) / (high - low) * 100, 2), f"{one / factor:,.6g}") for one in ticks),
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


def _labelled(label: str, unit: str) -> str:
    return f"{label} ({unit})" if unit else label


def _draw_curves(chart: Curves) -> Drawing:
    drawn = [one for one in chart.series if one.points]
    xs = [x for one in drawn for x in (one.points[0][0], one.points[-1][0])]
    xs += [position for mark in chart.marks for position in mark.positions[:1] + mark.positions[-1:]]
    ys = [y for one in drawn for _, y in one.points] + ([] if chart.limit is None else [chart.limit])
    low = min([0.0, *ys]) if chart.from_zero else min(ys, default=0.0)
    x = axis(chart.x_unit, min(xs, default=0.0), max(xs, default=1.0))
    y = axis(chart.y_unit, low, max(ys, default=1.0), is_wide=True)
    if not chart.from_zero:
        y = axis(chart.y_unit, max(0.0, low - 0.08 * (y.high - low)) if low >= 0 else low, y.high, is_wide=True)
    limit = None
    if chart.limit is not None:
        limit = Tick(100 - y.at(chart.limit), f"{chart.limit_label}: {said(chart.y_unit, chart.limit)}")
    keys = [Key(one.colour, clipped(one.name, 60)) for one in drawn]
    return Drawing(
        title=chart.title,
        reading=chart.reading,
        alt=_curves_in_words(chart, drawn),
        x_label=_labelled(chart.x_label, x.unit),
        x=x,
        y_label=_labelled(chart.y_label, y.unit),
        y=y,
        keys=tuple(keys[:_MOST_KEYS]),
        num_more_keys=max(0, len(keys) - _MOST_KEYS),
        paths=tuple(path for one in drawn for path in _paths(one, x, y, has_area=len(drawn) == 1)),
        limit=limit,
        strips=tuple(_mark_strip(one, x) for one in chart.marks),
        is_empty=not drawn,
    )


def _paths(series: Series, x: Axis, y: Axis, *, has_area: bool) -> list[Path]:
    at = [(x.at(one, WIDTH), round(HEIGHT - y.at(two, HEIGHT), 1)) for one, two in series.points]
    title = clipped(series.name, 120)
    paths = []
    if series.style != "points" and len(at) > 1:
        form = "H{:g}V{:g}" if series.style == "step" else "L{:g} {:g}"
        shape = f"M{at[0][0]:g} {at[0][1]:g}" + "".join(form.format(*one) for one in at[1:])
        area = f"{shape}V{HEIGHT}H{at[0][0]:g}z" if has_area and series.style == "step" else ""
        paths.append(Path(series.colour, shape, title, "line", area))
    if series.style in ("points", "both") or len(at) == 1:
        dots = "".join(f"M{one:g} {two:g}h0" for one, two in at)
        paths.append(Path(series.colour, dots, title, "dots"))
    return paths


def _mark_strip(mark: Mark, x: Axis) -> Strip:
    shape = "".join(f"M{x.at(one, WIDTH):g} 1v{ROW_HEIGHT - 2}" for one in mark.positions)
    title = f"{mark.name}: {mark.num_events:,}"
    return Strip(mark.name, title, (Path(mark.colour, shape, title, "ticks"),))


def _draw_bars(chart: Bars) -> Drawing:
    bounds = [bound for row in chart.rows for begin, end, _ in row.bars for bound in (begin, end)]
    ends = bounds + ([] if chart.end is None else [chart.end])
    x = axis(chart.x_unit, min([*bounds, *([0.0] if chart.end is not None else [])], default=0.0), max(ends, default=1))
    lengths: dict[int, float] = defaultdict(float)
    for row in chart.rows:
        for begin, end, group in row.bars:
            lengths[group] += end - begin
    used = [number for number in range(len(chart.groups)) if number in lengths]
    keys = [Key(chart.groups[one].colour, clipped(chart.groups[one].name, 40)) for one in used]
    return Drawing(
        title=chart.title,
        reading=chart.reading,
        alt=_bars_in_words(chart),
        x_label=_labelled(chart.x_label, x.unit),
        x=x,
        keys=tuple(keys[:_MOST_KEYS]),
        num_more_keys=max(0, len(keys) - _MOST_KEYS),
        strips=tuple(_bar_strip(row, chart, x) for row in chart.rows),
        is_empty=not bounds,
    )


def _bar_strip(row: Row, chart: Bars, x: Axis) -> Strip:
    shapes: dict[int, list[str]] = defaultdict(list)
    lengths: dict[int, float] = defaultdict(float)
    for begin, end, group in row.bars:
        left = x.at(begin, WIDTH)
        wide = max(0.6, round(x.at(end, WIDTH) - left, 2))
        shapes[group].append(f"M{left:g} 0h{wide:g}v{ROW_HEIGHT}h-{wide:g}z")
        lengths[group] += end - begin
    paths = tuple(
        Path(
            chart.groups[group].colour,
            "".join(shapes[group]),
            f"{clipped(chart.groups[group].name, 120)}: {said(chart.x_unit, lengths[group])}",
            "bars",
        )
        for group in shapes
    )
    return Strip(clipped(row.name, 60), row.text or clipped(row.name, 120), paths)


def _curves_in_words(chart: Curves, drawn: Iterable[Series]) -> str:
    parts = [f"{chart.title}."]
    for one in list(drawn)[:6]:
        values = [y for _, y in one.points]
        low, high = said(chart.y_unit, min(values)), said(chart.y_unit, max(values))
        parts.append(f"{clipped(one.name, 80)}: from {low} to {high}.")
    if chart.limit is not None:
        parts.append(f"{chart.limit_label}: {said(chart.y_unit, chart.limit)}.")
    parts += [f"{one.name}: {one.num_events:,} times." for one in chart.marks]
    return " ".join(parts)


def _bars_in_words(chart: Bars) -> str:
    parts = [f"{chart.title}."]
    for row in chart.rows[:8]:
        lengths: dict[int, float] = defaultdict(float)
        for begin, end, group in row.bars:
            lengths[group] += end - begin
        most = sorted(lengths, key=lambda group: -lengths[group])[:3]
        told = ", ".join(f"{clipped(chart.groups[one].name, 40)} {said(chart.x_unit, lengths[one])}" for one in most)
        parts.append(f"{clipped(row.name, 60)}: {told or 'nothing'}.")
    return " ".join(parts)
