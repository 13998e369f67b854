"""The problem of one captured graph: its operators with their measured times, and what exists beside them."""

from penstock.directio import BLOCK_BYTES
from penstock.remat import _capture
from penstock.remat._beside import in_every_call
from penstock.remat._lanes import lane_rates
from penstock.remat._piece import Variant
from penstock.remat._problem import RematProblem
from penstock.remat._profile import Costs, ModelledCosts
from penstock.remat._settings import PlanSettings


def describe(
    variant: Variant, settings: PlanSettings, costs: Costs | ModelledCosts, standing_bytes: int
) -> RematProblem:
    """Return the problem of a captured graph alone, with measured operators.

    ``standing_bytes`` are bytes that exist between steps too.
    """
    captured = variant.captured
    assert captured is not None
    known = None if settings.profile is None else _capture.costs_of(captured, settings.profile)
    if known is None:
        durations_s, workspaces, variant.is_scaled = costs.measure(captured)
    else:
        durations_s, workspaces = known
    static_bytes = captured.static_inputs_bytes + in_every_call(captured) + standing_bytes
    if settings.accumulates:
        static_bytes += captured.gradient_bytes
    device = captured.device
    out, back = lane_rates(device, settings.account(), settings.machine)
    return _capture.problem_of(
        captured,
        durations_s,
        workspaces,
        static_bytes=static_bytes,
        out_bandwidth_bytes_per_s=out,
        in_bandwidth_bytes_per_s=back,
        swap_page_bytes=BLOCK_BYTES if device.type == "cpu" and settings.machine is None else 0,
    )
