"""How fast a step's swaps would be."""

import torch

from penstock import tiers
from penstock.directio import refuse_memory
from penstock.probe import bandwidths

_BESIDE_COMPUTING = 0.5
"""Share of the probe's rate that a CPU's lanes reach beside a step that uses all its cores; 0.45 to 0.65 measured."""


def lane_rates(device: torch.device, account: tiers.Budget) -> tuple[float, float]:
    """What the lanes of the waterfall carry, out and back, in bytes per second; zeros without a tier.

    Raises ``ValueError`` for directories that are main memory below a CPU.
    """
    has_host = account.host_bytes is not None and device.type != "cpu"
    if not account.disk_bytes and not has_host:
        return 0.0, 0.0
    if device.type == "cpu":
        refuse_memory(account.disk_bytes)
    directory = next(iter(account.disk_bytes), ".")
    known = {lane.lane: lane.bandwidth_bytes_per_s for lane in bandwidths(directory)}
    if device.type == "cpu":
        return _BESIDE_COMPUTING * known["device->disk"], _BESIDE_COMPUTING * known["disk->device"]
    out, back = [known["device->host"]], [known["host->device"]]
    if account.disk_bytes and not has_host:
        out.append(known.get("device->disk", known["host->disk"]))
        back.append(known.get("disk->device", known["disk->host"]))
    return min(out), min(back)
