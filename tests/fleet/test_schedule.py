"""One conformance suite for all schedulers, and what is special to each; on a virtual clock."""

import itertools
from dataclasses import replace

import pytest
from benchmarks.optimal import shortest_makespan_s
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import fleet
from penstock.errors import InternalError
from penstock.fleet import DeviceCost, FleetProblem, JobCost, ShardCost, UnitKind

SCHEDULERS = ["fair", "sharded-lrtf", "fifo", "shortest-first", "random"]


def job(name="job", num_shards=4, forward_s=1.0, num_steps=3, **changes):
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


@given(fleets, st.sampled_from(SCHEDULERS), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=150)
def test_every_schedule_is_verified_and_ends(problem, scheduler, double_buffer, sharp):
    schedule = fleet.simulate(problem, scheduler, double_buffer=double_buffer, sharp=sharp)
    fleet.verify(problem, schedule)
    assert len(schedule.units) == sum(one.num_units for one in problem.jobs)
    assert schedule.makespan_s >= fleet.lower_bound_s(problem) - 1e-9
    for device, use in enumerate(schedule.devices):
        own = [unit for unit in schedule.units if unit.device == device]
        assert use.busy_s == pytest.approx(sum(unit.end_s - unit.start_s for unit in own))
        assert use.busy_s + use.stall_s + use.idle_s == pytest.approx(schedule.makespan_s)
    assert fleet.simulate(problem, scheduler, double_buffer=double_buffer, sharp=sharp) == schedule
    bare = fleet.simulate(problem, scheduler, double_buffer=double_buffer, sharp=sharp, records=False)
    assert replace(schedule, units=()) == bare


def test_units_of_a_step_are_forward_then_fused_then_backward():
    kinds = [(unit.kind, unit.shard) for unit in job(num_shards=3).step_units]
    forward, fused, backward = UnitKind.FORWARD, UnitKind.FUSED, UnitKind.BACKWARD
    assert kinds == [(forward, 0), (forward, 1), (fused, 2), (backward, 1), (backward, 0)]
    assert len(job(num_shards=3, accumulate=2).step_units) == 10
    clipped = job(num_shards=3, accumulate=2, clips=True).step_units
    assert [(unit.kind, unit.shard) for unit in clipped[-3:]] == [(UnitKind.STEP, shard) for shard in range(3)]


@pytest.mark.parametrize("clips", [False, True])
def test_shard_by_shard_a_step_copies_as_much_as_one_of_a_single_mini_batch_but_for_values(clips):
    shard = ShardCost(forward_s=1.0, backward_s=2.0, parameter_bytes=100, state_bytes=200, recomputes=True)

    def copied(**changes):
        one = JobCost(name="job", shards=(shard,) * 8, num_steps=3, clips=clips, **changes)
        schedule = fleet.simulate(fleet_of([one], 1, in_bandwidth_bytes_per_s=1e3, out_bandwidth_bytes_per_s=1e3))
        return schedule.devices[0].in_bytes, schedule.devices[0].out_bytes

    assert copied() == copied(vertical=True) == copied(vertical=True, accumulate=4)
    assert copied(accumulate=4)[0] > 2 * copied()[0]


def test_recomputation_is_charged():
    plain, again = job(), job()
    again = replace(again, shards=tuple(replace(one, recomputes=True) for one in again.shards))
    assert plain.work_s == plain.plain_work_s == 3 * 4 * 3
    assert again.work_s - plain.work_s == 3 * 3  # the last shard has its forward at hand
    assert again.plain_work_s == plain.plain_work_s


def test_a_single_shard_stays_where_it_is():
    problem = fleet_of([job(num_shards=1, num_steps=5)], 2, in_bandwidth_bytes_per_s=10.0)
    schedule = fleet.simulate(problem)
    assert sum(use.in_bytes for use in schedule.devices) == 100
    assert schedule.makespan_s == pytest.approx(10 + 5 * 3)


def test_the_second_buffer_hides_copies():
    problem = fleet_of([job(str(index)) for index in range(6)], 2, in_bandwidth_bytes_per_s=110.0)
    hidden = fleet.simulate(problem)
    plain = fleet.simulate(problem, double_buffer=False)
    assert sum(use.stall_s for use in hidden.devices) < 0.1 * sum(use.stall_s for use in plain.devices)
    assert hidden.busy_share > 0.95
    assert plain.makespan_s > 1.3 * hidden.makespan_s


def test_two_units_that_do_not_fit_together_are_copied_one_after_the_other():
    jobs = [job(str(index)) for index in range(4)]
    most = max(unit.resident_bytes for unit in jobs[0].step_units)
    tight = fleet_of(jobs, 1, budget_bytes=most, in_bandwidth_bytes_per_s=100.0)
    roomy = fleet_of(jobs, 1, budget_bytes=2 * most, in_bandwidth_bytes_per_s=100.0)
    fleet.verify(tight, fleet.simulate(tight))
    assert fleet.simulate(tight).makespan_s > 1.2 * fleet.simulate(roomy).makespan_s


