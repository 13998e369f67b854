"""A lock that lets readers finish before something is closed."""

import os
import threading
import weakref
from typing import Self


class Readers:
    """A context for reading. ``close`` waits until all readers have left, and admits no new ones."""

    def __init__(self, closed: str):
        self._closed_message, self._is_closed, self._count = closed, False, 0
        self._left = threading.Condition()
        _all.add(self)

    def forget(self) -> None:
        """Reset the count in a forked child, where the threads that were reading do not exist."""
        self._count, self._left = 0, threading.Condition()

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


_all: "weakref.WeakSet[Readers]" = weakref.WeakSet()


def _forget_all() -> None:
    for readers in list(_all):
        readers.forget()


os.register_at_fork(after_in_child=_forget_all)
