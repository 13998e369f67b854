"""A fleet on a virtual clock: the scheduler that will run it, with measured unit times, for any number of devices.

Rules, as in the engine. A job is on one device at a time. While a device computes a unit it chooses its next one and
copies that in, if both fit its budget; the link in and the link out are serial lanes. What a unit changed is copied out
when it ends, and a unit that needs it elsewhere waits for that. A job that goes on where it was keeps the boundary
there, and a shard that goes on at once is not copied at all. Cost: O(log jobs) per unit, some 7 microseconds in Python.
"""

import heapq
from dataclasses import dataclass, field

from penstock.arguments import checked
from penstock.fleet._problem import FleetProblem, Unit
from penstock.fleet._schedule import DeviceUse, Schedule, ScheduledUnit
from penstock.fleet._schedulers import Progress, Scheduler, SchedulerName, scheduler_of


@checked("penstock.fleet.simulate(problem)")
def simulate(
    problem: FleetProblem,
    scheduler: SchedulerName | Scheduler = "sharded-lrtf",
    *,
    double_buffer: bool = True,
    sharp: bool = True,
    records: bool = True,
) -> Schedule:
    """Plays the whole fleet. Raises ``ValueError`` for an unknown scheduler.

    ``double_buffer=False`` copies in only when a device is free; ``sharp=False`` lets a device finish a job before it
    takes another; ``records=False`` leaves the units out of the result.
    """
    return _Clock(problem, scheduler_of(scheduler), double_buffer, sharp, records).run()


@dataclass(slots=True)
class _Job:
    index: int
    remaining_s: float
    at: int = 0
    """Units begun or done."""
    shard: int = -1
    """Which shard that was."""
    saved_s: float = 0.0
    """When everything that it changed so far is in host memory."""
    end_s: float = 0.0


@dataclass(slots=True)
class _Reservation:
    job: _Job
    unit: Unit
    made_s: float
    load_s: float
    ready_s: float


@dataclass(slots=True)
class _Device:
    index: int
    current: _Reservation | None = None
    next: _Reservation | None = None
    free_s: float = 0.0
    """When it last became free."""
    in_free_s: float = 0.0
    out_free_s: float = 0.0
    busy_s: float = 0.0
    stall_s: float = 0.0
    in_bytes: int = 0
    out_bytes: int = 0
    last: "_Job | None" = None
    """The job whose unit ended here last."""


