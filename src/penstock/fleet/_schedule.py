"""What a fleet did, or would do."""

from dataclasses import dataclass

from penstock.fleet._problem import UnitKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledUnit:
    """One unit on one device. Times are seconds from the beginning."""

    job: int
    """Place of the job in the problem."""
    index: int
    """Place among the job's units."""
    kind: UnitKind
    """What it computed."""
    shard: int
    """Of which shard."""
    device: int
    """Place of the device in the problem."""
    load_s: float
    """When copying in began."""
    start_s: float
    """When it began to compute."""
    end_s: float
    """When it had computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """What became of a device's time until the last unit ended, and of its link."""

    busy_s: float
    """It computed."""
    stall_s: float
    """A unit was chosen, and its bytes were not there yet."""
    idle_s: float
    """No job was there to take."""
    in_bytes: int
    """Copied in from host memory."""
    out_bytes: int
    """Copied out to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Where and when every unit ran."""

    makespan_s: float
    """When the last unit ended."""
    job_end_s: tuple[float, ...]
    """Per job."""
    devices: tuple[DeviceUse, ...]
    """Per device."""
    units: tuple[ScheduledUnit, ...]
    """In the order in which they began; empty if they were not recorded."""

    @property
    def busy_share(self) -> float:
        """Share of all devices' time in which they computed."""
        total = self.makespan_s * len(self.devices)
        return sum(one.busy_s for one in self.devices) / total if total else 1.0
