"""The check of schedules: every rule, broken by as little as possible and kept by as little as possible."""

from dataclasses import replace

import pytest
from fleet_problems import fleet_of, make_job

from penstock import fleet
from penstock.errors import InternalError

SHARD = fleet.ShardCost(forward_s=1.0, backward_s=2.0, parameter_bytes=100)
"""Its forward takes 1 s, its backward 2, both together 3; its bytes take 1 s on the link of `device`."""
ALONE = [(0, 0, 0, 0, 1, 2), (0, 1, 0, 1, 2, 5), (0, 2, 0, 4, 5, 7)]
"""A job of two shards, one step: job, unit, device, begin of copy in, begin and end of computation."""


def device(**changes):
    return fleet.DeviceCost(**{"name": "cuda:0", "in_bandwidth_bytes_per_s": 100.0, **changes})


def job(name="a", num_shards=2, **changes):
    return fleet.JobCost(name=name, shards=(SHARD,) * num_shards, num_steps=1, **changes)


def problem_of(*jobs, devices=None):
    return fleet.FleetProblem(jobs=jobs, devices=tuple(devices or [device()]))


def schedule_of(problem, rows):
    units = [
        fleet.ScheduledUnit(
            job=job,
            index=index,
            kind=problem.jobs[job].unit(index).kind,
            shard=problem.jobs[job].unit(index).shard,
            device=device,
            load_s=float(load_s),
            start_s=float(start_s),
            end_s=float(end_s),
        )
        for job, index, device, load_s, start_s, end_s in rows
    ]
    use = fleet.DeviceUse(busy_s=0.0, stall_s=0.0, idle_s=0.0, in_bytes=0, out_bytes=0)
    end_s = max((unit.end_s for unit in units), default=0.0)
    return fleet.Schedule(
        makespan_s=end_s,
        job_end_s=(end_s,) * len(problem.jobs),
        devices=(use,) * len(problem.devices),
        units=tuple(units),
    )


def check(problem, rows):
    fleet.verify(problem, schedule_of(problem, rows))


def changed(rows, number, **changes):
    """Return the rows with some fields of one of them changed."""
    names = ("job", "index", "device", "load_s", "start_s", "end_s")
    row = dict(zip(names, rows[number], strict=True)) | changes
    return [*rows[:number], tuple(row.values()), *rows[number + 1 :]]


def test_a_wrong_schedule_is_found():
    problem = fleet_of([make_job("one"), make_job("two")], 1, in_bandwidth_bytes_per_s=100.0)
    schedule = fleet.simulate(problem)
    first, *others = schedule.units
    wrong = {
        "do not each run once and in order": schedule.units[1:],
        "begins before": (first, *(replace(unit, start_s=0.0) if unit.index == 2 else unit for unit in others)),
        "takes": (replace(first, end_s=first.end_s + 5), *others),
    }
    for message, units in wrong.items():
        with pytest.raises(InternalError, match=message):
            fleet.verify(problem, replace(schedule, units=units))


def test_a_schedule_by_hand_is_right():
    check(problem_of(job()), ALONE)
    check(problem_of(), [])


@pytest.mark.parametrize("rows", [ALONE[:2], [*ALONE, (0, 3, 0, 6, 7, 8)], [ALONE[1], ALONE[0], ALONE[2]]])
def test_each_unit_runs_once_and_in_order(rows):
    with pytest.raises(InternalError, match="job 'a': its 3 units do not each run once and in order"):
        check(problem_of(job()), rows)


def test_a_job_begins_when_it_arrives():
    check(problem_of(job(arrival_s=1.0)), ALONE)
    with pytest.raises(InternalError, match="begins before"):
        check(problem_of(job(arrival_s=1.5)), ALONE)


def test_a_unit_begins_when_the_one_before_it_has_ended_on_another_device_too():
    two = problem_of(job(), devices=[device(), device(name="cuda:1")])
    check(two, changed(ALONE, 1, device=1))
    with pytest.raises(InternalError, match="job 'a': unit 1 begins before unit 0 has ended"):
        check(two, changed(ALONE, 1, device=1, load_s=0, start_s=1.9, end_s=4.9))


@pytest.mark.parametrize("end_s", [6.9, 7.1])
def test_a_unit_takes_its_time(end_s):
    with pytest.raises(InternalError, match="job 'a': unit 2 takes"):
        check(problem_of(job()), changed(ALONE, 2, end_s=end_s))


