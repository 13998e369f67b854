"""Where a table lies in a file: .npy, .safetensors, raw numbers, and our own aligned rows."""

import ast
import math
import os
import struct
from pathlib import Path
from typing import Any

import torch

from penstock.errors import FeatureFileError
from penstock.files import check_is_file, parse_json
from penstock.unified._aligned import MAGIC, read_header
from penstock.unified._table import Table, check_shape, refuse
from penstock.units import format_bytes

_NPY = b"\x93NUMPY"
_MOST_HEADER_BYTES = 100 * 2**20
_MOST_NPY_BYTES = 2**16
"""A literal of Python is read from it, which takes memory and depth."""
_NPY_TYPES = {
    "f2": torch.float16, "f4": torch.float32, "f8": torch.float64, "i1": torch.int8, "i2": torch.int16,
    "i4": torch.int32, "i8": torch.int64, "u1": torch.uint8, "b1": torch.bool, "c8": torch.complex64,
    "c16": torch.complex128,
}  # fmt: skip
_SAFETENSORS_TYPES = {
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "I8": torch.int8,
    "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def find_table(
    path: str | os.PathLike[str],
    key: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    shape: tuple[int, ...] | None = None,
    offset: int = 0,
) -> Table:
    """Reads a file's header. ``key`` names a tensor of a .safetensors file; ``dtype`` and ``shape`` describe raw ones.

    Raises ``FeatureFileError`` for a file that is damaged, too short or of no known kind, ``ValueError`` for arguments
    that do not go with it, and what ``open`` raises.
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
            if not shape or any(not isinstance(one, int) or one < 0 for one in shape) or offset < 0:
                raise ValueError(
                    f"a table's shape has rows first and no negative numbers, not {shape} at byte {offset}"
                )
            row = math.prod(shape[1:]) * dtype.itemsize
            found = Table(path=path, shape=tuple(shape), dtype=dtype, first_byte=offset, stride_bytes=row)
        elif begin[:6] == _NPY:
            found = _npy(path, file, begin)
        elif begin == MAGIC:
            found = read_header(path, file).table
        elif path.suffix == ".safetensors":
            found = _safetensors(path, file, begin, key, size)
        else:
            raise FeatureFileError(
                f"{path} is no .npy, .safetensors or penstock file. For raw numbers give their type and shape: "
                "dtype=torch.float32, shape=(num_rows, width)"
            )
    if found.end_byte > size:
        raise FeatureFileError(
            f"{path} is cut short: {found.shape} of {found.dtype} end at byte {found.end_byte}, the file at byte {size}"
        )
    return found


class _KeyMissing(ValueError):
    """Of a file that is whole."""


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
        raise ValueError(f"{path} holds numbers of type {name!r}, which are not numbers that PyTorch reads as they are")
    dtype = _NPY_TYPES[name[1:]]
    row = math.prod(shape[1:]) * dtype.itemsize
    return Table(path=path, shape=shape, dtype=dtype, first_byte=file.tell(), stride_bytes=row)


def _safetensors(path: Path, file: Any, begin: bytes, key: str | None, size: int) -> Table:
    length = int.from_bytes(begin, "little")
    if len(begin) < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
        refuse(path, f"its header claims {format_bytes(length)} of a file of {format_bytes(size)}")
    try:
        header = parse_json(file.read(length), "the header")
        names = [name for name in header if name != "__metadata__"]
        if key is None and len(names) == 1:
            key = names[0]
        if key not in names:
            raise _KeyMissing(
                f"{path} holds the tensors {', '.join(sorted(names)[:20])}; name one: from_file(path, key=...)"
            )
        entry = header[key]
        dtype, shape = _SAFETENSORS_TYPES.get(entry["dtype"]), tuple(entry["shape"])
        begins, ends = entry["data_offsets"]
        check_shape(path, shape)
        if not (isinstance(begins, int) and isinstance(ends, int) and 0 <= begins <= ends):
            refuse(path, f"its offsets are {begins!r} and {ends!r}")
    except (FeatureFileError, _KeyMissing):
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        refuse(path, f"its header cannot be read ({error})")
    if dtype is None:
        raise ValueError(f"{path} holds {key!r} as {entry['dtype']}, which rows are not read of")
    if ends - begins != math.prod(shape) * dtype.itemsize:
        refuse(path, f"{key!r} of {shape} has {ends - begins} bytes")
    row = math.prod(shape[1:]) * dtype.itemsize
    return Table(path=path, shape=shape, dtype=dtype, first_byte=8 + length + begins, stride_bytes=row)
