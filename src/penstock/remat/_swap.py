"""What the emitted graphs call: parking and fetching through `tiers`, and random operators that run again.

A swapped storage travels through autograd as a ticket: a tensor of a few bytes whose memory belongs to a Python object
that holds the handle. When autograd drops the last reference, wherever that is, the object dies and the handle is
released: a forward whose backward never comes leaks nothing, and two forwards before two backwards never meet.
"""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from penstock.tiers import Budget, Handle, ViewLayout, Waterfall, waterfall_for

TICKET_BYTES = 8
_waterfalls: dict[torch.device, Waterfall] = {}
_tickets: "weakref.WeakValueDictionary[int, _Ticket]" = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


class _Ticket(bytearray):
    """The memory of a ticket, and what it stands for."""

    handle: Handle
    layout: ViewLayout


def use_tiers(device: torch.device, budget: Budget) -> None:
    """Swaps of ``device`` go to the tiers of ``budget`` from now on."""
    if device not in _waterfalls:
        _waterfalls[device] = waterfall_for(device, budget)


def park(value: torch.Tensor) -> torch.Tensor:
    """Begins to copy the storage of ``value`` out; returns its ticket."""
    number = next(_numbers)
    ticket = _Ticket(number.to_bytes(TICKET_BYTES, "little"))
    ticket.layout = ViewLayout.of(value)
    ticket.handle = _waterfalls[value.device].park(value.untyped_storage(), label=str(number))
    _tickets[number] = ticket
    return torch.frombuffer(ticket, dtype=torch.uint8)


def finish(ticket: torch.Tensor) -> None:
    """Waits for the copy out: the plan needs its memory from here on."""
    _of(ticket).handle.finish_out()


def prefetch(ticket: torch.Tensor) -> None:
    """Begins the copy back."""
    _of(ticket).handle.prefetch()


def fetch(ticket: torch.Tensor) -> torch.Tensor:
    """The value as it was."""
    found = _of(ticket)
    return found.layout.rebuild(found.handle.get())


def generator_state(device: str) -> torch.Tensor:
    """The state of the default generator of ``device``, before a random operator that will run again."""
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state(device)


def replaying(target: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs ``target`` once more from a generator's state, and leaves the generator as it was."""

    def replay(state: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        is_cpu = state.numel() > 64  # the Mersenne twister's state; CUDA's is a seed and an offset
        before = torch.get_rng_state() if is_cpu else torch.cuda.get_rng_state()
        put: Callable[[torch.Tensor], None] = torch.set_rng_state if is_cpu else torch.cuda.set_rng_state
        put(state)
        try:
            return target(*arguments, **keywords)
        finally:
            put(before)

    replay.__name__ = f"replay_{str(target).replace('.', '_')}"
    return replay


def _of(ticket: torch.Tensor) -> _Ticket:
    return _tickets[int.from_bytes(ticket.numpy().tobytes(), "little")]


for _function in (park, finish, prefetch, generator_state):
    fx.node.has_side_effect(_function)
