"""Old names of the public interface, which work for one more minor version and warn (docs/stability.md)."""

import sys
import warnings
from collections.abc import Mapping
from typing import Any


def keep_old_names(module: str, names: Mapping[str, str]) -> None:
    """Let ``module`` find what ``names`` renames, old to new, also under the old name, with a `DeprecationWarning`.

    A map calls it on one line: ``keep_old_names(__name__, {"Old": "New"})``.
    """

    def find(name: str) -> Any:  # any: whatever has the new name
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is now called {module}.{names[name]}", DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], names[name])

    # Set here, not in the map: a type checker that sees a module's `__getattr__` admits every misspelled name.
    vars(sys.modules[module])["__getattr__"] = find
