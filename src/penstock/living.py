"""Objects of a class, among all that are alive."""

import contextlib
import gc
import sys
import threading
import time
from collections.abc import Iterator
from typing import TypeVar

from penstock.forks import renewed_in_child

_Kind = TypeVar("_Kind")
_LONGEST_S = 0.25
"""The time for which no thread can ask for its turn: more than a look at a million objects takes."""


class _Turns:
    """The time for which a thread may run, longer while one looks."""

    def __init__(self) -> None:
        self._looking = threading.RLock()  # a finalizer of the user's may look, too
        self._before_s: float | None = None
        self._all.add(self)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let no other thread run while the block runs, as long as that takes no longer than a moment."""
        with self._looking:
            before_s = sys.getswitchinterval()
            if before_s >= _LONGEST_S:
                yield
                return
            self._before_s = before_s
            sys.setswitchinterval(_LONGEST_S)
            try:
                time.sleep(2 * before_s)  # threads that are waiting for their turn still ask for it at the old interval
                yield
            finally:
                sys.setswitchinterval(before_s)
                self._before_s = None

    def _renew(self) -> None:
        self._looking = threading.RLock()
        if self._before_s is not None:
            sys.setswitchinterval(self._before_s)
            self._before_s = None

    _all = renewed_in_child(_renew)


_turns = _Turns()


def living(kind: type[_Kind]) -> list[_Kind]:
    """Return all objects of a class and of those derived from it. Takes as long as a collection of garbage.

    Other threads do not run meanwhile. The list of all objects has tuples that they are still building from generators,
    and CPython cannot resize a tuple that somebody else has: it raises ``SystemError: bad argument to internal
    function`` in their code.
    """
    kinds = _derived(kind)  # a process has half a million objects, and a set lookup costs a tenth of issubclass
    with _turns.held():
        return [thing for thing in gc.get_objects() if type(thing) in kinds]


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
