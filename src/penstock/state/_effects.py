"""The effect of an operator on storages, derived from its schema."""

from dataclasses import dataclass
from typing import Any

_OVERWRITE = ("zero_", "fill_", "copy_", "normal_", "uniform_")
"""Operators that overwrite a tensor without reading it."""
_VIEWS = ("_unsafe_view", "_reshape_alias")
"""Views that schemas do not declare as views."""
_RUNNING = ("running_mean", "running_var")


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of an operator, by its schema."""

    is_alias: bool
    """Whether its result is the same tensor."""
    is_view: bool
    """Whether it reads no bytes. Its page is fetched all the same, since it needs a storage of the right size."""
    writes: frozenset[int | str]
    """Arguments that it writes to, by position and by name."""
    overwrites: bool
    """Whether it does not read what it writes to."""
    is_of_lists: bool
    """Whether it does the same to each tensor of a list."""
    makes_new: bool
    """Whether it may make new storages."""


_effects: dict[int, tuple[Any, Effect]] = {}
"""Effects by the identity of operators, which hash slowly. The operator is kept too, so its identity stays valid."""


def effect_of(func: Any) -> Effect:
    """Return the effect of an operator, which is derived once."""
    known = _effects.get(id(func))
    if known is None:
        known = _effects[id(func)] = (func, _derived(func))
    return known[1]


def _derived(func: Any) -> Effect:
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator needs all its arguments
        return Effect(False, False, frozenset(), False, False, True)
    name = schema.name.split("::")[-1]
    writes: set[int | str] = set()
    for place, argument in enumerate(schema.arguments):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written or (argument.name in _RUNNING and "batch_norm" in name):  # its schema does not say so
            writes |= {place, argument.name}
    return Effect(
        is_alias=name in ("detach", "alias", "lift_fresh"),
        is_view=not writes
        and (name in _VIEWS or all(declared.alias_info is not None for declared in schema.returns))
        and bool(schema.returns),
        writes=frozenset(writes),
        overwrites=name in _OVERWRITE or name == "_foreach_zero_",
        is_of_lists=name.startswith(("_foreach_", "_amp_foreach_", "_fused_"))
        and str(schema.arguments[0].type) == "List[Tensor]"  # not so _fused_dropout, _fused_rms_norm, QAT's observers
        and len(schema.returns) <= 1  # _fused_adam returns several lists
        and (not name.startswith("_foreach_addc") or schema.overload_name != "Tensor"),  # one tensor has all scalars
        makes_new=name not in _VIEWS and any(declared.alias_info is None for declared in schema.returns),
    )
