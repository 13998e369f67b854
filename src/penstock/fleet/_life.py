"""A job in the fleet: its state, and what is known about it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from penstock.fleet._job import Job
from penstock.fleet._pilot import ShardMeasure
from penstock.fleet._problem import JobCost
from penstock.fleet._schedulers import Progress
from penstock.fleet._training import JobTraining
from penstock.fleet._uncut import Uncut
from penstock.fleet._ways import Ways
from penstock.fleet._worker import Worker


class JobState(Enum):
    """State of a job, from its arrival to its end."""

    PENDING = "pending"
    """Not started."""
    RUNNING = "running"
    """Started, and on a device or about to be."""
    WAITING = "waiting"
    """Started, and waiting for a device for a second or more."""
    PAUSED = "paused"
    """Held until it is resumed."""
    DONE = "done"
    """Trained to its end."""
    FAILED = "failed"
    """Ended by an error of its own."""
    STOPPED = "stopped"
    """Ended early, by a user or by a stopper."""

    @property
    def is_over(self) -> bool:
        """Whether the job has ended, in one way or another."""
        return self in (JobState.DONE, JobState.FAILED, JobState.STOPPED)


@dataclass(slots=True)
class JobPlan:
    """How a job trains: its length, and what was found out about its shards. It is wide because turns fill it in one by
    one.
    """

    is_ready: bool = False
    """Whether the job is prepared, so that the rest is known."""
    num_steps: int = 0
    """Total number of steps, as far as known."""
    seconds_per_step: float = 0.0
    """Seconds of a step's units on one device, refined as steps are measured."""
    measures: list[ShardMeasure] = field(default_factory=list)
    """Measures of its first shape of batch, per shard."""
    measures_of: dict[Any, list[ShardMeasure]] = field(default_factory=dict)
    """Measures of all shapes of batch so far."""
    ways: Ways = field(default_factory=Ways)
    """Measurements of its mini-batches, if the model is run whole."""
    uncut: Uncut | None = None
    """The job's own loop, if the job is not cut. It then has a device to itself until it is over."""
    saves: list[bool] = field(default_factory=list)
    """Per shard, whether backward uses what forward saved."""
    is_vertical: bool = False
    """Whether all mini-batches of a step pass one shard before the next."""
    vertical_of: dict[Any, bool] = field(default_factory=dict)
    """The same per shape of batch."""
    leaf_bytes: int = 0
    """Bytes of its first batch."""
    num_times_smaller: int = 0
    """How often it was cut smaller because a device ran out of memory."""
    num_retries: int = 0
    """How often it began again after an error of its own."""


@dataclass(slots=True)
class Milestones:
    """When a job began, was validated and was saved."""

    started_s: float = 0.0
    last_validation: int = -1
    """Step of the last validation."""
    wants_validation: bool = False
    """Whether a validation is due before the next batch."""
    saved_step: int = -1
    """Step of the last checkpoint."""
    saved_s: float = 0.0
    """Time of the last checkpoint."""


def metric_of(job: Job) -> tuple[str, str]:
    """Return the metric of validations by which the job's best one is told, and whether it is the least or the most."""
    return job.best or ("loss", "min")


def num_since_best(job: Job, validations: Sequence[Mapping[str, float]]) -> int | None:
    """Return how many validations have come since the best one by what the job calls so; 0 if that is the last.

    ``None`` if no validation has a number for it.
    """
    name, mode = metric_of(job)
    sign = 1.0 if mode == "min" else -1.0
    values = [sign * float(each.get(name, math.nan)) for each in validations]
    known = [value for value in values if not math.isnan(value)]
    return len(values) - 1 - values.index(min(known)) if known else None


@dataclass(eq=False)
class JobRun:
    """A job in the fleet. The engine's lock guards it, except `training`, `plan` and `milestones`.

    Those belong to the worker that took the job.
    """

    job: Job
    place: int
    training: JobTraining
    state: JobState = JobState.PENDING
    wanted: JobState | None = None
    """A user's pending request: to pause, to stop, or to run again."""
    error: str | None = None
    home: Worker | None = None
    """The device that ran it last and has its items."""
    is_taken: bool = False
    arrival_s: float = 0.0
    """Its arrival, in seconds since the fleet started."""
    since_s: float = 0.0
    """Since when it has been waiting, or has had its device, in seconds since the fleet started."""
    plan: JobPlan = field(default_factory=JobPlan)
    milestones: Milestones = field(default_factory=Milestones)

    @property
    def is_prepared(self) -> bool:
        """Whether its model is cut and measured, so that it can train."""
        return self.plan.is_ready

    @property
    def size_bytes(self) -> int:
        """Bytes of parameters, gradients and optimizer state; 0 until they are measured."""
        if not self.is_prepared:
            return 0
        return sum(2 * shard.parameter_bytes + shard.state_bytes for shard in self.plan.measures)

    def has_device_alone(self) -> bool:
        """Whether no other job may take its device before it is over."""
        return self.plan.uncut is not None and not self.state.is_over

    def cost(self) -> JobCost:
        """Return the job's cost for schedulers and simulations. The job must be prepared."""
        return JobCost(
            name=self.job.name,
            shards=tuple(shard.cost(saves) for shard, saves in zip(self.plan.measures, self.plan.saves, strict=True)),
            num_steps=self.plan.num_steps,
            accumulate=self.job.accumulate,
            clips=self.job.clip_norm is not None or self.job.precision == "float16",
            on_host=self.training.update != "device",
            vertical=self.plan.is_vertical,
        )

    @property
    def batches_per_turn(self) -> int:
        """Mini-batches after which a device may take another job."""
        return self.job.accumulate if self.plan.is_vertical else 1

    @property
    def turn_s(self) -> float:
        """Seconds of one turn, on one device."""
        return self.plan.seconds_per_step * self.batches_per_turn / self.job.accumulate

    def remaining_s(self, *, at_hand: bool = False) -> float:
        """Return the seconds of its remaining units, on one device.

        ``at_hand`` leaves out the current mini-batch. Infinite until the job is measured.
        """
        if not self.is_prepared:
            return math.inf
        position = self.training.position
        left = (self.plan.num_steps - position.step) * self.job.accumulate - position.micro
        left -= at_hand * self.batches_per_turn
        return max(0, left) * self.turn_s / self.batches_per_turn

    def ends_with_turn(self) -> bool:
        """Whether its current mini-batch is certain to be its last."""
        return self.is_prepared and self.job.steps is not None and not self.remaining_s(at_hand=True)

    def progress(self, now_s: float, fleet_s: float, *, at_hand: bool) -> Progress:
        """Return its progress for schedulers.

        ``at_hand`` is for the device that has the job and is about to end its mini-batch.
        """
        position = self.training.position
        return Progress(
            job=self.place,
            arrival_s=self.arrival_s,
            remaining_s=self.remaining_s(at_hand=at_hand),
            turn_s=self.turn_s,
            num_done=position.step * self.job.accumulate + position.micro + at_hand * self.batches_per_turn,
            since_s=self.since_s,
            had_s=now_s - self.since_s if at_hand else None,
            fleet_s=fleet_s,
        )
