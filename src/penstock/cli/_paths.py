"""Paths that a user names: whether a command can use them, found out before it begins.

A `PathUse` stands beside the typer option in the annotation of a command's parameter; `_command` checks what was given.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import PenstockError


@dataclass(frozen=True, slots=True, kw_only=True)
class PathUse:
    """What a command does with a path."""

    check: Callable[[str, Path], None]
    """From the option's name and the path; raises ``PenstockError`` for one that cannot be used so."""


def check_spill(name: str, path: Path) -> None:
    """Raise ``PenstockError`` for what is no directory in which a tier can make its file."""
    from penstock.directio import SpillFile  # which loads PyTorch

    try:
        SpillFile(path).close()
    except OSError as error:
        raise PenstockError(f"{name}: {error}") from error


def check_folder(name: str, path: Path) -> None:
    """Raise ``PenstockError`` for a folder that is neither there nor can be made, or in which no file can be made."""
    why = _trouble(path)
    if why:
        raise PenstockError(
            f"{name} must be a folder that can be written, got {path}: {why}. Give another one, such as {name} results"
        )


def check_output(name: str, path: Path) -> None:
    """Raise ``PenstockError`` for a file that cannot be written."""
    why = "it is a folder" if path.is_dir() else _trouble(path.parent)
    if why:
        raise PenstockError(
            f"{name} must be a file that can be written, got {path}: {why}. Give another one, such as"
            f" {name} results/{path.name}"
        )


def _trouble(folder: Path) -> str:
    """Why no file can be made in a folder, which need not exist yet; empty if one can be."""
    place = folder
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
        if not place.is_dir():
            return f"{place} is a file"
        tempfile.TemporaryFile(dir=place).close()
    except (OSError, ValueError) as error:
        return f"no file can be made in {place} ({getattr(error, 'strerror', None) or error})"
    return ""


def check_input(name: str, path: Path) -> None:
    """Raise ``PenstockError`` for what is not there, and for a folder."""
    if path.is_dir():
        raise PenstockError(f"{name} must be a file, got the folder {path}")
    if not path.exists():
        raise PenstockError(f"{name} must be a file, got {path}: there is no such file below {Path.cwd()}")


SPILLS = PathUse(check=check_spill)
"""A directory to spill to."""
FOLDER = PathUse(check=check_folder)
"""A folder for results, made where it is missing."""
OUTPUT = PathUse(check=check_output)
"""A file for results."""
INPUT = PathUse(check=check_input)
"""A file to read."""
