"""Reading of small files that a crash, a disk or a person may have changed; an error names the file. And the cache.

Nothing in them is executed, and no pipe or device is waited for.
"""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

__all__ = ["cache_folder", "check_is_file", "parse_json", "read_json", "read_text"]


def check_is_file(path: str | os.PathLike[str]) -> None:
    """Raise ``ValueError`` for a pipe, a socket or a device, which may never end, and ``OSError`` as ``open`` does."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} must be a file, not a pipe, a socket or a device; copy its contents into a file")


def cache_folder() -> Path:
    """Return the folder of the user's that keeps what can be made again. Raises ``RuntimeError`` without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


def read_text(path: Path) -> str:
    """Return the text of a file. Raises ``ValueError`` with its name if it is not UTF-8 or no file, and ``OSError``."""
    check_is_file(path)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: byte {error.start} is {error.object[error.start]:#x}") from None


def read_json(path: Path) -> Any:  # any: what JSON holds
    """Return the JSON value in a file. Raises ``ValueError`` with its name if it is not JSON, and ``OSError``."""
    return parse_json(read_text(path), path)


def parse_json(text: str | bytes, source: object) -> Any:  # any: what JSON holds
    """Return the JSON value of ``text``. Raises ``ValueError`` with ``source`` if it is invalid or too deep."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} is not valid JSON: {error}") from None
