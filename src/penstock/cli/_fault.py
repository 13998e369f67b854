"""The description of an exception in one paragraph: the command, what happened, and where in the user's own code."""

import os
import re
import sysconfig
import traceback
from pathlib import Path

from penstock.cli._answer import ExitCode
from penstock.errors import BudgetError, InternalError, PenstockError

_MOST_CHARACTERS = 400
_QUOTED = re.compile(r'File "([^"]+)", line (\d+)')
_OURS = Path(__file__).resolve().parents[1]
_OTHERS = {Path(sysconfig.get_paths()[name]).resolve() for name in ("stdlib", "purelib", "platlib")}


class Misuse(PenstockError):
    """Arguments that a command does not take."""


def exit_code_of(error: Exception) -> ExitCode:
    """Return 2 for misuse, 3 for a budget that cannot be met, and otherwise 1."""
    if isinstance(error, Misuse):
        return ExitCode.MISUSE
    return ExitCode.NO_BUDGET if isinstance(error, BudgetError) else ExitCode.FAILED


def explain(error: Exception, command: str) -> str:
    """Return ``error`` as a paragraph: our own errors as they are, others with their class and place."""
    message = _words_of(error) if _speaks(error) else named(error)
    if isinstance(error, InternalError):
        message += ". This is a bug in Penstock: please report it"
    mark = "" if message.endswith((".", "!", "?")) else "."
    return f"{command}: {message}{mark} With --debug there is a traceback."


def named(error: BaseException) -> str:
    """Return ``"KeyError: 'x' (train.py, line 7)"``: the innermost line outside of Penstock, PyTorch and Python.

    If there is no such line, the innermost one in Penstock is named.
    """
    frames = traceback.extract_tb(error.__traceback__)
    places = [(frame.filename, frame.lineno) for frame in frames]
    places += _QUOTED.findall(str(error))  # compilers put the line of the user's code into the text
    theirs = [place for place in places if not _is_inside(place[0], _OURS, *_OTHERS)]
    ours = [place for place in places if _is_inside(place[0], _OURS)]
    where = "".join(f" ({file}, line {number})" for file, number in (theirs or ours)[-1:])
    line = " ".join(str(error).split())  # one line, of the pages that compilers and CUDA write
    if len(line) > _MOST_CHARACTERS:
        line = f"{line[:_MOST_CHARACTERS]}..."
    return f"{type(error).__name__}: {line}{where}"


def _words_of(error: Exception) -> str:
    """Return the error's text, without the system's error number and with the file first."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    if error.filename is None:
        return error.strerror
    return f"{os.fsdecode(error.filename)} cannot be used: {error.strerror[:1].lower()}{error.strerror[1:]}"


def _speaks(error: Exception) -> bool:
    """Whether the text alone is clear: our own error, the system's about a file, or ours about an argument."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, PenstockError):
        return True
    if not frames or not all(_is_inside(frame.filename, _OURS, *_OTHERS) for frame in frames):
        return False
    if isinstance(error, OSError) and error.filename is not None:
        return True
    return isinstance(error, ValueError | TypeError | OSError) and _is_inside(frames[-1].filename, _OURS)


def _is_inside(file: str, *folders: Path) -> bool:
    if file.startswith("<"):  # made at run time, or frozen into Python
        return True
    path = Path(file).resolve()
    return any(path.is_relative_to(folder) for folder in folders)
