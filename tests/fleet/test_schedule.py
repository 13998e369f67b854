"""Schedules, beside what no schedule beats and what other methods reach."""

import pytest
from benchmarks.optimal import shortest_makespan_s
from fleet_problems import fleet_of, make_job

from penstock import fleet
from penstock.fleet import JobCost, ShardCost


@pytest.mark.parametrize(
    ("lengths", "num_devices"),
    [([(1, 2), (2, 2), (3, 1)], 2), ([(2, 1), (1, 3), (1, 2), (2, 2)], 2), ([(3, 2), (1, 1), (2, 1), (1, 2)], 3)],
)
def test_longest_remaining_first_is_near_the_optimum(lengths, num_devices):
    """Jobs of (shards, steps), one second forward and one backward each."""
    jobs = [
        JobCost(name=str(index), shards=(ShardCost(forward_s=1, backward_s=1),) * num_shards, num_steps=num_steps)
        for index, (num_shards, num_steps) in enumerate(lengths)
    ]
    problem = fleet_of(jobs, num_devices)
    best_s = shortest_makespan_s(problem)
    assert best_s is not None
    assert fleet.lower_bound_s(problem) <= best_s
    assert best_s <= fleet.simulate(problem).makespan_s <= 1.15 * best_s


def test_the_papers_setting_beats_model_parallelism_seven_times():
    """8 devices, 12 jobs that take up to 1.5 times as long as each other, copies that a second buffer can hide."""
    jobs = [make_job(str(index), num_shards=8, forward_s=1 + 0.1 * (index % 6), num_steps=20) for index in range(12)]
    problem = fleet_of(jobs, 8, in_bandwidth_bytes_per_s=300.0, out_bandwidth_bytes_per_s=300.0)
    schedule = fleet.simulate(problem)
    fleet.verify(problem, schedule)
    assert schedule.makespan_s <= 1.05 * fleet.lower_bound_s(problem)
    assert fleet.model_parallel_s(problem) >= 7 * schedule.makespan_s
    assert fleet.pipeline_s(problem, 4) > schedule.makespan_s
