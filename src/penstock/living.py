"""Objects of a class, among all that are alive."""

import gc
import sys
import threading
import time
from typing import TypeVar

_Kind = TypeVar("_Kind")
_LONGEST_S = 0.25
"""The time for which no thread can ask for its turn: more than a look at a million objects takes."""
_looking = threading.Lock()


def living(kind: type[_Kind]) -> list[_Kind]:
    """Return all objects of a class and of those derived from it. Takes as long as a collection of garbage.

    Other threads do not run meanwhile. The list of all objects has tuples that they are still building from generators,
    and CPython cannot resize a tuple that somebody else has: it raises ``SystemError: bad argument to internal
    function`` in their code.
    """
    kinds = _derived(kind)  # a process has half a million objects, and a set lookup costs a tenth of issubclass
    with _looking:
        before_s = sys.getswitchinterval()
        sys.setswitchinterval(_LONGEST_S)
        try:
            time.sleep(2 * before_s)  # threads that are waiting for their turn still ask for it at the old interval
            return [thing for thing in gc.get_objects() if type(thing) in kinds]
        finally:
            sys.setswitchinterval(before_s)


def _derived(kind: type) -> set[type]:
    """Return a class and all classes derived from it that exist now."""
    kinds: set[type] = set()
    waiting = [kind]
    while waiting:
        next_kind = waiting.pop()
        if next_kind not in kinds:
            kinds.add(next_kind)
            waiting += type.__subclasses__(next_kind)
    return kinds
