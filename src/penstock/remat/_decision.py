"""The decision on a storage, and the outcome of a simulation: numbers that `native/remat.c` uses by the same names.

They are written only here: the C source is compiled below them (`penstock.native.load`). This file imports nothing but
the standard library, since `hatch_build.py` runs it where PyTorch is missing.
"""

import warnings
from enum import EnumType, IntEnum
from typing import TYPE_CHECKING

_RENAMED = {"RECOMPUTE_EACH_TIME": "RECOMPUTE_PER_GROUP", "RECOMPUTE_EVERY_TIME": "RECOMPUTE_PER_USE"}
"""Old names of decisions, with the new ones. They work until version 0.2."""


class _TakesOldNames(EnumType):
    """A kind of enumeration whose members are also found by their old names."""

    if not TYPE_CHECKING:  # otherwise mypy would accept any name

        def __getattr__(cls, name):
            if name not in _RENAMED:
                raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
            return super().__getitem__(_current(name))

        def __getitem__(cls, name):
            return super().__getitem__(_current(name))


def _current(name: str) -> str:
    """Return the name that a decision has today, and warn if ``name`` is an old one."""
    if name not in _RENAMED:
        return name
    text = f"Decision.{name} is now called Decision.{_RENAMED[name]}; the old name works until version 0.2"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    return _RENAMED[name]


class Decision(IntEnum, metaclass=_TakesOldNames):
    """The treatment of a forward storage after its last use in forward."""

    KEEP = 0
    """Stay until the last use in backward."""
    RECOMPUTE = 1
    """Drop, compute again when backward needs it, and hold until the last operator that needs it."""
    RECOMPUTE_PER_GROUP = 2
    """Like ``RECOMPUTE``, but drop again whenever the next operator that needs it is far away."""
    SWAP = 3
    """Leave the device over a lane, and be back when backward needs it."""
    RECOMPUTE_PER_USE = 4
    """Drop again after each operator that needs it."""

    @property
    def recomputes(self) -> bool:
        """Whether it is dropped in forward."""
        return self not in (Decision.KEEP, Decision.SWAP)


class Outcome(IntEnum):
    """The outcome of a compiled simulation."""

    DONE = 0
    """The step was simulated."""
    ENDLESS = 1
    """The decisions recompute more than the limit allows."""
    NO_MEMORY = 2
    """The system refused memory for the simulation itself."""


NUMBERS_OF_C = (Decision, Outcome)
"""The enumerations that `native/remat.c` shares."""
