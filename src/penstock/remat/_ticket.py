"""Python objects that travel through autograd, from forward to the backward of the same call.

A ticket is a tensor of a few bytes whose memory belongs to an object that holds what it stands for. When autograd
drops the last reference, wherever that is, the object dies: a forward whose backward never comes leaks nothing, and two
forwards before two backwards never meet.
"""

import itertools
import weakref
from typing import Any

import torch

TICKET_BYTES = 8
_tickets: "weakref.WeakValueDictionary[int, _Memory]" = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


class _Memory(bytearray):
    """The memory of a ticket."""

    thing: Any


def issue(thing: Any) -> torch.Tensor:
    """A ticket for ``thing``, which lives as long as the ticket."""
    number = next(_numbers)
    memory = _Memory(number.to_bytes(TICKET_BYTES, "little"))
    memory.thing = thing
    _tickets[number] = memory
    return torch.frombuffer(memory, dtype=torch.uint8)


def thing_of(ticket: torch.Tensor) -> Any | None:
    """What ``ticket`` stands for; ``None`` if a saved-tensors hook of the user put another tensor in its place."""
    found = _tickets.get(int.from_bytes(ticket.numpy().tobytes(), "little"))
    return None if found is None else found.thing
