"""The driver's knowledge of jobs and nodes of a fleet on Ray."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from penstock.fleet import Device, DeviceStatistics, Job, JobResult, JobRow, JobState
from penstock.integrations._ray_plan import JobLoad, NodeLoad

Devices = Sequence[str | torch.device | Device]


@dataclass(slots=True, eq=False)
class KnownJob:
    """A job, as the driver knows it."""

    job: Job
    place: int
    packed: bytes = field(repr=False)
    row: JobRow
    node: "KnownNode | None" = None
    size_bytes: int | None = None
    result: JobResult | None = None
    sent_s: float = 0.0
    begin_s: float = 0.0
    """Seconds that a node took to begin with it."""
    free_from_s: float = 0.0
    """Time from which another node may have it."""
    num_losses: int = 0
    lost_at_step: int = -1

    def note(self, node: "KnownNode", row: JobRow, size_bytes: int | None) -> None:
        """Note the row that its node reports. Before its first step there, the figures known before stay."""
        is_begun = row.seconds_per_step > 0
        if is_begun and not self.begin_s:
            self.begin_s = time.monotonic() - self.sent_s
        self.size_bytes = size_bytes or self.size_bytes
        before = self.row
        self.row = replace(
            row,
            place=self.place,
            device=f"{node.name} {row.device}".strip(),
            step=row.step if is_begun else before.step,
            num_steps=row.num_steps or before.num_steps,
            seconds_per_step=row.seconds_per_step or before.seconds_per_step,
        )

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
class KnownNode:
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
    jobs: dict[str, KnownJob] = field(default_factory=dict)
    leaving: dict[str, str] = field(default_factory=dict)
    """Jobs that are to leave, and the nodes they go to."""
    devices: tuple[DeviceStatistics, ...] = ()

    def load(self) -> NodeLoad:
        """Return the node as the planner sees it."""
        jobs = tuple(known.load(is_leaving=name in self.leaving) for name, known in self.jobs.items())
        return NodeLoad(name=self.id, num_devices=self.num_devices, host_bytes=self.host_bytes, jobs=jobs)

    def note_devices(self, devices: Iterable[DeviceStatistics]) -> None:
        """Note the statistics of its devices, under names that differ from those of other nodes."""
        self.devices = tuple(replace(device, name=f"{self.name} {device.name}") for device in devices)


def kind(device: str | torch.device | Device) -> str:
    return torch.device(device.name if isinstance(device, Device) else device).type


def num_cpus(devices: Devices, resources: Mapping[str, float]) -> float:
    """Return the cores that devices need. A CPU device takes its threads, by default all cores; a GPU takes one."""
    most = float(resources.get("CPU", 0))
    wanted = 0.0
    for device in devices:
        threads = device.threads if isinstance(device, Device) else None
        wanted += 1 if kind(device) != "cpu" else threads or most
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
