"""Objects by number: a custom operator's arguments are tensors and numbers, and `torch.compile` knows numbers."""

import itertools
import os
import threading
import weakref
from typing import Any

_objects: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
"""Holds nothing alive."""
_numbers = itertools.count(1)


class Guard:
    """A lock that a forked child finds open: whoever held it does not exist there."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _guards.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """In a forked child."""
        self._lock = threading.RLock()


_guards: "weakref.WeakSet[Guard]" = weakref.WeakSet()
_lock = Guard()


def _renew_all() -> None:
    for one in list(_guards):
        one.renew()


os.register_at_fork(after_in_child=_renew_all)


def register(one: Any) -> int:
    """A number for the object, never given to another."""
    with _lock:
        number = next(_numbers)
        _objects[number] = one
    return number


def registered(number: int) -> Any:
    """The object. Raises ``KeyError`` once it is gone."""
    return _objects[number]
