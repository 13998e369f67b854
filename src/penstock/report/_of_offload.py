"""The part of a page about an offloader: decisions and their reasons, the lanes over time, and waits."""

import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from penstock.offload import Offloader, OffloadStatistics
from penstock.report._model import BarGroup, Bars, Curves, Headline, ReportTable, Section, Series, Wear, clipped, hue
from penstock.report._part import Part, share, table
from penstock.report._thin import thin, thin_bars, traffic
from penstock.tiers import Event, TierStatistics
from penstock.units import format_bytes, format_duration

_NUM_STEPS_SHOWN = 3


def part_of_offloader(offloader: Offloader) -> Part:
    """Return the part for an offloader: figures of the last step, lanes in the last steps, and all traced traffic."""
    last, sums, events = offloader.statistics(), offloader.tier_statistics(), offloader.trace()
    account = offloader.budget
    return Part(
        section=section_of(last, sums, events, budget_bytes=account.device_bytes, disks=list(account.disk_bytes)),
        events=events,
    )


def section_of(
    last: OffloadStatistics,
    sums: TierStatistics,
    events: Sequence[Event],
    *,
    budget_bytes: int | None = None,
    disks: Sequence[Path] = (),
) -> Section:
    """Return the section, from statistics and events alone."""
    wear = Wear(written_bytes=last.written_to_disk_bytes, duration_s=last.step_s, capacity_bytes=capacity_bytes(disks))
    is_planned = last.peak_bytes is None and budget_bytes is not None
    charts = () if not events else (lanes(events, last.step_s), traffic_of(events))
    return Section(
        kind="offload",
        title="Offloaded activations",
        text=_text(last, is_whole=last.peak_bytes is not None or budget_bytes is not None),
        headline=Headline(
            what=f"offload, step {last.num_steps:,}",
            peak_bytes=last.predicted_peak_bytes if is_planned else last.peak_bytes,
            is_peak_predicted=is_planned,
            budget_bytes=budget_bytes,
            stall_s=last.stall_s,
            stall_share=last.stall_s / last.step_s if last.step_s else None,
            out_bytes=last.parked_bytes,
            in_bytes=last.fetched_bytes,
            wear=wear if disks else None,
        ),
        charts=charts,
        tables=tuple(lines for lines in (_decisions(last), _modules(events), _sums(sums)) if lines.lines),
    )


def capacity_bytes(directories: Sequence[Path]) -> int | None:
    """Return the capacity of the disks under these directories, each counted once; ``None`` if one cannot be read."""
    try:
        return (
            sum({directory.stat().st_dev: shutil.disk_usage(directory).total for directory in directories}.values())
            or None
        )
    except OSError:
        return None


def _text(last: OffloadStatistics, *, is_whole: bool) -> str:
    """Describe the last step. ``is_whole``: the predicted peak is the device's, not only that of saved storages."""
    if last.declined:
        return f"Nothing is offloaded: {last.declined}."
    if not last.num_steps:
        return "No step has ended yet. The figures are known once backward has run."
    promised = []
    if last.predicted_peak_bytes is not None:
        of_what = "" if is_whole else " of saved storages"
        promised.append(f"a peak of {format_bytes(last.predicted_peak_bytes)}{of_what}")
    if last.predicted_stall_s is not None:
        promised.append(f"{format_duration(last.predicted_stall_s)} of waiting")
    return (
        f"In step {last.num_steps:,} autograd saved {format_bytes(last.saved_bytes)} in addition to the weights; "
        f"{format_bytes(last.parked_bytes)} left the device and {format_bytes(last.fetched_bytes)} came back from a "
        f"tier. The computation waited {format_duration(last.stall_s)} of {format_duration(last.step_s)}."
        + (f" The plan predicted {' and '.join(promised)}." if promised else " There was no plan yet.")
    )


