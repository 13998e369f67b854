"""Conversion of batches to flat lists of tensors, and back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Structure:
    """The structure of a nest of tuples, lists and dicts: all of it except its tensors."""

    rebuild: Callable[[Sequence[torch.Tensor]], Any]
    """A function that builds the nest from the tensors."""
    signature: tuple[Any, ...]  # hashable
    """A key that is equal for batches which differ only in the values of their tensors."""


def flatten(batch: Any) -> tuple[list[torch.Tensor], Structure]:  # any: a nest
    """Return the tensors of ``batch`` in order, and its structure: nested tuples, lists and mappings, other leaves."""
    tensors: list[torch.Tensor] = []
    rebuild, signature = _walk(batch, tensors)
    return tensors, Structure(rebuild, signature)


def _walk(thing: Any, tensors: list[torch.Tensor]) -> tuple[Callable[[Sequence[torch.Tensor]], Any], tuple[Any, ...]]:
    if isinstance(thing, torch.Tensor):
        index = len(tensors)
        tensors.append(thing)
        layout = thing.stride() if thing.layout is torch.strided else str(thing.layout)
        return lambda tensors: tensors[index], ("tensor", tuple(thing.shape), layout, str(thing.dtype))
    if isinstance(thing, Mapping):
        keys = list(thing)
        parts = [_walk(thing[key], tensors) for key in keys]
        return (
            lambda tensors: {key: part[0](tensors) for key, part in zip(keys, parts, strict=True)},
            ("dict", tuple(map(str, keys)), tuple(part[1] for part in parts)),
        )
    if isinstance(thing, tuple | list):
        parts = [_walk(part, tensors) for part in thing]
        make = type(thing)
        if hasattr(thing, "_fields"):
            return lambda tensors: make(*(part[0](tensors) for part in parts)), (
                "tuple",
                tuple(part[1] for part in parts),
            )
        return lambda tensors: make(part[0](tensors) for part in parts), ("list", tuple(part[1] for part in parts))
    if thing is None or isinstance(thing, bool | int | float | str | bytes | torch.dtype | torch.device):
        return lambda _: thing, ("constant", repr(thing))
    raise TypeError(
        "a batch may hold only tensors, numbers and strings in tuples, lists and dicts, but this one holds a "
        f"{type(thing).__name__}. Yield its tensors from data(): {{'x': batch.x, 'y': batch.y}}"
    )
