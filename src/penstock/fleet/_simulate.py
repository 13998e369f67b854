"""A fleet on a virtual clock: the real scheduler with measured unit times, for any number of devices.

The rules are those of the engine. A job is on one device at a time, for at least a mini-batch. When the last unit of a
mini-batch begins, the device chooses its next job. While a device computes a unit it copies its next one in, if both
fit its budget. The link in and the link out are serial lanes. What a unit changed is copied out when the unit ends, and
another device may take the job when all of it has arrived. A job that stays on its device keeps the boundary there, and
a shard that continues at once is not copied at all. Cost: O(log jobs) per unit, about 7 microseconds in Python; with a
user's scheduler, O(jobs) per mini-batch.
"""

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from penstock.arguments import checked
from penstock.fleet._problem import FleetProblem, JobCost, Unit
from penstock.fleet._schedule import DeviceUse, Schedule, ScheduledUnit
from penstock.fleet._schedulers import JobCandidate, Progress, Scheduler, SchedulerName, choose, orders_of, scheduler_of


@checked("penstock.fleet.simulate(problem)")
def simulate(
    problem: FleetProblem,
    scheduler: SchedulerName | Scheduler = "fair",
    *,
    double_buffer: bool = True,
    sharp: bool = True,
    records: bool = True,
) -> Schedule:
    """Simulate the whole fleet. Raises ``ValueError`` for an unknown scheduler.

    ``double_buffer=False`` copies in only when a device is free; ``sharp=False`` lets a device finish a job before it
    takes another; ``records=False`` leaves the units out of the result.
    """
    units: list[ScheduledUnit] | None = [] if records else None
    clock = _FleetClock(problem, scheduler_of(scheduler), double_buffer=double_buffer, sharp=sharp, units=units)
    return clock.run()


@dataclass(slots=True)
class _SimulatedJob:
    index: int
    cost: JobCost
    num_begun: int = 0
    """Number of its units that have begun or ended."""
    num_turns: int = 0
    """Number of mini-batches whose last unit has begun."""
    shard: int = -1
    """The shard of its last unit."""
    since_s: float = 0.0
    """Since when it has been waiting, or has had its device."""
    home: int | None = None
    """The device that had it last."""
    saved_s: float = 0.0
    """Time at which everything that it changed so far is in host memory."""
    end_s: float = 0.0

    @property
    def is_done(self) -> bool:
        return self.num_begun >= self.cost.num_units

    @property
    def is_between(self) -> bool:
        """Whether the last unit that it has begun or ended was the last of a mini-batch."""
        units = len(self.cost.step_units)
        return (self.num_begun + units - 1) % units in self.cost.turn_ends

    def progress(self, fleet_s: float, had_s: float | None) -> Progress:
        """Return its progress, in turns of equal length, as the engine counts them."""
        cost = self.cost
        num_turns = cost.num_steps * cost.turns_per_step
        turn_s = cost.work_s / num_turns
        return Progress(
            job=self.index,
            arrival_s=cost.arrival_s,
            remaining_s=(num_turns - self.num_turns) * turn_s,
            turn_s=turn_s,
            num_done=self.num_turns * cost.accumulate // cost.turns_per_step,
            since_s=self.since_s,
            had_s=had_s,
            fleet_s=fleet_s,
        )


@dataclass(slots=True)
class _Reservation:
    job: _SimulatedJob
    unit: Unit
    made_s: float
    load_s: float
    ready_s: float


@dataclass(slots=True)
class _SimulatedDevice:
    index: int
    current: _Reservation | None = None
    next: _Reservation | None = None
    following: _SimulatedJob | None = None
    """The next job, chosen before its first unit is copied in."""
    free_s: float = 0.0
    """Time at which it last became free."""
    in_free_s: float = 0.0
    out_free_s: float = 0.0
    busy_s: float = 0.0
    stall_s: float = 0.0
    in_bytes: int = 0
    out_bytes: int = 0
    last: "_SimulatedJob | None" = None
    """The job of the last unit that ended here."""


