"""`penstock fleet simulate`: the time that jobs of known costs would take on devices that need not exist."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self, get_args

from pydantic import BeforeValidator, Field, model_validator
from rich.console import Console
from rich.table import Table

from penstock import fleet
from penstock.cli._answer import Answer
from penstock.cli._document import Strict, read, to_bytes
from penstock.cli._progress import Steps
from penstock.cli._tables import print_table
from penstock.report import gantt
from penstock.units import format_bytes, format_duration

SCHEDULERS: tuple[fleet.SchedulerName, ...] = get_args(fleet.SchedulerName)


def _to_rate(given: object) -> object:
    """Parse a rate such as ``"8GB/s"`` to bytes per second."""
    return to_bytes(given.removesuffix("/s") if isinstance(given, str) else given)


Bytes = Annotated[int, BeforeValidator(to_bytes)]
Rate = Annotated[int, BeforeValidator(_to_rate), Field(gt=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Copies = Annotated[int, Field(ge=1)]


class ShardSettings(Strict):
    """A `penstock.fleet.ShardCost`, or several identical ones."""

    copies: Copies = 1
    """Number of identical shards in a row."""
    forward_s: Seconds
    """Seconds of forward for one mini-batch on a device of speed 1."""
    backward_s: Seconds
    """Seconds of backward, without recomputation."""
    step_s: Seconds = 0.0
    """Seconds of the optimizer's step."""
    parameter_bytes: Bytes = 0
    """Bytes of the parameters."""
    state_bytes: Bytes = 0
    """Bytes of the optimizer's state."""
    boundary_bytes: Bytes = 0
    """Bytes that the shard passes to the next one."""
    activation_bytes: Bytes = 0
    """Bytes that forward saves for backward."""
    recomputes: bool = False
    """Whether backward runs forward again."""


class JobSettings(Strict):
    """A `penstock.fleet.JobCost`, or several identical ones."""

    name: str
    """Name of the job; copies are called ``"name 0"``, ``"name 1"``."""
    copies: Copies = 1
    """Number of identical jobs."""
    num_steps: int = Field(ge=1)
    """Number of optimizer steps."""
    accumulate: int = Field(default=1, ge=1)
    """Mini-batches per step."""
    clips: bool = False
    """Whether the optimizer waits for the norm of all gradients."""
    arrival_s: Seconds = 0.0
    """Time at which the job may begin."""
    shards: list[ShardSettings] = Field(min_length=1)
    """Shards, in the order of forward."""


class SimulatedDevice(Strict):
    """A `penstock.fleet.DeviceCost`, or several identical ones."""

    name: str
    """Name of the device; copies are called ``"name:0"``, ``"name:1"``."""
    copies: Copies = 1
    """Number of identical devices."""
    speed: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Speed of the device: a unit takes its seconds divided by it."""
    budget_bytes: Bytes | None = None
    """Bytes that units may use; none: no limit."""
    in_bandwidth_bytes_per_s: Rate | None = None
    """Rate of copies from host memory, such as ``25GB/s``; none: copies take no time."""
    out_bandwidth_bytes_per_s: Rate | None = None
    """Rate of copies to host memory; none: copies take no time."""


class ProblemSettings(Strict):
    """The content of the file: a `penstock.fleet.FleetProblem`."""

    jobs: list[JobSettings] = Field(min_length=1)
    """Jobs, in the order in which they are submitted."""
    devices: list[SimulatedDevice] = Field(min_length=1)
    """Devices that the jobs share."""

    @model_validator(mode="after")
    def _has_own_names(self) -> Self:
        for names in ([job.name for job in self.jobs], [device.name for device in self.devices]):
            twice = [name for name in names if names.count(name) > 1]
            if twice:
                raise ValueError(f"two are called {twice[0]!r}; for several alike give one with copies: 2")
        return self

    def problem(self) -> fleet.FleetProblem:
        """Return the problem to simulate. Raises ``BudgetError`` if no device can take a job."""
        jobs = [job for settings in self.jobs for job in _jobs_of(settings)]
        devices = [device for settings in self.devices for device in _devices_of(settings)]
        return fleet.FleetProblem(jobs=tuple(jobs), devices=tuple(devices))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One problem under every scheduler."""

    problem: fleet.FleetProblem = field(repr=False)
    """The jobs and devices."""
    schedules: Mapping[fleet.SchedulerName, fleet.Schedule] = field(repr=False)
    """A schedule per scheduler."""
    lower_bound_s: float
    """Seconds that no schedule can beat."""
    model_parallel_s: float
    """Seconds if jobs run one after the other, each over all devices."""

    def table(self) -> Table:
        """Return the comparison as a table for ``rich``."""
        table = Table("scheduler", "ends after", "over the bound", "devices compute", "stall", "copied in")
        for name, schedule in self.schedules.items():
            total_s = max(schedule.makespan_s * len(schedule.devices), 1e-12)
            table.add_row(
                name,
                format_duration(schedule.makespan_s),
                self._over(schedule.makespan_s),
                f"{schedule.busy_share:.1%}",
                f"{sum(device.stall_s for device in schedule.devices) / total_s:.1%}",
                format_bytes(sum(device.in_bytes for device in schedule.devices)),
            )
        table.add_section()
        for label, end_s in (("model parallelism", self.model_parallel_s), ("lower bound", self.lower_bound_s)):
            table.add_row(label, format_duration(end_s), self._over(end_s), "", "", "")
        return table

    def as_data(self) -> dict[str, object]:
        """Return the table for JSON."""
        schedules = {
            name: {
                "makespan_s": schedule.makespan_s,
                "busy_share": schedule.busy_share,
                "devices": {
                    device.name: {key: getattr(use, key) for key in fleet.DeviceUse.__slots__}
                    for device, use in zip(self.problem.devices, schedule.devices, strict=True)
                },
                "job_end_s": {
                    job.name: end_s for job, end_s in zip(self.problem.jobs, schedule.job_end_s, strict=True)
                },
            }
            for name, schedule in self.schedules.items()
        }
        bounds = {"lower_bound_s": self.lower_bound_s, "model_parallel_s": self.model_parallel_s}
        return {"schedulers": schedules, **bounds}

    def draw(self, path: Path, scheduler: fleet.SchedulerName) -> None:
        """Draw which job was on which device when."""
        rows: dict[str, list[tuple[float, float, str]]] = {device.name: [] for device in self.problem.devices}
        for unit in self.schedules[scheduler].units:
            device, job = self.problem.devices[unit.device].name, self.problem.jobs[unit.job].name
            rows[device].append((unit.start_s, unit.end_s, job))
        gantt(path, rows, title=f"Units per device, {scheduler}")

    def _over(self, end_s: float) -> str:
        return f"{end_s / self.lower_bound_s:.2f}" if self.lower_bound_s else ""


