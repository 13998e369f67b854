"""Compilation of a C++ extension of Python into the same cache."""

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import PenstockError
from penstock.native._build import cache_folder, is_whole, seal
from penstock.native._compiler import Command


def find_cpp_compiler() -> Command | None:
    """Return the command of the C++ compiler: ``$CXX``, or the first of c++, g++ and clang++; ``None`` without one."""
    if named := shlex.split(os.environ.get("CXX", "")):
        return tuple(named) if shutil.which(named[0]) else None
    path = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    return (path,) if path else None


def compile_extension(source: Path, flags: Sequence[str], *, versions: str) -> Path:
    """Compile ``source`` and the headers next to it into a module of its name, once for each content and ``versions``.

    Raises ``PenstockError`` if there is no C++ compiler, or with the compiler's message if it fails.
    """
    compiler = find_cpp_compiler()
    if compiler is None:
        raise PenstockError("no C++ compiler was found (c++, g++ or clang++ on the path, or `$CXX`)")
    texts = [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]
    key = hashlib.sha256("\0".join([*compiler, *flags, versions, *texts]).encode()).hexdigest()[:24]
    file = cache_folder() / key / f"{source.stem}.so"
    if not is_whole(file):
        file.parent.mkdir(exist_ok=True)
        _compile([*compiler, "-shared", "-fPIC", str(source), *flags], file)  # libraries must come last
    return file


def _compile(command: list[str], file: Path) -> None:
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        fresh = Path(folder) / file.name
        outcome = subprocess.run([*command, "-o", str(fresh)], capture_output=True, text=True, check=False)
        if outcome.returncode:
            raise PenstockError(f"{command[0]} cannot compile {file.stem}: {outcome.stderr.strip()[:2000]}")
        seal(fresh)
        fresh.replace(file)