def test_without_sharp_a_device_ends_a_job_before_the_next():
    problem = fleet_of([job(str(index)) for index in range(5)], 2)
    schedule = fleet.simulate(problem, sharp=False)
    for device in range(2):
        order = [unit.job for unit in schedule.units if unit.device == device]
        assert len(list(itertools.groupby(order))) == len(set(order))
    assert schedule.makespan_s > fleet.simulate(problem).makespan_s


def test_schedulers_do_what_they_are_named_for():
    jobs = [job("short", num_steps=10), job("long", num_steps=40), job("middle", num_steps=20)]
    ends = {name: fleet.simulate(fleet_of(jobs, 1), name).job_end_s for name in SCHEDULERS}
    short, long, middle = ends["shortest-first"]
    assert short < middle < long
    assert ends["fifo"][0] < ends["fifo"][1] < ends["fifo"][2]
    assert max(ends["sharded-lrtf"]) - min(ends["sharded-lrtf"]) < 0.2 * max(ends["sharded-lrtf"])


@pytest.mark.parametrize(
    ("lengths", "num_devices"),
    [([(1, 2), (2, 2), (3, 1)], 2), ([(2, 1), (1, 3), (1, 2), (2, 2)], 2), ([(3, 2), (1, 1), (2, 1), (1, 2)], 3)],
)
def test_longest_remaining_first_is_near_the_optimum(lengths, num_devices):
    """Jobs of (shards, steps), one second forward and one backward each."""
    made = [
        JobCost(name=str(at), shards=(ShardCost(forward_s=1, backward_s=1),) * num_shards, num_steps=num_steps)
        for at, (num_shards, num_steps) in enumerate(lengths)
    ]
    problem = fleet_of(made, num_devices)
    best_s = shortest_makespan_s(problem)
    assert best_s is not None
    assert fleet.lower_bound_s(problem) <= best_s
    assert best_s <= fleet.simulate(problem).makespan_s <= 1.15 * best_s


def test_the_papers_setting_beats_model_parallelism_seven_times():
    """8 devices, 12 jobs that take up to 1.5 times as long as each other, copies that a second buffer can hide."""
    jobs = [job(str(at), num_shards=8, forward_s=1 + 0.1 * (at % 6), num_steps=20) for at in range(12)]
    problem = fleet_of(jobs, 8, in_bandwidth_bytes_per_s=300.0, out_bandwidth_bytes_per_s=300.0)
    schedule = fleet.simulate(problem)
    fleet.verify(problem, schedule)
    assert schedule.makespan_s <= 1.05 * fleet.lower_bound_s(problem)
    assert fleet.model_parallel_s(problem) >= 7 * schedule.makespan_s
    assert fleet.pipeline_s(problem, 4) > schedule.makespan_s


def test_a_job_too_large_for_every_device_is_refused():
    with pytest.raises(ValueError, match=r"no device is large enough for job 'big': one of its units needs \d+ bytes"):
        fleet_of([job("big")], 2, budget_bytes=150)


def test_a_job_runs_only_where_it_fits():
    large = replace(job("large"), shards=(replace(job().shards[0], parameter_bytes=500),) * 2)
    problem = FleetProblem(
        jobs=(large, job("small")),
        devices=(DeviceCost(name="small", budget_bytes=400), DeviceCost(name="large", budget_bytes=2000)),
    )
    schedule = fleet.simulate(problem)
    fleet.verify(problem, schedule)
    assert {unit.device for unit in schedule.units if unit.job == 0} == {1}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fleet_of([job()], 0), "must have at least one device"),
        (lambda: job(num_shards=0), "at least 1, got 0 shards"),
        (lambda: DeviceCost(name="d", speed=0.0), "above 0"),
        (lambda: fleet.simulate(fleet_of([job()], 1), "longest"), "`scheduler` must be 'fair'"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_wrong_schedule_is_found():
    problem = fleet_of([job("one"), job("two")], 1, in_bandwidth_bytes_per_s=100.0)
    schedule = fleet.simulate(problem)
    first, *others = schedule.units
    wrong = {
        "do not each run once and in order": schedule.units[1:],
        "begins before": (first, *(replace(one, start_s=0.0) if one.index == 2 else one for one in others)),
        "takes": (replace(first, end_s=first.end_s + 5), *others),
    }
    for message, units in wrong.items():
        with pytest.raises(InternalError, match=message):
            fleet.verify(problem, replace(schedule, units=units))
