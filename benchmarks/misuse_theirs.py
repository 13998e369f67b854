"""Where PyTorch's or Python's own error says it better, and values that are taken although an annotation excludes them.

Every entry has its reason.
"""

import re
from typing import NamedTuple


class Theirs(NamedTuple):
    """Errors of others that stand as they are."""

    public: str
    """Regular expression for the public name, methods included."""
    parameter: str
    """The same for the argument."""
    text: str
    """The same for the error's type and message."""
    reason: str
    """Why ours would say no more."""


_DEVICE = "PyTorch lists the devices that there are"
THEIRS: list[Theirs] = [
    Theirs(".*", "device", r"RuntimeError: (Expected one of|Invalid device|Device index|Expected |Cannot access)", _DEVICE),
    Theirs(".*", ".*", r"TypeError: .*(missing \d+ required|unexpected keyword argument|positional argument)",
           "Python names the argument that is missing or unknown"),
    Theirs(".*", ".*", r"(FileNotFoundError|NotADirectoryError|IsADirectoryError|PermissionError|FileExistsError): "
           r"\[Errno \d+\] .*'.*'", "the system names the path, and what is wrong with it"),
    Theirs(".*", ".*", r"TypeError: cannot pickle", "Python names the class that cannot be pickled"),
]  # fmt: skip

ENDLESS: frozenset[tuple[str, str, str]] = frozenset()
"""Calls that do what they are asked for longer than anybody waits: public name, parameter, value."""

ACCEPTED: dict[tuple[str, str], str] = {}
"""Values that are taken although the annotation excludes them: public name and parameter, and why."""


def reason_for(error: BaseException, file: str, public: str, parameter: str, value: str) -> str:
    """Why an error of others stands; empty where it does not."""
    text = f"{type(error).__name__}: {error}"
    for one in THEIRS:
        if re.fullmatch(one.public, public) and re.fullmatch(one.parameter, parameter) and re.match(one.text, text):
            return one.reason
    return ""
