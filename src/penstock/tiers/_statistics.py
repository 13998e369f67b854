"""What a waterfall has done, as frozen numbers."""

from dataclasses import dataclass, field

from penstock.arguments import checked

_TERABYTES_WRITTEN_PER_TERABYTE = 600
"""Rated endurance of common SSDs, in bytes written per byte of capacity (600 TBW for a drive of 1 TB)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStatistics:
    """Sums since the waterfall was made. All sizes are bytes, all durations seconds."""

    parked_bytes: int
    """Copied from the device into a tier."""
    fetched_bytes: int
    """Copied back."""
    forwarded_bytes: int
    """Asked for while still on the device, so that no copy back was made."""
    kept_bytes: int
    """Meant to be parked, but left on the device: no room, or a failed copy."""
    bounced_bytes: int
    """Copied by the processor on the way: the unaligned edges of storages, below 8 KiB each."""
    written_to_disk_bytes: int
    """Written to disks: what wears an SSD."""
    stall_s: float
    """Time the computation waited for a copy, in either direction."""
    num_live_handles: int
    """Handles not yet released."""
    num_failed_writes: int
    """Copies into a tier that failed; their storages stayed on the device."""
    in_flight_peak_bytes: int
    """The most bytes that were on their way out at once."""
    held_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes in live extents, per tier."""
    reserved_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes taken from the system, per tier (nameless files do not show in ``du``)."""


@checked(
    "ssd_life_s(capacity_bytes=10**12, written_bytes=10**9, duration_s=60.0)",
    capacity_bytes=0,
    written_bytes=0,
    duration_s=0,
)
def ssd_life_s(*, capacity_bytes: int, written_bytes: int, duration_s: float) -> float:
    """Seconds until an SSD of ``capacity_bytes`` reaches its rated endurance at this rate of writing.

    The rating assumed is 600 bytes written per byte of capacity, that of common consumer drives; drives made for
    servers stand three to thirty times as much. Infinite where nothing is written.
    """
    if not written_bytes:
        return float("inf")
    return capacity_bytes * _TERABYTES_WRITTEN_PER_TERABYTE / written_bytes * duration_s
