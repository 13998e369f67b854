"""The driver's knowledge of jobs and nodes of a fleet on Ray."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from penstock.fleet import Device, DeviceStatistics, Job, JobResult, JobRow, JobState
from penstock.integrations._ray_plan import JobLoad, NodeLoad

Devices = Sequence[str | torch.device | Device]


@dataclass(slots=True, eq=False)
class Task:
    """A job, as the driver knows it."""

    job: Job
    place: int
    packed: bytes = field(repr=False)
    row: JobRow
    node: "Node | None" = None
    size_bytes: int | None = None
    result: JobResult | None = None
    logged: dict[bool, int] = field(default_factory=dict)
    """Last step whose metrics trackers have, of training (``False``) and of validation (``True``)."""
    verdicts: dict[int, bool | str] = field(default_factory=dict)
    """The stopper's verdicts by step; a text is the error with which it failed."""
    sent_s: float = 0.0
    begin_s: float = 0.0
    """Seconds that a node took to begin with it."""
    free_from_s: float = 0.0
    """Time from which another node may have it."""
    num_losses: int = 0
    lost_at_step: int = -1

    def load(self, *, is_leaving: bool) -> JobLoad:
        """Return the job as the planner sees it."""
        row = self.row
        is_known, is_paused = row.seconds_per_step > 0, row.state == JobState.PAUSED.value
        left_s = max(1, row.num_steps - row.step) * row.seconds_per_step if is_known else None
        return JobLoad(
            name=self.job.name,
            remaining_s=0.0 if is_paused else left_s,
            size_bytes=self.size_bytes,
            begin_s=self.begin_s,
            is_paused=is_paused,
            can_move=self.begin_s > 0 and not is_leaving,
        )


@dataclass(slots=True, eq=False)
class Node:
    """An actor, as the driver knows it."""

    id: str
    name: str
    actor: Any  # any: Ray's handle
    lease: Path
    num_devices: int
    news: Any  # any: Ray's future of a report, or of its begin
    begun_s: float = field(default_factory=time.monotonic)
    is_ready: bool = False
    host_bytes: int | None = None
    tasks: dict[str, Task] = field(default_factory=dict)
    leaving: dict[str, str] = field(default_factory=dict)
    """Jobs that are to leave, and the nodes they go to."""
    devices: tuple[DeviceStatistics, ...] = ()

    def load(self) -> NodeLoad:
        """Return the node as the planner sees it."""
        jobs = tuple(task.load(is_leaving=name in self.leaving) for name, task in self.tasks.items())
        return NodeLoad(name=self.id, num_devices=self.num_devices, host_bytes=self.host_bytes, jobs=jobs)


def kind(device: str | torch.device | Device) -> str:
    return torch.device(device.name if isinstance(device, Device) else device).type


def num_cpus(devices: Devices, resources: Mapping[str, float]) -> float:
    """Return the cores that devices need. A CPU device takes its threads, by default all cores; a GPU takes one."""
    most = float(resources.get("CPU", 0))
    wanted = 0.0
    for one in devices:
        threads = one.threads if isinstance(one, Device) else None
        wanted += 1 if kind(one) != "cpu" else threads or most
    return min(most, wanted)


def first_row(job: Job, place: int) -> JobRow:
    return JobRow(
        name=job.name,
        place=place,
        state=JobState.PENDING.value,
        step=0,
        num_steps=job.steps or 0,
        epoch=0,
        loss=None,
        validation={},
        device="",
        seconds_per_step=0.0,
        error=None,
        tags=dict(job.tags),
        source=None,
        updated_s=time.time(),
    )