@dataclass
class _Clock:
    problem: FleetProblem
    scheduler: Scheduler
    double_buffer: bool
    sharp: bool
    records: bool
    now_s: float = 0.0
    ready: list[tuple[float, int, _Job]] = field(default_factory=list)
    events: list[tuple[float, int, str, int]] = field(default_factory=list)
    """Time, order, what, and of which device or job."""
    num_events: int = 0
    num_waits: int = 0
    units: list[ScheduledUnit] = field(default_factory=list)

    def run(self) -> Schedule:
        self.jobs = [_Job(index, job.work_s) for index, job in enumerate(self.problem.jobs)]
        self.devices = [_Device(index) for index in range(len(self.problem.devices))]
        self.idle, self.hungry = set(range(len(self.devices))), set[int]()
        for job in self.jobs:
            self._at(self.problem.jobs[job.index].arrival_s, "arrives", job.index)
        while self.events:
            self.now_s = self.events[0][0]
            while self.events and self.events[0][0] == self.now_s:
                _, _, what, index = heapq.heappop(self.events)
                if what == "arrives":
                    self._wait(self.jobs[index])
                elif what == "starts":
                    self._start(self.devices[index])
                else:
                    self._end(self.devices[index])
            self._dispatch()
        return self._schedule()

    def _at(self, time_s: float, what: str, index: int) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (time_s, self.num_events, what, index))

    def _wait(self, job: _Job) -> None:
        """The job may be taken."""
        self.num_waits += 1
        heapq.heappush(self.ready, (self._priority(job), self.num_waits, job))

    def _priority(self, job: _Job) -> float:
        cost = self.problem.jobs[job.index]
        return self.scheduler(
            Progress(job=job.index, arrival_s=cost.arrival_s, remaining_s=job.remaining_s, num_done=job.at)
        )

    def _dispatch(self) -> None:
        """Devices that have nothing choose first, then those that have nothing to follow."""
        for index in sorted(self.idle) if self.ready else ():
            device = self.devices[index]
            job = self._take(device)
            if job is not None:
                self.idle.discard(index)
                device.next = self._reserve(device, job)
                self._at(max(self.now_s, device.next.ready_s), "starts", index)
        for index in sorted(self.hungry):
            device = self.devices[index]
            job = self._take(device)
            if job is not None:
                self.hungry.discard(index)
                device.next = self._reserve(device, job)

    def _take(self, device: _Device) -> _Job | None:
        """The first job that fits the device; the one that it computes now may go on there."""
        own = self._own(device)
        if own is not None and not self.sharp:
            return own
        passed: list[tuple[float, int, _Job]] = []
        found: _Job | None = None
        while self.ready and found is None:
            entry = heapq.heappop(self.ready)
            if not self.problem.may_run(entry[2].index, device.index):
                passed.append(entry)
            elif own is not None and self._priority(own) <= entry[0]:
                passed.append(entry)
                found = own
            else:
                found = entry[2]
        for entry in passed:
            heapq.heappush(self.ready, entry)
        return found if found is not None else own

    def _own(self, device: _Device) -> _Job | None:
        if device.current is None:
            return None
        job = device.current.job
        return job if job.at < self.problem.jobs[job.index].num_units else None

    def _reserve(self, device: _Device, job: _Job) -> _Reservation:
        """Lays the copy in on the device's lane."""
        unit = self.problem.jobs[job.index].unit(job.at)
        cost = self.problem.devices[device.index]
        goes_on = device.current.job is job if device.current is not None else device.last is job
        size, earliest_s = unit.in_bytes, job.saved_s
        if goes_on:
            size = 0 if unit.shard == job.shard else unit.in_bytes - unit.kept_bytes
            earliest_s = 0.0 if unit.shard == job.shard else earliest_s
        load_s = max(self.now_s, device.in_free_s, earliest_s, device.out_free_s if size else 0.0)
        if device.current is not None and cost.budget_bytes is not None:
            together = unit.resident_bytes + device.current.unit.resident_bytes
            if together > cost.budget_bytes and unit.shard != job.shard:
                load_s = max(
                    load_s, self._end_of(device) + device.current.unit.out_bytes / cost.out_bandwidth_bytes_per_s
                )
        ready_s = load_s + size / cost.in_bandwidth_bytes_per_s
        device.in_free_s = ready_s
        device.in_bytes += size
        return _Reservation(job=job, unit=unit, made_s=self.now_s, load_s=load_s, ready_s=ready_s)

    def _end_of(self, device: _Device) -> float:
        assert device.current is not None
        return device.free_s + device.current.unit.compute_s / self.problem.devices[device.index].speed

    def _start(self, device: _Device) -> None:
        reservation = device.next
        assert reservation is not None and device.current is None
        device.stall_s += self.now_s - max(device.free_s, reservation.made_s)
        device.current, device.next = reservation, None
        device.free_s = self.now_s
        job, unit = reservation.job, reservation.unit
        compute_s = unit.compute_s / self.problem.devices[device.index].speed
        device.busy_s += compute_s
        job.remaining_s -= unit.compute_s
        if self.records:
            self.units.append(
                ScheduledUnit(
                    job=job.index,
                    index=job.at,
                    kind=unit.kind,
                    shard=unit.shard,
                    device=device.index,
                    load_s=reservation.load_s,
                    start_s=self.now_s,
                    end_s=self.now_s + compute_s,
                )
            )
        job.at += 1
        job.shard = unit.shard
        if self.double_buffer:
            self.hungry.add(device.index)
        self._at(self.now_s + compute_s, "ends", device.index)

    def _end(self, device: _Device) -> None:
        assert device.current is not None
        job, unit = device.current.job, device.current.unit
        device.current, device.last, device.free_s = None, job, self.now_s
        device.out_free_s = max(device.out_free_s, self.now_s)
        device.out_free_s += unit.out_bytes / self.problem.devices[device.index].out_bandwidth_bytes_per_s
        device.out_bytes += unit.out_bytes
        job.saved_s, job.end_s = device.out_free_s, self.now_s
        self.hungry.discard(device.index)
        is_done = job.at >= self.problem.jobs[job.index].num_units
        if not is_done and not self.sharp and device.next is None:
            device.next = self._reserve(device, job)
        goes_on = device.next is not None and device.next.job is job
        if not is_done and not goes_on:
            self._wait(job)
        if device.next is None:
            self.idle.add(device.index)
        else:
            self._at(max(self.now_s, device.next.ready_s), "starts", device.index)

    def _schedule(self) -> Schedule:
        makespan_s = max((job.end_s for job in self.jobs), default=0.0)
        return Schedule(
            makespan_s=makespan_s,
            job_end_s=tuple(job.end_s for job in self.jobs),
            devices=tuple(
                DeviceUse(
                    busy_s=one.busy_s,
                    stall_s=one.stall_s,
                    idle_s=max(0.0, makespan_s - one.busy_s - one.stall_s),
                    in_bytes=one.in_bytes,
                    out_bytes=one.out_bytes,
                )
                for one in self.devices
            ),
            units=tuple(self.units),
        )
