"""The part of a page about a demo: all methods side by side, their memory under the cap, and where they ran."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from penstock.errors import PenstockError
from penstock.files import read_text
from penstock.report._model import MOST_SERIES, Curves, Finite, Headline, ReportTable, Section, Series, Text, hue
from penstock.report._part import Part, table
from penstock.report._thin import thin
from penstock.units import format_bytes

_SUMMARY_FILE = "summary.json"
_MEMORY_FILE = "memory.json"
_HEADINGS = ("method", "under the cap", "activations", "step time (plain = 1)", "moved out a step", "losses off by")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Peak:
    """Measured memory of one step."""

    peak_bytes: int
    activation_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _MeasuredMethod(_Peak):
    """Figures of a method under the cap."""

    label: Text
    step_time_ratio: Finite
    largest_loss_difference: Finite
    moved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moved:
    """Bytes that `offload.training` moved in the last step, by kind."""

    step_parked: Annotated[Mapping[str, int], Field(max_length=32)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole:
    """Figures of the second model, whose parameters, gradients and optimizer state exceed the cap."""

    state_bytes: int
    cap_bytes: int
    failures: Annotated[Mapping[Text, Text], Field(max_length=32)]
    step_time_ratio: Finite
    largest_loss_difference: Finite
    statistics: _Moved


@dataclass(frozen=True, slots=True, kw_only=True)
class _Summary:
    """The fields of ``summary.json`` that the page shows."""

    cap_bytes: int
    budget_bytes: int
    plain: _Peak
    plain_failure: Text
    methods: Annotated[Mapping[str, _MeasuredMethod], Field(max_length=MOST_SERIES)]
    best: str
    whole: _Whole
    command: Text
    machine: Annotated[Mapping[Text, Text | int | None], Field(max_length=32)] = field(default_factory=dict)


_Timelines = Annotated[dict[Text, list[tuple[Finite, Finite]]], Field(max_length=MOST_SERIES)]


def is_demo(folder: Path) -> bool:
    """Whether ``penstock demo`` has written to the folder."""
    return all((folder / name).is_file() for name in (_SUMMARY_FILE, _MEMORY_FILE))


def part_of_demo(folder: Path) -> Part:
    """Return the part for a demo's folder. Raises ``PenstockError`` if a file is damaged."""
    try:
        summary = TypeAdapter(_Summary).validate_json(read_text(folder / _SUMMARY_FILE))
        timelines = TypeAdapter(_Timelines).validate_json(read_text(folder / _MEMORY_FILE))
        best = summary.methods[summary.best]
    except (ValidationError, OSError, ValueError, KeyError) as error:
        raise PenstockError(f"{folder} cannot be read as the folder of a demo: {error}") from None
    section = Section(
        kind="demo",
        title="Training under a memory cap",
        text=f"Plain PyTorch takes {format_bytes(summary.plain.activation_bytes)} of activations in a step. Under a "
        f"cap of {format_bytes(summary.cap_bytes)}, which the kernel enforces, it fails: {summary.plain_failure}. The "
        f"fastest method that trains under the cap is {best.label}; Penstock's budget is "
        f"{format_bytes(summary.budget_bytes)} with what is held between steps.",
        headline=Headline(
            what=f"demo, {best.label}",
            peak_bytes=best.peak_bytes,
            budget_bytes=summary.budget_bytes,
            out_bytes=best.moved_bytes,
        ),
        charts=(_memory(timelines, summary),),
        tables=(_methods(summary), _second_model(summary.whole), circumstances(summary.command, summary.machine)),
    )
    return Part(section=section)


def _memory(timelines: Mapping[str, list[tuple[float, float]]], summary: _Summary) -> Curves:
    start_bytes = summary.plain.peak_bytes - summary.plain.activation_bytes
    series = []
    for index, (name, timeline) in enumerate(timelines.items()):
        points = thin([(time_s - timeline[0][0], held) for time_s, held in timeline])
        peak_bytes = max((held for _, held in points), default=0)
        name = f"{name}: peak {format_bytes(peak_bytes)}"
        series.append(Series(name=name, points=points, style="step", colour=hue(index)))
    return Curves(
        title="Memory held over one step.",
        reading="Memory rises in forward and falls in backward. A method trains under the cap if its curve stays below "
        "the dashed line.",
        x_label="time in the step",
        x_unit="s",
        y_label="held",
        y_unit="bytes",
        series=tuple(series),
        limit=start_bytes + summary.cap_bytes,
        limit_label="cap",
    )


def _methods(summary: _Summary) -> ReportTable:
    lines = [("plain", "fails", format_bytes(summary.plain.activation_bytes), "1", "", "")]
    lines += [
        (
            method.label,
            "trains",
            format_bytes(method.activation_bytes),
            f"{method.step_time_ratio:.2f}",
            format_bytes(method.moved_bytes),
            f"{method.largest_loss_difference:g}",
        )
        for method in summary.methods.values()
    ]
    return table("All methods", _HEADINGS, lines, note="Plain training is timed without the cap.")


def _second_model(whole: _Whole) -> ReportTable:
    fate = {name: "fails" if failure else "trains" for name, failure in whole.failures.items()}
    lines = [(name, verdict, "", "", "") for name, verdict in fate.items()]
    lines.append(
        (
            "Penstock: training",
            "trains",
            f"{whole.step_time_ratio:.2f}",
            format_bytes(sum(whole.statistics.step_parked.values())),
            f"{whole.largest_loss_difference:g}",
        )
    )
    return table(
        "A model that is larger than the cap",
        (*_HEADINGS[:2], *_HEADINGS[3:]),
        lines,
        note=f"Parameters, gradients and optimizer state are {format_bytes(whole.state_bytes)}; the cap is "
        f"{format_bytes(whole.cap_bytes)}.",
    )


def circumstances(command: str, machine: Mapping[str, str | int | None]) -> ReportTable:
    """Return the table of what ran, and where."""
    lines = [("command", command)]
    for name, value in machine.items():
        if value is not None:
            is_size = name.endswith("_bytes") and isinstance(value, int)
            lines.append((name.removesuffix("_bytes"), format_bytes(int(value)) if is_size else str(value)))
    return table("Machine, versions and command", ("what", "value"), lines)
