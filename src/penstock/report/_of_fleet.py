"""The part of a page about a fleet, from its folder or its results: schedule, losses, jobs and devices."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.fleet import DeviceStatistics, FleetState, JobRow, Results
from penstock.report._fleet import UnitLine, events_of, read_losses, read_units
from penstock.report._model import (
    MOST_GROUPS,
    MOST_ROWS,
    BarGroup,
    Bars,
    Colour,
    Curves,
    Headline,
    ReportTable,
    Section,
    Series,
    Wear,
    clipped,
    hue,
)
from penstock.report._part import MOST_EVENTS, Part, share, table
from penstock.report._thin import thin, thin_bars
from penstock.units import format_bytes, format_duration

_MOST_CURVES = 20
_CLOSE_S = 60.0
"""A run longer than three times this gets a second chart of its last seconds."""


class _JobLine(NamedTuple):
    name: str
    state: str
    num_steps: int
    loss: float | None
    validation: str
    seconds_per_step: float
    error: str | None


def is_run_dir(folder: Path) -> bool:
    """Whether a fleet ran in ``folder``."""
    return (folder / "units.jsonl").is_file() or (folder / "fleet.db").is_file()


def part_of_run_dir(run_dir: Path) -> Part:
    """Return the part for a fleet that runs or ran in any process. The folder does not hold the traffic of tiers."""
    state = FleetState(run_dir)
    jobs = [_job_of_row(row) for row in state.jobs()] if state.exists else []
    losses = read_losses(run_dir)
    is_running = state.exists and state.is_alive
    return _part(jobs, losses, read_units(run_dir), (), run_dir.resolve().name, is_running=is_running)


def part_of_results(results: Results) -> Part:
    """Return the part for a fleet's results, which also tell about its devices."""
    jobs = []
    for result in results.values():
        last: Mapping[str, float] = result.validations[-1] if result.validations else {}
        jobs.append(
            _JobLine(
                result.name,
                result.state.value,
                len(result.losses),
                result.losses[-1] if result.losses else None,
                _said(last),
                result.seconds_per_step,
                result.error,
            )
        )
    losses = {result.name: list(result.losses) for result in results.values()}
    return _part(jobs, losses, read_units(results.run_dir), results.devices, results.run_dir.name)


def _job_of_row(row: JobRow) -> _JobLine:
    return _JobLine(row.name, row.state, row.step, row.loss, _said(row.validation), row.seconds_per_step, row.error)


