"""Objects by number, since a custom operator takes tensors and numbers, which `torch.compile` understands."""

import itertools
import threading
import weakref
from typing import Any

from penstock.forks import renewed_in_child

_objects: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
"""The registered objects; a weak dictionary, so it keeps nothing alive."""
_numbers = itertools.count(1)


class Guard:
    """A lock that is open in a forked child, where the thread that held it does not exist."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._all.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Replace the lock, in a forked child."""
        self._lock = threading.RLock()

    _all = renewed_in_child(renew)


_lock = Guard()


def register(thing: Any) -> int:
    """Return a number for the object that is never given to another."""
    with _lock:
        number = next(_numbers)
        _objects[number] = thing
    return number


def registered(number: int) -> Any:
    """Return the object. Raises ``KeyError`` once it is gone."""
    return _objects[number]
