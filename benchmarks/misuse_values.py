"""Values that are wrong for most arguments, and a check of whether an annotation admits a value."""

import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import torch
from torch import nn

POOL: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "-1": lambda: -1,
    "0": lambda: 0,
    "1.5": lambda: 1.5,
    "NaN": lambda: math.nan,
    "infinity": lambda: math.inf,
    "2**70": lambda: 2**70,
    "True": lambda: True,
    "''": lambda: "",
    "'12 potatoes'": lambda: "12 potatoes",
    "b'raw'": lambda: b"raw",
    "[]": list,
    "{}": dict,
    "[None]": lambda: [None],
    "{'potatoes': 12}": lambda: {"potatoes": 12},
    "an object": object,
    "a function": lambda: lambda *_, **__: None,
    "a class": lambda: int,
    "a tensor": lambda: torch.ones(3),
    "an empty tensor": lambda: torch.empty(0, dtype=torch.int64),
    "a module": lambda: nn.Linear(2, 2),
    "a generator": lambda: (number for number in (1, 2)),
}
QUICK = ("None", "-1", "'12 potatoes'", "an object")


def fits(annotation: Any, value: Any) -> bool:
    """Return whether a value has the type that an annotation names, as far as known; NaN fits no number."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, str):
        return True  # a type from a library imported only for type checkers
    if annotation in (inspect.Parameter.empty, Any, object) or isinstance(annotation, typing.TypeVar):
        return True
    if annotation is None or annotation is type(None):
        return value is None
    if origin in (Union, types.UnionType):
        return any(fits(part, value) for part in parts)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin in (Callable, typing.Callable) or (origin is not None and origin.__name__ == "Callable"):
        return callable(value)
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if annotation is bool:
        return isinstance(value, bool) or (type(value) is int and value in (0, 1))
    return _fits_class(origin or annotation, parts, value)


def _fits_class(kind: Any, parts: tuple[Any, ...], value: Any) -> bool:
    if not isinstance(kind, type):
        return True
    if getattr(kind, "_is_protocol", False):
        return kind is Iterable or not isinstance(value, int | float | str | list | dict | None)
    if issubclass(kind, Path.__mro__[1]) or kind.__name__ == "PathLike":
        return isinstance(value, Path)
    if not isinstance(value, kind) or (isinstance(value, str | bytes) and kind is not type(value)):
        return False
    if issubclass(kind, tuple | list | Sequence) and parts:
        inner = parts[0]
        return all(fits(inner, item) for item in value)
    if issubclass(kind, Mapping) and len(parts) == 2:
        return all(fits(parts[0], key) and fits(parts[1], item) for key, item in value.items())
    return True


def annotations_of(function: Any) -> dict[str, Any]:
    """Return annotations by parameter, as text if they cannot be resolved here."""
    try:
        return typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
    except (NameError, TypeError, AttributeError):
        return {name: parameter.annotation for name, parameter in inspect.signature(function).parameters.items()}
