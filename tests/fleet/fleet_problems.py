"""Scheduling problems: equal jobs, and strategies for random ones."""

from typing import get_args

from hypothesis import strategies as st

from penstock.fleet import DeviceCost, FleetProblem, JobCost, SchedulerName, ShardCost

SCHEDULERS = list(get_args(SchedulerName))


def make_job(name="job", num_shards=4, forward_s=1.0, num_steps=3, **changes):
    """Equal shards, backward twice as long as forward."""
    shard = ShardCost(forward_s=forward_s, backward_s=2 * forward_s, parameter_bytes=100, boundary_bytes=4)
    return JobCost(name=name, shards=(shard,) * num_shards, num_steps=num_steps, **changes)


def fleet_of(jobs, num_devices, **changes):
    devices = tuple(DeviceCost(name=f"cuda:{index}", **changes) for index in range(num_devices))
    return FleetProblem(jobs=tuple(jobs), devices=devices)


shards = st.builds(
    ShardCost,
    forward_s=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    backward_s=st.sampled_from([0.5, 1.0, 4.0]),
    step_s=st.sampled_from([0.0, 0.2]),
    parameter_bytes=st.integers(0, 100),
    state_bytes=st.integers(0, 200),
    boundary_bytes=st.integers(0, 20),
    activation_bytes=st.integers(0, 80),
    recomputes=st.booleans(),
)


jobs = st.builds(
    JobCost,
    name=st.just("job"),
    shards=st.lists(shards, min_size=1, max_size=4).map(tuple),
    num_steps=st.integers(1, 3),
    accumulate=st.integers(1, 3),
    clips=st.booleans(),
    vertical=st.booleans(),
    arrival_s=st.sampled_from([0.0, 0.0, 2.5]),
)


devices = st.builds(
    DeviceCost,
    name=st.just("device"),
    speed=st.sampled_from([0.5, 1.0, 2.0]),
    budget_bytes=st.sampled_from([None, 1200, 2400]),
    in_bandwidth_bytes_per_s=st.sampled_from([50.0, 1000.0, float("inf")]),
    out_bandwidth_bytes_per_s=st.sampled_from([50.0, 1000.0, float("inf")]),
)


fleets = st.builds(
    FleetProblem,
    jobs=st.lists(jobs, max_size=6).map(tuple),
    devices=st.lists(devices, min_size=1, max_size=3).map(tuple),
)
