"""What a factory handed in that somebody else holds too, such as ``model=lambda: model``.

A fleet takes the bytes of a job's model away, so it trains modules that nobody else has, and a copy of others. Whether
somebody has them is told as a garbage collector tells it: references that come from the model's own objects are
counted, and an object with more than those is held elsewhere.
"""

import copy
import gc
import sys
import types
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from penstock.errors import SharedModelWarning


def own_model(box: list[nn.Module], job: str) -> nn.Module:
    """The module in ``box``, or, if it or a part of it is held elsewhere as well, a copy, and a warning says so.

    Nobody but the box may refer to it. Raises ``ValueError`` for a module that is held elsewhere and cannot be copied.
    """
    shared = held_elsewhere(box)
    if shared is None:
        return box.pop()
    what = "a module" if not shared else f"a module whose part {shared!r}"
    advice = "model=lambda: copy.deepcopy(module), or a factory that makes a new one"
    try:
        own = copy.deepcopy(box[0])
    except Exception as error:  # whatever a part of it raises
        raise ValueError(
            f"job {job!r}: model() returned {what} is held elsewhere too, and it cannot be copied "
            f"({type(error).__name__}: {error}). Its bytes leave while others train, so each call of model() must "
            "return a module of its own"
        ) from error
    warnings.warn(
        f"job {job!r}: model() returned {what} that others hold too. The fleet trains a copy and leaves that one as it "
        f"is. To say so yourself: {advice}",
        SharedModelWarning,
        stacklevel=2,
    )
    return own


def held_elsewhere(box: list[nn.Module]) -> str | None:
    """The name of a part of the model in ``box`` that somebody else holds; "" for the model itself, ``None`` for none.

    Parts are modules, parameters and buffers. Nobody but the box may refer to the model.
    """
    inside = _references_inside(box)
    parts = _parts(box)
    names = list(parts)
    for name in names:
        part = parts.pop(name)
        # References beside those: this variable, and what getrefcount is given.
        if sys.getrefcount(part) - 2 > inside[id(part)]:
            return name
    return None


def _references_inside(box: list[nn.Module]) -> Counter[int]:
    """By identity of modules and tensors, references that the box and the model's own objects have to them."""
    inside: Counter[int] = Counter()
    seen: set[int] = {id(box)}
    waiting: list[Any] = [box]  # any: whatever a module refers to
    while waiting:
        thing = waiting.pop()
        for other in _referents(thing):
            if isinstance(other, nn.Module | torch.Tensor):
                inside[id(other)] += 1
            if id(other) not in seen and gc.is_tracked(other):
                seen.add(id(other))
                waiting.append(other)
    return inside


def _referents(thing: Any) -> list[Any]:  # any: whatever a module refers to
    """What a thing refers to, if that may belong to the model: neither modules of Python nor globals of functions."""
    if isinstance(thing, types.ModuleType):
        return []
    if isinstance(thing, types.FunctionType):
        return [thing.__closure__, thing.__defaults__, thing.__kwdefaults__, thing.__dict__]
    if isinstance(thing, type):  # parametrizations make a class for each module, whose properties refer to it
        return [value for value in vars(thing).values() if isinstance(value, property)]
    return gc.get_referents(thing)


def _parts(box: list[nn.Module]) -> dict[str, Any]:  # any: modules and tensors
    return dict(_named_parts(box[0]))


def _named_parts(model: nn.Module) -> Iterator[tuple[str, Any]]:  # any: modules and tensors
    yield from model.named_modules()
    yield from model.named_parameters()
    yield from model.named_buffers()
