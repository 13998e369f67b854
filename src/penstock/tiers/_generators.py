"""The state of the random generators from which this thread's operators draw.

PyTorch's CPU generator belongs to the process. A fleet lets a job's operators draw from the job's own state instead. A
planned step saves the state before a random operator, so that it can run the operator again, and it has to save the
job's state.

Code that replaces the state of the process's generators for a while, or draws and then restores it, must hold
`generators_held` meanwhile. Otherwise one room's state could be restored in the middle of another's work.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from penstock.arguments import checked
from penstock.devices import backend_of
from penstock.forks import renewed_in_child
from penstock.tiers._gate import gate


class Generators(Protocol):
    """An object that swaps generator states in for single operators."""

    def get(self, device: str) -> torch.Tensor:
        """Return the state from which the next operator on ``device`` draws."""

    def put(self, state: torch.Tensor, device: str) -> None:
        """Make the next operator on ``device`` draw from ``state``."""


class _DrawnFrom(threading.local):
    """The generators from which the current thread's operators draw; ``None`` for those of the process."""

    generators: Generators | None = None


_mine = _DrawnFrom()


@checked("generator_state('cpu')")
def generator_state(device: str) -> torch.Tensor:
    """Return the state from which this thread's next operator on ``device`` draws."""
    if _mine.generators is not None:
        return _mine.generators.get(device)
    return backend_of(device).random_state()


@checked("set_generator_state(state, 'cpu')")
def set_generator_state(state: torch.Tensor, device: str) -> None:
    """Make this thread's next operator on ``device`` draw from ``state``."""
    if _mine.generators is not None:
        _mine.generators.put(state, device)
    else:
        backend_of(device).set_random_state(state)


@contextmanager
@checked("with drawing_from(generators)")
def drawing_from(generators: Generators) -> Iterator[None]:
    """Let operators of this thread draw from ``generators`` inside the ``with`` block."""
    before, _mine.generators = _mine.generators, generators
    try:
        yield
    finally:
        _mine.generators = before


class _Lock:
    """A reentrant lock that is replaced in forked children."""

    def __init__(self) -> None:
        self.renew()
        self._all.add(self)

    def renew(self) -> None:
        """Take a new lock: in a forked child, the thread that held the old one does not exist."""
        self.lock = threading.RLock()

    _all = renewed_in_child(renew)


_held = _Lock()


@contextmanager
def generators_held() -> Iterator[None]:
    """Keep other rooms from swapping states of the process's generators inside the ``with`` block. May be nested.

    A thread that waits here lets others trace meanwhile. A thread inside may begin to trace; a thread that already
    traces must not enter.
    """
    # The order is fixed, generators before the gate: the thread that holds them may be waiting to trace, and would wait
    # for this one for ever if this one waited here while it computes.
    while not _held.lock.acquire(blocking=False):
        with gate.released(), _held.lock:
            pass
    try:
        yield
    finally:
        _held.lock.release()
