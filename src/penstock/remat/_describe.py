"""The problem of a captured graph: its operators with measured times, its lanes, and what exists beside them."""

import torch

from penstock import tiers
from penstock.directio import BLOCK_BYTES, refuse_memory
from penstock.links import DEVICE, DISK, HOST, Link
from penstock.machines import Machine
from penstock.probe import bandwidths
from penstock.remat import _capture
from penstock.remat._beside import in_every_call
from penstock.remat._piece import Variant
from penstock.remat._problem import RematProblem
from penstock.remat._profile import Costs, ModelledCosts
from penstock.remat._settings import PlanSettings

_BESIDE_COMPUTING = 0.5
"""Share of the probe's rate that a CPU's lanes reach while a step uses all cores.

Measured: 0.45 to 0.65.
"""


def describe(variant: Variant, settings: PlanSettings, costs: Costs | ModelledCosts) -> RematProblem:
    """Return the problem of a captured graph alone, with measured operators, and without what stands beside it."""
    captured = variant.captured
    assert captured is not None
    known = None if settings.profile is None else _capture.costs_of(captured, settings.profile)
    if known is None:
        durations_s, workspaces, variant.is_scaled = costs.measure(captured)
    else:
        durations_s, workspaces = known
    static_bytes = captured.static_inputs_bytes + in_every_call(captured)
    if settings.accumulates:
        static_bytes += captured.gradient_bytes
    device = captured.device
    out, back = lane_rates(device, settings.account, settings.machine)
    return _capture.problem_of(
        captured,
        durations_s,
        workspaces,
        static_bytes=static_bytes,
        out_bandwidth_bytes_per_s=out,
        in_bandwidth_bytes_per_s=back,
        swap_page_bytes=BLOCK_BYTES if device.type == "cpu" and settings.machine is None else 0,
    )


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
