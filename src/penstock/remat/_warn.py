"""Warnings that point at the user's line, no matter how deep in PyTorch the step is."""

import sys
import warnings

_PASSED = ("penstock", "torch", "contextlib", "functools")
"""Packages whose frames are skipped."""


def _is_passed(module: str) -> bool:
    """Whether to skip a module's frames. Generated code has no module name."""
    return not module or module.partition(".")[0] in _PASSED


def warn(text: str, category: type[Warning]) -> None:
    """Warn at the innermost line that belongs neither to Penstock nor to PyTorch."""
    # A fixed stacklevel would point into Dynamo, whose depth differs between versions and calls.
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _is_passed(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
