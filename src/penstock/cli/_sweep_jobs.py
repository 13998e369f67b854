"""The jobs of a sweep: calls its function with the parameters of each job, and gives each a unique name."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.cli._sweep import Parameters, SweepFile
from penstock.cli._target import called, function_of, misfit_of
from penstock.errors import PenstockError
from penstock.fleet import Job, JobSource

_MOST_CHARACTERS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMaker:
    """The sweep's function; an error in it becomes one line that says where it happened."""

    function: Callable[..., Any]
    """The user's function, from parameters to a job."""
    path: str
    """The location of the function, independent of the current directory."""

    def __call__(self, **parameters: Any) -> Job:  # any: JSON
        """Make a job. Raises ``PenstockError`` if the function raises or returns something else."""
        job = called(self.path, self.function, **parameters)
        if not isinstance(job, Job):
            raise PenstockError(f"{self.path} returns a penstock.fleet.Job, not {type(job).__name__} {job!r}")
        return job

    def source(self, parameters: Parameters) -> JobSource:
        """Return how the job was made, for clones."""
        return JobSource(make=self, path=self.path, parameters=parameters)


def maker_of(file: SweepFile) -> JobMaker:
    """Return the function that makes jobs. Raises ``ValueError`` if it does not exist or takes other parameters."""
    target, folder = file.sweep.job, file.document.path.parent
    try:
        function = function_of(target, "makes jobs", "(**parameters) returns a penstock.fleet.Job", folder)
    except PenstockError as error:
        raise file.document.error(("job",), str(error)) from None
    _check_parameters(file, function)
    is_file = target.rpartition(":")[0].endswith(".py")
    return JobMaker(function=function, path=str((folder / target).resolve()) if is_file else target)


def make_jobs(file: SweepFile, make: JobMaker) -> list[tuple[Job, JobSource]]:
    """Make the jobs of a sweep, with unique names. Raises ``PenstockError`` if one cannot be made."""
    jobs = with_own_names([make(**point) for point in file.points], file.points)
    return [(job, make.source(point)) for job, point in zip(jobs, file.points, strict=True)]


def with_own_names(jobs: Sequence[Job], points: Sequence[Parameters]) -> list[Job]:
    """Return the jobs with unique names; equal names get their parameters appended: ``"gpt lr=0.0001,batch=4"``."""
    counts, taken, named = Counter(job.name for job in jobs), set[str](), []
    for job, point in zip(jobs, points, strict=True):
        name = job.name if counts[job.name] == 1 else f"{job.name} {_label(point)}".strip(" .")
        if name in taken:
            name = next(other for number in range(2, len(jobs) + 2) if (other := f"{name} {number}") not in taken)
        taken.add(name)
        named.append(job if name == job.name else job.with_changes(name=name))
    return named


def _label(point: Parameters) -> str:
    """Return a label such as ``lr=0.0001,batch=4``, with characters that a job's name may have."""
    text = ",".join(f"{key}={value}" for key, value in point.items())
    return re.sub(r"[^a-zA-Z0-9._=+, -]+", "-", text)[:_MOST_CHARACTERS]


def _check_parameters(file: SweepFile, function: Callable[..., Any]) -> None:
    for index, point in enumerate(file.points):
        name, why = misfit_of(function, point)
        if why:
            raise file.error_at(index, name, f"{file.sweep.job} {why}")
