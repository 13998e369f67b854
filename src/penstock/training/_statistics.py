"""Statistics of a training, as frozen numbers."""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.units import format_bytes


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
