"""Functions that emitted graphs call: parking and fetching through `tiers`, and random operators that run again.

A swapped storage travels through autograd as a ticket (`_ticket.py`). Its handle is released when the ticket ends.
"""

import functools
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from penstock.remat import _ticket
from penstock.tiers import (
    Budget,
    Handle,
    ViewLayout,
    Waterfall,
    generator_state,
    generators_held,
    set_generator_state,
    waterfall_for,
)

_tiers: "weakref.WeakValueDictionary[int, Tiers]" = weakref.WeakValueDictionary()
_numbers = itertools.count(1)
_drawn = threading.local()


class _Parked(NamedTuple):
    handle: Handle
    layout: ViewLayout
    tiers: "Tiers"
    """Its tiers, which live as long as something is in them."""


class Tiers:
    """The tiers of one planned step's swaps. Graphs refer to them by ``number``, which is unique while this lives."""

    def __init__(self, device: torch.device, budget: Budget, *, verify: bool):
        self.number = next(_numbers)
        self._device, self._budget, self._verify = device, budget, verify
        _tiers[self.number] = self

    @functools.cached_property
    def waterfall(self) -> Waterfall:
        """The waterfall, made on the first swap: a step that is only planned opens no file and starts no lane."""
        waterfall = waterfall_for(self._device, self._budget.named("remat"), verify=self._verify)
        self._closer = weakref.finalize(self, _close_beside, waterfall)
        self._closer.atexit = False
        return waterfall

    def close(self) -> None:
        """End the lanes, if any were started."""
        if "waterfall" in self.__dict__:
            self._closer.detach()
            self.waterfall.close()


def _close_beside(waterfall: Waterfall) -> None:
    """Close the waterfall in another thread.

    The garbage collector may run in a thread that ends, or that holds one of its locks.
    """
    threading.Thread(target=waterfall.close, name="penstock closes swaps").start()


def park(value: torch.Tensor, tiers: int) -> torch.Tensor:
    """Begin to copy the storage of ``value`` out to the tiers of that number, and return its ticket."""
    place = _tiers[tiers]
    handle = place.waterfall.park(value.untyped_storage(), label=f"swap {next(_numbers)}")
    return _ticket.issue(_Parked(handle, ViewLayout.of(value), place))


def finish(ticket: torch.Tensor) -> None:
    """Wait for the copy out. The plan needs its memory from here on."""
    _of(ticket).handle.finish_out()


def prefetch(ticket: torch.Tensor) -> None:
    """Begin the copy back."""
    _of(ticket).handle.prefetch()


def fetch(ticket: torch.Tensor) -> torch.Tensor:
    """Return the value as it was."""
    parked = _of(ticket)
    return parked.layout.rebuild(parked.handle.get())


def drawing(target: Callable[..., Any], device: str, *, notes_state: bool) -> Callable[..., Any]:
    """Return a function that runs ``target``, a random operator.

    It can note the generator's state for ``state_before``.
    """

    def draw(*arguments: Any, **keywords: Any) -> Any:
        with generators_held():  # otherwise the process's generator may hold another room's state
            if notes_state:
                _drawn.state = generator_state(device)
            return target(*arguments, **keywords)

    draw.__name__ = f"draw_{str(target).replace('.', '_')}"
    return draw


def state_before() -> torch.Tensor:
    """Return the state from which this thread's last operator run by ``drawing`` drew."""
    state: torch.Tensor = _drawn.state
    del _drawn.state
    return state


def replaying(target: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Return a function that runs ``target`` again from a generator's state, and restores the generator."""

    def replay(state: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        with generators_held():
            before = generator_state(device)
            set_generator_state(state, device)
            try:
                return target(*arguments, **keywords)
            finally:
                set_generator_state(before, device)

    replay.__name__ = f"replay_{str(target).replace('.', '_')}"
    return replay


def _of(ticket: torch.Tensor) -> _Parked:
    parked: _Parked = _ticket.thing_of(ticket)
    return parked


for _function in (park, finish, prefetch, state_before):
    fx.node.has_side_effect(_function)
