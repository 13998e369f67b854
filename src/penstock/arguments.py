"""Checks of arguments against their annotations, so that an error names the wrong argument where it was passed.

An annotation says what a parameter accepts. `checked` checks every call of a function, and `check_fields` the values of
a dataclass. A value of exactly one of the annotated types costs a lookup in a set (60 ns); all other values are looked
at more closely. Types that are imported only for type checkers admit everything, as do ``Any`` and type variables.
"""

import collections.abc
import functools
import inspect
import math
import numbers
import os
import types
import typing
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import chain, islice
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

__all__ = ["check_fields", "checked", "must_be", "renamed", "warn_renamed"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MOST_ELEMENTS = 1000
"""The most elements of a long list that are checked."""
_LARGEST = 2**63 - 1
_ANYTHING = ("anything",)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_MOST_SHOWN = 60
"""The most characters of a value in a message."""


class AdmittedValues(NamedTuple):
    """The values that an annotation admits."""

    exact: frozenset[type]
    """Types whose values need no further check."""
    admits: Callable[[Any], bool]  # any: whatever was given
    """A function that says whether a value is admitted."""
    words: tuple[str, ...]
    """Descriptions for a message, such as "an int" or "text"."""


def checked(example: str, **least: float) -> Callable[[_Function], _Function]:
    """Check the arguments of a function, of a method or of ``__init__`` at every call.

    ``example`` is a call that works, for the message; ``least`` gives the smallest value of some parameters. The
    function then raises ``TypeError`` for a value of another type than annotated, and ``ValueError`` for a word that a
    ``Literal`` does not list, for NaN, for an ``int`` of more than 63 bits, and for a number below its smallest value.
    """

    def decorated(function: _Function) -> _Function:
        parameters = list(inspect.signature(function).parameters.values())
        names = [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL]
        # filled at the first call, since names in annotations may not exist before
        admitted: dict[str, AdmittedValues] = {}

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:  # any: the function's own
            if not admitted:
                admitted.update(_admitted_by_name(function))
            by_position = zip(names, arguments, strict=False)
            for name, value in chain(by_position, keywords.items()) if keywords else by_position:
                values, kind = admitted.get(name), type(value)
                # an int of the right type may still have too many bits
                if values is not None and (kind not in values.exact or kind is int or name in least):
                    _check(name, value, values, least.get(name), example)
            return function(*arguments, **keywords)

        return typing.cast("_Function", call)

    return decorated


def renamed(**names: str) -> Callable[[_Function], _Function]:
    """Accept keyword arguments by their earlier names as well, with a ``DeprecationWarning``: ``old="new"``.

    The function then raises ``TypeError`` if an argument is given by both names.
    """

    def decorated(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:  # any: the function's own
            for old, new in names.items():
                if old in keywords:
                    if new in keywords:
                        raise TypeError(f"`{old}` is the earlier name of `{new}`; give `{new}` alone")
                    warn_renamed(old, new, stacklevel=3)
                    keywords[new] = keywords.pop(old)
            return function(*arguments, **keywords)

        return typing.cast("_Function", call)

    return decorated


def warn_renamed(old: str, new: str, *, stacklevel: int = 2) -> None:
    """Warn that a name was used under which something is known for one more minor version only."""
    warnings.warn(
        f"`{old}` is now called `{new}`; the earlier name works for one more minor version",
        DeprecationWarning,
        stacklevel=stacklevel,
    )


def check_fields(thing: Any, example: str, **least: float) -> None:  # any: a dataclass
    """Check the fields of a dataclass, from its ``__post_init__``. Raises what a function that is `checked` raises."""
    admitted = _FIELDS.get(type(thing))
    if admitted is None:
        by_name = _admitted_by_name(type(thing))
        admitted = _FIELDS[type(thing)] = {field.name: by_name[field.name] for field in fields(thing)}
    for name, values in admitted.items():
        value = getattr(thing, name)
        if name in least or type(value) is int or type(value) not in values.exact:
            _check(name, value, values, least.get(name), example)


def must_be(name: str, words: str, value: object, example: str) -> TypeError:
    """Return the error for an argument of a wrong type."""
    return TypeError(f"`{name}` must be {words}, got {_shown(value)}: {example}")


def _check(name: str, value: Any, admitted: AdmittedValues, least: float | None, example: str) -> None:
    if type(value) not in admitted.exact and not admitted.admits(value):
        if isinstance(value, float) and math.isnan(value) and admitted.admits(0.0):
            raise ValueError(f"`{name}` must be a number, got nan: {example}")
        words = _joined(admitted.words)
        if isinstance(value, str) and "'" in words:
            raise ValueError(f"`{name}` must be {words}, got {value!r}: {example}")
        raise must_be(name, words, value, example)
    if isinstance(value, int) and abs(value) > _LARGEST and admitted.words != _ANYTHING:
        raise ValueError(f"`{name}` must be a number of at most 63 bits, got {value}: {example}")
    if least is not None and isinstance(value, int | float) and value < least:
        raise ValueError(f"`{name}` must be at least {least:g}, got {value!r}: {example}")


def _shown(value: object) -> str:
    kind = type(value)
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, types.FunctionType):
        return f"the function {value.__name__}"
    if type(value).__module__ != "builtins":
        return f"an object of {kind.__module__}.{kind.__qualname__}"
    text = repr(value)
    return f"{text if len(text) <= _MOST_SHOWN else f'{text[:_MOST_SHOWN]}...'} ({kind.__name__})"


_FIELDS: dict[type, Mapping[str, AdmittedValues]] = {}
"""The values that fields admit, of dataclasses that were checked before."""


def _admitted_by_name(function: Callable[..., Any]) -> Mapping[str, AdmittedValues]:
    """Return what parameters, or fields of a dataclass, admit."""
    try:
        hints = typing.get_type_hints(function)
    except NameError:  # a library that is imported only for type checkers
        hints = _resolvable(function)
    return {name: _admitted(hint) for name, hint in hints.items() if name != "return"}


def _resolvable(function: Callable[..., Any]) -> dict[str, Any]:
    names = vars(inspect.getmodule(function))
    resolved = {}
    for name, hint in function.__annotations__.items():
        try:
            resolved[name] = eval(hint, dict(names)) if isinstance(hint, str) else hint  # noqa: S307  # our own source
        except NameError:
            resolved[name] = Any
    return resolved


def _admitted(hint: Any) -> AdmittedValues:  # any: an annotation
    """Return what one annotation admits."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint in (Any, object) or isinstance(hint, TypeVar | str):
        return AdmittedValues(frozenset(), lambda _: True, _ANYTHING)
    if origin in (Union, types.UnionType):
        return _any_of([_admitted(part) for part in _joined_mappings(parts)])
    if origin is Literal:
        words = tuple(map(repr, parts))
        return AdmittedValues(
            frozenset(), lambda value: any(type(value) is type(word) and value == word for word in parts), words
        )
    if hint in _PLAIN:
        return _PLAIN[hint]
    kind = origin or hint
    if kind is Callable:
        return AdmittedValues(frozenset((types.FunctionType,)), callable, ("a function",))
    if kind is type:
        return AdmittedValues(frozenset(), lambda value: isinstance(value, type), ("a class",))
    if kind is os.PathLike:
        return AdmittedValues(frozenset(), lambda value: isinstance(value, os.PathLike), ("a path",))
    if getattr(kind, "_is_protocol", False) and not issubclass(kind, Iterable):
        return _protocol(kind)
    return _container(kind, parts) if issubclass(kind, Iterable) and parts else _instance(kind)


def _joined_mappings(parts: tuple[Any, ...]) -> list[Any]:  # any: annotations
    """Join mappings with several types of keys into one mapping that may have all of them."""
    mappings = [get_args(part) for part in parts if get_origin(part) is collections.abc.Mapping]
    if len(mappings) < 2:
        return list(parts)
    union: Any = Union  # any: types that are made here
    keys, values = (union[tuple(mapping[place] for mapping in mappings)] for place in (0, 1))
    joined: Any = Mapping
    return [*(part for part in parts if get_origin(part) is not collections.abc.Mapping), joined[keys, values]]


def _any_of(parts: Sequence[AdmittedValues]) -> AdmittedValues:
    exact = frozenset[type]().union(*(part.exact for part in parts))
    words = tuple(dict.fromkeys(word for part in parts for word in part.words))
    return AdmittedValues(exact, lambda value: any(part.admits(value) for part in parts), words)


def _joined(words: Sequence[str]) -> str:
    words = sorted(words, key=lambda word: word == "None")
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    if type(value) is float:  # by far the most
        return not math.isnan(value)
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and not math.isnan(value)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool) or type(value).__name__ == "bool" or (type(value) is int and value in (0, 1))


_PLAIN: dict[Any, AdmittedValues] = {  # any: an annotation
    type(None): AdmittedValues(frozenset((type(None),)), lambda value: value is None, ("None",)),
    None: AdmittedValues(frozenset((type(None),)), lambda value: value is None, ("None",)),
    bool: AdmittedValues(frozenset((bool,)), _is_flag, ("True or False",)),
    int: AdmittedValues(frozenset((int,)), _is_int, ("an int",)),
    float: AdmittedValues(frozenset((int,)), _is_number, ("a number",)),  # a float may be NaN, so it is looked at
    str: AdmittedValues(frozenset((str,)), lambda value: isinstance(value, str), ("text",)),
}


def _instance(kind: type) -> AdmittedValues:
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{_public_module(kind)}.{kind.__qualname__}"
    article = "an" if name[0] in "aeiou" else "a"
    return AdmittedValues(frozenset((kind,)), lambda value: isinstance(value, kind), (f"{article} {name}",))


def _public_module(kind: type) -> str:
    """Return the module where users find a class: ``penstock.tiers``, not ``penstock.tiers._budget``."""
    parts = kind.__module__.split(".")
    private = next((place for place, part in enumerate(parts) if part.startswith("_")), len(parts))
    return ".".join(parts[:private]).removesuffix(".modules.module")


def _protocol(kind: type) -> AdmittedValues:
    names = [name for base in kind.__mro__ for name in vars(base) if not name.startswith("_")]
    words = f"an object with {_joined([f'{name}()' for name in names])}".replace(" or ", " and ")

    def admits(value: Any) -> bool:
        return not isinstance(value, type) and all(hasattr(value, name) for name in names)

    return AdmittedValues(frozenset(), admits, (words,))


def _container(kind: type, parts: tuple[Any, ...]) -> AdmittedValues:  # any: annotations
    if issubclass(kind, Mapping):
        key, inner = _admitted(parts[0]), _admitted(parts[1])
        words = "a dict" if len(inner.words) > 1 or inner.words == _ANYTHING else f"a dict of {_many(inner.words[0])}"
        return AdmittedValues(
            frozenset(),
            lambda value: isinstance(value, kind) and _all(key, value) and _all(inner, value.values()),
            (words,),
        )
    if kind is tuple and parts[-1] is not Ellipsis:
        elements = [_admitted(part) for part in parts]
        words = f"a tuple ({', '.join(_joined(element.words) for element in elements)})"
        return AdmittedValues(frozenset(), lambda value: _is_record(value, elements), (words,))
    inner = _admitted(parts[0])
    name = "a tuple" if kind is tuple else "a list"
    words = name if len(inner.words) > 1 or inner.words == _ANYTHING else f"{name} of {_many(inner.words[0])}"

    def admits(value: Any) -> bool:
        if isinstance(value, str | bytes) or not isinstance(value, kind):
            return False
        return _all(inner, value) if isinstance(value, Collection) and not isinstance(value, range) else True

    return AdmittedValues(frozenset(), admits, (words,))


def _many(words: str) -> str:
    """Return the plural of a description: ``ints`` for ``an int``."""
    return words if words == "text" else f"{words.removeprefix('an ').removeprefix('a ')}s"


def _is_record(value: Any, elements: Sequence[AdmittedValues]) -> bool:
    return isinstance(value, tuple) and len(value) == len(elements) and all(map(_admits, elements, value))


def _admits(admitted: AdmittedValues, value: Any) -> bool:
    return type(value) in admitted.exact or admitted.admits(value)


def _all(admitted: AdmittedValues, values: Collection[Any]) -> bool:
    try:
        return all(_admits(admitted, value) for value in islice(values, _MOST_ELEMENTS))
    except TypeError:  # such as a tensor without dimensions
        return False
