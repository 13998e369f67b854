"""Objects by number: a custom operator's arguments are tensors and numbers, and `torch.compile` knows numbers."""

import itertools
import threading
import weakref
from typing import Any

_objects: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
"""Holds nothing alive."""
_numbers = itertools.count(1)
_lock = threading.Lock()


def register(one: Any) -> int:
    """A number for the object, never given to another."""
    with _lock:
        number = next(_numbers)
        _objects[number] = one
    return number


def registered(number: int) -> Any:
    """The object. Raises ``KeyError`` once it is gone."""
    return _objects[number]
