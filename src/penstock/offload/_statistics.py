"""What offloading did in a step, as frozen numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadStatistics:
    """One step: from the first tensor saved to the last one used. Sizes are bytes, durations seconds."""

    num_steps: int
    """Steps finished so far, this one included."""
    saved_bytes: int
    """All storages that autograd saved, each counted once, weights left out."""
    parked_bytes: int
    """Copied out of the device."""
    fetched_bytes: int
    """Copied back."""
    forwarded_bytes: int
    """Asked for while still on the device."""
    kept_bytes: dict[str, int] = field(default_factory=dict)
    """Left on the device, by reason."""
    failed_bytes: int = 0
    """Meant to be parked, but left on the device: no room, or a failed write."""
    stall_s: float = 0.0
    """Time the computation waited for copies."""
    step_s: float = 0.0
    """Time from the first tensor saved to the last one used, as the host sees it: it may be ahead of a device."""
    written_to_disk_bytes: int = 0
    """Written to disks: what wears an SSD."""
    peak_bytes: int | None = None
    """Device peak of the step where it was measured: always on CUDA, on CPU while a budget is being fitted."""
    predicted_peak_bytes: int | None = None
    """What the plan promised: the device peak with a budget or on CUDA, else the peak of saved storages alone."""
    predicted_stall_s: float | None = None
    """What the plan promised; ``None`` before there is one."""
    is_planned: bool = False
    """Whether the step followed a plan. Steps that are recorded for one move all that they may."""
    declined: str = ""
    """Why nothing is offloaded; empty while something is."""
    peak_parts: Mapping[str, int] = field(default_factory=dict)
    """Bytes of ``predicted_peak_bytes`` by what they are, the largest part first: why the peak is not lower."""

    def explain(self) -> str:
        """The step in some lines of text: what moved, what stayed and why, and what the peak is made of."""
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
    """What a `Training` had on the device at one moment of a step."""

    at_s: float
    """Seconds since the step began."""
    held_bytes: Mapping[str, int]
    """Bytes of parameters, gradients, optimizer state and activations."""
    others_bytes: int
    """What else was there before the first step, the same at all times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStatistics:
    """What a `Training` did since it was made."""

    num_steps: int
    """Times that its context was left."""
    state_bytes: int
    """Of all parameters, gradients and optimizer states that it moves, wherever they are now."""
    num_parameters: int
    """Elements of the model's parameters."""
    fetched_bytes: int
    """Copied to the device."""
    parked_bytes: int
    """Copied out of it."""
    step_fetched: Mapping[str, int]
    """Bytes copied to the device in the last step: of parameters, gradients, optimizer state and activations."""
    step_parked: Mapping[str, int]
    """Bytes copied out of it in the last step, likewise."""
    written_to_disk_bytes: int
    """Of ``parked_bytes``: what wears an SSD."""
    stall_s: float
    """Seconds that the computation waited for copies."""
    wall_s: float
    """Seconds since the first step began, until the last one ended."""
    num_host_updates: int | None
    """Updates of single parameters that the host computed; ``None`` where the device does all."""
    held_bytes: int
    """What it has on the device now."""
    measured_peak_bytes: int | None
    """Of the device, in the last step that was measured: the first of each kind; ``None`` before."""

    @property
    def step_fetched_bytes(self) -> int:
        """Copied to the device in the last step."""
        return sum(self.step_fetched.values())

    @property
    def step_parked_bytes(self) -> int:
        """Copied out of it in the last step."""
        return sum(self.step_parked.values())

    def figures(self) -> dict[str, float]:
        """As numbers for a log: bytes per parameter in and out in the last step, seconds of stalls, the peak."""
        parameters = max(1, self.num_parameters)
        found = {
            "in_bytes_per_parameter": self.step_fetched_bytes / parameters,
            "out_bytes_per_parameter": self.step_parked_bytes / parameters,
            "total_stall_s": self.stall_s,
        }
        if self.measured_peak_bytes is not None:
            found["peak_gib"] = self.measured_peak_bytes / 2**30
        return found

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
            f"waited {self.stall_s:.3f} s for copies; {format_bytes(self.written_to_disk_bytes)} written to disk"
        )
