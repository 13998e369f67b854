"""Results of a fleet."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from rich.markup import escape
from rich.table import Table
from torch import nn

from penstock.arguments import checked
from penstock.fleet._checkpoint import fill_model, latest, load_model, read_state
from penstock.fleet._job import Job
from penstock.fleet._life import JobState
from penstock.fleet._random import Randomness
from penstock.units import format_bytes, format_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStatistics:
    """Statistics of one device, in seconds and bytes."""

    name: str
    """Its name, such as ``"cuda:0"``."""
    wall_s: float
    """Seconds from the fleet's start to its end."""
    compute_s: float
    """Seconds in units, without pilots and factories."""
    recompute_s: float
    """Part of these seconds that ran forward again, as measured by pilots."""
    stall_s: float
    """Seconds of waiting for bytes."""
    num_units: int
    """Units that ran."""
    peak_bytes: int
    """The largest charge of its budget at any time."""
    measured_peak_bytes: int
    """The same with every unit's own bytes measured; 0 unless ``verify=True``."""
    budget_bytes: int
    """Its budget."""
    parked_bytes: int
    """Bytes copied out of the device."""
    fetched_bytes: int
    """Bytes copied back."""
    written_to_disk_bytes: int
    """Part of the bytes copied out that was written to a disk."""

    @property
    def useful_share(self) -> float:
        """Share of the time with a job to run in which the device trained, without stalls and recomputation."""
        busy_s = self.compute_s + self.stall_s
        return (self.compute_s - self.recompute_s) / busy_s if busy_s else 1.0

    def __str__(self) -> str:
        return format_fields(self, "useful_share")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """Result of one job."""

    job: Job = field(repr=False)
    """The job, as it was given."""
    state: JobState
    """Done, failed, stopped, or its state when the fleet was interrupted."""
    losses: tuple[float, ...] = field(repr=False)
    """Losses, one per optimizer step."""
    validations: tuple[Mapping[str, float], ...] = field(repr=False)
    """Validations: for each its ``"step"``, and the metrics."""
    error: str | None
    """The error that made it fail; ``None`` if it did not fail."""
    seconds_per_step: float
    """Seconds of a step's units, on one device."""
    checkpoint: Path | None
    """Folder of the last checkpoint; ``None`` if there is none."""
    best_checkpoint: Path | None = None
    """Folder of the best validation's checkpoint; ``None`` without ``Job(best=...)``."""
    weights: Mapping[str, torch.Tensor] | None = field(default=None, repr=False, compare=False)
    """The trained tensors in main memory, if the last checkpoint could not be written; ``None`` if they are there."""
    keeps: object = field(default=None, repr=False, compare=False)
    """An object that lives as long as the result, so that a temporary folder does, too."""

    @property
    def name(self) -> str:
        """The job's name."""
        return self.job.name

    def model(self, *, best: bool = False) -> nn.Module:
        """Return the trained model, in main memory; ``best``: as it was at its best validation.

        Raises ``ValueError`` if there is no checkpoint, and ``CheckpointError`` if it cannot be used.
        """
        if best and self.best_checkpoint is None:
            raise ValueError(
                f"job {self.name!r} has no checkpoint of its best validation; ask for one: Job(best=('loss', 'min'))"
            )
        if not best and self.checkpoint is None and self.weights is None:
            raise ValueError(f"job {self.name!r} is {self.state.value} and has no checkpoint to load: {self.error}")
        with Randomness(self.job.seed).swapped_in():
            model = self.job.model()
        path = self.best_checkpoint if best else self.checkpoint
        if self.weights is not None and not best:
            return fill_model(model, self.weights)
        assert path is not None
        return load_model(path, model)

    def value(self, metric: str) -> float | None:
        """Return the last validation's ``metric``; for ``"loss"`` without a validation, the last step's loss."""
        if self.validations and metric in self.validations[-1]:
            return self.validations[-1][metric]
        return self.losses[-1] if metric == "loss" and self.losses else None


class Results(Mapping[str, JobResult]):
    """Results by name of the job, in the order in which jobs were added; ``print`` shows them as text."""

    def __init__(self, results: Sequence[JobResult], devices: Sequence[DeviceStatistics], run_dir: Path, keeps: object):
        self.devices = tuple(devices)
        """Statistics of each device."""
        self.run_dir = run_dir
        """Folder of checkpoints, metrics and the fleet's state."""
        self._results = {result.name: replace(result, keeps=keeps) for result in results}
        self._keeps = keeps  # a temporary folder, if the user named none

    def __getitem__(self, name: str) -> JobResult:
        try:
            return self._results[name]
        except (KeyError, TypeError):  # such as a list
            raise KeyError(
                f"`name` must be the name of a job, got {name!r}; there are {', '.join(self._results)}"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._results)

    def __len__(self) -> int:
        return len(self._results)

    @checked("results.best('loss', mode='min')")
    def best(self, metric: str = "loss", mode: Literal["min", "max"] = "min") -> JobResult:
        """Return the job with the smallest or largest last ``metric``. Raise ``ValueError`` if no job has it.

        Jobs that failed are left out, and those whose metric is not a number.
        """
        known = [
            (value, result)
            for result in self._results.values()
            if result.state is not JobState.FAILED
            and (value := result.value(metric)) is not None
            and not math.isnan(value)
        ]
        if not known:
            raise ValueError(
                f"no job that did not fail has a metric {metric!r} that is a number; give jobs validation= and metric="
            )
        pick = min if mode == "min" else max
        return pick(known, key=lambda pair: pair[0])[1]

    def table(self) -> Table:
        """Return the results as a table of ``rich``."""
        table = Table()
        for heading in ("job", "state", "steps", "loss", "validation", "s/step", "error"):
            table.add_column(heading)
        for result in self._results.values():
            last = {
                key: value
                for key, value in (result.validations[-1] if result.validations else {}).items()
                if key != "step"
            }
            table.add_row(
                escape(result.name),
                result.state.value,
                str(len(result.losses)),
                f"{result.losses[-1]:.4f}" if result.losses else "",
                ", ".join(f"{key} {value:.4f}" for key, value in last.items()),
                f"{result.seconds_per_step:.3g}",
                escape(result.error or ""),
            )
        return table

    def __repr__(self) -> str:
        lines = []
        for result in self._results.values():
            loss = f", loss {result.losses[-1]:.4f}" if result.losses else ""
            error = f", {result.error}" if result.error else ""
            lines.append(f"{result.name}: {result.state.value} after {len(result.losses)} steps{loss}{error}")
        for device in self.devices:
            peak, budget = format_bytes(device.peak_bytes), format_bytes(device.budget_bytes)
            lines.append(f"{device.name}: held {peak} of {budget} at most, {device.num_units} units")
        return "\n".join(lines)


@checked("penstock.fleet.stored_result(job, folder, JobState.DONE, None, 0.0)")
def stored_result(job: Job, folder: Path, state: JobState, error: str | None, seconds_per_step: float) -> JobResult:
    """Return the result of a job that is over, or that was in ``state`` when its process ended.

    It comes from the last checkpoint in the job's folder.
    """
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
        best_checkpoint=latest(folder, "best"),
    )
