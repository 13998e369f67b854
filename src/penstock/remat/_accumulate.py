"""Gradients added to what accumulates them as soon as they are made, rather than handed out together at the end.

AOTAutograd's backward is one function, so all its gradients live until it returns, beside those they are then added to.
Eager training adds each one where it is made and frees it. A planned backward does the same: it adds a finished
gradient to its leaf and returns nothing in its place. Where that would not be what the caller asked for, as in
``torch.autograd.grad`` or with hooks on the leaf, the gradient is returned and autograd does the rest.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from penstock.remat import _ticket
from penstock.remat._capture import accumulates_now

_discards: list[bool] = []
"""Not empty while a step is only tried."""


def leaves(*found: torch.Tensor) -> torch.Tensor:
    """In forward: a ticket for the leaves that backward will have gradients of."""
    return _ticket.issue(found)


def deliver(ticket: torch.Tensor, index: int, gradient: torch.Tensor) -> torch.Tensor | None:
    """In backward: adds ``gradient`` to that of a leaf, or returns it where autograd has to."""
    if _discards:
        return None
    leaf: Any = _ticket.thing_of(ticket)[index]
    if leaf.grad is None or not accumulates_now(leaf):
        return gradient
    leaf.grad.add_(gradient)
    return None


@contextmanager
def discarding() -> Iterator[None]:
    """Gradients made inside are for nobody: a trial of a step."""
    _discards.append(True)
    try:
        yield
    finally:
        _discards.pop()


for _function in (leaves, deliver):
    fx.node.has_side_effect(_function)
