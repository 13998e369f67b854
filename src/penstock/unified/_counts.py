"""Counters that several threads add to, read as frozen statistics."""

import threading
from dataclasses import replace
from typing import Any, Generic, TypeVar

from penstock.forks import renewed_in_child

Statistics = TypeVar("Statistics")


class Counts(Generic[Statistics]):
    """A frozen dataclass of numbers, and a lock under which it is replaced when a number changes."""

    def __init__(self, empty: Statistics):
        self._empty = self._now = empty
        self.renew()
        self._all.add(self)

    def renew(self) -> None:
        """Take a new lock: in a forked child, the thread that held the old one does not exist."""
        self._lock = threading.Lock()

    _all = renewed_in_child(renew)

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
