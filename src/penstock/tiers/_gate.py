"""Tracing beside computing: never at once.

While ``torch.export`` traces it patches modules and sets flags for the whole process; a unit or an optimizer that ran
in another thread meanwhile would take other paths, to other last bits. So whatever computes enters the gate together,
and a tracer alone.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Many may be inside ``computing``, or one inside ``tracing``; one who wants to trace goes before new units.

    A thread that is inside goes through again, whatever it wants.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._num_computing = 0
        self._num_waiting = 0
        self._is_tracing = False
        self._thread = threading.local()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Waits for whoever traces."""
        if self._is_inside:
            yield
            return
        with self._condition:
            self._condition.wait_for(lambda: not self._is_tracing and not self._num_waiting)
            self._num_computing += 1
        self._thread.is_inside = True
        try:
            yield
        finally:
            self._thread.is_inside = False
            with self._condition:
                self._num_computing -= 1
                self._condition.notify_all()

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Waits for whoever computes."""
        if self._is_inside:
            yield
            return
        with self._condition:
            self._num_waiting += 1
            self._condition.wait_for(lambda: not self._is_tracing and not self._num_computing)
            self._num_waiting -= 1
            self._is_tracing = True
        self._thread.is_inside = True
        try:
            yield
        finally:
            self._thread.is_inside = False
            with self._condition:
                self._is_tracing = False
                self._condition.notify_all()

    @property
    def _is_inside(self) -> bool:
        """Whether this thread is."""
        return getattr(self._thread, "is_inside", False)


gate = Gate()
"""The gate of this process."""
