"""Which job comes next: nobody waits for ever."""

import itertools

import pytest
from fleet_problems import SCHEDULERS, fleet_of, make_job

from penstock import fleet
from penstock.fleet import Progress
from penstock.fleet import _schedulers as schedulers
from penstock.fleet._schedulers import JobCandidate, choose


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_short_job_is_not_kept_waiting_by_long_ones(num_devices):
    """Two jobs of 3,000 steps beside one of 60, which Sharded-LRTF keeps at its first step to the end."""
    jobs = [make_job(str(steps), num_steps=steps, forward_s=0.05) for steps in (3000, 3000, 60)]
    problem = fleet_of(jobs, num_devices)
    fair, longest = fleet.simulate(problem), fleet.simulate(problem, "sharded-lrtf")
    assert fair.job_end_s[2] < 4 * jobs[2].work_s
    assert longest.job_end_s[2] > 0.99 * longest.makespan_s
    assert fair.makespan_s <= 1.002 * fleet.lower_bound_s(problem)


@pytest.mark.parametrize("num_devices", [2, 3, 8])
def test_fairness_costs_nothing_at_the_end(num_devices):
    """Jobs of very different lengths, one of which decides when all is over."""
    lengths = [10, 20, 40, 80, 160, 30, 70, 110, 250, 500, 15, 5][: num_devices + 4]
    problem = fleet_of(
        [make_job(str(index), num_steps=steps, forward_s=0.05) for index, steps in enumerate(lengths)], num_devices
    )
    fair = fleet.simulate(problem)
    assert fair.makespan_s <= 1.02 * fleet.lower_bound_s(problem)
    assert sum(fair.job_end_s) < sum(fleet.simulate(problem, "sharded-lrtf").job_end_s)


def test_jobs_that_wait_have_turns_by_turns():
    problem = fleet_of([make_job(str(index), num_shards=2, num_steps=60) for index in range(4)], 1)
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
    late = [make_job(str(index), arrival_s=1.8e9 + index * 1e-6) for index in range(4)]
    ends = fleet.simulate(fleet_of(late, 1), "fifo").job_end_s
    assert list(ends) == sorted(ends)


def test_any_order_is_the_same_in_every_run():
    drawn = {
        schedulers.in_any_order(Progress(job=index, arrival_s=0, remaining_s=1, num_done=n))
        for index in range(9)
        for n in range(9)
    }
    assert len(drawn) == 81
    assert all(0 <= priority < 1 for priority in drawn)


def test_every_name_has_a_function():
    assert list(schedulers._SCHEDULERS) == SCHEDULERS


def test_schedulers_do_what_they_are_named_for():
    jobs = [make_job("short", num_steps=10), make_job("long", num_steps=40), make_job("middle", num_steps=20)]
    ends = {name: fleet.simulate(fleet_of(jobs, 1), name).job_end_s for name in SCHEDULERS}
    short, long, middle = ends["shortest-first"]
    assert short < middle < long
    assert ends["fifo"][0] < ends["fifo"][1] < ends["fifo"][2]
    assert max(ends["sharded-lrtf"]) - min(ends["sharded-lrtf"]) < 0.2 * max(ends["sharded-lrtf"])
