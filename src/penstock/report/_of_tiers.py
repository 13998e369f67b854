"""The parts of a page about a budget and about a measured peak of memory."""

from collections.abc import Sequence

from penstock.probe import PeakReport
from penstock.report._model import MOST_ROWS, BarGroup, Bars, Curves, Headline, Mark, Row, Section, Series, clipped, hue
from penstock.report._part import Part, share, table
from penstock.report._thin import thin, thin_positions
from penstock.tiers import Budget, Event, PlaceUse
from penstock.units import format_bytes


def part_of_budget(budget: Budget) -> Part:
    """Return the part for a budget: the holders of bytes in each place."""
    uses = budget.uses()
    holders = list(dict.fromkeys(holder.name for use in uses for holder in use.holders))
    groups = [BarGroup(name=clipped(name), colour=hue(index)) for index, name in enumerate(holders)]
    groups += [BarGroup(name="no named holder", colour="c9"), BarGroup(name="held before, at the peak", colour="muted")]
    device = next((use for use in uses if use.place == "device"), None)
    lines: list[Sequence[str]] = []
    for use in uses:
        limit = "-" if use.limit_bytes is None else format_bytes(use.limit_bytes)
        lines.append(
            (
                use.place,
                "all",
                format_bytes(use.held_bytes),
                format_bytes(use.peak_bytes),
                limit,
                share(use.peak_bytes, use.limit_bytes or 0),
            )
        )
        lines += [
            (use.place, holder.name, format_bytes(holder.held_bytes), format_bytes(holder.peak_bytes), "", "")
            for holder in use.holders
        ]
    kept = [f"{use.place} {format_bytes(use.peak_bytes)}" for use in uses if use.peak_bytes]
    section = Section(
        kind="budget",
        title="The account of bytes",
        text=f"The most bytes held at once: {', '.join(kept[:8])}." if kept else "No bytes were ever charged.",
        headline=Headline(
            what="account of bytes",
            peak_bytes=None if device is None else device.peak_bytes,
            budget_bytes=None if device is None else device.limit_bytes,
        ),
        charts=(
            Bars(
                title="Who holds what of each place.",
                reading="A row is a place; its full width is the limit, or the peak if there is no limit. Colors are "
                "bytes held now; gray is what was also held at the peak; the empty part was never "
                "taken.",
                x_label="share of the limit",
                x_unit="share",
                groups=tuple(groups),
                rows=tuple(_row(use, holders) for use in uses[:MOST_ROWS]),
                end=1.0,
            ),
        ),
        tables=(
            table(
                "Places and holders",
                ("place", "holder", "held", "peak", "limit", "peak of limit"),
                lines,
                note="Holders may share bytes; they then add up to more than is held.",
            ),
        ),
    )
    return Part(section=section)


def part_of_peak(report: PeakReport, events: Sequence[Event] = ()) -> Part:
    """Return the part for a measured peak: memory over time, with the copies made meanwhile."""
    timeline = report.timeline
    charts: tuple[Curves, ...] = ()
    if timeline:
        zero_s, end_s = timeline[0][0], timeline[-1][0]
        events = [event for event in events if zero_s <= event.end_s and event.start_s <= end_s]
        charts = (_timeline(report, events),)
    lines = [
        ("peak", format_bytes(report.peak_bytes)),
        ("held before", format_bytes(report.start_bytes)),
        ("activation peak", format_bytes(report.activation_bytes)),
        ("released, of the bytes held before", format_bytes(report.released_bytes)),
        ("requested, at most", format_bytes(report.requested_bytes)),
        ("reserved by the allocator, at most", format_bytes(report.reserved_bytes)),
        ("resident memory of the process, at most", format_bytes(report.rss_bytes)),
    ]
    note = "" if timeline else " CUDA's allocator counts the peak but keeps no history, so there is no curve."
    section = Section(
        kind="memory",
        title="Memory, measured",
        text=f"The call held {format_bytes(report.start_bytes)} when it began and {format_bytes(report.peak_bytes)} "
        f"at its peak, {format_bytes(report.activation_bytes)} more.{note}",
        headline=Headline(what="measured peak", peak_bytes=report.peak_bytes),
        charts=charts,
        tables=(table("Peak", ("figure", "bytes"), lines),),
    )
    return Part(section=section, events=tuple(events) if timeline else (), memory=timeline if events else ())


def _row(use: PlaceUse, holders: list[str]) -> Row:
    whole = max(use.limit_bytes or use.peak_bytes, 1)
    together = sum(holder.held_bytes for holder in use.holders)
    shrunk = min(1.0, use.held_bytes / together) if together else 1.0
    bars, at_bytes = [], 0.0
    for holder in use.holders:
        if holder.held_bytes:
            end_bytes = at_bytes + holder.held_bytes * shrunk
            bars.append((at_bytes / whole, end_bytes / whole, holders.index(holder.name)))
            at_bytes = end_bytes
    for until_bytes, group in ((use.held_bytes, len(holders)), (use.peak_bytes, len(holders) + 1)):
        if until_bytes > at_bytes + 0.5:
            bars.append((at_bytes / whole, until_bytes / whole, group))
            at_bytes = until_bytes
    text = f"{use.place}: {format_bytes(use.held_bytes)} held, {format_bytes(use.peak_bytes)} at the peak"
    return Row(name=clipped(use.place, 200), bars=tuple(bars), text=clipped(text))


def _timeline(report: PeakReport, events: Sequence[Event]) -> Curves:
    zero_s = report.timeline[0][0]
    points = thin([(time_s - zero_s, held) for time_s, held in report.timeline])
    marks = []
    for kind, name, colour in (
        ("park", "parked", hue(0)),
        ("fetch", "fetched", hue(2)),
        ("stall", "waits", "stall"),
    ):
        times_s = [event.end_s - zero_s for event in events if event.kind == kind]
        if times_s:
            marks.append(Mark(name=name, positions=thin_positions(times_s), num_events=len(times_s), colour=colour))
    return Curves(
        title="Memory held over the call.",
        reading="Every allocation and release, including static bytes. Memory rises in forward and falls in backward."
        + (" Ticks below mark the ends of copies and waits." if marks else ""),
        x_label="time",
        x_unit="s",
        y_label="held on the device",
        y_unit="bytes",
        series=(
            Series(name=f"held: peak {format_bytes(report.peak_bytes)}", points=points, style="step", colour=hue(0)),
        ),
        marks=tuple(marks),
    )
