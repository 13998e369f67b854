"""Detection of objects from a factory that others hold as well, such as ``model=lambda: model``.

A fleet takes the bytes of a job's model away. It therefore trains modules that nobody else holds, and copies of others.
It detects other holders as a garbage collector does: it counts the references that come from the model's own objects.
An object with more references than those is held elsewhere.
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
    """Return the module in ``box``, or a copy with a warning if it or a part of it is held elsewhere.

    Only the box may refer to it. Raises ``ValueError`` for a module that is held elsewhere and cannot be copied.
    """
    # Not copied without need: that would double the memory of every model while it is made. Two jobs that trained one
    # module crashed PyTorch.
    # Who holds TorchScript's modules cannot be counted: they and their tensors are in C++.
    is_compiled = any(isinstance(module, torch.jit.ScriptModule) for module in box[0].modules())
    shared = held_elsewhere(box)
    if shared is None and not is_compiled:
        return box.pop()
    what = "a module that" if not shared else f"a module whose part {shared!r}"
    advice = "model=lambda: copy.deepcopy(module), or a factory that creates a new one"
    try:
        own = copy.deepcopy(box[0])
    except Exception as error:  # a part of the module may raise anything
        raise ValueError(
            f"job {job!r}: model() returned {what} is also referenced elsewhere, and it cannot be copied "
            f"({type(error).__name__}: {error}). Its bytes leave the device while other jobs train, so each call of "
            "model() must return a new module"
        ) from error
    for parameter in own.parameters() if is_compiled else ():
        if not parameter.is_leaf:  # copies of TorchScript's parameters are results of clone()
            parameter.detach_().requires_grad_()
    if is_compiled:
        return own
    warnings.warn(
        f"job {job!r}: model() returned {what} is also referenced elsewhere. The fleet trains a copy and leaves the "
        f"original unchanged. To avoid this warning: {advice}",
        SharedModelWarning,
        stacklevel=2,
    )
    return own


def held_elsewhere(box: list[nn.Module]) -> str | None:
    """Return the name of a part of the model in ``box`` that is held elsewhere.

    The name is "" for the model itself, and the result ``None`` if nothing is held elsewhere. Parts are modules,
    parameters and buffers. Only the box may refer to the model.
    """
    inside = _references_inside(box)
    parts = _parts(box)
    names = list(parts)
    for name in names:
        part = parts.pop(name)
        # Two references are ours: this variable, and the argument of getrefcount.
        if sys.getrefcount(part) - 2 > inside[id(part)]:
            return name
    return None


def _references_inside(box: list[nn.Module]) -> Counter[int]:
    """Count the references that the box and the model's own objects have to modules and tensors, by identity."""
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
    """Return what ``thing`` refers to, if it may belong to the model: no Python modules and no globals of functions."""
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
