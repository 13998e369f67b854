"""The result of a command: a document for programs, a view of it for people, and an exit code."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass
from enum import IntEnum

from rich.console import Console


class ExitCode(IntEnum):
    """The exit code of a command."""

    GOOD = 0
    FAILED = 1
    """The run failed, or one of its jobs."""
    MISUSE = 2
    """The command does not take these arguments; typer uses the same code."""
    NO_BUDGET = 3
    """A budget that cannot be met."""
    INTERRUPTED = 130
    """Ctrl-C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of a command."""

    data: object
    """The document for ``--json``: dataclasses, mappings, lists, numbers, text."""
    show: Callable[[Console], None]
    """Prints it as tables or sentences."""
    exit_code: ExitCode = ExitCode.GOOD
    """The exit code; a failed job or a refused budget gives an answer too."""


def as_json(data: object) -> str:
    """Return one JSON document. Numbers that are not finite become ``null``; values unknown to JSON become text."""
    return json.dumps(_plain(data), indent=2, default=str)


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
