"""The machine's C compiler: how to find it and call it, and what its absence costs."""

import os
import re
import shlex
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterable
from enum import IntEnum
from pathlib import Path

from penstock.errors import InternalError, PenstockWarning

Command = tuple[str, ...]
"""A program and its first arguments."""

FLAGS = ("-O3", "-std=c11", "-Wall", "-Wextra", "-Werror", "-fPIC", "-ffp-contract=off")
"""Compiler flags. Results must not depend on the compiler: no fused multiply-add, no fast math."""
WITH_THREADS = ("-fopenmp", "-fno-math-errno", "-Wno-unused-function", "-Wno-unused-variable")
"""Flags for threads. No OpenMP runtime is linked: names resolve to PyTorch's own, whatever its file is called."""
WITHOUT_THREADS = ("-fopenmp-simd", "-Wno-unknown-pragmas", "-Wno-unused-parameter", *WITH_THREADS[1:])
"""Flags for when PyTorch's runtime lacks functions that the compiler calls, as with clang and GCC's runtime."""

INSTALL = "Install gcc (apt-get install gcc libc6-dev; dnf install gcc; conda install -c conda-forge gcc)"
SLOWER = (
    "planning (remat) takes about 30 times as long, reading rows from disk (unified) 20 times, sampling neighbors and "
    "relational layers 3 times"
)
"""The cost of a missing compiler, as docs/design/native.md measures it."""
_TOLD = "PENSTOCK_TOLD_OF_COMPILER"
"""Name of a process variable that is set once the user was told, so that child processes do not repeat it."""


def find_compiler() -> Command | None:
    """Return the C compiler: ``$CC``, or the first of cc, gcc and clang on the path; ``None`` without one."""
    if named := shlex.split(os.environ.get("CC", "")):
        return tuple(named) if shutil.which(named[0]) else None
    path = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    return (path,) if path else None


def compile_to(compiler: Command, flags: tuple[str, ...], source: str, name: str, file: Path) -> None:
    """Compile ``source`` into the library ``file``. Raise ``InternalError`` with the compiler's message if it fails."""
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        text, compiled, linked = (Path(folder) / f"{name}.{kind}" for kind in ("c", "o", "so"))
        text.write_text(source)
        for arguments in (
            [*flags, "-c", "-o", str(compiled), str(text)],
            ["-shared", "-pthread", "-o", str(linked), str(compiled), "-lm"],
        ):
            outcome = subprocess.run([*compiler, *arguments], capture_output=True, text=True, check=False)
            if outcome.returncode:
                raise InternalError(f"{shlex.join(compiler)} cannot compile {name}.c: {outcome.stderr.strip()}")
        linked.replace(file)


def read_source(file: Path) -> str:
    """Return the text of a C file, with the headers that lie beside it in their places."""
    source = file.read_text()

    def header(include: re.Match[str]) -> str:
        text, line = (file.parent / include[1]).read_text(), source.count("\n", 0, include.end()) + 1
        return f'#line 1 "{include[1]}"\n{text}#line {line} "{file.name}"\n'

    return re.sub(r'^#include "(.+)"\n', header, source, flags=re.MULTILINE)


def with_numbers(source: str, numbers: Iterable[type[IntEnum]]) -> str:
    """Return ``source`` below the members of Python's enumerations, so that the numbers are written only there."""
    enums = [f"enum {{ {', '.join(f'{member.name} = {member.value}' for member in kind)} }};" for kind in numbers]
    return "\n".join([*enums, "#line 1", source]) if enums else source  # errors name the lines of the file


def why_slower(refused: str = "") -> str:
    """Return what runs slower without compiled libraries, and what to do. ``refused`` is the compiler's message."""
    named = os.environ.get("CC", "")
    tried = f"`$CC` names {named!r}, which is not a program" if named else "none of cc, gcc and clang is on the path"
    first = f"the C compiler does not work: {refused}" if refused else f"no C compiler was found ({tried})"
    return (
        f"{first}. Results are the same, but slower: {SLOWER}. {INSTALL}, or a wheel of Penstock, which contains "
        "these loops compiled (pip install --only-binary penstock penstock)."
    )


def say_once(message: str, say: Callable[[str], None]) -> None:
    """Say it, unless this process or the one that started it has told the user.

    A command says it once, and its child processes do not.
    """
    if not os.environ.get(_TOLD):
        os.environ[_TOLD] = "1"
        say(message)


def warn_once(message: str) -> None:
    """Warn once, under the same condition as `say_once`."""
    say_once(message, lambda text: warnings.warn(text, PenstockWarning, stacklevel=5))
