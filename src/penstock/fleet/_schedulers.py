"""The choice of the job that a device takes next, for both the engine and the simulation.

A device chooses when the last unit of its mini-batch begins, and when it is idle. `choose` is the whole rule.
Schedulers differ only in one number per job.

The default scheduler, ``"fair"``, gives all jobs equal turns, except jobs that decide when the fleet ends. Such a job
has as much left to do as all jobs together have per device. An order that keeps every device busy, and such jobs always
on a device, ends as early as any order can (McNaughton 1959), up to the length of a turn. The rest of the order is
free, so fairness does not delay the end. Sharded-LRTF (Hydra, Nagrecha and Kumar 2021) ends as early: it takes the job
with the longest remaining time, and lets short jobs wait for long ones.
"""

import math
import numbers
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from penstock.arguments import must_be

SchedulerName = Literal["fair", "sharded-lrtf", "fifo", "shortest-first", "random"]
"""Names of the built-in schedulers. A scheduler decides which job a free device takes."""

TURN_S = 10.0
"""Seconds for which a job keeps its device while others have equal rights, since its bytes are there."""
# With a margin of one, 2,000 jobs on 256 devices ended 1.6% late, because devices choose only between turns.
_ROOM = 2
"""Margin, in turns of the job.

A job that would decide when the fleet ends if it waited that much longer already counts as one that does.
"""
_GRACE = 1.02
"""Factor by which the fleet may end later than the earliest end.

Without it a short job waits with its last steps until the end.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A scheduler's view of a job that waits, or that a device has and might keep."""

    job: int
    """Its index in the problem."""
    arrival_s: float
    """Time at which it could have begun, in seconds since the fleet started."""
    remaining_s: float
    """Seconds of its remaining units on a device of speed 1, refined as units are measured."""
    num_done: int
    """Mini-batches done, including the current one."""
    turn_s: float = 0.0
    """Seconds of one mini-batch, on a device of speed 1."""
    since_s: float = 0.0
    """Since when it has been waiting, in seconds since the fleet started.

    For a device's current job: since when it has had its device.
    """
    had_s: float | None = None
    """Seconds for which the current job has had its device; ``None`` for a job that waits."""
    fleet_s: float = math.inf
    """Seconds until the earliest possible end of the fleet: the remaining work of all its jobs, divided by its devices.

    Infinite with one device, for which any order ends at the same time.
    """


Scheduler = Callable[[Progress], float]
"""A function from a job's progress to a number. The job with the smallest number is taken.

Of equals, the current job is taken, then the one that has waited longest. The function is called again at every choice.
"""


class JobCandidate(NamedTuple):
    """A job that may be taken. Candidates sort in the order in which they are taken."""

    priority: Any
    """The scheduler's number."""
    since_s: float
    """Since when it has been waiting."""
    job: int
    """Its index in the problem."""


def choose(candidates: Iterable[JobCandidate], own: JobCandidate | None) -> JobCandidate | None:
    """Return the job that the device takes: the first of ``candidates``, or ``own`` if none of them precedes it."""
    first = min(candidates, default=None)
    if own is not None and (first is None or own.priority <= first.priority):
        return own
    return first


_EXAMPLE = "scheduler=lambda progress: progress.remaining_s"


def fair(progress: Progress) -> tuple[int, float]:
    """Return a priority that gives equal turns to all jobs, except jobs that decide when the fleet ends.

    Those come first, the latest before the others.
    """
    slack_s = _GRACE * progress.fleet_s - _needs_s(progress)
    if slack_s <= 0:
        return 0, slack_s
    if progress.had_s is None:
        return 2, progress.since_s
    return (1 if progress.had_s < TURN_S else 3), 0.0


def _needs_s(progress: Progress) -> float:
    return progress.remaining_s + _ROOM * progress.turn_s


def longest_remaining_first(progress: Progress) -> float:
    """Return the priority of Sharded-LRTF."""
    return -progress.remaining_s


def first_come_first_served(progress: Progress) -> float:
    """Return a priority that runs jobs to their end in the order of arrival."""
    return progress.arrival_s


def shortest_remaining_first(progress: Progress) -> float:
    """Return a priority that gives first results soonest, but ends later."""
    return progress.remaining_s


def in_any_order(progress: Progress) -> float:
    """Return a random priority at each choice, the same in every run."""
    mixed = (progress.job * 0x9E3779B97F4A7C15 + progress.num_done * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 31)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 29)) / 2**64


_SCHEDULERS: dict[str, Callable[[Progress], Any]] = {
    "fair": fair,
    "sharded-lrtf": longest_remaining_first,
    "fifo": first_come_first_served,
    "shortest-first": shortest_remaining_first,
    "random": in_any_order,
}


def orders_of(scheduler: Callable[[Progress], Any]) -> tuple[Callable[[Progress], float], ...] | None:
    """Return orders that do not change while a job waits. The first job of one of them is the scheduler's choice.

    Returns ``None`` if they are not known.
    """
    if scheduler is fair:
        return (lambda progress: progress.since_s), (lambda progress: -_needs_s(progress))
    return (scheduler,) if scheduler in _SCHEDULERS.values() else None


def _returns_a_number(scheduler: Scheduler) -> Scheduler:
    def call(progress: Progress) -> float:
        priority = scheduler(progress)
        if not isinstance(priority, numbers.Real) or math.isnan(priority):
            raise must_be("scheduler", "a function that returns a number", priority, _EXAMPLE)
        return priority

    return call


def scheduler_of(name: "SchedulerName | Scheduler") -> Callable[[Progress], Any]:
    """Return the scheduler of that name. Raise ``ValueError`` if there is none."""
    if callable(name):
        return _returns_a_number(name)
    if name not in _SCHEDULERS:
        raise ValueError(f"there is no scheduler named {name!r}; there are {', '.join(_SCHEDULERS)}")
    return _SCHEDULERS[name]
