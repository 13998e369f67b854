"""Storages whose memory is refused, with a message, to whoever asks for it: see ``guard.cpp``."""

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import PenstockError
from penstock.native._extension import compile_extension

if TYPE_CHECKING:
    import torch


def can_refuse() -> bool:
    """Return whether memory can be refused: where there is a C++ compiler."""
    return _library() is not None


def refuse_memory(storage: "torch.UntypedStorage", message: str) -> bool:
    """Let whoever asks for the memory of a storage get a ``RuntimeError``; return whether that is possible."""
    library = _library()
    if library is None:
        return False
    library.penstock_refuse(storage._cdata, message.encode())
    return True


def allow_memory(storage: "torch.UntypedStorage") -> None:
    """Undo `refuse_memory`."""
    library = _library()
    if library is not None:
        library.penstock_allow(storage._cdata)


def address_of(storage: "torch.UntypedStorage") -> int:
    """Return the address of a storage's memory, also if it is refused; 0 without memory."""
    try:
        return storage.data_ptr()
    except RuntimeError:
        library = _library()
        return 0 if library is None else int(library.penstock_address(storage._cdata) or 0)


@functools.cache
def _library() -> ctypes.PyDLL | None:
    import torch  # which takes a second, and commands that need none import this

    source = Path(__file__).parent / "guard.cpp"
    flags = (
        *("-O1", "-std=c++20", "-w", f"-I{Path(torch.__file__).parent / 'include'}"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    )
    try:
        # These exchange a pointer: whoever lets other threads go on meanwhile waits for them afterwards.
        library = ctypes.PyDLL(str(compile_extension(source, flags, versions=torch.__version__)))
    except (PenstockError, OSError):
        return None
    library.penstock_refuse.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    library.penstock_allow.argtypes = library.penstock_address.argtypes = [ctypes.c_void_p]
    library.penstock_refuse.restype = library.penstock_allow.restype = None
    library.penstock_address.restype = ctypes.c_void_p
    return library
