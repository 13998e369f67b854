"""A part of a page: a section, and the events for the trace next to the page."""

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.report._model import MOST_LINES, ReportTable, Section, clipped
from penstock.tiers import Event, write_trace

MOST_EVENTS = 200_000
"""The most events of a trace; the last ones are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A section with its trace: events in memory, or a saved file."""

    section: Section
    """The section on the page."""
    events: Sequence[Event] = ()
    """Events for the trace."""
    memory: Sequence[tuple[float, int]] = ()
    """Memory for the same trace: seconds of ``time.time()``, and bytes."""
    saved_trace: Path | None = None
    """A trace file written earlier."""

    @property
    def has_trace(self) -> bool:
        """Whether the part has a trace."""
        return bool(self.events) or self.saved_trace is not None

    def write_trace(self, path: Path) -> None:
        """Write the trace for ui.perfetto.dev."""
        if self.saved_trace is None:
            write_trace(path, self.events[-MOST_EVENTS:], memory=self.memory[-MOST_EVENTS:], name=self.section.title)
        elif not (path.exists() and path.samefile(self.saved_trace)):
            shutil.copyfile(self.saved_trace, path)


def trace_names(parts: Sequence[Part], prefix: str = "") -> list[str | None]:
    """Return a file name for each part that has a trace: its kind, numbered if the kind repeats."""
    counts: dict[str, int] = {}
    names: list[str | None] = []
    for part in parts:
        kind = part.section.kind
        counts[kind] = counts.get(kind, 0) + part.has_trace
        number = f"-{counts[kind]}" if counts[kind] > 1 else ""
        names.append(f"{prefix}{kind}{number}.trace.json" if part.has_trace else None)
    return names


def table(
    title: str, columns: Sequence[str], lines: Iterable[Sequence[str]], *, note: str = "", most: int = MOST_LINES
) -> ReportTable:
    """Return a table of the first ``most`` lines, with long cells cut; the note says how many lines are left out."""
    kept = list(lines)
    if len(kept) > most:
        note = f"{note} {len(kept) - most:,} more are left out.".strip()
    return ReportTable(
        title=title,
        columns=tuple(columns),
        lines=tuple(tuple(clipped(cell) for cell in line) for line in kept[:most]),
        note=note,
    )


def share(part: float, whole: float) -> str:
    """Return the share in percent; empty if ``whole`` is 0."""
    return f"{part / whole:.1%}" if whole else ""
