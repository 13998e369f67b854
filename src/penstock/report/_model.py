"""What a page shows: sections of charts and tables, as frozen data that is made once, saved as JSON, and drawn.

Whoever fills these in keeps within the bounds below, so that a page of any run stays small; what is loaded is held to
them too.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

MOST_POINTS = 1500
"""Points of a curve, positions of a mark."""
MOST_BARS = 8000
"""Bars of a chart, all rows together."""
MOST_SERIES = 24
"""Curves of a chart."""
MOST_ROWS = 64
"""Rows of bars."""
MOST_LINES = 200
"""Lines of a table."""
MOST_GROUPS = 4000
"""Kinds of bars in a chart: jobs, as a rule."""
MOST_TEXT = 4000
"""Characters of a text; of code, ten times as many."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
"""What can be drawn."""
Unit = Literal["bytes", "s", "share", "bytes/s", ""]
"""What an axis counts."""
Text = Annotated[str, Field(max_length=MOST_TEXT)]
"""Anything to read."""
Colour = Literal["c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8", "c9", "stall", "muted"]
"""A colour of the theme: one of ten to tell things apart, or that of waiting, or of what does not matter."""
HUES: tuple[Colour, ...] = ("c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8", "c9")
"""The ten."""


def hue(index: int) -> Colour:
    """The colour of the ``index``-th thing; they come round again."""
    return HUES[index % len(HUES)]


def clipped(text: str, most: int = 300) -> str:
    """``text``, with an ellipsis if it is longer than ``most``."""
    return text if len(text) <= most else text[: most - 1] + "…"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve."""

    name: Text
    """In the legend."""
    points: Annotated[tuple[tuple[Finite, Finite], ...], Field(max_length=MOST_POINTS)]
    """Ascending in x."""
    style: Literal["step", "line", "points", "both"] = "line"
    """``"step"``: a value holds until the next; ``"both"``: a line with points on it."""
    colour: Colour = "c0"
    """Of the curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A row of ticks below a chart: when something happened."""

    name: Text
    """In the legend."""
    positions: Annotated[tuple[Finite, ...], Field(max_length=MOST_POINTS)]
    """On the x axis."""
    num_events: int
    """How many there were before they were thinned."""
    colour: Colour
    """Of the ticks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Curves over one axis, with a limit and rows of marks."""

    title: Text
    """What it shows."""
    reading: Text
    """How to read it, in a sentence."""
    x_label: Text
    """What is on the x axis, without its unit."""
    y_label: Text
    """What is on the y axis, without its unit."""
    series: Annotated[tuple[Series, ...], Field(max_length=MOST_SERIES)]
    """At least one with points, or the page says that there is nothing to draw."""
    x_unit: Unit = ""
    """Of the x axis."""
    y_unit: Unit = ""
    """Of the y axis."""
    limit: Finite | None = None
    """A dashed line."""
    limit_label: Text = "limit"
    """What it is."""
    marks: Annotated[tuple[Mark, ...], Field(max_length=8)] = ()
    """Rows below the axis."""
    from_zero: bool = True
    """Whether the y axis begins at 0."""
    kind: Literal["curves"] = "curves"
    """In JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A kind of bars."""

    name: Text
    """In the legend, and where the pointer rests on one."""
    colour: Colour
    """Of its bars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Bars beside a name."""

    name: Text
    """Left of the bars."""
    bars: Annotated[tuple[tuple[Finite, Finite, int], ...], Field(max_length=MOST_BARS)]
    """Begin, end, and the position of its group."""
    text: Text = ""
    """More about the row, where the pointer rests on its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Rows of bars over one axis: who had a device when, or what a whole is made of."""

    title: Text
    """What it shows."""
    reading: Text
    """How to read it, in a sentence."""
    x_label: Text
    """What is on the x axis, without its unit."""
    groups: Annotated[tuple[Group, ...], Field(max_length=MOST_GROUPS)]
    """Kinds of bars."""
    rows: Annotated[tuple[Row, ...], Field(max_length=MOST_ROWS)]
    """From the top."""
    x_unit: Unit = "s"
    """Of the x axis."""
    end: Finite | None = None
    """Where the axis ends, at least."""
    kind: Literal["bars"] = "bars"
    """In JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Lines of text and numbers."""

    title: Text
    """What it shows."""
    columns: Annotated[tuple[Text, ...], Field(max_length=16)]
    """Headings; the first column names the line."""
    lines: Annotated[tuple[tuple[Text, ...], ...], Field(max_length=MOST_LINES)]
    """As long as ``columns``, each."""
    note: Text = ""
    """How to read it, or what was left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Something to paste."""

    title: Text
    """What it is."""
    text: Annotated[str, Field(max_length=10 * MOST_TEXT)]
    """The code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wear:
    """What was written to disks."""

    written_bytes: int
    """In ``duration_s``."""
    duration_s: Finite
    """Seconds in which it was written."""
    capacity_bytes: int | None
    """Of the disks; ``None`` where unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """A section's line in the summary; ``None`` where a number is not known, or means nothing."""

    what: Text
    """What ran."""
    peak_bytes: int | None = None
    """On the device."""
    is_peak_predicted: bool = False
    """Whether a plan says so, rather than a measurement."""
    budget_bytes: int | None = None
    """That it had to stay within."""
    stall_s: Finite | None = None
    """Time the computation waited for copies."""
    stall_share: Finite | None = None
    """Of the time of the step or the run, 0 to 1."""
    out_bytes: int | None = None
    """Copied out of the device."""
    in_bytes: int | None = None
    """Copied back."""
    wear: Wear | None = None
    """Of the disks."""


Chart = Curves | Bars
"""What is drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One thing on the page."""

    kind: Literal["offload", "training", "remat", "fleet", "unified", "budget", "advice", "memory"]
    """What it is of; files beside the page are named so."""
    title: Text
    """Of the section."""
    text: Text
    """What it says, in a few sentences."""
    headline: Headline
    """In the summary."""
    charts: Annotated[tuple[Chart, ...], Field(max_length=8)] = ()
    """Pictures."""
    tables: Annotated[tuple[Table, ...], Field(max_length=8)] = ()
    """Tables."""
    codes: Annotated[tuple[Code, ...], Field(max_length=16)] = ()
    """Code."""