class _Line:
    """Waiting jobs, ordered so that the first one is found without looking at all of them."""

    def __init__(self, scheduler: Callable[[Progress], Any]):
        self.scheduler = scheduler
        self._orders = orders_of(scheduler)
        self._heaps: list[list[tuple[float, float, int]]] = [[] for _ in self._orders or ()]
        self.jobs: dict[int, _SimulatedJob] = {}

    def add(self, job: _SimulatedJob) -> None:
        self.jobs[job.index] = job
        progress = job.progress(math.inf, None)
        for order, heap in zip(self._orders or (), self._heaps, strict=True):
            heapq.heappush(heap, (order(progress), job.since_s, job.index))

    def take(self, may_take: Callable[[_SimulatedJob], bool], own: JobCandidate | None, fleet_s: float) -> int | None:
        """Remove the chosen job from the waiting ones and return its index."""
        # A user's scheduler may say anything at any time, so that all jobs have to be asked.
        if self._orders is None:
            waiting: Iterator[_SimulatedJob] = iter(self.jobs.values())
        else:
            waiting = (job for heap in self._heaps for job in self._first(heap, may_take))
        candidates = [
            JobCandidate(self.scheduler(job.progress(fleet_s, None)), job.since_s, job.index)
            for job in waiting
            if may_take(job)
        ]
        chosen = choose(candidates, own)
        if chosen is None:
            return None
        self.jobs.pop(chosen.job, None)
        return chosen.job

    def _first(
        self, heap: list[tuple[float, float, int]], may_take: Callable[[_SimulatedJob], bool]
    ) -> Iterator[_SimulatedJob]:
        passed = []
        while heap:
            _, since_s, index = heap[0]
            job = self.jobs.get(index)
            if job is None or job.since_s != since_s:  # it was taken meanwhile
                heapq.heappop(heap)
            elif may_take(job):
                yield job
                break
            else:
                passed.append(heapq.heappop(heap))
        for entry in passed:
            heapq.heappush(heap, entry)


