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
