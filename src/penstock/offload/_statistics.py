"""What offloading did in a step, as frozen numbers."""

from dataclasses import dataclass, field


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
    """Time from the first tensor saved to the last one used."""
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
