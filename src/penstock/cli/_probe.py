"""`penstock probe`: the devices, tiers, bandwidths and features of this machine."""

from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from penstock.cli._answer import Answer
from penstock.cli._progress import Steps
from penstock.cli._tables import print_table
from penstock.probe import MachineReport, machine, provenance
from penstock.units import format_bytes, format_rate


def probe(disk: Path, refresh: bool, steps: Steps) -> Answer:
    """Measure the machine, with ``disk`` as the directory to offload to."""
    steps.phase(f"measuring bandwidths of {disk}")
    report = machine(disk, refresh=refresh, progress=steps.advance)
    software = provenance()
    return Answer(
        data={**asdict(report), "environment": software},
        show=lambda console: _show(report, software, console),
    )


def _show(report: MachineReport, software: dict[str, object], console: Console) -> None:
    places = Table("place", "what", "capacity", "free", title="Devices and tiers", title_justify="left")
    for place in report.places:
        places.add_row(
            place.name, place.description, format_bytes(place.capacity_bytes), format_bytes(place.free_bytes)
        )
    lanes = Table("lane", "bandwidth", "direct", title="Bandwidths", title_justify="left")
    for lane in report.lanes:
        lanes.add_row(lane.lane, format_rate(lane.bandwidth_bytes_per_s), "yes" if lane.is_direct else "no")
    features = Table("feature", "works", "why", title="Features", title_justify="left")
    for feature in report.features:
        features.add_row(feature.name, "yes" if feature.is_supported else "no", feature.reason)
    for table in (places, lanes, features):
        print_table(table, console)
    console.print(
        f"penstock {software['penstock']}, torch {software['torch']}, Python {software['python']}, "
        f"{software['system']}",
        highlight=False,
    )
