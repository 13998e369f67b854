"""Compiling and loading C sources, each once per content."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

from penstock.errors import InternalError, PenstockWarning

_FLAGS = ("-O3", "-std=c11", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-ffp-contract=off")
"""Results must not depend on the compiler: no fused multiply-add, no fast math."""
_FLAGS_WITH_THREADS = ("-march=native", "-fopenmp", "-fno-math-errno", "-Wno-unused-function", "-Wno-unused-variable")
"""The runtime is found by its name, libgomp.so.1: PyTorch's own, which is loaded already."""


_CHECKSUM_BYTES = 32


def load(name: str, *, openmp: bool = False) -> ctypes.CDLL | None:
    """The compiled ``<name>.c`` of this package; ``None`` on a machine without a C compiler.

    ``openmp``: for this machine's own processor and with threads, those of PyTorch's OpenMP runtime.
    """
    return _loaded(_source(name), name, openmp)


def compile_source(source: str, name: str, *, openmp: bool = False) -> ctypes.CDLL | None:
    """The library compiled from ``source``; ``None`` on a machine without a C compiler.

    Raises ``InternalError`` with the compiler's message where the source is refused.
    """
    return _loaded(source, name, openmp)


def keep_source(source: str, name: str) -> Path:
    """The source as a file of that name in the cache, for what reads its own source; ``name`` tells contents apart."""
    file = _cache() / name
    if not file.is_file() or file.read_bytes() != source.encode():
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            made = Path(folder) / name
            made.write_bytes(source.encode())
            _replace(made, file)
    return file


def _replace(made: Path, file: Path) -> None:
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    made.replace(file)


@functools.cache
def _source(name: str) -> str:
    return (Path(__file__).parent / f"{name}.c").read_text()


@functools.lru_cache(maxsize=256)
def _loaded(source: str, name: str, openmp: bool) -> ctypes.CDLL | None:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        _warn_once()
        return None
    flags = [*_FLAGS, *(_FLAGS_WITH_THREADS if openmp else ())]
    key = hashlib.sha256("\0".join([source, compiler, *flags, _processor() if openmp else ""]).encode()).hexdigest()[
        :24
    ]
    file = _cache() / f"{name}-{key}.so"
    if not _is_whole(file):
        _compile(compiler, flags, source, name, file)
    return ctypes.CDLL(str(file))


def _is_whole(file: Path) -> bool:
    """Whether it is what was compiled: a damaged one would be executed. Its last bytes are its own checksum."""
    if not file.is_file():
        return False
    raw = file.read_bytes()
    return hashlib.sha256(raw[:-_CHECKSUM_BYTES]).digest() == raw[-_CHECKSUM_BYTES:]


def _compile(compiler: str, flags: list[str], source: str, name: str, file: Path) -> None:
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        text, made = Path(folder) / f"{name}.c", Path(folder) / file.name
        text.write_text(source)
        outcome = subprocess.run(
            [compiler, *flags, "-o", str(made), str(text), "-lm"], capture_output=True, text=True, check=False
        )
        if outcome.returncode:
            raise InternalError(f"{compiler} refuses {name}.c: {outcome.stderr.strip()}")
        raw = made.read_bytes()
        made.write_bytes(raw + hashlib.sha256(raw).digest())  # loaders read what the headers name, and not the end
        _replace(made, file)  # whoever compiles the same at once replaces it with the same


def _cache() -> Path:
    """A folder that only this user can write to, since what lies in it is executed."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "native"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder
    except OSError:
        pass
    return _folder_of_this_process()


@functools.cache
def _folder_of_this_process() -> Path:
    return Path(tempfile.mkdtemp(prefix="penstock-native-"))


@functools.cache
def _processor() -> str:
    """What ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(next((line for line in lines if line.startswith(what)), "") for what in ("model name", "flags"))


@functools.cache
def _warn_once() -> None:
    warnings.warn(
        "no C compiler was found (cc, gcc or clang on PATH, or $CC): loops that are compiled elsewhere run in Python, "
        "which is correct and slower. Installing gcc is enough.",
        PenstockWarning,
        stacklevel=4,
    )