def lanes(events: Sequence[Event], step_s: float) -> Bars:
    """Return the chart of copies in the last steps, and of where the computation waited."""
    end_s = max(event.end_s for event in events)
    begin_s = min(event.start_s for event in events)
    if step_s:
        begin_s = max(begin_s, end_s - _NUM_STEPS_SHOWN * step_s)
    shown = [event for event in events if event.end_s > begin_s]
    kinds = {"park": 0, "fetch": 1, "stall": 2}
    rows: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
    for event in shown:
        name = "waits" if event.kind == "stall" else event.lane
        bar = (max(0.0, event.start_s - begin_s), event.end_s - begin_s, kinds.get(event.kind, 3))
        rows[name].append(bar)
    order = sorted(rows, key=lambda name: (name == "waits", name))
    return Bars(
        title="Lanes and waits in the last steps.",
        reading="A bar is a copy in progress, or the computation waiting for one. Waits below busy lanes mean that a "
        "lane is too slow for its copies. Short gaps in the lanes without waits are normal.",
        x_label="time",
        groups=(
            BarGroup(name="copy out (park)", colour="c0"),
            BarGroup(name="copy back (fetch)", colour="c2"),
            BarGroup(name="computation waits", colour="stall"),
            BarGroup(name="other", colour="muted"),
        ),
        rows=thin_bars([(name, rows[name]) for name in order]),
        end=end_s - begin_s,
    )


def traffic_of(events: Sequence[Event]) -> Curves:
    """Return the chart of bytes per second on every lane."""
    begin_s, end_s = min(event.start_s for event in events), max(event.end_s for event in events)
    lanes: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
    for event in events:
        if event.kind != "stall":
            lanes[event.lane].append((event.start_s, event.end_s, event.size_bytes))
    step_s = (end_s - begin_s) / 200
    series = []
    for number, (name, moved) in enumerate(sorted(lanes.items())[:8]):
        rates = traffic(moved, begin_s, end_s)
        points = [((index + 0.5) * step_s, rate) for index, rate in enumerate(rates.tolist())]
        total_bytes = sum(size_bytes for _, _, size_bytes in moved)
        colour = hue((0, 2, 1, 3, 4, 5, 6, 7)[number])
        series.append(
            Series(
                name=f"{clipped(name, 40)}: {format_bytes(total_bytes)}",
                points=thin(points),
                style="step",
                colour=colour,
            )
        )
    return Curves(
        title="Tier traffic.",
        reading="Bytes per second on every lane, over all steps whose events are kept. A plateau is the bandwidth of "
        "the link.",
        x_label="time",
        x_unit="s",
        y_label="copied",
        y_unit="bytes/s",
        series=tuple(series),
    )


def _decisions(last: OffloadStatistics) -> ReportTable:
    lines = [("parked", last.parked_bytes, "left the device")]
    lines += [
        ("kept", size_bytes, reason.removeprefix("kept: "))
        for reason, size_bytes in sorted(last.kept_bytes.items(), key=lambda item: -item[1])
    ]
    lines.append(("kept", last.failed_bytes, "to be parked, but there was no space or a write failed"))
    shown = [
        (what, format_bytes(size_bytes), share(size_bytes, last.saved_bytes), why)
        for what, size_bytes, why in lines
        if size_bytes
    ]
    if last.forwarded_bytes:
        shown.append(
            (
                "forwarded",
                format_bytes(last.forwarded_bytes),
                share(last.forwarded_bytes, last.saved_bytes),
                "needed before it had left, or while something still held it",
            )
        )
    return table(
        "Decisions on the saved storages",
        ("decision", "bytes", "of all saved", "why"),
        shown,
        note="In the last step. The parked bytes include those that were forwarded.",
        most=40,
    )


def _modules(events: Sequence[Event]) -> ReportTable:
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for event in events:
        if event.kind in ("park", "fetch"):
            sums[event.label][event.kind == "fetch"] += event.size_bytes
    order = sorted(sums, key=lambda label: -sum(sums[label]))
    return table(
        "By module",
        ("module", "copied out", "copied back"),
        ((label or "(the model)", *map(format_bytes, sums[label])) for label in order),
        note="Over all steps whose events are kept.",
        most=30,
    )


def _sums(sums: TierStatistics) -> ReportTable:
    lines = [
        ("copied out", format_bytes(sums.parked_bytes)),
        ("copied back", format_bytes(sums.fetched_bytes)),
        ("forwarded", format_bytes(sums.forwarded_bytes)),
        ("written to disks", format_bytes(sums.written_to_disk_bytes)),
        ("in flight out of the device, at most", format_bytes(sums.in_flight_peak_bytes)),
        ("waited for copies", format_duration(sums.stall_s)),
        ("failed writes", f"{sums.num_failed_writes:,}"),
    ]
    lines += [(f"held in {name}", format_bytes(size)) for name, size in sums.held_bytes.items()]
    lines += [(f"reserved in {name}", format_bytes(size)) for name, size in sums.reserved_bytes.items()]
    return table("Tiers since the offloader was created", ("figure", "sum"), lines, most=40)
