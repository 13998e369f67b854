"""Positions of tensors in .safetensors files, so that one tensor is read without mapping the whole file.

Format: 8 bytes with the length of a JSON header, the header, and the tensors' bytes. Source: the safetensors project.
"""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from penstock.files import check_is_file, parse_json
from penstock.units import format_bytes

__all__ = ["Entry", "TensorFiles", "read_header"]

_MOST_HEADER_BYTES = 100 * 2**20  # about the limit of the safetensors library; a damaged length may be any number
_TYPES = {
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "I8": torch.int8,
    "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """The entry of one tensor in a file."""

    dtype: torch.dtype | None
    """Dtype; ``None`` for a type that PyTorch does not have."""
    type_name: str
    """Name of the type in the file."""
    shape: tuple[int, ...]
    """Shape; empty for a single number."""
    first_byte: int
    """Position of its first byte in the file."""
    size_bytes: int
    """Number of its bytes."""


def read_header(file: BinaryIO, size: int) -> dict[str, Entry]:
    """Return the entries of a file of ``size`` bytes, read from its beginning. Raises ``ValueError`` for damage."""
    length = int.from_bytes(file.read(8), "little")
    if length > min(size - 8, _MOST_HEADER_BYTES):
        raise ValueError(f"its header claims to have {format_bytes(length)}, and the file has {format_bytes(size)}")
    try:
        header = parse_json(file.read(length), "the header")
        return {name: _entry(name, fields, 8 + length) for name, fields in header.items() if name != "__metadata__"}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its header cannot be read ({error})") from None


def _entry(name: str, fields: Mapping[str, Any], first_byte: int) -> Entry:  # any: JSON
    shape, type_name = fields["shape"], str(fields["dtype"])
    begins, ends = fields["data_offsets"]
    if not isinstance(shape, list) or not all(isinstance(number, int) and number >= 0 for number in shape):
        raise ValueError(f"the shape of {name!r} must be a list of sizes, got {shape!r}")
    if not (isinstance(begins, int) and isinstance(ends, int) and 0 <= begins <= ends):
        raise ValueError(f"the offsets of {name!r} must be ascending integers, got {begins!r} and {ends!r}")
    dtype = _TYPES.get(type_name)
    if dtype is not None and ends - begins != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name!r} of {tuple(shape)} {type_name} cannot have {ends - begins} bytes")
    return Entry(dtype, type_name, tuple(shape), first_byte + begins, ends - begins)


class TensorFiles(Mapping[str, torch.Tensor]):
    """The tensors of several files by name. Each is read on access, into memory of its own.

    Raises ``ValueError``, which names the file, for damaged files, and ``OSError``.
    """

    def __init__(self, paths: list[Path]):
        self.entries: dict[str, Entry] = {}
        self._paths: dict[str, Path] = {}
        for path in paths:
            check_is_file(path)
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                try:
                    entries = read_header(file, size)
                    ends = max((entry.first_byte + entry.size_bytes for entry in entries.values()), default=0)
                    if ends > size:
                        raise ValueError(f"it is cut short: tensors end at byte {ends}, the file at byte {size}")
                except ValueError as error:
                    raise ValueError(f"{path.name}: {error}") from None
            self.entries |= entries
            self._paths |= dict.fromkeys(entries, path)

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = self.entries[name]
        if entry.dtype is None:
            raise ValueError(f"{name} is of type {entry.type_name}, which PyTorch does not have")
        raw = np.empty(entry.size_bytes, np.uint8)
        with self._paths[name].open("rb", buffering=0) as file:
            file.seek(entry.first_byte)
            done = 0
            while done < entry.size_bytes:
                read = file.readinto(raw[done:])  # type: ignore[arg-type]
                if not read:
                    raise ValueError(f"{self._paths[name].name} is cut short")
                done += read
        if not entry.size_bytes:
            return torch.empty(entry.shape, dtype=entry.dtype)
        return torch.from_numpy(raw).view(entry.dtype).reshape(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)
