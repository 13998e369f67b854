"""The part of a page about tiered features: where rows are, and which tier served accesses, planned and counted."""

from penstock.report._model import BarGroup, Bars, Headline, Row, Section, hue
from penstock.report._part import Part, share, table
from penstock.unified import TieredFeatures
from penstock.units import format_bytes, format_duration

_ALWAYS = 4
"""Tiers that are shown even if nothing is in them; those of other ranks and machines are not."""


def part_of_features(features: TieredFeatures) -> Part:
    """Return the part for tiered features: the plan, and the reads so far."""
    plan, counted = features.plan, features.statistics()
    tiers = [
        ("device", 0, len(plan.device_rows), plan.device_share, counted.device_rows),
        ("host memory", 2, len(plan.host_rows), plan.host_share, counted.host_rows),
        ("page cache", 3, 0, 0.0, counted.cached_rows),
        ("disk", 1, plan.num_disk_rows, plan.disk_share, counted.disk_rows),
        ("memory of peers", 4, plan.num_peer_rows, plan.peer_share, counted.peer_rows),
        ("disks of peers", 5, plan.num_peer_disk_rows, plan.peer_disk_share, counted.peer_disk_rows),
        ("read shortly before", 6, 0, 0.0, counted.shared_rows),
    ]
    tiers = tiers[:_ALWAYS] + [tier for tier in tiers[_ALWAYS:] if any(tier[2:])]
    names, colours, rows, planned, served = zip(*tiers, strict=True)
    total = sum(served)
    bars = [("rows", [count / max(1, sum(rows)) for count in rows]), ("accesses, planned", list(planned))]
    if total:
        bars.append(("accesses, counted", [count / total for count in served]))
        text = (
            f"{counted.hit_rate:.1%} of {total:,} rows were held in memory; the plan expected {plan.hit_rate:.1%}. "
            f"The system's page cache still had {share(counted.cached_rows, total)}. The disk read "
            f"{counted.read_amplification:.2f} bytes for each byte of a row, in {counted.disk_requests:,} requests."
        )
    else:
        text = f"No row has been read yet. The plan expects {plan.hit_rate:.1%} of accesses to be served from memory."
    lines = [
        (
            name,
            f"{rows[index]:,}",
            format_bytes(rows[index] * plan.row_bytes),
            f"{planned[index]:.1%}",
            share(served[index], total),
            f"{served[index]:,}",
        )
        for index, name in enumerate(names)
    ]
    disk = [
        ("requests", f"{counted.disk_requests:,}"),
        ("read, in whole sectors", format_bytes(counted.disk_read_bytes)),
        ("of that, rows", format_bytes(counted.disk_row_bytes)),
        ("read amplification", f"{counted.read_amplification:.3g}"),
        ("time in reads, of all threads", format_duration(counted.disk_s)),
    ]
    section = Section(
        kind="unified",
        title="Features in tiers",
        text=f"A table of {' x '.join(f'{size:,}' for size in features.shape)}. {text}",
        headline=Headline(
            what=f"features, {sum(rows):,} rows",
            in_bytes=total * features.row_bytes,
        ),
        charts=(
            Bars(
                title="Where rows are, and who serves the accesses.",
                reading="Few rows near the device should serve most accesses. If the counted share of the disk is "
                "larger than the planned one, the scores do not match what the sampler reads.",
                x_label="share",
                x_unit="share",
                groups=tuple(
                    BarGroup(name=name, colour=hue(colour)) for name, colour in zip(names, colours, strict=True)
                ),
                rows=tuple(Row(name=name, bars=_stacked(shares)) for name, shares in bars),
                end=1.0,
            ),
        ),
        tables=(
            table("Tiers", ("tier", "rows", "bytes", "accesses, planned", "counted", "rows served"), lines),
            table("The disk", ("figure", "so far"), disk if counted.disk_requests else ()),
        ),
    )
    return Part(section=section)


def _stacked(shares: list[float]) -> tuple[tuple[float, float, int], ...]:
    bars, begin = [], 0.0
    for index, length in enumerate(shares):
        if length > 0:
            bars.append((begin, min(1.0, begin + length), index))
            begin += length
    return tuple(bars)
