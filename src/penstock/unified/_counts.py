"""Counters that several threads add to, read as frozen statistics."""

import os
import threading
import weakref
from dataclasses import replace
from typing import Any, Generic, TypeVar

Statistics = TypeVar("Statistics")


class Counts(Generic[Statistics]):
    """A frozen dataclass of numbers, and a lock under which it is replaced when a number changes."""

    def __init__(self, empty: Statistics):
        self._empty = self._now = empty
        self.renew()
        _all.add(self)

    def renew(self) -> None:
        """Take a new lock: in a forked child, the thread that held the old one does not exist."""
        self._lock = threading.Lock()

    def add(self, **more: Any) -> None:
        """Add to each field."""
        with self._lock:
            grown = {name: getattr(self._now, name) + value for name, value in more.items()}
            self._now = replace(self._now, **grown)  # type: ignore[type-var]

    def raise_to(self, **values: Any) -> None:
        """Raise each field to at least the given value."""
        with self._lock:
            raised = {name: max(getattr(self._now, name), value) for name, value in values.items()}
            self._now = replace(self._now, **raised)  # type: ignore[type-var]

    def now(self) -> Statistics:
        """Return the counts so far."""
        with self._lock:
            return self._now

    def reset(self) -> Statistics:
        """Return the counts so far, and start again."""
        with self._lock:
            last, self._now = self._now, self._empty
            return last


_all: "weakref.WeakSet[Counts[Any]]" = weakref.WeakSet()


def _renew_all() -> None:
    for counts in list(_all):
        counts.renew()


os.register_at_fork(after_in_child=_renew_all)
