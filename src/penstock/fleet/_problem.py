"""The scheduling problem: jobs cut into shards with measured costs, and devices.

A problem holds no tensor and no model. Its figures come from pilot runs, or describe machines that you do not have.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from penstock.arguments import check_fields, checked
from penstock.errors import BudgetError

_MOST_MINI_BATCHES = 2**20
"""Limit of mini-batches per step, because the units of a step are listed."""


class UnitKind(Enum):
    """The work of one shard on one mini-batch without leaving the device."""

    FORWARD = "forward"
    FUSED = "forward and backward"
    """Forward and backward of the last shard, which has the loss."""
    BACKWARD = "backward"
    STEP = "step"
    """The optimizer's step, if it has to wait for the norm of all gradients."""


@dataclass(frozen=True, slots=True)
class Task:
    """A unit, given by its kind and its shard."""

    kind: UnitKind
    """The kind of computation."""
    shard: int
    """Index of the shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCost:
    """Costs of a shard: consecutive layers that fit a device together.

    Times in seconds on a device of speed 1, sizes in bytes.
    """

    forward_s: float
    """Forward of one mini-batch."""
    backward_s: float
    """Backward of one mini-batch, without recomputation."""
    step_s: float = 0.0
    """The optimizer's step on this shard."""
    parameter_bytes: int = 0
    """Parameters. Their gradients take as much."""
    state_bytes: int = 0
    """The optimizer's state."""
    boundary_bytes: int = 0
    """Values that the shard hands to the next. Their gradients take as much."""
    activation_bytes: int = 0
    """Activations that forward saves for backward inside the shard."""
    recomputes: bool = False
    """Whether backward runs forward again instead of fetching what forward saved."""

    def __post_init__(self) -> None:
        sizes = {name: 0 for name in self.__slots__ if name != "recomputes"}
        check_fields(self, "ShardCost(forward_s=0.1, backward_s=0.2)", **sizes)
        if not math.isfinite(self.forward_s + self.backward_s + self.step_s):
            raise ValueError("`forward_s`, `backward_s` and `step_s` must be finite: ShardCost(forward_s=0.1, ...)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One unit of a job: its computation, and the bytes that it needs on the device, copies in and copies out."""

    kind: UnitKind
    """The kind of computation."""
    shard: int
    """Index of the shard, from 0."""
    compute_s: float
    """Seconds on a device of speed 1."""
    in_bytes: int
    """Bytes copied in before, if the job's last unit ran elsewhere."""
    kept_bytes: int
    """Part of these bytes that is already there if the same device ran the job's last unit."""
    out_bytes: int
    """Bytes copied out afterwards."""
    resident_bytes: int
    """Bytes on the device while it computes."""
    own_bytes: int = 0
    """Bytes copied in even if the same shard ran before: the values of another mini-batch."""


@dataclass(frozen=True, kw_only=True)
class JobCost:
    """Costs of one model to train."""

    name: str
    """Name given by the user."""
    shards: tuple[ShardCost, ...]
    """Its shards, in the order of forward."""
    num_steps: int
    """Optimizer steps."""
    accumulate: int = 1
    """Mini-batches per step."""
    clips: bool = False
    """Whether the optimizer waits for the norm of all gradients, in units of its own."""
    on_host: bool = False
    """Whether the host steps the optimizer: states stay there, and the device's units of the step do nothing."""
    vertical: bool = False
    """Whether all mini-batches of a step pass one shard before the next."""
    arrival_s: float = 0.0
    """Time at which the job may begin, in seconds."""

    def __post_init__(self) -> None:
        check_fields(self, "JobCost(name='a', shards=(shard,) * 8, num_steps=50)", arrival_s=0)
        if self.accumulate > _MOST_MINI_BATCHES or not math.isfinite(self.arrival_s):
            raise ValueError(
                f"job {self.name!r}: `accumulate` must be at most {_MOST_MINI_BATCHES} and `arrival_s` finite, got "
                f"{self.accumulate} and {self.arrival_s}"
            )
        if not self.shards or self.num_steps < 1 or self.accumulate < 1:
            raise ValueError(
                f"job {self.name!r}: `shards`, `num_steps` and `accumulate` must be at least 1, got "
                f"{len(self.shards)} shards, {self.num_steps} steps and {self.accumulate} mini-batches"
            )

    @cached_property
    def step_units(self) -> tuple[Unit, ...]:
        """The units of one optimizer step, in order."""
        return tuple(self._units())

    @cached_property
    def turn_ends(self) -> frozenset[int]:
        """Positions in a step of the units that end a mini-batch.

        After them a device may take another job.
        """
        if self.vertical:
            return frozenset([len(self.step_units) - 1])
        per_batch = 2 * len(self.shards) - 1
        ends = [per_batch * (batch + 1) - 1 for batch in range(self.accumulate)]
        return frozenset([*ends[:-1], len(self.step_units) - 1])

    @property
    def num_units(self) -> int:
        """Number of units of the whole job."""
        return self.num_steps * len(self.step_units)

    @property
    def work_s(self) -> float:
        """Seconds of all units on a device of speed 1, including recomputation."""
        return self.num_steps * sum(unit.compute_s for unit in self.step_units)

    @property
    def plain_work_s(self) -> float:
        """Seconds of all units without recomputation, as on a device that holds the whole model."""
        per_batch = sum(shard.forward_s + shard.backward_s for shard in self.shards)
        step_s = 0.0 if self.on_host else sum(shard.step_s for shard in self.shards)
        return self.num_steps * (self.accumulate * per_batch + step_s)

    @checked("job.unit(0)", index=0)
    def unit(self, index: int) -> Unit:
        """Return unit ``index`` of the job, from 0."""
        return self.step_units[index % len(self.step_units)]

    @property
    def turns_per_step(self) -> int:
        """How often in a step a device may take another job."""
        return 1 if self.vertical else self.accumulate

    def _units(self) -> Iterator[Unit]:
        last = len(self.shards) - 1
        if self.vertical:
            for shard in range(last):
                yield from (self._forward(shard) for _ in range(self.accumulate))
            for shard in range(last, -1, -1):
                yield from (self._backward(shard, batch) for batch in range(self.accumulate))
            yield from (self._step(shard) for shard in range(last + 1) if self.clips or self.on_host)
            return
        for batch in range(self.accumulate):
            for shard in range(last):
                yield self._forward(shard)
            for shard in range(last, -1, -1):
                yield self._backward(shard, batch)
        if self.clips or self.on_host:
            for shard in range(last + 1):
                yield self._step(shard)

    def _forward(self, shard: int) -> Unit:
        cost = self.shards[shard]
        entering_bytes = self.shards[shard - 1].boundary_bytes if shard else 0
        return Unit(
            kind=UnitKind.FORWARD,
            shard=shard,
            compute_s=cost.forward_s,
            in_bytes=cost.parameter_bytes + entering_bytes,
            kept_bytes=entering_bytes,
            own_bytes=entering_bytes if self.vertical else 0,
            out_bytes=cost.boundary_bytes + (0 if cost.recomputes else cost.activation_bytes),
            resident_bytes=cost.parameter_bytes + entering_bytes + cost.boundary_bytes + cost.activation_bytes,
        )

    def _backward(self, shard: int, batch: int) -> Unit:
        cost, is_last = self.shards[shard], shard == len(self.shards) - 1
        steps = batch == self.accumulate - 1 and not (self.clips or self.on_host)
        entering_bytes = self.shards[shard - 1].boundary_bytes if shard else 0
        gradients = cost.parameter_bytes
        taken = cost.parameter_bytes + (gradients if batch else 0) + (cost.state_bytes if steps else 0)
        if is_last:
            kept, inside = entering_bytes, 0
        else:
            kept, inside = cost.boundary_bytes, entering_bytes if cost.recomputes else cost.activation_bytes
        runs_forward = is_last or cost.recomputes
        if steps:
            leaving_bytes = cost.parameter_bytes + cost.state_bytes
        else:  # shard by shard, gradients leave once they are complete
            leaving_bytes = gradients if not self.vertical or batch == self.accumulate - 1 else 0
        return Unit(
            kind=UnitKind.FUSED if is_last else UnitKind.BACKWARD,
            shard=shard,
            compute_s=cost.backward_s + (cost.forward_s if runs_forward else 0.0) + (cost.step_s if steps else 0.0),
            in_bytes=taken + kept + inside,
            kept_bytes=kept,
            own_bytes=kept + inside + (cost.state_bytes if steps and batch else 0) if self.vertical else 0,
            out_bytes=entering_bytes + leaving_bytes,
            resident_bytes=(
                cost.parameter_bytes + gradients + entering_bytes + cost.boundary_bytes + cost.activation_bytes
                + (cost.state_bytes if steps else 0)
            ),
        )  # fmt: skip

    def _step(self, shard: int) -> Unit:
        cost = self.shards[shard]
        size = 0 if self.on_host else 2 * cost.parameter_bytes + cost.state_bytes
        return Unit(
            kind=UnitKind.STEP,
            shard=shard,
            compute_s=0.0 if self.on_host else cost.step_s,
            in_bytes=size,
            kept_bytes=0,
            out_bytes=0 if self.on_host else cost.parameter_bytes + cost.state_bytes,
            resident_bytes=size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCost:
    """A device and its link to host memory."""

    name: str
    """Its name, such as ``"cuda:0"``."""
    speed: float = 1.0
    """Its relative speed: units take ``compute_s / speed``."""
    budget_bytes: int | None = None
    """Bytes that units may take on it, both buffers together; ``None``: no limit."""
    in_bandwidth_bytes_per_s: float = float("inf")
    """Bandwidth of its lane from host memory."""
    out_bandwidth_bytes_per_s: float = float("inf")
    """Bandwidth of its lane to host memory."""

    def __post_init__(self) -> None:
        check_fields(self, "DeviceCost(name='cuda:0', in_bandwidth_bytes_per_s=8e9)", budget_bytes=1)
        if not math.isfinite(self.speed):
            raise ValueError(f"device {self.name!r}: `speed` must be finite, got {self.speed}")
        if min(self.speed, self.in_bandwidth_bytes_per_s, self.out_bandwidth_bytes_per_s) <= 0:
            raise ValueError(
                f"device {self.name!r}: `speed`, `in_bandwidth_bytes_per_s` and `out_bandwidth_bytes_per_s` must be "
                "above 0: DeviceCost(name='cuda:0', in_bandwidth_bytes_per_s=8e9)"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetProblem:
    """Jobs and the devices that they share."""

    jobs: tuple[JobCost, ...]
    """The jobs, in the order in which they were given."""
    devices: tuple[DeviceCost, ...]
    """The devices; at least one."""

    def __post_init__(self) -> None:
        check_fields(self, "FleetProblem(jobs=jobs, devices=(DeviceCost(name='cuda:0'),))")
        if not self.devices:
            raise ValueError(
                "`devices` must have at least one device, got none: FleetProblem(jobs=jobs, "
                "devices=(DeviceCost(name='cuda:0'),))"
            )
        for job in self.jobs:
            most = max(unit.resident_bytes for unit in job.step_units)
            if not any(device.budget_bytes is None or most <= device.budget_bytes for device in self.devices):
                largest = max(device.budget_bytes or 0 for device in self.devices)
                raise BudgetError(
                    f"no device is large enough for job {job.name!r}: one of its units needs {most} bytes, and the "
                    f"largest budget is {largest} bytes. Cut the job into smaller shards"
                )

    @checked("problem.may_run(job=0, device=0)", job=0, device=0)
    def may_run(self, job: int, device: int) -> bool:
        """Whether every unit of the job fits the device."""
        budget = self.devices[device].budget_bytes
        return budget is None or max(unit.resident_bytes for unit in self.jobs[job].step_units) <= budget
