"""Costs of jobs, measured without training them."""

import pytest
from fleet_jobs import gpt, make_job, train

from penstock import fleet
from penstock.errors import PenstockError


def test_measured_jobs_are_simulated_and_not_trained():
    calls = []

    def counted():
        calls.append(1)
        return gpt()

    jobs = [
        make_job(name=f"{index}", model=counted, clip_norm=1.0 if index else None, accumulate=2, steps=3)
        for index in range(2)
    ]
    costs = fleet.measure(jobs, budget="2500KB", host="256MiB")
    assert len(calls) == 2
    assert [(cost.name, cost.num_steps, cost.accumulate, cost.clips) for cost in costs] == [
        ("0", 3, 2, False),
        ("1", 3, 2, True),
    ]
    parameters = sum(parameter.nbytes for parameter in gpt().parameters())
    for cost in costs:
        assert len(cost.shards) > 1
        assert all(shard.forward_s > 0 for shard in cost.shards[:-1]) and all(
            shard.backward_s > 0 for shard in cost.shards
        )
        assert all((shard.step_s > 0) == (shard.state_bytes > 0) for shard in cost.shards)
        assert parameters <= sum(shard.parameter_bytes for shard in cost.shards) < 1.1 * parameters
        assert sum(shard.state_bytes for shard in cost.shards) >= 2 * parameters
    devices = tuple(fleet.DeviceCost(name=f"cpu:{index}", budget_bytes=2_500_000) for index in range(2))
    problem = fleet.FleetProblem(jobs=costs, devices=devices)
    schedule = fleet.simulate(problem)
    fleet.verify(problem, schedule)
    trained = [job.with_changes(name=f"{job.name} trained") for job in jobs]
    results = train(trained, budget="2500KB")
    units = sum(len(cost.step_units) * cost.num_steps for cost in costs)
    assert len(schedule.units) == units == sum(device.num_units for device in results.devices)


def test_what_cannot_be_measured_is_said():
    with pytest.raises(PenstockError, match="job 'large' could not be measured: .*`budget` must be at least"):
        fleet.measure([make_job(name="large")], budget="300KB", host="64MiB")