class _Agenda:
    """Events to come, in the order of their times. Events of one time keep the order in which they were added."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, str, int]] = []
        self._num_events = 0

    def add(self, time_s: float, what: str, index: int) -> None:
        """Add an event of a device or job, given by its index."""
        self._num_events += 1
        heapq.heappush(self._events, (time_s, self._num_events, what, index))

    def next_s(self) -> float | None:
        """Return the time of the next event; ``None`` if there is none."""
        return self._events[0][0] if self._events else None

    def due(self, now_s: float) -> Iterator[tuple[str, int]]:
        """Remove and yield the events of this time, also those that are added meanwhile."""
        while self._events and self._events[0][0] == now_s:
            _, _, what, index = heapq.heappop(self._events)
            yield what, index


class _FleetClock:
    """A fleet in virtual time. ``units`` collects what runs; ``None`` if nobody needs it."""

    def __init__(
        self,
        problem: FleetProblem,
        scheduler: Callable[[Progress], Any],
        *,
        double_buffer: bool,
        sharp: bool,
        units: list[ScheduledUnit] | None,
    ):
        self.problem, self.units = problem, units
        self.double_buffer, self.sharp = double_buffer, sharp
        self.now_s = 0.0
        self.agenda = _Agenda()
        self.jobs = [_SimulatedJob(index, job) for index, job in enumerate(problem.jobs)]
        self.devices = [_SimulatedDevice(index) for index in range(len(problem.devices))]
        self.line = _Line(scheduler)
        self.idle = set(range(len(self.devices)))
        self.speed = sum(device.speed for device in problem.devices)
        self.work_s = 0.0
        """Remaining seconds of all jobs that have arrived."""

    def run(self) -> Schedule:
        for job in self.jobs:
            self.agenda.add(job.cost.arrival_s, "arrives", job.index)
        while (next_s := self.agenda.next_s()) is not None:
            self.now_s = next_s
            for what, index in self.agenda.due(next_s):
                if what == "arrives":
                    self.work_s += self.jobs[index].cost.work_s
                    self._wait(self.jobs[index])
                elif what == "starts":
                    self._start(self.devices[index])
                elif what == "ends":
                    self._end(self.devices[index])
            self._dispatch()
        return self._schedule()

    def _wait(self, job: _SimulatedJob) -> None:
        """Let the job wait until a device takes it."""
        job.since_s = self.now_s
        self.line.add(job)

    def _dispatch(self) -> None:
        """Let idle devices choose a job."""
        for index in sorted(self.idle) if self.line.jobs else ():
            device = self.devices[index]
            job = self._take(device, None)
            if job is not None:
                self.idle.discard(index)
                device.next = self._reserve(device, job)
                self.agenda.add(max(self.now_s, device.next.ready_s), "starts", index)

    @property
    def _fleet_s(self) -> float:
        if len(self.devices) == 1:
            return math.inf
        return self.work_s / self.speed

    def _take(self, device: _SimulatedDevice, own: _SimulatedJob | None) -> _SimulatedJob | None:
        """Return the job that comes next on the device: ``own``, its current job, or a waiting one that fits."""
        candidate = None
        if own is not None:
            progress = own.progress(self._fleet_s, self.now_s - own.since_s)
            candidate = JobCandidate(self.line.scheduler(progress), own.since_s, own.index)
        if own is not None and not self.sharp:
            return own

        def may_take(job: _SimulatedJob) -> bool:
            is_here = job.home in (None, device.index) or job.saved_s <= self.now_s
            return is_here and self.problem.may_run(job.index, device.index)

        chosen = self.line.take(may_take, candidate, self._fleet_s)
        if chosen is None:
            return None
        job = self.jobs[chosen]
        if job is not own:
            job.home, job.since_s = device.index, self.now_s
        return job

    def _reserve(self, device: _SimulatedDevice, job: _SimulatedJob) -> _Reservation:
        """Reserve the copy in on the device's lane."""
        unit = job.cost.unit(job.num_begun)
        cost = self.problem.devices[device.index]
        goes_on = device.current.job is job if device.current is not None else device.last is job
        size, earliest_s = unit.in_bytes, job.saved_s
        stays = goes_on and unit.shard == job.shard
        if goes_on:
            size = unit.own_bytes if stays else unit.in_bytes - unit.kept_bytes
            earliest_s = 0.0 if stays else earliest_s
        load_s = max(self.now_s, device.in_free_s, earliest_s, device.out_free_s if size else 0.0)
        if device.current is not None and cost.budget_bytes is not None:
            together = unit.resident_bytes + device.current.unit.resident_bytes
            if together > cost.budget_bytes and not stays:
                load_s = max(
                    load_s, self._end_of(device) + device.current.unit.out_bytes / cost.out_bandwidth_bytes_per_s
                )
        ready_s = load_s + size / cost.in_bandwidth_bytes_per_s
        device.in_free_s = ready_s
        device.in_bytes += size
        return _Reservation(job=job, unit=unit, made_s=self.now_s, load_s=load_s, ready_s=ready_s)

    def _end_of(self, device: _SimulatedDevice) -> float:
        assert device.current is not None
        return device.free_s + device.current.unit.compute_s / self.problem.devices[device.index].speed

    def _start(self, device: _SimulatedDevice) -> None:
        reservation = device.next
        assert reservation is not None and device.current is None
        device.stall_s += self.now_s - max(device.free_s, reservation.made_s)
        device.current, device.next = reservation, None
        device.free_s = self.now_s
        job, unit = reservation.job, reservation.unit
        compute_s = unit.compute_s / self.problem.devices[device.index].speed
        device.busy_s += compute_s
        self.work_s -= unit.compute_s
        if self.units is not None:
            self.units.append(
                ScheduledUnit(
                    job=job.index,
                    index=job.num_begun,
                    kind=unit.kind,
                    shard=unit.shard,
                    device=device.index,
                    load_s=reservation.load_s,
                    start_s=self.now_s,
                    end_s=self.now_s + compute_s,
                )
            )
        job.num_begun += 1
        job.shard = unit.shard
        if job.is_between:
            job.num_turns += 1
            device.following = self._take(device, None if job.is_done else job)
        else:
            device.following = job
        if self.double_buffer and device.following is not None:
            device.next = self._reserve(device, device.following)
        self.agenda.add(self.now_s + compute_s, "ends", device.index)

    def _end(self, device: _SimulatedDevice) -> None:
        assert device.current is not None
        job, unit = device.current.job, device.current.unit
        device.current, device.last, device.free_s = None, job, self.now_s
        device.out_free_s = max(device.out_free_s, self.now_s)
        device.out_free_s += unit.out_bytes / self.problem.devices[device.index].out_bandwidth_bytes_per_s
        device.out_bytes += unit.out_bytes
        job.saved_s, job.end_s = device.out_free_s, self.now_s
        if device.next is None and device.following is not None:
            device.next = self._reserve(device, device.following)
        if not job.is_done and device.following is not job:
            self._wait(job)
            self.agenda.add(job.saved_s, "is saved", job.index)
        device.following = None
        if device.next is None:
            self.idle.add(device.index)
        else:
            self.agenda.add(max(self.now_s, device.next.ready_s), "starts", device.index)

    def _schedule(self) -> Schedule:
        makespan_s = max((job.end_s for job in self.jobs), default=0.0)
        return Schedule(
            makespan_s=makespan_s,
            job_end_s=tuple(job.end_s for job in self.jobs),
            devices=tuple(
                DeviceUse(
                    busy_s=device.busy_s,
                    stall_s=device.stall_s,
                    idle_s=max(0.0, makespan_s - device.busy_s - device.stall_s),
                    in_bytes=device.in_bytes,
                    out_bytes=device.out_bytes,
                )
                for device in self.devices
            ),
            units=tuple(self.units or ()),
        )
