"""The state of random generators, as this thread's operators draw from them.

PyTorch's CPU generator belongs to the process. A fleet lets a job's operators draw from the job's own state instead; a
planned step, which notes the state before a random operator so that it can run again, has to note that one.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch


class Generators(Protocol):
    """Whoever swaps states in for single operators."""

    def get(self, device: str) -> torch.Tensor:
        """The state from which the next operator on ``device`` draws."""

    def put(self, state: torch.Tensor, device: str) -> None:
        """Lets the next operator on ``device`` draw from ``state``."""


class _OfThread(threading.local):
    generators: Generators | None = None


_mine = _OfThread()


def generator_state(device: str) -> torch.Tensor:
    """The state from which the next operator of this thread on ``device`` draws."""
    if _mine.generators is not None:
        return _mine.generators.get(device)
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state(device)


def set_generator_state(state: torch.Tensor, device: str) -> None:
    """Lets the next operator of this thread on ``device`` draw from ``state``."""
    if _mine.generators is not None:
        _mine.generators.put(state, device)
    elif device == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


@contextmanager
def drawing_from(generators: Generators) -> Iterator[None]:
    """Inside, operators of this thread draw from ``generators``, whose business that is."""
    before, _mine.generators = _mine.generators, generators
    try:
        yield
    finally:
        _mine.generators = before
