"""What a command gives back: one document for programs, a view of it for people, and an exit code."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass
from enum import IntEnum

from rich.console import Console


class ExitCode(IntEnum):
    """What every command ends with."""

    GOOD = 0
    FAILED = 1
    """The run failed, or one of its jobs."""
    MISUSE = 2
    """The command does not take these arguments; typer says so."""
    NO_BUDGET = 3
    """A budget that cannot be met."""
    INTERRUPTED = 130
    """Ctrl-C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of a command."""

    data: object
    """For ``--json``: dataclasses, mappings, lists, numbers, text."""
    show: Callable[[Console], None]
    """Prints it as tables or sentences."""
    exit_code: ExitCode = ExitCode.GOOD
    """With a failed job or a refused budget there is an answer all the same."""


def as_json(data: object) -> str:
    """One JSON document; what is not finite becomes ``null``, and what JSON does not know becomes text."""
    return json.dumps(_plain(data), indent=2, default=str)


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