def answer(path: Path, scheduler: fleet.SchedulerName, picture: Path | None, steps: Steps) -> Answer:
    """Run `penstock fleet simulate`; ``picture`` shows the schedule of ``scheduler``."""
    comparison = compare(path, None if picture is None else scheduler, steps)
    if picture is not None:
        steps.phase(f"drawing {picture}")
        comparison.draw(picture, scheduler)
    return Answer(data=comparison.as_data(), show=lambda console: show(comparison, console))


def compare(path: Path, recorded: fleet.SchedulerName | None, steps: Steps) -> Comparison:
    """Simulate the problem in a file under every scheduler, and keep the units of ``recorded`` for a picture.

    Raises ``OSError``, and ``ValueError`` with file, line and key of what is wrong.
    """
    document = read(path)
    settings = document.check(ProblemSettings)
    try:
        problem = settings.problem()
    except ValueError as error:
        raise type(error)(document.error(("jobs",), str(error))) from None  # a BudgetError stays a BudgetError
    steps.phase("simulating schedulers", len(SCHEDULERS))
    schedules = {}
    for number, name in enumerate(SCHEDULERS, 1):
        schedules[name] = fleet.simulate(problem, name, records=name == recorded)
        steps.advance(number, len(SCHEDULERS))
    return Comparison(
        problem=problem,
        schedules=schedules,
        lower_bound_s=fleet.lower_bound_s(problem),
        model_parallel_s=fleet.model_parallel_s(problem),
    )


def show(found: Comparison, console: Console) -> None:
    """Print the table."""
    print_table(found.table(), console)
    units = sum(job.num_units for job in found.problem.jobs)
    console.print(f"{len(found.problem.jobs)} jobs of {units} units in all, {len(found.problem.devices)} devices.")


def _jobs_of(given: JobSettings) -> list[fleet.JobCost]:
    shards = [
        fleet.ShardCost(**shard.model_dump(exclude={"copies"})) for shard in given.shards for _ in range(shard.copies)
    ]
    fields: dict[str, Any] = given.model_dump(exclude={"copies", "shards", "name"})
    return [fleet.JobCost(name=name, shards=tuple(shards), **fields) for name in _names(given.name, given.copies, " ")]


def _devices_of(given: SimulatedDevice) -> list[fleet.DeviceCost]:
    fields = {key: value for key, value in given.model_dump(exclude={"copies", "name"}).items() if value is not None}
    return [fleet.DeviceCost(name=name, **fields) for name in _names(given.name, given.copies, ":")]


def _names(name: str, copies: int, between: str) -> list[str]:
    return [name] if copies == 1 else [f"{name}{between}{index}" for index in range(copies)]
