"""One conformance suite for all schedulers, on a virtual clock, and the same decisions as in a real fleet."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fleet_jobs import STEPS, layered_job
from fleet_problems import SCHEDULERS, fleet_of, fleets, make_job
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import fleet
from penstock.fleet import DeviceCost, FleetProblem, JobCost, JobState, ShardCost
from penstock.fleet._engine import Engine
from penstock.fleet._life import JobRun
from penstock.fleet._schedulers import scheduler_of


@given(fleets, st.sampled_from(SCHEDULERS), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=150)
def test_every_schedule_is_verified_and_ends(problem, scheduler, double_buffer, sharp):
    schedule = fleet.simulate(problem, scheduler, double_buffer=double_buffer, sharp=sharp)
    fleet.verify(problem, schedule)
    assert len(schedule.units) == sum(cost.num_units for cost in problem.jobs)
    assert schedule.makespan_s >= fleet.lower_bound_s(problem) - 1e-9
    for device, use in enumerate(schedule.devices):
        own = [unit for unit in schedule.units if unit.device == device]
        assert use.busy_s == pytest.approx(sum(unit.end_s - unit.start_s for unit in own))
        assert use.busy_s + use.stall_s + use.idle_s == pytest.approx(schedule.makespan_s)
    assert fleet.simulate(problem, scheduler, double_buffer=double_buffer, sharp=sharp) == schedule
    bare = fleet.simulate(problem, scheduler, double_buffer=double_buffer, sharp=sharp, records=False)
    assert replace(schedule, units=()) == bare


@pytest.mark.parametrize("clips", [False, True])
def test_shard_by_shard_a_step_copies_as_much_as_one_of_a_single_mini_batch_but_for_values(clips):
    shard = ShardCost(forward_s=1.0, backward_s=2.0, parameter_bytes=100, state_bytes=200, recomputes=True)

    def copied(**changes):
        cost = JobCost(name="job", shards=(shard,) * 8, num_steps=3, clips=clips, **changes)
        schedule = fleet.simulate(fleet_of([cost], 1, in_bandwidth_bytes_per_s=1e3, out_bandwidth_bytes_per_s=1e3))
        return schedule.devices[0].in_bytes, schedule.devices[0].out_bytes

    assert copied() == copied(vertical=True) == copied(vertical=True, accumulate=4)
    assert copied(accumulate=4)[0] > 2 * copied()[0]


def test_a_single_shard_stays_where_it_is():
    problem = fleet_of([make_job(num_shards=1, num_steps=5)], 2, in_bandwidth_bytes_per_s=10.0)
    schedule = fleet.simulate(problem)
    assert sum(use.in_bytes for use in schedule.devices) == 100
    assert schedule.makespan_s == pytest.approx(10 + 5 * 3)


def test_the_second_buffer_hides_copies():
    problem = fleet_of([make_job(str(index)) for index in range(6)], 2, in_bandwidth_bytes_per_s=110.0)
    hidden = fleet.simulate(problem)
    plain = fleet.simulate(problem, double_buffer=False)
    assert sum(use.stall_s for use in hidden.devices) < 0.1 * sum(use.stall_s for use in plain.devices)
    assert hidden.busy_share > 0.95
    assert plain.makespan_s > 1.3 * hidden.makespan_s


def test_two_units_that_do_not_fit_together_are_copied_one_after_the_other():
    jobs = [make_job(str(index)) for index in range(4)]
    most = max(unit.resident_bytes for unit in jobs[0].step_units)
    tight = fleet_of(jobs, 1, budget_bytes=most, in_bandwidth_bytes_per_s=100.0)
    roomy = fleet_of(jobs, 1, budget_bytes=2 * most, in_bandwidth_bytes_per_s=100.0)
    fleet.verify(tight, fleet.simulate(tight))
    assert fleet.simulate(tight).makespan_s > 1.2 * fleet.simulate(roomy).makespan_s


def test_without_sharp_a_device_ends_a_job_before_the_next():
    problem = fleet_of([make_job(str(index)) for index in range(5)], 2)
    schedule = fleet.simulate(problem, sharp=False)
    for device in range(2):
        order = [unit.job for unit in schedule.units if unit.device == device]
        assert len(list(itertools.groupby(order))) == len(set(order))
    assert schedule.makespan_s > fleet.simulate(problem).makespan_s


def test_a_job_runs_only_where_it_fits():
    large = replace(make_job("large"), shards=(replace(make_job().shards[0], parameter_bytes=500),) * 2)
    problem = FleetProblem(
        jobs=(large, make_job("small")),
        devices=(DeviceCost(name="small", budget_bytes=400), DeviceCost(name="large", budget_bytes=2000)),
    )
    schedule = fleet.simulate(problem)
    fleet.verify(problem, schedule)
    assert {unit.device for unit in schedule.units if unit.job == 0} == {1}


UNIT_S = {"long": 1.0, "short": 0.5, "middle": 2.0}
"""Seconds of each unit, by job."""


def cost_of(job, records, vertical):
    """What the simulation takes of a job whose units were recorded: as many shards, each unit as long."""
    num_shards = 1 + max(record.shard for record in records if record.job == job.name)
    unit_s = UNIT_S[job.name]
    first = ShardCost(forward_s=unit_s, backward_s=unit_s, step_s=unit_s if job.clip_norm else 0.0)
    last = ShardCost(forward_s=0.0, backward_s=unit_s, step_s=first.step_s)
    return JobCost(
        name=job.name, shards=(first,) * (num_shards - 1) + (last,), num_steps=job.steps, accumulate=job.accumulate,
        clips=job.clip_norm is not None, vertical=vertical,
    )  # fmt: skip


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("changes", "budget"),
    [
        ({}, "250KB"),
        ({"accumulate": 2}, "250KB"),
        ({"accumulate": 2, "clip_norm": 1.0}, "250KB"),
        ({"accumulate": 2, "clip_norm": 1.0}, "120KB"),  # shard by shard
    ],
)
@pytest.mark.parametrize("scheduler", [*SCHEDULERS, lambda progress: -progress.num_done])
def test_a_recorded_run_is_replayed_by_the_simulation_unit_by_unit(scheduler, changes, budget, monkeypatch):
    """On a clock that units move on, so that no measured second decides."""
    jobs = [layered_job(name, **changes) for name in STEPS]

    def now_s(engine):
        return sum(UNIT_S[record.job] for worker in engine.workers for record in worker.log.records)

    def turn_s(run):
        last = SimpleNamespace(job=run.job.name, shard=len(run.plan.measures) - 1)
        cost = cost_of(run.job, [last], run.plan.is_vertical)
        return cost.work_s / (cost.num_steps * cost.turns_per_step)

    monkeypatch.setattr(Engine, "now_s", property(now_s))
    monkeypatch.setattr(JobRun, "turn_s", property(turn_s))
    with fleet.Fleet(
        [fleet.Device(name="cpu", threads=1)], budget, host="64MiB", progress=None, scheduler=scheduler
    ) as running:
        for job in jobs:
            running.add(job)
        results = running.wait()
        records, vertical = running.records, {run.plan.is_vertical for run in running._engine.runs}
    assert [result.state for result in results.values()] == [JobState.DONE] * 3
    ran = [(record.job, record.kind, record.shard) for record in records]
    assert vertical == {budget == "120KB"}
    costs = tuple(cost_of(job, records, *vertical) for job in jobs)
    problem = FleetProblem(jobs=costs, devices=(DeviceCost(name="cpu"),))
    played = fleet.simulate(problem, scheduler)
    assert ran == [(jobs[unit.job].name, unit.kind.value, unit.shard) for unit in played.units]
    assert len({kind for _, kind, _ in ran}) == (4 if "clip_norm" in changes else 3)


@given(fleets, st.sampled_from(SCHEDULERS), st.booleans())
@settings(deadline=None, max_examples=150)
def test_the_first_of_all_is_found_by_looking_at_few(problem, name, sharp):
    known = scheduler_of(name)
    looked_at_all = fleet.simulate(problem, lambda progress: rank(known(progress)), sharp=sharp)
    assert fleet.simulate(problem, name, sharp=sharp) == looked_at_all


def rank(priority):
    """A number for what `fair` says, which is a pair."""
    return priority[0] * 1e6 + priority[1] if isinstance(priority, tuple) else priority
