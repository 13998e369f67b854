"""Sums that several threads add to, read as frozen statistics."""

import threading
from dataclasses import replace
from typing import Any, Generic, TypeVar

Statistics = TypeVar("Statistics")


class Counts(Generic[Statistics]):
    """A frozen dataclass of numbers, replaced by a larger one whenever something happens."""

    def __init__(self, empty: Statistics):
        self._empty = self._now = empty
        self._lock = threading.Lock()

    def add(self, **more: Any) -> None:
        """Each field grows by its number."""
        with self._lock:
            grown = {name: getattr(self._now, name) + value for name, value in more.items()}
            self._now = replace(self._now, **grown)  # type: ignore[type-var]

    def raise_to(self, **values: Any) -> None:
        """Each field is at least that."""
        with self._lock:
            raised = {name: max(getattr(self._now, name), value) for name, value in values.items()}
            self._now = replace(self._now, **raised)  # type: ignore[type-var]

    def now(self) -> Statistics:
        """So far."""
        with self._lock:
            return self._now

    def reset(self) -> Statistics:
        """So far, and begin anew."""
        with self._lock:
            found, self._now = self._now, self._empty
            return found
