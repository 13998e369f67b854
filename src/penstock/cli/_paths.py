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

    check: Callable[[str, Path], object]
    """From the option's name and the path; raises ``PenstockError`` for one that cannot be used so."""


def check_directory(name: str, path: Path) -> str:
    """Raise ``PenstockError`` for what is no directory in which a tier can make its file.

    Returns what it is if it is main memory, such as ``"tmpfs"``.
    """
    from penstock.directio import SpillFile  # which loads PyTorch

    try:
        spill = SpillFile(path)
    except OSError as error:
        raise PenstockError(f"{name}: {error.strerror or error}") from error
    spill.close()
    return spill.memory_kind


def check_spill(name: str, path: Path) -> None:
    """Raise ``PenstockError`` for what is no directory to spill to, on a CPU also for one that is main memory."""
    from penstock.devices import accelerators  # which loads PyTorch

    kind = check_directory(name, path)
    if kind and not accelerators():
        raise PenstockError(
            f"{name} must be on a disk, got {path}, which is main memory ({kind}): without a GPU that is the device "
            f"itself, and nothing would leave it. Give a directory on an SSD; `penstock probe --disk DIRECTORY` shows "
            "what one is"
        )


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


PROBED = PathUse(check=check_directory)
"""A directory to look at."""
SPILLS = PathUse(check=check_spill)
"""A directory to spill to."""
FOLDER = PathUse(check=check_folder)
"""A folder for results, made where it is missing."""
OUTPUT = PathUse(check=check_output)
"""A file for results."""
INPUT = PathUse(check=check_input)
"""A file to read."""
