"""Which job comes next: the engine and the simulation choose alike, and nobody waits for ever."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schedule import SCHEDULERS, fleet_of, fleets, job
from torch import nn

from penstock import fleet
from penstock.fleet import DeviceCost, FleetProblem, JobCost, JobState, Progress, ShardCost
from penstock.fleet import _schedulers as schedulers
from penstock.fleet._engine import Engine
from penstock.fleet._life import JobRun
from penstock.fleet._schedulers import JobCandidate, choose, scheduler_of

STEPS = {"long": 9, "short": 2, "middle": 5}
UNIT_S = {"long": 1.0, "short": 0.5, "middle": 2.0}
"""Seconds of each unit, by job."""


def small(name, **changes):
    return fleet.Job(
        name=name,
        model=lambda: nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]),
        data=lambda: [torch.ones(4, 64)] * 4,
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        **{"steps": STEPS.get(name, 3), **changes},
    )


def cost_of(one, records, vertical):
    """What the simulation takes of a job whose units were recorded: as many shards, each unit as long."""
    num_shards = 1 + max(record.shard for record in records if record.job == one.name)
    unit_s = UNIT_S[one.name]
    first = ShardCost(forward_s=unit_s, backward_s=unit_s, step_s=unit_s if one.clip_norm else 0.0)
    last = ShardCost(forward_s=0.0, backward_s=unit_s, step_s=first.step_s)
    return JobCost(
        name=one.name, shards=(first,) * (num_shards - 1) + (last,), num_steps=one.steps, accumulate=one.accumulate,
        clips=one.clip_norm is not None, vertical=vertical,
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
    jobs = [small(name, **changes) for name in STEPS]

    def now_s(engine):
        return sum(UNIT_S[record.job] for worker in engine.workers for record in worker.log.records)

    def turn_s(run):
        last = SimpleNamespace(job=run.job.name, shard=len(run.plan.measures) - 1)
        cost = cost_of(run.job, [last], run.plan.is_vertical)
        return cost.work_s / (cost.num_steps * cost.turns_per_step)

    monkeypatch.setattr(Engine, "now_s", property(now_s))
    monkeypatch.setattr(JobRun, "turn_s", property(turn_s))
    with fleet.Fleet(
        [fleet.Device(name="cpu", threads=1)], budget, host_budget="64MiB", progress=None, scheduler=scheduler
    ) as made:
        for one in jobs:
            made.add(one)
        results = made.wait()
        records, vertical = made.records, {run.plan.is_vertical for run in made._engine.runs}
    assert [one.state for one in results.values()] == [JobState.DONE] * 3
    ran = [(record.job, record.kind, record.shard) for record in records]
    assert vertical == {budget == "120KB"}
    costs = tuple(cost_of(one, records, *vertical) for one in jobs)
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


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_short_job_is_not_kept_waiting_by_long_ones(num_devices):
    """Two jobs of 3,000 steps beside one of 60, which Sharded-LRTF keeps at its first step to the end."""
    made = [job(str(steps), num_steps=steps, forward_s=0.05) for steps in (3000, 3000, 60)]
    problem = fleet_of(made, num_devices)
    fair, longest = fleet.simulate(problem), fleet.simulate(problem, "sharded-lrtf")
    assert fair.job_end_s[2] < 4 * made[2].work_s
    assert longest.job_end_s[2] > 0.99 * longest.makespan_s
    assert fair.makespan_s <= 1.002 * fleet.lower_bound_s(problem)


@pytest.mark.parametrize("num_devices", [2, 3, 8])
def test_fairness_costs_nothing_at_the_end(num_devices):
    """Jobs of very different lengths, one of which decides when all is over."""
    lengths = [10, 20, 40, 80, 160, 30, 70, 110, 250, 500, 15, 5][: num_devices + 4]
    problem = fleet_of([job(str(at), num_steps=steps, forward_s=0.05) for at, steps in enumerate(lengths)], num_devices)
    fair = fleet.simulate(problem)
    assert fair.makespan_s <= 1.02 * fleet.lower_bound_s(problem)
    assert sum(fair.job_end_s) < sum(fleet.simulate(problem, "sharded-lrtf").job_end_s)


def test_jobs_that_wait_have_turns_by_turns():
    problem = fleet_of([job(str(at), num_shards=2, num_steps=60) for at in range(4)], 1)
    order = [unit.job for unit in fleet.simulate(problem).units]
    turns = [(number, len(list(units))) for number, units in itertools.groupby(order)]
    assert [number for number, _ in turns[:8]] == [0, 1, 2, 3] * 2
    assert {length * 3 for _, length in turns[:8]} <= {12, 18}  # two mini-batches of 3 units: 6 s each, 10 s at least


def test_choosing_is_the_smallest_number_then_ones_own_then_the_longest_wait():
    a, b, c = JobCandidate(1.0, 5.0, 0), JobCandidate(1.0, 4.0, 1), JobCandidate(2.0, 0.0, 2)
    assert choose([a, b, c], None) == b
    assert choose([a, b], c) == b
    assert choose([b, c], a) == a
    assert choose([], a) == a
    assert choose([], None) is None


def test_a_job_that_came_first_ends_first_however_long_the_clock_has_run():
    late = [job(str(at), arrival_s=1.8e9 + at * 1e-6) for at in range(4)]
    ends = fleet.simulate(fleet_of(late, 1), "fifo").job_end_s
    assert list(ends) == sorted(ends)


def test_any_order_is_the_same_in_every_run():
    drawn = {
        schedulers.in_any_order(Progress(job=at, arrival_s=0, remaining_s=1, num_done=n))
        for at in range(9)
        for n in range(9)
    }
    assert len(drawn) == 81
    assert all(0 <= one < 1 for one in drawn)


@pytest.mark.usefixtures("one_thread")
def test_a_job_between_turns_is_shown_as_waiting(monkeypatch):
    """One device, two jobs: while one trains its ten seconds, the other waits."""
    seen = []
    monkeypatch.setattr(Engine, "now_s", property(lambda engine: 0.4 * len(engine.workers[0].records)))

    def looking(progress):
        if progress.had_s is None:
            waited_s = made._engine.now_s - progress.since_s
            seen.append((made.rows()[progress.job].state, waited_s >= 1))
        return scheduler_of("fifo")(progress)

    device = fleet.Device(name="cpu", threads=1)
    with fleet.Fleet([device], "1MB", host_budget="64MiB", progress=None, scheduler=looking) as made:
        made.add(small("a", steps=6))
        made.add(small("b", steps=6))
        made.wait()
    assert set(seen) == {("running", False), ("waiting", True)}
