"""A lock that lets readers finish before something is closed."""

import threading
from typing import Self

from penstock.forks import renewed_in_child


class Readers:
    """A context for reading. ``close`` waits until all readers have left, and admits no new ones."""

    def __init__(self, closed: str):
        self._closed_message, self._is_closed, self._count = closed, False, 0
        self._left = threading.Condition()
        self._all.add(self)

    def forget(self) -> None:
        """Reset the count in a forked child, where the threads that were reading do not exist."""
        self._count, self._left = 0, threading.Condition()

    _all = renewed_in_child(forget)

    def __enter__(self) -> Self:
        with self._left:
            if self._is_closed:
                raise ValueError(self._closed_message)
            self._count += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._left:
            self._count -= 1
            self._left.notify_all()

    def close(self) -> None:
        """Wait until all readers have left, and admit no new ones. May be called again."""
        with self._left:
            self._is_closed = True
            self._left.wait_for(lambda: not self._count)
