"""A working call of every public name, from which the campaign derives its misuses.

A public name is one that a room's ``__init__.py`` maps. Each is in exactly one of three tables: `USES` (how it is
called, and what proves that it worked), `RECORDS` (classes that Penstock returns and users do not create) or `UNCALLED`
(names that are not callable, each with a reason). `missing` lists the names in none of them.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.soak_case import Case

ROOMS = (
    "offload", "remat", "fleet", "unified", "relational", "tiers", "probe", "devices", "advisor", "report",
    "testing", "integrations",
)  # fmt: skip
Arguments = dict[str, Any]


class Wrong(Exception):
    """The error for numbers that differ from plain PyTorch's, or for a call that does not do what it promises."""


class Told(Exception):
    """An error that was reported, not raised, as a fleet reports why a job failed; only its text is judged."""


def require(holds: object, what: str) -> None:
    """Raise `Wrong` unless the condition holds."""
    if not holds:
        raise Wrong(what)


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A working call."""

    call: Callable[..., Any]
    """The callable: the public name itself, or, to test methods, a function that creates the object."""
    good: Callable[[Case], Arguments]
    """Working arguments by parameter, created for each case; those of ``*name`` are under ``"*name"``."""
    check: Callable[[Any, Arguments], object] = lambda _result, _arguments: None
    """Uses the result, compares it with plain PyTorch and closes it. Raises `Wrong`."""
    methods: Mapping[str, Callable[[Any], Arguments]] = field(default_factory=dict)
    """Functions from the object to working arguments, for methods that need arguments."""
    close: Callable[[Any], object] = lambda result: result.close() if callable(getattr(result, "close", None)) else None
    """Closes the created object."""
    made_by: str = ""
    """The maker of a class that users do not call; its own parameters are then not misused."""
    skips: frozenset[str] = frozenset()
    """Methods that a machine without CUDA cannot call, or that belong to a subclass's author."""


USES: dict[str, Use] = {}
RECORDS: dict[str, Callable[[], Any]] = {}
UNCALLED: dict[str, str] = {}
SCENES: dict[str, Callable[[Case], object]] = {}
"""Misuses that no signature shows, by room and action."""


def scene(name: str) -> Callable[[Callable[[Case], object]], Callable[[Case], object]]:
    """Register a function in `SCENES`."""

    def put(function: Callable[[Case], object]) -> Callable[[Case], object]:
        SCENES[name] = function
        return function

    return put


def public_names(room: str) -> dict[str, Any]:
    """Return the names that a room maps, with their objects."""
    module = importlib.import_module(f"penstock.{room}")
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and getattr(value, "__module__", "penstock.").startswith("penstock.")
    }


def public_methods(kind: type) -> list[str]:
    """Return the methods of a class of ours, including operators such as ``[...]``."""
    own = [base for base in kind.__mro__ if base.__module__.startswith("penstock.")]
    return sorted({name for owner in own for name in vars(owner) if _is_method(kind, name)})


def public_properties(kind: type) -> list[str]:
    own = [base for base in kind.__mro__ if base.__module__.startswith("penstock.")]
    names = {name for owner in own for name in vars(owner) if not name.startswith("_")}
    return sorted(name for name in names if isinstance(inspect.getattr_static(kind, name), property))


_OPERATORS = ("__getitem__", "__call__", "__len__", "__iter__")


def _is_method(kind: type, name: str) -> bool:
    value = inspect.getattr_static(kind, name)
    if isinstance(value, classmethod | staticmethod):
        return not name.startswith("_")
    return inspect.isfunction(value) and (not name.startswith("_") or name in _OPERATORS)


def missing() -> list[str]:
    """Return public names and methods for which no table says how they are called."""
    load()
    result = []
    for room in ROOMS:
        for name, value in public_names(room).items():
            full = f"{room}.{name}"
            if sum(full in table for table in (USES, RECORDS, UNCALLED)) != 1:
                result.append(full)
            elif full in USES and inspect.isclass(value):
                result += [f"{full}.{method}" for method in _unknown_methods(USES[full], value)]
    return result


def _unknown_methods(use: Use, kind: type) -> Iterator[str]:
    for method in public_methods(kind):
        if method not in use.methods and method not in use.skips and needs_arguments(kind, method):
            yield method


def needs_arguments(kind: type, method: str) -> bool:
    """Return whether a method cannot be called without arguments."""
    bound = isinstance(inspect.getattr_static(kind, method), classmethod | staticmethod)
    parameters = list(inspect.signature(getattr(kind, method)).parameters.values())[0 if bound else 1 :]
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(parameter.default is parameter.empty and parameter.kind not in optional for parameter in parameters)


def load() -> None:
    """Fill the tables."""
    for name in (
        "engine",
        "tiers",
        "graphs",
        "fleets",
        "others",
        "scenes",
        "scenes_remat",
        "scenes_graphs",
        "scenes_fleets",
    ):
        importlib.import_module(f"benchmarks.misuse_{name}")
