"""What a source gives to the page: a section, and the events for a trace beside it."""

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.report._model import MOST_LINES, Section, Table, clipped
from penstock.tiers import Event, write_trace

MOST_EVENTS = 200_000
"""Of a trace; the last ones are taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A section with its trace: events in memory, or a file that was saved."""

    section: Section
    """On the page."""
    events: Sequence[Event] = ()
    """For the trace."""
    memory: Sequence[tuple[float, int]] = ()
    """Seconds of ``time.time()`` and bytes, in the same trace."""
    saved_trace: Path | None = None
    """A trace that was written before."""

    @property
    def has_trace(self) -> bool:
        """Whether there is anything to zoom into."""
        return bool(self.events) or self.saved_trace is not None

    def write_trace(self, path: Path) -> None:
        """Writes it for ui.perfetto.dev."""
        if self.saved_trace is None:
            write_trace(path, self.events[-MOST_EVENTS:], memory=self.memory[-MOST_EVENTS:], name=self.section.title)
        elif not (path.exists() and path.samefile(self.saved_trace)):
            shutil.copyfile(self.saved_trace, path)


def trace_names(parts: Sequence[Part], prefix: str = "") -> list[str | None]:
    """A file name for each part that has a trace: its kind, numbered where a kind comes again."""
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
) -> Table:
    """The first ``most`` lines, with every cell of a length to read; the note says how many are left out."""
    kept = list(lines)
    if len(kept) > most:
        note = f"{note} {len(kept) - most:,} more are left out.".strip()
    return Table(
        title=title,
        columns=tuple(columns),
        lines=tuple(tuple(clipped(cell) for cell in line) for line in kept[:most]),
        note=note,
    )


def share(part: float, whole: float) -> str:
    """In percent; empty of nothing."""
    return f"{part / whole:.1%}" if whole else ""
