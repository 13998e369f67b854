"""The tables of `penstock probe`."""

from rich.console import Console
from rich.table import Table

from penstock.probe import MachineReport
from penstock.units import format_bytes, format_rate


def show(report: MachineReport, console: Console) -> None:
    """Prints what the probe found."""
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
        console.print(table)