def test_a_device_of_twice_the_speed_takes_half_the_time():
    fast = problem_of(job(), devices=[device(speed=2.0)])
    check(fast, [(0, 0, 0, 0, 1, 1.5), (0, 1, 0, 1, 2, 3.5), (0, 2, 0, 3, 4, 5)])
    with pytest.raises(InternalError, match="takes"):
        check(fast, ALONE)


def test_a_device_computes_one_unit_at_a_time():
    jobs = job(num_shards=1), job("b", num_shards=1)
    check(problem_of(*jobs), [(0, 0, 0, 0, 1, 4), (1, 0, 0, 3, 4, 7)])
    with pytest.raises(InternalError, match=r"device 'cuda:0' computes two units at 3\.5 s"):
        check(problem_of(*jobs), [(0, 0, 0, 0, 1, 4), (1, 0, 0, 2, 3.5, 6.5)])
    check(problem_of(*jobs, devices=[device(), device(name="cuda:1")]), [(0, 0, 0, 0, 1, 4), (1, 0, 1, 2, 3.5, 6.5)])


def test_what_is_loaded_early_fits_beside_what_is_there():
    jobs = job(num_shards=1), job("b", num_shards=1)  # each takes 200 bytes: parameters and gradients
    early, late = [(0, 0, 0, 0, 1, 4), (1, 0, 0, 3, 4, 7)], [(0, 0, 0, 0, 1, 4), (1, 0, 0, 4, 5, 8)]
    check(problem_of(*jobs, devices=[device(budget_bytes=400)]), early)
    check(problem_of(*jobs, devices=[device(budget_bytes=399)]), late)
    with pytest.raises(InternalError, match="device 'cuda:0' holds 400 of 399 bytes"):
        check(problem_of(*jobs, devices=[device(budget_bytes=399)]), early)


def test_a_shard_that_runs_again_is_there_once():
    twice = fleet.JobCost(name="a", shards=(SHARD,), num_steps=2)
    tight = problem_of(twice, devices=[device(budget_bytes=200)])
    check(tight, [(0, 0, 0, 0, 1, 4), (0, 1, 0, 3, 4, 7)])


@pytest.mark.parametrize("load_s", [0.1, 0.5])
def test_a_unit_waits_for_its_bytes(load_s):
    with pytest.raises(InternalError, match="begins unit 0 of job 0 before its bytes have arrived"):
        check(problem_of(job()), changed(ALONE, 0, load_s=load_s))


def test_the_boundary_that_the_last_unit_left_does_not_arrive():
    shard = replace(SHARD, boundary_bytes=300)
    handed = problem_of(fleet.JobCost(name="a", shards=(shard, SHARD), num_steps=1))
    check(handed, ALONE)  # each unit loads 400 bytes, of which 300 are kept


def test_a_shard_that_is_still_there_does_not_arrive_again():
    twice = fleet.JobCost(name="a", shards=(SHARD,), num_steps=2)
    rows = [(0, 0, 0, 0, 1, 4), (0, 1, 0, 4, 4, 7)]
    check(problem_of(twice), rows)
    two = problem_of(twice, devices=[device(), device(name="cuda:1")])
    with pytest.raises(InternalError, match="device 'cuda:1' begins unit 1 of job 0 before its bytes have arrived"):
        check(two, changed(rows, 1, device=1))
    with pytest.raises(InternalError, match="begins unit 1 of job 0"):
        check(problem_of(job()), changed(ALONE, 1, load_s=2))  # another shard


def test_the_makespan_is_when_the_last_unit_ends():
    problem = problem_of(job())
    schedule = schedule_of(problem, ALONE)
    for makespan_s in (6.9, 7.1):
        with pytest.raises(InternalError, match="makespan"):
            fleet.verify(problem, replace(schedule, makespan_s=makespan_s))


def test_rounding_is_no_error_and_more_is():
    problem = problem_of(job())
    check(problem, changed(ALONE, 1, start_s=2 - 1e-10, end_s=5 - 1e-10))
    with pytest.raises(InternalError, match="begins before"):
        check(problem, changed(ALONE, 1, start_s=2 - 1e-7, end_s=5 - 1e-7))
