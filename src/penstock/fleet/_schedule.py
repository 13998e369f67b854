"""A schedule: what a fleet did, or would do."""

from dataclasses import dataclass

from penstock.fleet._problem import UnitKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledUnit:
    """One unit on one device. Times are seconds from the start."""

    job: int
    """Index of the job in the problem."""
    index: int
    """Index among the job's units."""
    kind: UnitKind
    """Its kind of computation."""
    shard: int
    """Index of the shard."""
    device: int
    """Index of the device in the problem."""
    load_s: float
    """Time at which its copy in began."""
    start_s: float
    """Time at which its computation began."""
    end_s: float
    """Time at which its computation ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """Use of a device's time until the last unit ended, and of its link."""

    busy_s: float
    """Seconds of computation."""
    stall_s: float
    """Seconds in which a unit was chosen, but its bytes were not there yet."""
    idle_s: float
    """Seconds without a job to take."""
    in_bytes: int
    """Bytes copied in from host memory."""
    out_bytes: int
    """Bytes copied out to host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Place and time of every unit."""

    makespan_s: float
    """Time at which the last unit ended."""
    job_end_s: tuple[float, ...]
    """Per job, the time at which it ended."""
    devices: tuple[DeviceUse, ...]
    """Per device, the use of its time."""
    units: tuple[ScheduledUnit, ...]
    """Units in the order in which they began; empty if they were not recorded."""

    @property
    def busy_share(self) -> float:
        """Share of all devices' time in which they computed."""
        total = self.makespan_s * len(self.devices)
        return sum(one.busy_s for one in self.devices) / total if total else 1.0
