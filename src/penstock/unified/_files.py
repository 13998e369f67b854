"""Finding a table in a file: .npy, .safetensors, raw numbers, and our own aligned rows."""

import ast
import math
import os
import struct
from pathlib import Path
from typing import Any

import torch

from penstock import tensorfiles
from penstock.errors import FeatureFileError
from penstock.files import check_is_file
from penstock.unified._aligned import MAGIC, read_header
from penstock.unified._table import Table, check_shape, refuse
from penstock.units import format_bytes

_NPY = b"\x93NUMPY"
_MOST_NPY_BYTES = 2**16
"""Largest .npy header that is read: parsing its Python literal takes memory and recursion depth."""
_NPY_TYPES = {
    "f2": torch.float16, "f4": torch.float32, "f8": torch.float64, "i1": torch.int8, "i2": torch.int16,
    "i4": torch.int32, "i8": torch.int64, "u1": torch.uint8, "b1": torch.bool, "c8": torch.complex64,
    "c16": torch.complex128,
}  # fmt: skip


def find_table(
    path: str | os.PathLike[str],
    key: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    shape: tuple[int, ...] | None = None,
    offset: int = 0,
) -> Table:
    """Read a file's header and return the table in it.

    ``key`` names a tensor of a .safetensors file; ``dtype``, ``shape`` and ``offset`` describe raw numbers.

    Raises ``FeatureFileError`` for a file that is damaged, too short or of unknown format, ``ValueError`` for arguments
    that do not fit the file, and what ``open`` raises.
    """
    path = Path(path)
    check_is_file(path)
    with path.open("rb") as file:
        begin, size = file.read(8), os.fstat(file.fileno()).st_size
        if dtype is not None or shape is not None:
            if dtype is None or shape is None or key is not None:
                raise ValueError(
                    "raw numbers need dtype= and shape=, and no key: from_file(path, dtype=..., shape=...)"
                )
            if not shape or any(not isinstance(length, int) or length < 0 for length in shape) or offset < 0:
                raise ValueError(
                    "`shape` must begin with the number of rows and hold no negative numbers, and `offset` must be at "
                    f"least 0, got {shape} and {offset}"
                )
            row = math.prod(shape[1:]) * dtype.itemsize
            table = Table(path=path, shape=tuple(shape), dtype=dtype, first_byte=offset, stride_bytes=row)
        elif begin[:6] == _NPY:
            table = _npy(path, file, begin)
        elif begin == MAGIC:
            table = read_header(path, file).table
        elif path.suffix == ".safetensors":
            table = _safetensors(path, file, key, size)
        else:
            raise FeatureFileError(
                f"{path} is not a .npy, .safetensors or penstock file. If it holds raw numbers, give their type and "
                "shape: dtype=torch.float32, shape=(num_rows, width)"
            )
    if table.end_byte > size:
        raise FeatureFileError(
            f"{path} is cut short: {table.shape} of {table.dtype} should end at byte {table.end_byte}, but the file "
            f"ends at byte {size}"
        )
    return table


def _npy(path: Path, file: Any, begin: bytes) -> Table:
    try:
        long = begin[6] > 1
        (length,) = struct.unpack("<I" if long else "<H", file.read(4 if long else 2))
        if length > _MOST_NPY_BYTES:
            refuse(path, f"its header claims {format_bytes(length)}")
        header = ast.literal_eval(file.read(length).decode("latin1"))
        order, name, shape = header["fortran_order"], header["descr"], tuple(header["shape"])
        check_shape(path, shape)
    except (
        struct.error,
        ValueError,
        SyntaxError,
        KeyError,
        TypeError,
        IndexError,
        MemoryError,
        RecursionError,
    ) as error:
        refuse(path, f"its header cannot be read ({error})")
    if order and len(shape) > 1:
        raise ValueError(f"{path} holds columns one after the other (Fortran order); save np.ascontiguousarray(array)")
    if not isinstance(name, str) or name[:1] == ">" or name[1:] not in _NPY_TYPES:
        raise ValueError(f"{path} holds numbers of type {name!r}, which PyTorch cannot read as they are")
    dtype = _NPY_TYPES[name[1:]]
    row = math.prod(shape[1:]) * dtype.itemsize
    return Table(path=path, shape=shape, dtype=dtype, first_byte=file.tell(), stride_bytes=row)


def _safetensors(path: Path, file: Any, key: str | None, size: int) -> Table:
    file.seek(0)
    try:
        entries = tensorfiles.read_header(file, size)
    except ValueError as error:
        refuse(path, str(error))
    if key is None and len(entries) == 1:
        (key,) = entries
    if key not in entries:
        raise ValueError(
            f"{path} holds the tensors {', '.join(sorted(entries)[:20])}; choose one of them: from_file(path, key=...)"
        )
    entry = entries[key]
    check_shape(path, entry.shape)
    if entry.dtype is None:
        raise ValueError(f"{path} holds {key!r} as {entry.type_name}, a type that rows cannot have")
    row = math.prod(entry.shape[1:]) * entry.dtype.itemsize
    return Table(path=path, shape=entry.shape, dtype=entry.dtype, first_byte=entry.first_byte, stride_bytes=row)