def _said(validation: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {value:.4g}" for key, value in validation.items() if key != "step")


def _part(
    jobs: Sequence[_JobLine],
    losses: dict[str, list[float]],
    units: Sequence[UnitLine],
    devices: Sequence[DeviceStatistics],
    name: str,
    *,
    is_running: bool = False,
) -> Part:
    names = list(dict.fromkeys([*(job.name for job in jobs), *losses, *(unit.job for unit in units)]))
    colours = {job: hue(index) for index, job in enumerate(names)}
    charts: list[Bars | Curves] = []
    if units:
        charts += _schedules(units, colours)
    if any(losses.values()):
        charts.append(_losses(losses, colours))
    section = Section(
        kind="fleet",
        title=clipped(f"Fleet {name}"),
        text=_text(jobs, units) + (" It is running now." if is_running else ""),
        headline=_headline(jobs, units, devices, name),
        charts=tuple(charts),
        tables=tuple(lines for lines in (_jobs(jobs), _devices(units, devices), _tiers(devices)) if lines.lines),
    )
    return Part(section=section, events=tuple(events_of(units[-MOST_EVENTS:])))


def _text(jobs: Sequence[_JobLine], units: Sequence[UnitLine]) -> str:
    if not jobs and not units:
        return "There are no jobs yet, and no unit has run."
    counts: dict[str, int] = defaultdict(int)
    for job in jobs:
        counts[job.state] += 1
    told = ", ".join(f"{count:,} {state}" for state, count in counts.items()) or "none known"
    if not units:
        return f"Jobs: {told}. No unit has run yet."
    wall_s = max(unit.end_s for unit in units) - min(unit.start_s for unit in units)
    # shares of the time in units: a run that was resumed has a break in its wall time, in which no device worked
    busy_s = sum(unit.end_s - unit.start_s for unit in units)
    stall_s = sum(unit.stall_s for unit in units)
    num_devices = len({unit.device for unit in units})
    again_s = sum(unit.recompute_s for unit in units)
    return (
        f"Jobs: {told}. {len(units):,} unit{'s' * (len(units) != 1)} ran on {num_devices} "
        f"device{'s' * (num_devices > 1)} within {format_duration(wall_s)} and took {format_duration(busy_s)} in all, "
        f"of which {share(stall_s, busy_s) or '0%'} were waits for copies and {share(again_s, busy_s) or '0%'} "
        "recomputed forward passes."
    )


def _headline(
    jobs: Sequence[_JobLine], units: Sequence[UnitLine], devices: Sequence[DeviceStatistics], name: str
) -> Headline:
    what = clipped(f"fleet {name}: {len(jobs):,} jobs", 80)
    busy_s = sum(unit.end_s - unit.start_s for unit in units)
    stall_s = sum(unit.stall_s for unit in units)
    known = Headline(what=what, stall_s=stall_s, stall_share=stall_s / busy_s if busy_s else None)
    if not devices:
        return known
    fullest = max(devices, key=lambda device: device.peak_bytes / max(1, device.budget_bytes))
    written_bytes = sum(device.written_to_disk_bytes for device in devices)
    return Headline(
        what=what,
        stall_s=known.stall_s,
        stall_share=known.stall_share,
        peak_bytes=fullest.peak_bytes,
        budget_bytes=fullest.budget_bytes,
        out_bytes=sum(device.parked_bytes for device in devices),
        in_bytes=sum(device.fetched_bytes for device in devices),
        wear=Wear(written_bytes=written_bytes, duration_s=max(device.wall_s for device in devices), capacity_bytes=None)
        if written_bytes
        else None,
    )


def _schedules(units: Sequence[UnitLine], colours: dict[str, Colour]) -> list[Bars]:
    end_s = max(unit.end_s for unit in units)
    charts = [_schedule(units, colours, "Which job was on which device.")]
    if end_s - min(unit.start_s for unit in units) > 3 * _CLOSE_S:
        last = [unit for unit in units if unit.end_s > end_s - _CLOSE_S]
        charts.append(_schedule(last, colours, f"The same, for the last {_CLOSE_S:.0f} s."))
    return charts


def _schedule(units: Sequence[UnitLine], colours: dict[str, Colour], title: str) -> Bars:
    begin_s = min(unit.start_s for unit in units)
    jobs = {name: index for index, name in enumerate(dict.fromkeys(unit.job for unit in units))}
    groups = [BarGroup(name=clipped(name), colour=colours[name]) for name in list(jobs)[: MOST_GROUPS - 2]]
    others, stall = len(groups), len(groups) + 1
    groups.append(BarGroup(name="further jobs", colour="muted"))
    groups.append(BarGroup(name="waits for copies", colour="stall"))
    rows: dict[int, list[tuple[float, float, int]]] = defaultdict(list)
    for unit in units:
        computes_s = unit.start_s + unit.stall_s
        if unit.stall_s > 0:
            rows[unit.device].append((unit.start_s - begin_s, computes_s - begin_s, stall))
        rows[unit.device].append((computes_s - begin_s, unit.end_s - begin_s, min(jobs[unit.job], others)))
    devices = sorted(rows)
    more = f" {len(devices) - MOST_ROWS} further devices are not shown." if len(devices) > MOST_ROWS else ""
    return Bars(
        title=title,
        reading="A row is a device; a bar is the job whose unit ran there. Red is time waiting for copies. Gaps are "
        f"time without a unit: checkpoints, pilots, or no job that was free.{more}",
        x_label="time",
        groups=tuple(groups),
        rows=thin_bars([(f"device {device}", rows[device]) for device in devices]),
    )


def _losses(losses: dict[str, list[float]], colours: dict[str, Colour]) -> Curves:
    known = {name: values for name, values in losses.items() if values}
    order = sorted(known, key=lambda name: (known[name][-1] != known[name][-1], known[name][-1]))
    shown = order[:_MOST_CURVES]
    more = f" The {len(shown)} lowest of {len(order)} jobs are drawn." if len(order) > len(shown) else ""
    return Curves(
        title="Losses.",
        reading=f"One curve per job, ordered by the last loss, lowest first.{more}",
        x_label="step",
        y_label="loss",
        from_zero=False,
        series=tuple(
            Series(
                name=f"{clipped(name, 80)}: {known[name][-1]:.4g}",
                points=thin(list(enumerate(known[name], start=1)), most=max(100, 1500 // len(shown))),
                colour=colours[name],
            )
            for name in shown
        ),
    )


def _jobs(jobs: Iterable[_JobLine]) -> ReportTable:
    return table(
        "Jobs",
        ("job", "state", "steps", "loss", "validation", "time per step", "error"),
        (
            (
                job.name,
                job.state,
                f"{job.num_steps:,}",
                "" if job.loss is None else f"{job.loss:.4g}",
                job.validation,
                format_duration(job.seconds_per_step) if job.seconds_per_step else "",
                job.error or "",
            )
            for job in jobs
        ),
        note="Losses and validations are the latest ones; the time is that of a step on one device.",
    )


class _DeviceLine(NamedTuple):
    """Sums of a device's units, in all processes that ran the fleet."""

    num_units: int = 0
    compute_s: float = 0.0
    recompute_s: float = 0.0
    stall_s: float = 0.0

    def plus(self, unit: UnitLine) -> "_DeviceLine":
        """Return the sums with another unit."""
        compute_s = unit.end_s - unit.start_s - unit.stall_s
        return _DeviceLine(
            self.num_units + 1,
            self.compute_s + compute_s,
            self.recompute_s + unit.recompute_s,
            self.stall_s + unit.stall_s,
        )

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the table."""
        return (f"{self.num_units:,}", *map(format_duration, (self.compute_s, self.recompute_s, self.stall_s)))

    @property
    def useful_share(self) -> float:
        """Share of the time in units that was neither a wait nor recomputation."""
        busy_s = self.compute_s + self.stall_s
        return (self.compute_s - self.recompute_s) / busy_s if busy_s else 1.0


def _devices(units: Sequence[UnitLine], devices: Sequence[DeviceStatistics]) -> ReportTable:
    sums: dict[int, _DeviceLine] = defaultdict(_DeviceLine)
    for unit in units:
        sums[unit.device] = sums[unit.device].plus(unit)
    headings = ("device", "units", "computed", "of it recomputed", "waited")
    if not devices:
        return table(
            "Devices",
            headings,
            ((f"device {index}", *line.cells()) for index, line in sorted(sums.items())),
            note="From the units in the folder. Peaks and traffic are in the results that fleet.run returns.",
        )
    lines = []
    for index, device in enumerate(devices):
        line = _DeviceLine(device.num_units, device.compute_s, device.recompute_s, device.stall_s)
        # the folder also knows the units of earlier processes, and lacks units if its disk was full
        line = max(line, sums[index], key=lambda known: known.num_units)
        sizes = (format_bytes(device.peak_bytes), format_bytes(device.budget_bytes))
        lines.append((f"{device.name} #{index}", *line.cells(), f"{line.useful_share:.1%}", *sizes))
    is_resumed = len(units) > sum(device.num_units for device in devices)
    return table(
        "Devices",
        (*headings, "useful", "peak", "budget"),
        lines,
        note="Useful: the share of training in the time in which there was something to run."
        + (" The fleet was resumed: peaks and traffic are of the last process." if is_resumed else ""),
    )


def _tiers(devices: Sequence[DeviceStatistics]) -> ReportTable:
    return table(
        "Tier traffic",
        ("device", "moved out", "moved in", "written to disk"),
        (
            (
                f"{device.name} #{index}",
                format_bytes(device.parked_bytes),
                format_bytes(device.fetched_bytes),
                format_bytes(device.written_to_disk_bytes),
            )
            for index, device in enumerate(devices)
        ),
    )
