"""Scheduling problems: the units of a job, and what they cost."""

from dataclasses import replace

import pytest
from fleet_problems import fleet_of, make_job

from penstock import fleet
from penstock.fleet import DeviceCost, UnitKind


def test_units_of_a_step_are_forward_then_fused_then_backward():
    kinds = [(unit.kind, unit.shard) for unit in make_job(num_shards=3).step_units]
    forward, fused, backward = UnitKind.FORWARD, UnitKind.FUSED, UnitKind.BACKWARD
    assert kinds == [(forward, 0), (forward, 1), (fused, 2), (backward, 1), (backward, 0)]
    assert len(make_job(num_shards=3, accumulate=2).step_units) == 10
    clipped = make_job(num_shards=3, accumulate=2, clips=True).step_units
    assert [(unit.kind, unit.shard) for unit in clipped[-3:]] == [(UnitKind.STEP, shard) for shard in range(3)]


def test_recomputation_is_charged():
    plain, again = make_job(), make_job()
    again = replace(again, shards=tuple(replace(shard, recomputes=True) for shard in again.shards))
    assert plain.work_s == plain.plain_work_s == 3 * 4 * 3
    assert again.work_s - plain.work_s == 3 * 3  # the last shard has its forward at hand
    assert again.plain_work_s == plain.plain_work_s


def test_a_job_too_large_for_every_device_is_refused():
    with pytest.raises(ValueError, match=r"no device is large enough for job 'big': one of its units needs \d+ bytes"):
        fleet_of([make_job("big")], 2, budget_bytes=150)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fleet_of([make_job()], 0), "must have at least one device"),
        (lambda: make_job(num_shards=0), "at least 1, got 0 shards"),
        (lambda: DeviceCost(name="d", speed=0.0), "above 0"),
        (lambda: fleet.simulate(fleet_of([make_job()], 1), "longest"), "`scheduler` must be 'fair'"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
