"""What no schedule can beat, and what others reach, from the same unit times."""

from penstock.arguments import checked
from penstock.fleet._problem import FleetProblem


@checked("penstock.fleet.lower_bound_s(problem)")
def lower_bound_s(problem: FleetProblem) -> float:
    """No schedule of these units ends earlier: all work over all devices, or the longest job on the fastest one."""
    speeds = [device.speed for device in problem.devices]
    work_s = sum(job.work_s for job in problem.jobs) / sum(speeds)
    return max([work_s, *(job.arrival_s + job.work_s / max(speeds) for job in problem.jobs)])


@checked("penstock.fleet.model_parallel_s(problem)")
def model_parallel_s(problem: FleetProblem) -> float:
    """One job after the other, each spread over all devices whole: one of them computes at a time, none recomputes."""
    mean_speed = sum(device.speed for device in problem.devices) / len(problem.devices)
    end_s = 0.0
    for job in sorted(problem.jobs, key=lambda one: one.arrival_s):
        end_s = max(end_s, job.arrival_s) + job.plain_work_s / mean_speed
    return end_s


@checked("penstock.fleet.pipeline_s(problem, num_micro_batches=8)", num_micro_batches=1)
def pipeline_s(problem: FleetProblem, num_micro_batches: int) -> float:
    """One job after the other over all devices, each mini-batch cut into so many, as GPipe does; none recomputes.

    Stages are taken as balanced and the devices as equal, to the pipeline's advantage.
    """
    stages = len(problem.devices)
    bubble = (num_micro_batches + stages - 1) / num_micro_batches
    return model_parallel_s(problem) * bubble / stages
