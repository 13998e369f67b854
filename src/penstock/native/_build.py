"""Compiled libraries, each loaded once: those of this package, and those of generated source."""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import tempfile
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

from penstock.errors import InternalError
from penstock.native._compiler import (
    FLAGS,
    INSTALL,
    SLOWER,
    WITH_THREADS,
    WITHOUT_THREADS,
    Command,
    compile_to,
    find_compiler,
    read_source,
    say_once,
    warn_once,
    why_slower,
    with_numbers,
)

_CHECKSUM_BYTES = 32
_NAMES = ("indexes", "memory", "relational", "remat", "sampling", "sharing", "unified", "updates")


def load(name: str, *, openmp: bool = False, numbers: tuple[type[IntEnum], ...] = ()) -> ctypes.CDLL | None:
    """Return the library of this package's ``<name>.c``, compiled here or taken from the wheel, else ``None``.

    ``openmp`` compiles for this machine's own processor, with threads of PyTorch's OpenMP runtime. ``numbers`` are
    enumerations whose members the source uses by name.
    """
    return _own(name, openmp, numbers)


def compile_source(source: str, name: str, *, openmp: bool = False) -> ctypes.CDLL | None:
    """Return the library compiled from ``source``; ``None`` on a machine without a C compiler.

    Raises ``InternalError`` with the compiler's message if the source does not compile.
    """
    library = _loaded(source, name, openmp)
    if library is None:
        can_compile()
    return library


def can_compile() -> bool:
    """Whether generated source can be compiled. Warns once if it cannot."""
    if find_compiler() is not None:
        return True
    warn_once(_without_generated() if has_libraries() else why_slower())
    return False


def tell_what_is_slower(say: Callable[[str], None]) -> None:
    """Say what runs slower on this machine without compiled libraries, and how to fix it, before the user meets it.

    Says nothing if nothing is slower, or if the user was told already. Child processes then stay silent, too.
    """
    if find_compiler() is None and not has_libraries():
        say_once(why_slower(), say)


def describe_compiler() -> str:
    """Return the command of the C compiler, or what its absence costs and how to fix it."""
    compiler = find_compiler()
    if compiler is not None:
        return shlex.join(compiler)
    if has_libraries():
        return "none: this wheel contains compiled loops; relational layers run on PyTorch's operators"
    return f"none: {SLOWER}. {INSTALL}"


def has_libraries() -> bool:
    """Whether this installation contains compiled libraries, as wheels do."""
    return all(_shipped(name) for name in _NAMES)


def keep_source(source: str, name: str) -> Path:
    """Write the source to a file ``name`` in the cache, for code that reads its own source, and return the path.

    ``name`` must differ for different contents.
    """
    file = cache_folder() / name
    if not file.is_file() or file.read_bytes() != source.encode():
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            fresh = Path(folder) / name
            fresh.write_bytes(source.encode())
            _replace(fresh, file)
    return file


def _without_generated() -> str:
    return (
        "no C compiler was found (cc, gcc or clang on the path, or `$CC`), so relational layers, whose kernels are "
        f"generated, run on PyTorch's operators: the same results, several times slower. {INSTALL}."
    )


@functools.cache
def _own(name: str, openmp: bool, numbers: tuple[type[IntEnum], ...]) -> ctypes.CDLL | None:
    refused = ""
    try:
        source = read_source(Path(__file__).parent / f"{name}.c")
        library = _loaded(with_numbers(source, numbers), name, openmp)
        if library is not None:
            return library
    except (InternalError, OSError) as error:  # such as a compiler without the headers of the C library
        refused = " ".join(str(error).split())[:300]
    file = _shipped(name)
    if file is not None:
        return _opened(file)
    warn_once(why_slower(refused))
    return None


def _shipped(name: str) -> Path | None:
    """Return the library that the wheel contains, if any."""
    file = Path(__file__).parent / f"{name}.so"
    return file if file.is_file() else None


@functools.lru_cache(maxsize=256)
def _loaded(source: str, name: str, openmp: bool) -> ctypes.CDLL | None:
    compiler = find_compiler()
    if compiler is None:
        return None
    if not openmp:
        return ctypes.CDLL(str(_compiled(compiler, FLAGS, source, name)))
    try:
        return _opened(_compiled(compiler, (*FLAGS, "-march=native", *WITH_THREADS), source, name))
    except (InternalError, OSError):
        return ctypes.CDLL(str(_compiled(compiler, (*FLAGS, "-march=native", *WITHOUT_THREADS), source, name)))


def _opened(file: Path) -> ctypes.CDLL:
    """Open a library that names no OpenMP runtime.

    PyTorch makes the names of its own runtime global. If it does not, they are made global here. A second runtime in
    the process would cost milliseconds on small calls.
    """
    try:
        return ctypes.CDLL(str(file))
    except OSError:
        for runtime in _runtimes():
            ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(file))


def _runtimes() -> list[str]:
    """Return the OpenMP runtimes that this process has loaded."""
    paths = dict.fromkeys(
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line
    )
    return [path for path in paths if Path(path).name.startswith(("libgomp", "libiomp5", "libomp"))]


def _compiled(compiler: Command, flags: tuple[str, ...], source: str, name: str) -> Path:
    """Return the library's file in the cache, by content, and compile it if it is missing or damaged."""
    processor = _processor() if "-march=native" in flags else ""
    key = hashlib.sha256("\0".join([source, *compiler, *flags, processor]).encode()).hexdigest()[:24]
    file = cache_folder() / f"{name}-{key}.so"
    if not is_whole(file):
        _compile(compiler, flags, source, name, file)
    return file


def is_whole(file: Path) -> bool:
    """Whether the file is intact. A damaged one would be executed.

    Its last bytes are its own checksum.
    """
    if not file.is_file():
        return False
    raw = file.read_bytes()
    return hashlib.sha256(raw[:-_CHECKSUM_BYTES]).digest() == raw[-_CHECKSUM_BYTES:]


def seal(library: Path) -> None:
    """Append the checksum that ``is_whole`` checks.

    Loaders read the parts that the headers name, and ignore the end of the file.
    """
    raw = library.read_bytes()
    library.write_bytes(raw + hashlib.sha256(raw).digest())


def _compile(compiler: Command, flags: tuple[str, ...], source: str, name: str, file: Path) -> None:
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        fresh = Path(folder) / file.name
        compile_to(compiler, flags, source, name, fresh)
        seal(fresh)
        _replace(fresh, file)  # a concurrent process that compiles the same replaces it with the same


def _replace(fresh: Path, file: Path) -> None:
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    fresh.replace(file)


def cache_folder() -> Path:
    """Return a folder that only this user can write to, since its contents are executed."""
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
    """Return the properties of the processor on which ``-march=native`` depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(next((line for line in lines if line.startswith(what)), "") for what in ("model name", "flags"))
