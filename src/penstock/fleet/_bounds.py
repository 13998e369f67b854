"""A lower bound for any schedule, and the times that other methods reach, from the same unit times."""

from penstock.arguments import checked
from penstock.fleet._problem import FleetProblem


@checked("penstock.fleet.lower_bound_s(problem)")
def lower_bound_s(problem: FleetProblem) -> float:
    """Return a time that no schedule of these units beats.

    It is the larger of two: all work spread over all devices, and the longest job on the fastest device.
    """
    speeds = [device.speed for device in problem.devices]
    work_s = sum(job.work_s for job in problem.jobs) / sum(speeds)
    return max([work_s, *(job.arrival_s + job.work_s / max(speeds) for job in problem.jobs)])


@checked("penstock.fleet.model_parallel_s(problem)")
def model_parallel_s(problem: FleetProblem) -> float:
    """Return the time of jobs run one after the other, each spread over all devices without recomputation.

    One device computes at a time.
    """
    mean_speed = sum(device.speed for device in problem.devices) / len(problem.devices)
    end_s = 0.0
    for job in sorted(problem.jobs, key=lambda one: one.arrival_s):
        end_s = max(end_s, job.arrival_s) + job.plain_work_s / mean_speed
    return end_s


@checked("penstock.fleet.pipeline_s(problem, num_micro_batches=8)", num_micro_batches=1)
def pipeline_s(problem: FleetProblem, num_micro_batches: int) -> float:
    """Return the time of jobs run one after the other as GPipe does, without recomputation.

    Each mini-batch is cut into ``num_micro_batches``. Stages are assumed to be balanced and devices equal, which favors
    the pipeline.
    """
    stages = len(problem.devices)
    bubble = (num_micro_batches + stages - 1) / num_micro_batches
    return model_parallel_s(problem) * bubble / stages
