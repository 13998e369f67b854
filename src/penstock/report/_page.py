"""Rendering of sections as one self-contained HTML file."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import jinja2

from penstock._version import __version__
from penstock.report._draw import Drawing, draw
from penstock.report._model import Code, Headline, ReportTable, Section, Wear
from penstock.tiers import ssd_life_s
from penstock.units import format_bytes, format_duration

_NUMBER = re.compile(r"[-+<~]?\d[\d.,e+-]*%?( [A-Za-zµ/]+)?( \d+ min)?( \([^()]{0,40}\))?|-|")
_YEAR_S = 365 * 86400.0


class _Lines(NamedTuple):
    title: str
    note: str
    columns: Sequence[str]
    lines: Sequence[Sequence[str]]
    is_number: Sequence[bool]


@dataclass(frozen=True, slots=True)
class _Shown:
    title: str
    text: str
    drawings: list[Drawing]
    tables: list[_Lines]
    codes: Sequence[Code]
    trace: str | None


def page(
    title: str, sections: Sequence[Section], traces: Sequence[str | None], *, rated_bytes: int | None, now: datetime
) -> str:
    """Return the page as HTML. ``traces`` names, per section, the file next to the page that holds its events."""
    files = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=files, autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.get_template("page.html").render(
        title=title,
        version=__version__,
        written=now.strftime("%d %B %Y, %H:%M"),
        summary=_lines(_summary([section.headline for section in sections], rated_bytes)),
        notes=_notes([section.headline for section in sections], rated_bytes),
        sections=[_shown(section, trace) for section, trace in zip(sections, traces, strict=True)],
    )


def _shown(section: Section, trace: str | None) -> _Shown:
    return _Shown(
        section.title,
        section.text,
        [draw(chart) for chart in section.charts],
        [_lines(table) for table in section.tables],
        section.codes,
        trace,
    )


def _lines(table: ReportTable) -> _Lines:
    """Return a table for the template. A column counts as numbers if all its cells look like numbers."""
    columns = list(zip(*table.lines, strict=True)) or [()] * len(table.columns)
    is_number = [any(column) and all(_NUMBER.fullmatch(cell) for cell in column) for column in columns]
    return _Lines(table.title, table.note, table.columns, table.lines, is_number)


def _summary(headlines: Sequence[Headline], rated_bytes: int | None) -> ReportTable:
    return ReportTable(
        title="What ran",
        columns=("run", "device peak", "budget", "stalls", "moved out", "moved in", "SSD life"),
        lines=tuple(
            (
                headline.what,
                _size(headline.peak_bytes)
                + (" (plan)" if headline.is_peak_predicted and headline.peak_bytes is not None else ""),
                _size(headline.budget_bytes),
                _stalls(headline),
                _size(headline.out_bytes),
                _size(headline.in_bytes),
                _life(headline.wear, rated_bytes),
            )
            for headline in headlines
        ),
    )


def _notes(headlines: Sequence[Headline], rated_bytes: int | None) -> list[str]:
    """Return sentences for below the summary: exceeded budgets, and what is assumed about disks."""
    notes = [
        f"{headline.what}: its peak of {format_bytes(headline.peak_bytes)} is above the budget, "
        f"{format_bytes(headline.budget_bytes)}."
        for headline in headlines
        if headline.peak_bytes is not None
        and headline.budget_bytes is not None
        and headline.peak_bytes > headline.budget_bytes
    ]
    worn = [headline.wear for headline in headlines if headline.wear is not None and headline.wear.written_bytes]
    if worn and rated_bytes is not None:
        notes.append(f"SSD life: how long a drive rated for {rated_bytes / 1e12:,.4g} TB of writes lasts at this rate.")
    elif worn:
        notes.append(
            "SSD life: how long the drive lasts at this rate of writing. Its rating is not known; 600 bytes written "
            "for each byte of the disk are assumed, as is common for consumer drives. Give the rating from its data "
            "sheet: rated_bytes='600TB', or penstock report --rated 600TB."
        )
    return notes


def _size(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else format_bytes(size_bytes)


def _stalls(headline: Headline) -> str:
    if headline.stall_s is None:
        return "-"
    share = "" if headline.stall_share is None else f" ({headline.stall_share:.1%})"
    return format_duration(headline.stall_s) + share


def _life(wear: Wear | None, rated_bytes: int | None) -> str:
    """Return how long the disks last if writing goes on at this rate without a pause."""
    if wear is None:
        return "-"
    if not wear.written_bytes:
        return "nothing written"
    if not wear.duration_s or (rated_bytes is None and wear.capacity_bytes is None):
        return f"unknown ({format_bytes(wear.written_bytes)} written)"
    if rated_bytes is not None:
        life_s = rated_bytes * wear.duration_s / wear.written_bytes
    else:
        life_s = ssd_life_s(
            capacity_bytes=wear.capacity_bytes or 0, written_bytes=wear.written_bytes, duration_s=wear.duration_s
        )
    return "over 100 years" if not math.isfinite(life_s) or life_s > 100 * _YEAR_S else format_duration(life_s)
