"""Which job a device takes next: one choice, for the engine and for the simulation, by a scheduler's numbers.

A device chooses when the last unit of its mini-batch begins, and when it has nothing. `choose` is the whole rule; what
differs between schedulers is one number per job.

The scheduler by default, ``"fair"``, gives all jobs equal turns, but for those that decide when the fleet ends: jobs
with as much left as all jobs together have for each device. An order that keeps every device busy, and such jobs always
on one, ends as early as any can (McNaughton 1959), up to the length of a turn; so the rest of the order is free, and
fairness costs nothing at the end. Sharded-LRTF (Hydra, Nagrecha and Kumar 2021) ends as early, by taking the job with
the longest remaining time, and lets short jobs wait for long ones.
"""

import math
import numbers
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from penstock.arguments import must_be

SchedulerName = Literal["fair", "sharded-lrtf", "fifo", "shortest-first", "random"]
"""Schedulers that are called by name: what decides which job a free device takes."""

TURN_S = 10.0
"""A job that has a device keeps it for so long, where others have equal rights: its bytes are there."""
_ROOM = 2
"""Of its turns: a job that would decide when the fleet ends after so many more of waiting is taken as one that does."""
_GRACE = 1.02
"""The fleet may end so much later than at the soonest; without it a short job waits at its last steps to the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a scheduler knows of a job that waits, or that a device has and might keep."""

    job: int
    """Its place in the problem."""
    arrival_s: float
    """When it could have begun, in seconds since the fleet began."""
    remaining_s: float
    """Seconds of the units that it has left, on a device of speed 1; refined as units are measured."""
    num_done: int
    """Mini-batches that it has behind it, the one at hand included."""
    turn_s: float = 0.0
    """Seconds of one mini-batch, on a device of speed 1."""
    since_s: float = 0.0
    """Since when it waits, in seconds since the fleet began; of the job at hand: since when it has its device."""
    had_s: float | None = None
    """For how long the job at hand has had its device; ``None`` for a job that waits."""
    fleet_s: float = math.inf
    """Seconds in which the fleet can end at the soonest: what all its jobs have left, over its devices. Infinite with
    one device, for which any order ends as early."""


Scheduler = Callable[[Progress], float]
"""The smaller the number, the sooner the job is taken; of equals the one at hand, then the one that has waited longest.
Asked anew at every choice."""


class Candidate(NamedTuple):
    """A job that may be taken, in the order of what is taken first."""

    priority: Any
    """What the scheduler said."""
    since_s: float
    """Since when it waits."""
    job: int
    """Its place in the problem."""


def choose(candidates: Iterable[Candidate], own: Candidate | None) -> Candidate | None:
    """The job that a device takes: the first of ``candidates``, or ``own``, which it has, if none comes before it."""
    first = min(candidates, default=None)
    if own is not None and (first is None or own.priority <= first.priority):
        return own
    return first


_EXAMPLE = "scheduler=lambda progress: progress.remaining_s"


def fair(progress: Progress) -> tuple[int, float]:
    """Equal turns, but for jobs that decide when the fleet ends: they come first, the latest before the others."""
    slack_s = _GRACE * progress.fleet_s - _needs_s(progress)
    if slack_s <= 0:
        return 0, slack_s
    if progress.had_s is None:
        return 2, progress.since_s
    return (1 if progress.had_s < TURN_S else 3), 0.0


def _needs_s(progress: Progress) -> float:
    return progress.remaining_s + _ROOM * progress.turn_s


def longest_remaining_first(progress: Progress) -> float:
    """Sharded-LRTF."""
    return -progress.remaining_s


def first_come_first_served(progress: Progress) -> float:
    """Jobs that arrived first, to their end."""
    return progress.arrival_s


def shortest_remaining_first(progress: Progress) -> float:
    """First results soonest, at the price of a longer end."""
    return progress.remaining_s


def in_any_order(progress: Progress) -> float:
    """A random job each time, the same in every run."""
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
    """Numbers that stay while a job waits, one of whose smallest is the scheduler's choice; ``None`` if not known."""
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
    """The scheduler of that name. Raises ``ValueError`` for one that there is not."""
    if callable(name):
        return _returns_a_number(name)
    if name not in _SCHEDULERS:
        raise ValueError(f"no scheduler is called {name!r}; there are {', '.join(_SCHEDULERS)}")
    return _SCHEDULERS[name]
