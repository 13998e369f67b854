"""Costs of jobs, measured on one device without training them.

Simulations use them for devices that you need not have.
"""

from collections.abc import Iterable

import torch

from penstock.arguments import checked, renamed
from penstock.errors import PenstockError
from penstock.fleet._job import Device, Job
from penstock.fleet._problem import JobCost
from penstock.fleet._run import Fleet
from penstock.tiers import Budget, DiskSpec, Size


@renamed(host_budget="host")
@checked("penstock.fleet.measure(jobs, 'cuda:0', budget='40GiB')")
def measure(
    jobs: Iterable[Job],
    device: str | torch.device | Device = "cpu",
    budget: Size | Budget | None = None,
    *,
    host: Size | None = None,
    disk: DiskSpec = None,
) -> tuple[JobCost, ...]:
    """Cut every job for a device with that budget and measure its shards there, for `FleetProblem` and `simulate`.

    Takes the arguments of `Fleet`; the jobs' factories are called as for training. Jobs that compute the same on the
    same shapes are measured once. Raises ``PenstockError`` for a job that cannot be measured, with the reason.
    """
    with _MeasuringFleet([device], budget, host=host, disk=disk, progress=None) as running:
        return running.costs(jobs)


class _MeasuringFleet(Fleet):
    """A fleet that measures its jobs and does not train them."""

    def costs(self, jobs: Iterable[Job]) -> tuple[JobCost, ...]:
        """Measure the jobs and return their costs."""
        self._engine.pilots.end_jobs = True
        for job in jobs:
            self.add(job)
        self.wait()
        for run in self._engine.runs:
            if run.error is not None:
                raise PenstockError(f"job {run.job.name!r} could not be measured: {run.error}")
        return tuple(run.cost() for run in self._engine.runs)
