"""Which job a device takes next: Sharded-LRTF and its alternatives, as orders over jobs that wait.

Sharded-LRTF (Hydra, Nagrecha and Kumar 2021) takes the job with the longest remaining time: what would end last begins
first, so that at the end no device waits for one long job. Its cost is that of a heap: O(log jobs) a unit.
"""

import math
import numbers
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from penstock.arguments import must_be

SchedulerName = Literal["sharded-lrtf", "fifo", "shortest-first", "random"]
"""Schedulers that are called by name: what decides which job a free device takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a scheduler knows of a job that waits."""

    job: int
    """Its place in the problem."""
    arrival_s: float
    """When it could have begun."""
    remaining_s: float
    """Seconds of the units that it has left, on a device of speed 1; refined as units are measured."""
    num_done: int
    """Units that it has behind it."""


Scheduler = Callable[[Progress], float]
"""The smaller the number, the sooner the job is taken; of equals the one that has waited longest."""


_EXAMPLE = "scheduler=lambda progress: progress.remaining_s"


def longest_remaining_first(progress: Progress) -> float:
    """Sharded-LRTF."""
    return -progress.remaining_s


def first_come_first_served(progress: Progress) -> float:
    """Jobs that arrived first, to their end."""
    return progress.arrival_s + 1e-9 * progress.job


def shortest_remaining_first(progress: Progress) -> float:
    """First results soonest, at the price of a longer end."""
    return progress.remaining_s


def in_any_order(seed: int = 0) -> Scheduler:
    """A random job each time, the same for the same seed."""
    choices = random.Random(seed)  # noqa: S311  # an order, not a secret
    return lambda _: choices.random()


def _returns_a_number(scheduler: Scheduler) -> Scheduler:
    def call(progress: Progress) -> float:
        priority = scheduler(progress)
        if not isinstance(priority, numbers.Real) or math.isnan(priority):
            raise must_be("scheduler", "a function that returns a number", priority, _EXAMPLE)
        return priority

    return call


def scheduler_of(name: "SchedulerName | Scheduler") -> Scheduler:
    """The scheduler of that name. Raises ``ValueError`` for one that there is not."""
    if callable(name):
        return _returns_a_number(name)
    known: dict[str, Scheduler] = {
        "sharded-lrtf": longest_remaining_first,
        "fifo": first_come_first_served,
        "shortest-first": shortest_remaining_first,
        "random": in_any_order(),
    }
    if name not in known:
        raise ValueError(f"no scheduler is called {name!r}; there are {', '.join(known)}")
    return known[name]
