"""The content of a page: sections of charts and tables, as frozen data that is made once, saved as JSON, and drawn.

All content stays within the bounds below, so that the page of any run is small. Loading a saved page checks them too.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

MOST_POINTS = 1500
"""The most points of a curve, and positions of a mark."""
MOST_BARS = 8000
"""The most bars of a chart, over all rows."""
MOST_SERIES = 24
"""The most curves of a chart."""
MOST_ROWS = 64
"""The most rows of bars in a chart."""
MOST_LINES = 200
"""The most lines of a table."""
MOST_GROUPS = 4000
"""The most groups of bars in a chart; a group is usually a job."""
MOST_TEXT = 4000
"""The most characters of a text; code may have ten times as many."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
"""A number that can be drawn: neither infinite nor NaN."""
Unit = Literal["bytes", "s", "share", "bytes/s", ""]
"""The unit of an axis."""
Text = Annotated[str, Field(max_length=MOST_TEXT)]
"""A text of bounded length."""
Colour = Literal["c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8", "c9", "stall", "muted"]
"""A colour of the theme: one of ten that tell things apart, one for stalls, or one for what matters less."""
HUES: tuple[Colour, ...] = ("c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8", "c9")
"""The ten colours that tell things apart."""


def hue(index: int) -> Colour:
    """Return the colour of the ``index``-th thing; after ten they repeat."""
    return HUES[index % len(HUES)]


def clipped(text: str, most: int = 300) -> str:
    """Return ``text``, cut to ``most`` characters with an ellipsis if it is longer."""
    return text if len(text) <= most else text[: most - 1] + "…"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve."""

    name: Text
    """The name in the legend."""
    points: Annotated[tuple[tuple[Finite, Finite], ...], Field(max_length=MOST_POINTS)]
    """``(x, y)``, ascending in x."""
    style: Literal["step", "line", "points", "both"] = "line"
    """``"step"``: a value holds until the next; ``"both"``: a line with points on it."""
    colour: Colour = "c0"
    """The colour of the curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A row of ticks below a chart: when something happened."""

    name: Text
    """The name in the legend."""
    positions: Annotated[tuple[Finite, ...], Field(max_length=MOST_POINTS)]
    """Positions on the x axis."""
    num_events: int
    """Number of events before they were thinned."""
    colour: Colour
    """The colour of the ticks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Curves over one axis, with a limit and rows of marks."""

    title: Text
    """The title of the chart."""
    reading: Text
    """A sentence or two on how to read the chart."""
    x_label: Text
    """The label of the x axis, without its unit."""
    y_label: Text
    """The label of the y axis, without its unit."""
    series: Annotated[tuple[Series, ...], Field(max_length=MOST_SERIES)]
    """The curves. If none has points, the page says that there is nothing to draw."""
    x_unit: Unit = ""
    """The unit of the x axis."""
    y_unit: Unit = ""
    """The unit of the y axis."""
    limit: Finite | None = None
    """The y value of a dashed line; ``None`` for no line."""
    limit_label: Text = "limit"
    """The label of the dashed line."""
    marks: Annotated[tuple[Mark, ...], Field(max_length=8)] = ()
    """Rows of ticks below the axis."""
    from_zero: bool = True
    """Whether the y axis begins at 0."""
    kind: Literal["curves"] = "curves"
    """The kind of chart, in JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarGroup:
    """A kind of bars: those of one job or one holder, for example."""

    name: Text
    """The name in the legend, and in the tooltip of its bars."""
    colour: Colour
    """The colour of its bars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A named row of bars."""

    name: Text
    """The name, to the left of the bars."""
    bars: Annotated[tuple[tuple[Finite, Finite, int], ...], Field(max_length=MOST_BARS)]
    """Begin, end, and index of the group of each bar."""
    text: Text = ""
    """More about the row, as the tooltip of its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Rows of bars over one axis: which job had a device when, or the parts of a whole."""

    title: Text
    """The title of the chart."""
    reading: Text
    """A sentence or two on how to read the chart."""
    x_label: Text
    """The label of the x axis, without its unit."""
    groups: Annotated[tuple[BarGroup, ...], Field(max_length=MOST_GROUPS)]
    """The groups to which bars belong."""
    rows: Annotated[tuple[Row, ...], Field(max_length=MOST_ROWS)]
    """The rows, from the top."""
    x_unit: Unit = "s"
    """The unit of the x axis."""
    end: Finite | None = None
    """The smallest value at which the axis may end; ``None``: the last bar's end."""
    kind: Literal["bars"] = "bars"
    """The kind of chart, in JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """Lines of text and numbers."""

    title: Text
    """The title of the table."""
    columns: Annotated[tuple[Text, ...], Field(max_length=16)]
    """Headings; the first column names the line."""
    lines: Annotated[tuple[tuple[Text, ...], ...], Field(max_length=MOST_LINES)]
    """The lines; each is as long as ``columns``."""
    note: Text = ""
    """A note on how to read the table, or on what was left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Code to paste."""

    title: Text
    """The title of the code."""
    text: Annotated[str, Field(max_length=10 * MOST_TEXT)]
    """The code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wear:
    """Bytes written to disks, from which the life of an SSD is projected."""

    written_bytes: int
    """Bytes written in ``duration_s``."""
    duration_s: Finite
    """Seconds in which they were written."""
    capacity_bytes: int | None
    """Capacity of the disks; ``None`` if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """A section's line in the summary; a number is ``None`` if it is unknown or does not apply."""

    what: Text
    """The name of the run."""
    peak_bytes: int | None = None
    """The peak on the device."""
    is_peak_predicted: bool = False
    """Whether the peak is predicted by a plan rather than measured."""
    budget_bytes: int | None = None
    """The budget for the peak."""
    stall_s: Finite | None = None
    """Time the computation waited for copies."""
    stall_share: Finite | None = None
    """Share of the stall in the time of the step or the run, 0 to 1."""
    out_bytes: int | None = None
    """Bytes copied out of the device."""
    in_bytes: int | None = None
    """Bytes copied back."""
    wear: Wear | None = None
    """Writes to the disks."""


Chart = Curves | Bars
"""A chart of either kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One section of the page: text, charts, tables and code about one thing."""

    kind: Literal["offload", "training", "remat", "fleet", "unified", "budget", "advice", "memory", "demo"]
    """The kind of thing that it shows; the trace next to the page is named after it."""
    title: Text
    """The title of the section."""
    text: Text
    """A few sentences."""
    headline: Headline
    """The line in the summary."""
    charts: Annotated[tuple[Chart, ...], Field(max_length=8)] = ()
    """The charts."""
    tables: Annotated[tuple[ReportTable, ...], Field(max_length=8)] = ()
    """The tables."""
    codes: Annotated[tuple[Code, ...], Field(max_length=16)] = ()
    """Pieces of code to paste."""
