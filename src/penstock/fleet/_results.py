"""What came of a fleet."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from rich.markup import escape
from rich.table import Table
from torch import nn

from penstock.arguments import checked
from penstock.fleet._checkpoint import latest, load_model, read_state
from penstock.fleet._job import Job
from penstock.fleet._life import JobState
from penstock.fleet._random import Randomness
from penstock.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStatistics:
    """What a device did. Seconds, and bytes."""

    name: str
    """Such as ``"cuda:0"``."""
    wall_s: float
    """From the fleet's begin to its end."""
    compute_s: float
    """In units, pilots and factories not counted."""
    recompute_s: float
    """Part of it that ran forward again, as pilots measured it."""
    stall_s: float
    """Waiting for bytes."""
    num_units: int
    """Units that ran."""
    peak_bytes: int
    """The most that its budget was charged with at once."""
    measured_peak_bytes: int
    """The same with every unit's own bytes measured; 0 unless ``verify=True``."""
    budget_bytes: int
    """What it was given."""
    parked_bytes: int
    """Copied out of the device."""
    fetched_bytes: int
    """Copied back."""
    written_to_disk_bytes: int
    """Part of it that wore a disk."""

    @property
    def useful_share(self) -> float:
        """Seconds that trained (no stall, no recomputation) over seconds in which the device had a job to run."""
        busy_s = self.compute_s + self.stall_s
        return (self.compute_s - self.recompute_s) / busy_s if busy_s else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """What came of one job."""

    job: Job = field(repr=False)
    """As handed in."""
    state: JobState
    """Done, failed, stopped, or where it was when the fleet was interrupted."""
    losses: tuple[float, ...] = field(repr=False)
    """One per optimizer step."""
    validations: tuple[Mapping[str, float], ...] = field(repr=False)
    """One per validation: its ``"step"``, and the metrics."""
    error: str | None
    """Why it failed."""
    seconds_per_step: float
    """Of its units, on one device."""
    checkpoint: Path | None
    """Folder of the last checkpoint; ``None`` if there is none."""
    keeps: object = field(default=None, repr=False, compare=False)
    """Lives as long as the result, so that a temporary folder does, too."""

    @property
    def name(self) -> str:
        """The job's."""
        return self.job.name

    def model(self) -> nn.Module:
        """The trained model, in main memory. Raises ``ValueError`` where there is none, ``CheckpointError``."""
        if self.checkpoint is None:
            raise ValueError(f"job {self.name!r} is {self.state.value} and has no checkpoint to load: {self.error}")
        with Randomness(self.job.seed).swapped_in():
            model = self.job.model()
        return load_model(self.checkpoint, model)

    def value(self, metric: str) -> float | None:
        """The last validation's ``metric``; with ``"loss"`` and no validation, the last step's loss."""
        if self.validations and metric in self.validations[-1]:
            return self.validations[-1][metric]
        return self.losses[-1] if metric == "loss" and self.losses else None


class Results(Mapping[str, JobResult]):
    """Results by name of the job, in the order in which jobs came; ``print`` shows them as a table."""

    def __init__(self, results: Sequence[JobResult], devices: Sequence[DeviceStatistics], run_dir: Path, keeps: object):
        self.devices = tuple(devices)
        """Per device."""
        self.run_dir = run_dir
        """Where checkpoints, metrics and the fleet's state are."""
        self._results = {one.name: replace(one, keeps=keeps) for one in results}
        self._keeps = keeps  # a temporary folder, if nobody named one

    def __getitem__(self, name: str) -> JobResult:
        try:
            return self._results[name]
        except (KeyError, TypeError):  # such as a list
            raise KeyError(
                f"`name` must be that of a job, got {name!r}; there are {', '.join(self._results)}"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._results)

    def __len__(self) -> int:
        return len(self._results)

    @checked("results.best('loss', mode='min')")
    def best(self, metric: str = "loss", mode: Literal["min", "max"] = "min") -> JobResult:
        """The job with the smallest or largest last ``metric``. Raises ``ValueError`` where none has it."""
        known = [(value, one) for one in self._results.values() if (value := one.value(metric)) is not None]
        if not known:
            raise ValueError(f"no job has a metric {metric!r}; give jobs validation= and metric=")
        pick = min if mode == "min" else max
        return pick(known, key=lambda pair: pair[0])[1]

    def table(self) -> Table:
        """For ``rich``."""
        table = Table()
        for heading in ("job", "state", "steps", "loss", "validation", "s/step", "error"):
            table.add_column(heading)
        for one in self._results.values():
            last = {
                key: value for key, value in (one.validations[-1] if one.validations else {}).items() if key != "step"
            }
            table.add_row(
                escape(one.name),
                one.state.value,
                str(len(one.losses)),
                f"{one.losses[-1]:.4f}" if one.losses else "",
                ", ".join(f"{key} {value:.4f}" for key, value in last.items()),
                f"{one.seconds_per_step:.3g}",
                escape(one.error or ""),
            )
        return table

    def __repr__(self) -> str:
        lines = []
        for one in self._results.values():
            loss = f", loss {one.losses[-1]:.4f}" if one.losses else ""
            error = f", {one.error}" if one.error else ""
            lines.append(f"{one.name}: {one.state.value} after {len(one.losses)} steps{loss}{error}")
        for device in self.devices:
            peak, budget = format_bytes(device.peak_bytes), format_bytes(device.budget_bytes)
            lines.append(f"{device.name}: held {peak} of {budget} at most, {device.num_units} units")
        return "\n".join(lines)


@checked("penstock.fleet.stored_result(job, folder, JobState.DONE, None, 0.0)")
def stored_result(job: Job, folder: Path, state: JobState, error: str | None, seconds_per_step: float) -> JobResult:
    """Of a job that is over, or was when the process ended, from the last checkpoint in its folder."""
    path = latest(folder)
    known = {} if path is None else read_state(path)
    return JobResult(
        job=job,
        state=state,
        losses=tuple(known.get("losses", ())),
        validations=tuple(known.get("validations", ())),
        error=error,
        seconds_per_step=seconds_per_step,
        checkpoint=path,
    )
