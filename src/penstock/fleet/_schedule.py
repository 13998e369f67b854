"""A schedule: what a fleet did, or would do; and the times that any schedule and other methods reach."""

from dataclasses import dataclass

from penstock.arguments import checked
from penstock.fleet._problem import FleetProblem, UnitKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledUnit:
    """One unit on one device. Times are seconds from the start."""

    job: int
    """Index of the job in the problem."""
    index: int
    """Index among the job's units."""
    kind: UnitKind
    """Its kind of computation."""
    shard: int
    """Index of the shard."""
    device: int
    """Index of the device in the problem."""
    load_s: float
    """Time at which its copy in began."""
    start_s: float
    """Time at which its computation began."""
    end_s: float
    """Time at which its computation ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """Use of a device's time until the last unit ended, and of its link."""

    busy_s: float
    """Seconds of computation."""
    stall_s: float
    """Seconds in which a unit was chosen, but its bytes were not there yet."""
    idle_s: float
    """Seconds without a job to take."""
    in_bytes: int
    """Bytes copied in from host memory."""
    out_bytes: int
    """Bytes copied out to host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Place and time of every unit."""

    makespan_s: float
    """Time at which the last unit ended."""
    job_end_s: tuple[float, ...]
    """Per job, the time at which it ended."""
    devices: tuple[DeviceUse, ...]
    """Per device, the use of its time."""
    units: tuple[ScheduledUnit, ...]
    """Units in the order in which they began; empty if they were not recorded."""

    @property
    def busy_share(self) -> float:
        """Share of all devices' time in which they computed."""
        total = self.makespan_s * len(self.devices)
        return sum(device.busy_s for device in self.devices) / total if total else 1.0


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
    for job in sorted(problem.jobs, key=lambda job: job.arrival_s):
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
