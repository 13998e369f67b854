"""Expected speed of a step's swaps."""

import torch

from penstock import tiers
from penstock.directio import refuse_memory
from penstock.links import DEVICE, DISK, HOST, Link
from penstock.machines import Machine
from penstock.probe import bandwidths

_BESIDE_COMPUTING = 0.5
"""Share of the probe's rate that a CPU's lanes reach while a step uses all cores.

Measured: 0.45 to 0.65.
"""


def lane_rates(device: torch.device, account: tiers.Budget, machine: Machine | None) -> tuple[float, float]:
    """Return the rates of the waterfall's lanes, out and back, in bytes per second; zeros without a tier.

    They are those of ``device``, or come from the data sheet of a machine that is not here. Raises ``ValueError`` for
    directories that are main memory, below a CPU.
    """
    if machine is not None:
        has_tiers = account.host_bytes is not None or bool(account.disk_bytes)
        return machine.lane_rates(to_disk=account.host_bytes is None) if has_tiers else (0.0, 0.0)
    if not account.leads_below(device):
        return 0.0, 0.0
    has_host = account.host_bytes is not None and device.type != "cpu"
    if account.tiers and not account.disk_bytes and not has_host:
        return account.tiers[0].rates_bytes_per_s()
    if device.type == "cpu":
        refuse_memory(account.disk_bytes)
    directory = next(iter(account.disk_bytes), ".")
    known = {lane.link: lane.bandwidth_bytes_per_s for lane in bandwidths(directory)}
    if device.type == "cpu":
        return _BESIDE_COMPUTING * known[Link(DEVICE, DISK)], _BESIDE_COMPUTING * known[Link(DISK, DEVICE)]
    out, back = [known[Link(DEVICE, HOST)]], [known[Link(HOST, DEVICE)]]
    if account.disk_bytes and not has_host:
        out.append(known.get(Link(DEVICE, DISK), known[Link(HOST, DISK)]))
        back.append(known.get(Link(DISK, DEVICE), known[Link(DISK, HOST)]))
    return min(out), min(back)
