"""Python objects that travel through autograd, from forward to the backward of the same call.

A ticket is a tensor of a few bytes whose memory belongs to an object that holds what the ticket represents. When
autograd drops the last reference, wherever that is, the object dies. A forward whose backward never comes therefore
leaks nothing, and two forwards before two backwards stay apart.
"""

import itertools
import weakref
from typing import Any

import torch

from penstock.errors import InternalError

TICKET_BYTES = 8
_tickets: "weakref.WeakValueDictionary[int, _Memory]" = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


class _Memory(bytearray):
    """The memory of a ticket."""

    thing: Any
    address: int


def issue(thing: Any) -> torch.Tensor:
    """Return a ticket for ``thing``, which lives as long as the ticket."""
    number = next(_numbers)
    memory = _Memory(number.to_bytes(TICKET_BYTES, "little"))
    memory.thing = thing
    _tickets[number] = memory
    ticket = torch.frombuffer(memory, dtype=torch.uint8)
    memory.address = ticket.data_ptr()
    return ticket


def thing_of(ticket: torch.Tensor) -> Any:
    """Return the object that ``ticket`` represents."""
    memory = _tickets.get(int.from_bytes(ticket.numpy().tobytes(), "little"))
    if memory is None:
        raise InternalError("the tensor that a planned step passes from forward to backward was replaced in between")
    return memory.thing


def held_bytes(storage: torch.UntypedStorage) -> int:
    """Return the bytes of a storage; for a ticket's, the bytes that the object which it represents reports."""
    if storage.nbytes() != TICKET_BYTES or storage.device.type != "cpu":
        return storage.nbytes()
    number = torch.empty(0, dtype=torch.int64).set_(storage)
    memory = _tickets.get(int(number))
    if memory is None or memory.address != storage.data_ptr():  # an ordinary tensor with such a number
        return TICKET_BYTES
    return max(TICKET_BYTES, getattr(memory.thing, "held_bytes", 0))
