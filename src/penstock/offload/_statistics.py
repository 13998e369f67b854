"""Statistics of what offloading did in a step, as frozen numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.units import format_bytes, format_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadStatistics:
    """Statistics of one step, from the first tensor saved to the last one used. Sizes are bytes, durations seconds.

    It is wide because it is a flat record that people print and log.
    """

    num_steps: int
    """Number of steps finished so far, including this one."""
    saved_bytes: int
    """Bytes of all storages that autograd saved, each counted once, without weights."""
    parked_bytes: int
    """Bytes copied out of the device."""
    fetched_bytes: int
    """Bytes copied back to the device."""
    forwarded_bytes: int
    """Bytes that were asked for while they were still on the device."""
    kept_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes left on the device, by reason."""
    failed_bytes: int = 0
    """Bytes that should have been parked but stayed on the device, because of a full tier or a failed write."""
    stall_s: float = 0.0
    """Seconds that the computation waited for copies."""
    step_s: float = 0.0
    """Seconds from the first tensor saved to the last one used, on the host, which may be ahead of the device."""
    written_to_disk_bytes: int = 0
    """Bytes written to disks, which wear an SSD."""
    peak_bytes: int | None = None
    """Device peak of the step where it was measured: always on CUDA, on a CPU while a budget is being fitted."""
    predicted_peak_bytes: int | None = None
    """Peak that the plan predicted: of the device with a budget or on CUDA, else of saved storages alone."""
    predicted_stall_s: float | None = None
    """Seconds of waiting that the plan predicted; ``None`` before there is a plan."""
    is_planned: bool = False
    """Whether the step followed a plan. Steps that are recorded to make one move everything that may move."""
    declined: str = ""
    """The reason why nothing is offloaded; empty if something is."""
    peak_parts: Mapping[str, int] = field(default_factory=dict)
    """Bytes of ``predicted_peak_bytes`` by what they are, the largest first, to show why the peak is not lower."""

    def __str__(self) -> str:
        return format_fields(self)

    def explain(self) -> str:
        """Return a few lines of text about the step: what moved, what stayed and why, and what the peak consists of."""
        lines = [f"step {self.num_steps}: {format_bytes(self.saved_bytes)} saved for backward"]
        if self.declined:
            lines.append(f"offloading is declined: {self.declined}")
        lines.append(f"{format_bytes(self.parked_bytes)} parked, {format_bytes(self.fetched_bytes)} fetched")
        lines += [f"{format_bytes(size_bytes)} {reason}" for reason, size_bytes in self.kept_bytes.items()]
        if self.predicted_peak_bytes is not None:
            lines.append(f"predicted peak {format_bytes(self.predicted_peak_bytes)}, of which")
            lines += [f"    {format_bytes(size_bytes)} {part}" for part, size_bytes in self.peak_parts.items()]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes that a `Training` has on the device at one moment of a step."""

    at_s: float
    """Seconds since the step began."""
    held_bytes: Mapping[str, int]
    """Bytes of parameters, gradients, optimizer state and activations."""
    others_bytes: int
    """Bytes that were on the device before the first step, the same at all times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStatistics:
    """Statistics of a `Training` since it was made. It is wide because it is a flat record that people log."""

    num_steps: int
    """Number of times that its context was left without an error."""
    state_bytes: int
    """Bytes of all parameters, gradients and optimizer states that it moves, wherever they are now."""
    num_parameters: int
    """Number of elements in the model's parameters."""
    fetched_bytes: int
    """Bytes copied to the device."""
    parked_bytes: int
    """Bytes copied out of the device."""
    step_fetched: Mapping[str, int]
    """Bytes copied to the device in the last step, of parameters, gradients, optimizer state and activations."""
    step_parked: Mapping[str, int]
    """Bytes copied out of the device in the last step, of the same four."""
    written_to_disk_bytes: int
    """Bytes of ``parked_bytes`` that were written to a disk, which wears an SSD."""
    stall_s: float
    """Seconds that the computation waited for copies."""
    wall_s: float
    """Seconds from the beginning of the first step to the end of the last one."""
    num_host_updates: int | None
    """Number of updates of single parameters that the host computed; ``None`` if the device computes all."""
    held_bytes: int
    """Bytes that it has on the device now."""
    measured_peak_bytes: int | None
    """Device peak of the last measured step, which is one of the first of its kind; ``None`` before."""
    num_planned_steps: int
    """Number of steps that followed a plan from beginning to end. The first ones are measured to make one."""
    predicted_step_s: float | None
    """Seconds that a step takes by the plan that is followed; ``None`` before there is one. It counts copies and
    operators, and no time of the host's.
    """

    @property
    def step_fetched_bytes(self) -> int:
        """Bytes copied to the device in the last step."""
        return sum(self.step_fetched.values())

    @property
    def step_parked_bytes(self) -> int:
        """Bytes copied out of the device in the last step."""
        return sum(self.step_parked.values())

    def figures(self) -> dict[str, float]:
        """Return numbers for a log: bytes per parameter in and out in the last step, seconds of stalls, the peak."""
        parameters = max(1, self.num_parameters)
        figures = {
            "in_bytes_per_parameter": self.step_fetched_bytes / parameters,
            "out_bytes_per_parameter": self.step_parked_bytes / parameters,
            "total_stall_s": self.stall_s,
        }
        if self.measured_peak_bytes is not None:
            figures["peak_gib"] = self.measured_peak_bytes / 2**30
        return figures

    def __str__(self) -> str:
        def per_parameter(moved: Mapping[str, int]) -> str:
            shares = (f"{name} {size / max(1, self.num_parameters):.1f}" for name, size in moved.items() if size)
            return ", ".join(shares) or "nothing"

        peak = "not measured" if self.measured_peak_bytes is None else format_bytes(self.measured_peak_bytes)
        held, state = format_bytes(self.held_bytes), format_bytes(self.state_bytes)
        return (
            f"{self.num_steps} steps; on the device {held} of {state}, peak {peak}\n"
            f"bytes per parameter in the last step: in {per_parameter(self.step_fetched)}; "
            f"out {per_parameter(self.step_parked)}\n"
            f"waited {self.stall_s:.3f} s for copies; {format_bytes(self.written_to_disk_bytes)} written to disk; "
            f"{self.num_planned_steps} steps planned"
        )
