"""The part of a page about the demo of one room: plain training and Penstock under a cap, and where they ran."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from penstock.errors import PenstockError
from penstock.files import read_text
from penstock.report._model import MOST_SERIES, Curves, Finite, Headline, Section, Series, Text, hue
from penstock.report._of_demo import circumstances
from penstock.report._part import Part, table
from penstock.report._thin import thin
from penstock.units import format_bytes

_SUMMARY_FILE, _MEMORY_FILE = "room.json", "room-memory.json"
_OURS = "Penstock"


@dataclass(frozen=True, slots=True, kw_only=True)
class _RoomSummary:
    """The fields of ``room.json`` that the page shows."""

    story: Text
    cap_bytes: int
    failures: Annotated[Mapping[Text, Text], Field(max_length=MOST_SERIES)]
    taken_bytes: Annotated[Mapping[str, int], Field(max_length=MOST_SERIES)]
    time_ratio: Finite
    largest_loss_difference: Finite
    losses: Annotated[list[Finite], Field(min_length=1, max_length=100_000)]
    told: Text
    command: Text
    machine: Annotated[Mapping[Text, Text | int | None], Field(max_length=32)] = field(default_factory=dict)


_Timelines = Annotated[dict[Text, list[tuple[Finite, Finite]]], Field(max_length=MOST_SERIES)]


def is_room(folder: Path) -> bool:
    """Whether ``penstock demo --room`` has written to the folder."""
    return all((folder / name).is_file() for name in (_SUMMARY_FILE, _MEMORY_FILE))


def part_of_room(folder: Path) -> Part:
    """Return the part for a folder of a room's demo. Raises ``PenstockError`` if a file is damaged."""
    try:
        summary = TypeAdapter(_RoomSummary).validate_json(read_text(folder / _SUMMARY_FILE))
        timelines = TypeAdapter(_Timelines).validate_json(read_text(folder / _MEMORY_FILE))
        taken_bytes = summary.taken_bytes[_OURS]
    except (ValidationError, OSError, ValueError, KeyError) as error:
        raise PenstockError(f"{folder} cannot be read as the folder of a demo: {error}") from None
    taken = {name: format_bytes(size) for name, size in summary.taken_bytes.items()}
    lines = [
        (name, "fails" if failure else "trains", taken.get(name, ""), "", "")
        for name, failure in summary.failures.items()
    ]
    difference = f"{summary.largest_loss_difference:.2g}"
    lines.append((_OURS, "trains", format_bytes(taken_bytes), f"{summary.time_ratio:.2f}", difference))
    section = Section(
        kind="demo",
        title="Training under a memory cap",
        text=f"{summary.story} The kernel enforces a cap of {format_bytes(summary.cap_bytes)}. {summary.told} The loss "
        f"went from {summary.losses[0]:.4f} to {summary.losses[-1]:.4f}.",
        headline=Headline(what=f"demo, {_OURS}", peak_bytes=taken_bytes, budget_bytes=summary.cap_bytes),
        charts=(_memory(timelines, summary.cap_bytes),),
        tables=(
            table(
                "Plain PyTorch and Penstock",
                ("method", "under the cap", "memory taken", "time (plain = 1)", "losses off by"),
                lines,
                note="Plain training is timed, and its memory measured, without the cap.",
            ),
            circumstances(summary.command, summary.machine),
        ),
    )
    return Part(section=section)


def _memory(timelines: Mapping[str, list[tuple[float, float]]], cap_bytes: int) -> Curves:
    series = []
    for index, (name, timeline) in enumerate(timelines.items()):
        points = thin(timeline)
        peak_bytes = max((held for _, held in points), default=0)
        series.append(
            Series(name=f"{name}: peak {format_bytes(peak_bytes)}", points=points, style="step", colour=hue(index))
        )
    return Curves(
        title="Memory taken over the last round.",
        reading="Bytes that a process took since its libraries had loaded, as the kernel counts them for the cap. A "
        "curve that stays below the dashed line trains under the cap.",
        x_label="time",
        x_unit="s",
        y_label="taken",
        y_unit="bytes",
        series=tuple(series),
        limit=cap_bytes,
        limit_label="cap",
    )
