"""Checks of the paths that a user names, before a command begins.

A `PathUse` stands next to the typer option in the annotation of a command's parameter; `_command` checks the path.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import PenstockError


@dataclass(frozen=True, slots=True, kw_only=True)
class PathUse:
    """The use that a command makes of a path."""

    check: Callable[[str, Path], object]
    """Takes the option's name and the path; raises ``PenstockError`` if the path cannot be used in this way."""


def check_directory(name: str, path: Path) -> str:
    """Raise ``PenstockError`` unless ``path`` is a directory in which a tier can create its file.

    Returns the kind of memory if the directory is in main memory, such as ``"tmpfs"``, and otherwise an empty text.
    """
    from penstock.directio import SpillFile  # loads PyTorch

    try:
        spill = SpillFile(path)
    except OSError as error:
        raise PenstockError(f"{name}: {error.strerror or error}") from error
    spill.close()
    return spill.memory_kind


def check_spill(name: str, path: Path) -> None:
    """Raise ``PenstockError`` unless tensors can be moved to ``path``; without a GPU it must not be in main memory."""
    from penstock.devices import accelerators  # loads PyTorch

    kind = check_directory(name, path)
    if kind and not accelerators():
        raise PenstockError(
            f"{name} must be on a disk, got {path}, which is main memory ({kind}): without a GPU that is the device "
            f"itself, and nothing would leave it. Give a directory on an SSD; `penstock probe --disk DIRECTORY` shows "
            "what one is"
        )


def check_folder(name: str, path: Path) -> None:
    """Raise ``PenstockError`` unless the folder exists or can be created, and files can be created in it."""
    why = _trouble(path)
    if why:
        raise PenstockError(
            f"{name} must be a folder that can be written, got {path}: {why}. Give another one, such as {name} results"
        )


def check_output(name: str, path: Path) -> None:
    """Raise ``PenstockError`` if the file cannot be written."""
    why = "it is a folder" if path.is_dir() else _trouble(path.parent)
    if why:
        raise PenstockError(
            f"{name} must be a file that can be written, got {path}: {why}. Give another one, such as"
            f" {name} results/{path.name}"
        )


def _trouble(folder: Path) -> str:
    """Return why no file can be created in a folder, which need not exist yet; empty if one can."""
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
    """Raise ``PenstockError`` if the path does not exist or is a folder."""
    if path.is_dir():
        raise PenstockError(f"{name} must be a file, got the folder {path}")
    if not path.exists():
        raise PenstockError(f"{name} must be a file, got {path}: there is no such file below {Path.cwd()}")


PROBED = PathUse(check=check_directory)
"""A directory to measure."""
SPILLS = PathUse(check=check_spill)
"""A directory to offload to."""
FOLDER = PathUse(check=check_folder)
"""A folder for results, created if it is missing."""
OUTPUT = PathUse(check=check_output)
"""A file for results."""
INPUT = PathUse(check=check_input)
"""A file to read."""
