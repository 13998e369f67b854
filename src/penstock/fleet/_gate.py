"""Tracing beside computing: never at once.

While ``torch.export`` traces it patches modules and sets flags for the whole process; a unit or an optimizer that ran
in another thread meanwhile would take other paths. So units enter the gate together, and a tracer alone.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Many may be inside ``computing``, or one inside ``tracing``; one who wants to trace goes before new units."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._num_computing = 0
        self._num_waiting = 0
        self._is_tracing = False

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Not to be nested."""
        with self._condition:
            self._condition.wait_for(lambda: not self._is_tracing and not self._num_waiting)
            self._num_computing += 1
        try:
            yield
        finally:
            with self._condition:
                self._num_computing -= 1
                self._condition.notify_all()

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Waits for the units at hand."""
        with self._condition:
            self._num_waiting += 1
            self._condition.wait_for(lambda: not self._is_tracing and not self._num_computing)
            self._num_waiting -= 1
            self._is_tracing = True
        try:
            yield
        finally:
            with self._condition:
                self._is_tracing = False
                self._condition.notify_all()


gate = Gate()
"""The gate of this process."""
