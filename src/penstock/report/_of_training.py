"""The part of a page about an offloaded training: the device during a step, the copies, and the waits."""

from penstock.offload import Held, Training, TrainingStatistics
from penstock.report._model import Bars, Curves, Headline, ReportTable, Section, Series, Wear, hue
from penstock.report._of_offload import capacity_bytes, lanes, traffic_of
from penstock.report._part import Part, table
from penstock.report._thin import thin
from penstock.units import format_bytes, format_duration


def part_of_training(training: Training) -> Part:
    """Return the part for a training: the recorded step, lanes in the last steps, and the bytes of the last step."""
    last, timeline, events = training.statistics(), training.timeline(), training.trace()
    step_s = timeline[-1].at_s if timeline else 0.0
    charts: list[Curves | Bars] = [_held(timeline, training.budget_bytes)] if timeline else []
    if events:
        charts += [lanes(events, step_s), traffic_of(events)]
    stall_s = last.stall_s / max(1, last.num_steps)
    wear = Wear(
        written_bytes=last.written_to_disk_bytes,
        duration_s=last.wall_s,
        capacity_bytes=capacity_bytes(training.disks),
    )
    section = Section(
        kind="training",
        title="A model larger than the device",
        text=_text(last, training.budget_bytes),
        headline=Headline(
            what=f"training, {last.num_steps:,} steps",
            peak_bytes=last.measured_peak_bytes,
            budget_bytes=training.budget_bytes,
            stall_s=stall_s,
            stall_share=min(1.0, stall_s / step_s) if step_s else None,
            out_bytes=last.step_parked_bytes,
            in_bytes=last.step_fetched_bytes,
            wear=wear if training.disks and last.num_steps else None,
        ),
        charts=tuple(charts),
        tables=(_moved(last),),
    )
    return Part(section=section, events=events)


def _text(last: TrainingStatistics, budget_bytes: int) -> str:
    if not last.num_steps:
        return "No step has ended yet."
    on_host = f" The host computed {last.num_host_updates:,} updates." if last.num_host_updates else ""
    return (
        f"{last.num_parameters / 1e6:,.1f} million parameters, with their gradients and optimizer state "
        f"{format_bytes(last.state_bytes)}, train within {format_bytes(budget_bytes)}. In the last step "
        f"{format_bytes(last.step_fetched_bytes)} came to the device and {format_bytes(last.step_parked_bytes)} left "
        f"it. In total, the computation waited {format_duration(last.stall_s)} for copies.{on_host}"
    )


def _held(timeline: tuple[Held, ...], budget_bytes: int) -> Curves:
    kinds = list(timeline[0].held_bytes)
    series, below = [], [float(held.others_bytes) for held in timeline]
    for number, kind in enumerate(kinds):
        below = [size + held.held_bytes[kind] for size, held in zip(below, timeline, strict=True)]
        points = [(held.at_s, size) for held, size in zip(timeline, below, strict=True)]
        name = kind if not number else f"and {kind}"
        series.append(Series(name=name, points=thin(points), style="step", colour=hue((0, 2, 1, 3)[number])))
    return Curves(
        title="Bytes on the device during a step.",
        reading="Each curve adds to the one below it; the lowest starts above everything else that the process holds "
        "there. Where the highest touches the budget, bytes leave to make space. The gap that stays is for operators.",
        x_label="time",
        x_unit="s",
        y_label="held",
        y_unit="bytes",
        series=tuple(series),
        limit=float(budget_bytes),
        limit_label="budget",
    )


def _moved(last: TrainingStatistics) -> ReportTable:
    parameters = max(1, last.num_parameters)
    lines = [
        (
            kind,
            format_bytes(last.step_fetched.get(kind, 0)),
            format_bytes(last.step_parked.get(kind, 0)),
            f"{last.step_fetched.get(kind, 0) / parameters:.1f}",
            f"{last.step_parked.get(kind, 0) / parameters:.1f}",
        )
        for kind in last.step_fetched
    ]
    columns = ("what", "in", "out", "in, bytes per parameter", "out, bytes per parameter")
    return table("Copied in the last step", columns, lines)
