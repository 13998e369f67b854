"""Addition of gradients to those of their leaves as soon as they are made, instead of returning all of them at the end.

AOTAutograd's backward is one function. All its gradients therefore live until it returns, together with the gradients
that they are then added to. Eager training adds each one where it is made and frees it. A planned backward does the
same: it adds a finished gradient to its leaf and returns nothing in its place.

If the caller asked for something else, the gradient is returned and autograd does the rest. That is so for
``torch.autograd.grad``, with hooks on the leaf, and on a stream of the caller's own. It is also so if a step has
several graphs, or an eager rest: in eager training a leaf that several of them use gets the sum of its gradients at
once, which rounds differently than adding each to the leaf's gradient.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import fx

from penstock.remat import _ticket
from penstock.remat._capture import accumulates_now
from penstock.storages import storage_id

_adding = threading.Lock()
"""A lock, because backwards of several threads may share a leaf."""


class _Here(threading.local):
    discards = False
    returns = False


_here = _Here()


class _Leaves(NamedTuple):
    leaves: tuple[torch.Tensor, ...]
    others: frozenset[int]
    """Storages of forward's other arguments. A gradient in one of them must not change before backward has read it."""


def leaves(num_leaves: int, *inputs: torch.Tensor | None) -> torch.Tensor:
    """Return a ticket for the leaves that backward will have gradients of. Runs in forward.

    The leaves are the first inputs. Inputs may be ``None``: a token with which AOTAutograd orders checks.
    """
    tensors = [tensor for tensor in inputs if tensor is not None]
    others = [tensor for tensor in tensors[num_leaves:] if not isinstance(tensor, torch.nn.Parameter)]
    storages = frozenset(storage_id(tensor) for tensor in others)
    return _ticket.issue(_Leaves(tuple(tensors[:num_leaves]), storages))


def deliver(ticket: torch.Tensor, index: int, gradient: torch.Tensor) -> torch.Tensor | None:
    """Add ``gradient`` to that of a leaf, or return it if autograd has to add it. Runs in backward."""
    if _here.discards:
        return None
    inputs: _Leaves = _ticket.thing_of(ticket)
    leaf = inputs.leaves[index]
    if _here.returns or not accumulates_now(leaf):
        return gradient
    held = leaf.grad
    if held is None or storage_id(held) in inputs.others:
        return gradient
    with _adding:
        held.add_(gradient)
    return None


@contextmanager
def returning() -> Iterator[None]:
    """Return gradients made on this thread to autograd inside this context.

    Other gradients of the same leaves come from elsewhere.
    """
    before, _here.returns = _here.returns, True
    try:
        yield
    finally:
        _here.returns = before


@contextmanager
def discarding() -> Iterator[None]:
    """Discard gradients made on this thread inside this context, which is a trial of a step."""
    _here.discards = True
    try:
        yield
    finally:
        _here.discards = False


for _function in (leaves, deliver):
    fx.node.has_side_effect(_function)
