"""An independent check of a schedule, from nothing but its list of units."""

import itertools
from collections import defaultdict

from penstock.arguments import checked
from penstock.errors import InternalError
from penstock.fleet._problem import FleetProblem
from penstock.fleet._schedule import Schedule, ScheduledUnit

_ROUNDING_S = 1e-9


@checked("penstock.fleet.verify(problem, penstock.fleet.simulate(problem))")
def verify(problem: FleetProblem, schedule: Schedule) -> None:
    """Raise ``InternalError`` that names the first rule which ``schedule`` breaks.

    Use it for schedules that your own code makes or changes.

    >>> import dataclasses
    >>> from penstock import fleet
    >>> shard = fleet.ShardCost(forward_s=1.0, backward_s=2.0)
    >>> job = fleet.JobCost(name="a", shards=(shard, shard), num_steps=3)
    >>> problem = fleet.FleetProblem(jobs=(job,), devices=(fleet.DeviceCost(name="cuda:0"),))
    >>> schedule = fleet.simulate(problem, scheduler=lambda progress: progress.num_done)
    >>> fleet.verify(problem, schedule)
    >>> fleet.verify(problem, dataclasses.replace(schedule, units=schedule.units[1:]))
    Traceback (most recent call last):
        ...
    penstock.errors.InternalError: job 'a': its 9 units do not each run once and in order
    """
    of_job: dict[int, list[ScheduledUnit]] = defaultdict(list)
    of_device: dict[int, list[ScheduledUnit]] = defaultdict(list)
    for unit in schedule.units:
        of_job[unit.job].append(unit)
        of_device[unit.device].append(unit)
    for job in range(len(problem.jobs)):
        _verify_job(problem, job, of_job[job])
    for device, units in of_device.items():
        _verify_device(problem, device, units)
    end_s = max((unit.end_s for unit in schedule.units), default=0.0)
    if abs(end_s - schedule.makespan_s) > _ROUNDING_S:
        raise InternalError(f"the last unit ends at {end_s} s, but the schedule's makespan is {schedule.makespan_s} s")


def _verify_job(problem: FleetProblem, job: int, units: list[ScheduledUnit]) -> None:
    cost = problem.jobs[job]
    if [unit.index for unit in units] != list(range(cost.num_units)):
        raise InternalError(f"job {cost.name!r}: its {cost.num_units} units do not each run once and in order")
    before_s = cost.arrival_s
    for unit in units:
        if unit.start_s < before_s - _ROUNDING_S:
            raise InternalError(f"job {cost.name!r}: unit {unit.index} begins before unit {unit.index - 1} has ended")
        duration_s = cost.unit(unit.index).compute_s / problem.devices[unit.device].speed
        if abs(unit.end_s - unit.start_s - duration_s) > _ROUNDING_S * max(1.0, unit.end_s):
            raise InternalError(f"job {cost.name!r}: unit {unit.index} takes {unit.end_s - unit.start_s} s")
        before_s = unit.end_s


def _verify_device(problem: FleetProblem, device: int, units: list[ScheduledUnit]) -> None:
    cost = problem.devices[device]
    for before, unit in itertools.pairwise(units):
        if unit.start_s < before.end_s - _ROUNDING_S:
            raise InternalError(f"device {cost.name!r} computes two units at {unit.start_s} s")
        held = problem.jobs[before.job].unit(before.index).resident_bytes
        coming = problem.jobs[unit.job].unit(unit.index).resident_bytes
        is_same = (before.job, before.shard) == (unit.job, unit.shard)
        is_early = unit.load_s < before.end_s - _ROUNDING_S
        if is_early and not is_same and cost.budget_bytes is not None and held + coming > cost.budget_bytes:
            raise InternalError(f"device {cost.name!r} holds {held + coming} of {cost.budget_bytes} bytes")
    here = {(unit.job, unit.index, unit.shard) for unit in units}
    for unit in units:
        needed = problem.jobs[unit.job].unit(unit.index)
        least_s = (needed.in_bytes - needed.kept_bytes) / cost.in_bandwidth_bytes_per_s
        is_resident = (unit.job, unit.index - 1, unit.shard) in here
        if not is_resident and unit.start_s - unit.load_s < least_s - _ROUNDING_S * max(1.0, unit.start_s):
            raise InternalError(
                f"device {cost.name!r} begins unit {unit.index} of job {unit.job} before its bytes have arrived"
            )
