"""Gradients added to what accumulates them as soon as they are made, rather than handed out together at the end.

AOTAutograd's backward is one function, so all its gradients live until it returns, beside those they are then added to.
Eager training adds each one where it is made and frees it. A planned backward does the same: it adds a finished
gradient to its leaf and returns nothing in its place. Where that would not be what the caller asked for, as in
``torch.autograd.grad``, with hooks on the leaf or on a stream of the caller's own, the gradient is returned and
autograd does the rest. So it is where a step has several graphs, or an eager rest: a leaf of several of them gets the
sum of its gradients at once in eager training, which rounds differently than adding each to what the leaf has.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import fx

from penstock.remat import _ticket
from penstock.remat._capture import accumulates_now

_adding = threading.Lock()
"""Backwards of several threads may share a leaf."""


class _Here(threading.local):
    discards = False
    returns = False


_here = _Here()


class _Leaves(NamedTuple):
    leaves: tuple[torch.Tensor, ...]
    others: frozenset[int]
    """Storages of what else forward was given: a gradient among them is not to change before backward has read it."""


def leaves(num_leaves: int, *inputs: torch.Tensor | None) -> torch.Tensor:
    """In forward: a ticket for the leaves, which are given first, that backward will have gradients of.

    Inputs may be ``None``: a token of AOTAutograd's, for the order of checks.
    """
    given = [one for one in inputs if one is not None]
    others = [one for one in given[num_leaves:] if not isinstance(one, torch.nn.Parameter)]
    storages = frozenset(one.untyped_storage()._cdata for one in others)
    return _ticket.issue(_Leaves(tuple(given[:num_leaves]), storages))


def deliver(ticket: torch.Tensor, index: int, gradient: torch.Tensor) -> torch.Tensor | None:
    """In backward: adds ``gradient`` to that of a leaf, or returns it where autograd has to."""
    if _here.discards:
        return None
    found: _Leaves = _ticket.thing_of(ticket)
    leaf = found.leaves[index]
    if _here.returns or not accumulates_now(leaf):
        return gradient
    held = leaf.grad
    if held is None or held.untyped_storage()._cdata in found.others:
        return gradient
    with _adding:
        held.add_(gradient)
    return None


@contextmanager
def returning() -> Iterator[None]:
    """Gradients made inside, on this thread, are handed to autograd: others of the same leaf come from elsewhere."""
    before, _here.returns = _here.returns, True
    try:
        yield
    finally:
        _here.returns = before


@contextmanager
def discarding() -> Iterator[None]:
    """Gradients made inside, on this thread, are for nobody: a trial of a step."""
    _here.discards = True
    try:
        yield
    finally:
        _here.discards = False


for _function in (leaves, deliver):
    fx.node.has_side_effect(_function)
