"""Pictures of runs, drawn with matplotlib (the `report` extra)."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.arguments import checked
from penstock.errors import PenstockError

_MOST_LABELS = 20
"""The most jobs in a legend."""

_COLOURS = ("#6b7280", "#0f766e", "#b45309", "#4338ca", "#be123c")
_MIB = 2**20


@checked("penstock.report.memory_timeline('memory.png', {'planned': report.timeline})", limit_bytes=0)
def memory_timeline(
    path: str | Path,
    timelines: Mapping[str, Sequence[Sequence[float]]],
    *,
    limit_bytes: int | None = None,
    limit_label: str = "limit",
    marks: Mapping[str, Sequence[float]] | None = None,
    title: str = "Memory during one step",
) -> None:
    """Draw device memory over time: one curve per run, a line at ``limit_bytes``, and rows of ``marks`` below.

    ``timelines`` maps a name to ``(seconds, bytes)`` in ascending time, as in ``PeakReport.timeline``; every curve is
    shifted to begin at 0. ``marks`` maps the name of an event to its times in seconds from the beginning. The extension
    of ``path`` (``.png``, ``.svg``, ``.pdf``) chooses the format.
    """
    figure, axes = _axes("time in the step (s)", "memory held (MiB)", title)
    for (name, timeline), colour in zip(timelines.items(), _COLOURS * len(timelines), strict=False):
        zero_s = timeline[0][0]
        peak = max(held for _, held in timeline)
        axes.step(
            [time_s - zero_s for time_s, _ in timeline],
            [held / _MIB for _, held in timeline],
            where="post",
            label=f"{name}: peak {peak / _MIB:,.0f} MiB",
            color=colour,
            linewidth=1.3,
        )
    if limit_bytes is not None:
        _draw_limit(axes, limit_bytes, limit_label)
    _draw_marks(axes, marks or {})
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.legend(frameon=False, loc="best")
    _save(figure, path)


def _draw_limit(axes: Any, limit_bytes: int, label: str) -> None:  # any: as below
    axes.axhline(limit_bytes / _MIB, color="#be123c", linestyle="--", linewidth=1)
    axes.annotate(
        f"{label}: {limit_bytes / _MIB:,.0f} MiB",
        (1, limit_bytes / _MIB),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        color="#be123c",
        fontsize=9,
    )


def _draw_marks(axes: Any, marks: Mapping[str, Sequence[float]]) -> None:  # any: as below
    """Draw rows of ticks below the axis."""
    for row, (name, times_s) in enumerate(marks.items()):
        axes.plot(
            times_s,
            [-0.03 * (row + 1)] * len(times_s),
            transform=axes.get_xaxis_transform(),
            linestyle="none",
            marker="|",
            markersize=7,
            clip_on=False,
            color=_COLOURS[-1 - row % len(_COLOURS)],
            label=f"{name} ({len(times_s)})",
        )
    axes.tick_params(axis="x", pad=4 + 8 * len(marks))


@checked("penstock.report.throughput_curve('curve.png', {'offload': [(1.0, 9.5, 'all')]})")
def throughput_curve(
    path: str | Path,
    points: Mapping[str, Sequence[tuple[float, float, str]]],
    *,
    title: str = "Throughput against activation peak",
) -> None:
    """Draw the recompute-offload-keep curve: samples per second against the activation peak.

    ``points`` maps a method to ``(activation peak in bytes, samples per second, label)``, one per batch size.
    """
    figure, axes = _axes("activation peak (MiB)", "throughput (samples/s)", title)
    for (name, series), colour in zip(points.items(), _COLOURS * len(points), strict=False):
        ordered = sorted(series)
        axes.plot(
            [peak / _MIB for peak, _, _ in ordered],
            [rate for _, rate, _ in ordered],
            marker="o",
            label=name,
            color=colour,
            linewidth=1.3,
        )
        for peak, rate, label in ordered:
            axes.annotate(
                label, (peak / _MIB, rate), xytext=(4, 4), textcoords="offset points", fontsize=8, color=colour
            )
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.legend(frameon=False, loc="lower right")
    _save(figure, path)


@checked("penstock.report.pareto_curve('pareto.png', {'hybrid': [(2**30, 0.1)]})")
def pareto_curve(
    path: str | Path, curves: Mapping[str, Sequence[tuple[int, float]]], *, title: str = "Extra time over the peak"
) -> None:
    """Draw extra time against the peak: ``curves`` maps a method to ``(peak in bytes, extra share of step time)``."""
    figure, axes = _axes("peak (MiB)", "extra operator time (% of the step)", title)
    for (name, points), colour in zip(curves.items(), _COLOURS * len(curves), strict=False):
        ordered = sorted(points)
        axes.plot(
            [peak / _MIB for peak, _ in ordered],
            [100 * share for _, share in ordered],
            marker="o",
            label=name,
            color=colour,
            linewidth=1.3,
        )
    most = max((share for points in curves.values() for _, share in points), default=0.0)
    axes.set_ylim(0, max(1.0, 110 * most))
    axes.set_xlim(left=0)
    axes.legend(frameon=False, loc="upper right")
    _save(figure, path)


@checked("penstock.report.gantt('units.png', {'cuda:0': [(0.0, 1.5, 'job')]})")
def gantt(
    path: str | Path,
    rows: Mapping[str, Sequence[tuple[float, float, str]]],
    *,
    title: str = "Units per device",
) -> None:
    """Draw the units of each device over time: ``rows`` maps a device to ``(begin in s, end in s, job)`` of its units.

    Every job has a colour of its own; gaps are waits.
    """
    figure, axes = _axes("time (s)", "", title)
    jobs = list(dict.fromkeys(job for units in rows.values() for _, _, job in units))
    colours = importlib.import_module("matplotlib").colormaps["tab20"]
    number_of = {job: number for number, job in enumerate(jobs)}
    for index, units in enumerate(rows.values()):
        bars: dict[str, list[tuple[float, float]]] = {}
        for begin, end, job in units:
            bars.setdefault(job, []).append((begin, end - begin))
        for job, own in bars.items():
            axes.broken_barh(own, (index - 0.4, 0.8), color=colours(number_of[job] % 20), linewidth=0)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlim(left=min((begin for units in rows.values() for begin, _, _ in units), default=0.0))
    axes.grid(visible=False, axis="y")
    for number, job in enumerate(jobs[:_MOST_LABELS]):
        axes.barh(0, 0, color=colours(number), label=job)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    _save(figure, path)


@checked("penstock.report.curves('losses.png', {'a': losses})")
def curves(
    path: str | Path,
    series: Mapping[str, Sequence[float]],
    *,
    title: str = "Losses",
    x_label: str = "step",
    y_label: str = "loss",
) -> None:
    """Draw a line per name, with its values at 1, 2, 3 and so on; the legend is ordered by last value, descending."""
    figure, axes = _axes(x_label, y_label, title)
    colours = importlib.import_module("matplotlib").colormaps["tab20"]
    order = sorted((name for name in series if len(series[name])), key=lambda name: -series[name][-1])
    for index, name in enumerate(order):
        values = series[name]
        marker = "o" if len(values) == 1 else None
        steps = range(1, len(values) + 1)
        label = name if index < _MOST_LABELS else "_"  # which legends leave out
        axes.plot(steps, values, color=colours(index % 20), linewidth=1.2, marker=marker, label=label)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    _save(figure, path)


def _axes(x_label: str, y_label: str, title: str) -> tuple[Any, Any]:  # any: matplotlib is optional and untyped here
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise PenstockError("pictures need matplotlib: pip install 'penstock[report]'") from error
    figure = figures.Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes


def _save(figure: Any, path: str | Path) -> None:  # any: as above
    if not Path(path).name:
        raise ValueError(f"`path` must name a file, got {str(path)!r}: penstock.report.curves('losses.png', losses)")
    kinds = figure.canvas.get_supported_filetypes()
    if (kind := Path(path).suffix.removeprefix(".").lower() or "png") not in kinds:
        raise ValueError(f"a picture is a .png, .svg or .pdf, got {path}: {Path(path).with_suffix('.png')}")
    figure.savefig(path, dpi=130, format=kind)
