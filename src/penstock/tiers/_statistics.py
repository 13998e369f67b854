"""Counters of a waterfall, as frozen numbers."""

from dataclasses import dataclass, field

from penstock.arguments import checked
from penstock.units import format_fields

_TERABYTES_WRITTEN_PER_TERABYTE = 600
"""Rated endurance of common SSDs, in bytes written per byte of capacity (600 TBW for a drive of 1 TB)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStatistics:
    """Sums since the waterfall was made. All sizes are in bytes, all durations in seconds."""

    parked_bytes: int
    """Bytes copied from the device into a tier."""
    fetched_bytes: int
    """Bytes copied back to the device."""
    forwarded_bytes: int
    """Bytes asked for while still on the device, so that no copy back was made."""
    kept_bytes: int
    """Bytes that should have been parked but stayed on the device: no space, or a failed copy."""
    bounced_bytes: int
    """Bytes copied by the processor on the way: the unaligned edges of storages, below 8 KiB each."""
    written_to_disk_bytes: int
    """Bytes written to disks, which wear out SSDs."""
    stall_s: float
    """Time that the computation waited for a copy, in either direction."""
    num_live_handles: int
    """Number of handles not yet released."""
    num_failed_writes: int
    """Number of copies into a tier that failed; their storages stayed on the device."""
    in_flight_peak_bytes: int
    """The most bytes that were being copied out at once."""
    held_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes in live extents, per tier."""
    reserved_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes taken from the system, per tier (``du`` does not show unnamed files)."""

    def __str__(self) -> str:
        return format_fields(self)


@checked(
    "ssd_life_s(capacity_bytes=10**12, written_bytes=10**9, duration_s=60.0)",
    capacity_bytes=0,
    written_bytes=0,
    duration_s=0,
)
def ssd_life_s(*, capacity_bytes: int, written_bytes: int, duration_s: float) -> float:
    """Return the seconds until an SSD of ``capacity_bytes`` reaches its rated endurance at this rate of writing.

    The assumed rating is 600 bytes written per byte of capacity, as for common consumer drives; server drives endure
    three to thirty times as much. Infinite if nothing is written.
    """
    if not written_bytes:
        return float("inf")
    return capacity_bytes * _TERABYTES_WRITTEN_PER_TERABYTE / written_bytes * duration_s
