"""A description of rows in a file, for every format."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from penstock.errors import FeatureFileError


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows in a file."""

    path: Path
    """Path of the file."""
    shape: tuple[int, ...]
    """Shape of the table, rows first."""
    dtype: torch.dtype
    """Dtype of the numbers."""
    first_byte: int
    """Offset of row 0."""
    stride_bytes: int
    """Bytes from row to row; more than a row's bytes if rows are padded."""

    is_aligned: bool = False
    """Whether it is a Penstock file, with checksums."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row without padding."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows without padding."""
        return self.shape[0] * self.row_bytes

    @property
    def end_byte(self) -> int:
        """Offset of the end of the last row."""
        return self.first_byte + (self.shape[0] - 1) * self.stride_bytes + self.row_bytes if self.shape[0] else 0


def check_shape(path: Path, shape: tuple[Any, ...]) -> None:
    """Raise ``FeatureFileError`` for an invalid shape."""
    if not shape or not all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in shape):
        refuse(path, f"its shape is {shape!r}")
    if math.prod(max(1, size) for size in shape) > 2**60:
        refuse(path, f"its shape {shape} has more numbers than any disk can hold")


def refuse(path: Path, reason: str) -> NoReturn:
    """Raise ``FeatureFileError`` for a damaged file."""
    raise FeatureFileError(f"{path} is damaged: {reason}. Write it again, or restore it from a copy")
