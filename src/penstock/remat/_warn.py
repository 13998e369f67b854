"""Warnings that point at the user's line, however deep in PyTorch the step is."""

import sys
import warnings

_PASSED = ("penstock", "torch", "contextlib", "functools")
"""Packages whose frames are passed over."""


def _is_passed(module: str) -> bool:
    """Generated code has no name."""
    return not module or module.partition(".")[0] in _PASSED


def warn(text: str, category: type[Warning]) -> None:
    """Warns, at the innermost line that is neither ours nor PyTorch's."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _is_passed(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
