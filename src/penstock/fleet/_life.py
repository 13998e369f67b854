"""A job in the fleet: where it is in its life, and what is known of it."""

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from penstock.fleet._job import Job
from penstock.fleet._pilot import ShardMeasure
from penstock.fleet._problem import JobCost
from penstock.fleet._schedulers import Progress
from penstock.fleet._training import Training
from penstock.fleet._ways import Ways
from penstock.fleet._worker import Worker


class JobState(Enum):
    """Where a job is in its life."""

    PENDING = "pending"
    """Not begun."""
    RUNNING = "running"
    """Begun, and on a device, or just about to be."""
    WAITING = "waiting"
    """Begun, and waiting for a device for a second or more."""
    PAUSED = "paused"
    """Held until it is resumed."""
    DONE = "done"
    """Trained to its end."""
    FAILED = "failed"
    """Ended by an error of its own."""
    STOPPED = "stopped"
    """Ended before its end: by a user, or by a stopper."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more happens to it."""
        return self in (JobState.DONE, JobState.FAILED, JobState.STOPPED)


@dataclass(eq=False)
class JobRun:
    """A job in the fleet. Guarded by the engine's lock, but for `training`, which whoever took the job has alone."""

    job: Job
    place: int
    training: Training
    state: JobState = JobState.PENDING
    wanted: JobState | None = None
    """What a user asked for meanwhile: paused, stopped, or running again."""
    error: str | None = None
    trace: str = ""
    """The whole traceback of the error."""
    home: Worker | None = None
    """The device that ran it last and has its items."""
    is_taken: bool = False
    arrival_s: float = 0.0
    """When it came, in seconds since the fleet began."""
    since_s: float = 0.0
    """Since when it waits, or has its device; likewise."""
    seconds_per_step: float = 0.0
    """On one device, units alone; refined as steps are measured."""
    num_steps: int = 0
    """Steps in all, as far as known."""
    measures: list[ShardMeasure] = field(default_factory=list)
    """Of its first shape of batch, per shard."""
    measures_of: dict[Any, list[ShardMeasure]] = field(default_factory=dict)
    """Of all shapes that came."""
    ways: Ways = field(default_factory=Ways)
    """Of its mini-batches, where the model is run whole."""
    saves: list[bool] = field(default_factory=list)
    is_vertical: bool = False
    """Whether all mini-batches of a step go through a shard before the next shard comes."""
    vertical_of: dict[Any, bool] = field(default_factory=dict)
    """The same by shape of batch."""
    is_prepared: bool = False
    last_validation: int = -1
    wants_validation: bool = False
    saved_step: int = -1
    """Step of the last checkpoint."""
    saved_s: float = 0.0
    """When that was."""
    started_s: float = 0.0
    ended_s: float = 0.0
    leaf_bytes: int = 0
    """Of its first batch."""
    is_smaller: int = 0
    """Times it was cut smaller because a device ran out of memory."""

    @property
    def size_bytes(self) -> int:
        """Parameters, gradients and optimizer state; 0 before they were measured."""
        if not self.is_prepared:
            return 0
        return sum(2 * one.parameter_bytes + one.state_bytes for one in self.measures)

    def cost(self) -> JobCost:
        """As schedulers and simulations take it. The job was prepared."""
        return JobCost(
            name=self.job.name,
            shards=tuple(one.cost(saves) for one, saves in zip(self.measures, self.saves, strict=True)),
            num_steps=self.num_steps,
            accumulate=self.job.accumulate,
            clips=self.job.clip_norm is not None or self.job.precision == "float16",
            vertical=self.is_vertical,
        )

    @property
    def batches_per_turn(self) -> int:
        """Mini-batches after which a device may take another job."""
        return self.job.accumulate if self.is_vertical else 1

    @property
    def turn_s(self) -> float:
        """Seconds of one turn, on one device."""
        return self.seconds_per_step * self.batches_per_turn / self.job.accumulate

    def remaining_s(self, *, at_hand: bool = False) -> float:
        """Seconds of its units that are left, on one device; ``at_hand``: but for the mini-batch that it is at.

        Infinite before it was measured.
        """
        if not self.is_prepared:
            return math.inf
        at = self.training.position
        left = (self.num_steps - at.step) * self.job.accumulate - at.micro - at_hand * self.batches_per_turn
        return max(0, left) * self.turn_s / self.batches_per_turn

    def ends_with_turn(self) -> bool:
        """Whether the mini-batch that it is at is its last for certain."""
        return self.is_prepared and self.job.steps is not None and not self.remaining_s(at_hand=True)

    def progress(self, now_s: float, fleet_s: float, *, at_hand: bool) -> Progress:
        """As schedulers take it; ``at_hand``: for the device that has it, and whose mini-batch is ending."""
        at = self.training.position
        return Progress(
            job=self.place,
            arrival_s=self.arrival_s,
            remaining_s=self.remaining_s(at_hand=at_hand),
            turn_s=self.turn_s,
            num_done=at.step * self.job.accumulate + at.micro + at_hand * self.batches_per_turn,
            since_s=self.since_s,
            had_s=now_s - self.since_s if at_hand else None,
            fleet_s=fleet_s,
        )
