"""The state of random generators, as this thread's operators draw from them.

PyTorch's CPU generator belongs to the process. A fleet lets a job's operators draw from the job's own state instead; a
planned step, which notes the state before a random operator so that it can run again, has to note that one.

Whoever puts another state into the process's generators for a while, or draws and puts back, holds them meanwhile, so
that one room's state does not come back in the middle of another's.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from penstock.arguments import checked
from penstock.devices import backend_of
from penstock.tiers._gate import gate


class Generators(Protocol):
    """Whoever swaps states in for single operators."""

    def get(self, device: str) -> torch.Tensor:
        """The state from which the next operator on ``device`` draws."""

    def put(self, state: torch.Tensor, device: str) -> None:
        """Lets the next operator on ``device`` draw from ``state``."""


class _OfThread(threading.local):
    generators: Generators | None = None


_mine = _OfThread()


@checked("generator_state('cpu')")
def generator_state(device: str) -> torch.Tensor:
    """The state from which the next operator of this thread on ``device`` draws."""
    if _mine.generators is not None:
        return _mine.generators.get(device)
    return backend_of(device).random_state()


@checked("set_generator_state(state, 'cpu')")
def set_generator_state(state: torch.Tensor, device: str) -> None:
    """Lets the next operator of this thread on ``device`` draw from ``state``."""
    if _mine.generators is not None:
        _mine.generators.put(state, device)
    else:
        backend_of(device).set_random_state(state)


@contextmanager
@checked("with drawing_from(generators)")
def drawing_from(generators: Generators) -> Iterator[None]:
    """Inside, operators of this thread draw from ``generators``, whose business that is."""
    before, _mine.generators = _mine.generators, generators
    try:
        yield
    finally:
        _mine.generators = before


class _Lock:
    """Held by one thread, as often as it likes."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """In a forked child, where whoever held it does not exist."""
        self.lock = threading.RLock()


_held = _Lock()


@contextmanager
def generators_held() -> Iterator[None]:
    """Inside, no other room swaps states of the process's generators. May be nested.

    Whoever waits to hold them lets others trace meanwhile, and whoever holds them may begin to trace; a thread that
    already traces must not begin to hold them.
    """
    while not _held.lock.acquire(blocking=False):
        with gate.released(), _held.lock:
            pass
    try:
        yield
    finally:
        _held.lock.release()
