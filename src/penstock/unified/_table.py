"""What is known of rows in a file, whatever its format."""

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
    """Of the file."""
    shape: tuple[int, ...]
    """Rows first."""
    dtype: torch.dtype
    """Of the numbers."""
    first_byte: int
    """Where row 0 begins."""
    stride_bytes: int
    """From row to row; more than a row's bytes where rows are padded."""

    is_aligned: bool = False
    """Whether it is one of our own files, with checksums."""

    @property
    def row_bytes(self) -> int:
        """Of a row without padding."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def size_bytes(self) -> int:
        """Of all rows without padding."""
        return self.shape[0] * self.row_bytes

    @property
    def end_byte(self) -> int:
        """After the last row."""
        return self.first_byte + (self.shape[0] - 1) * self.stride_bytes + self.row_bytes if self.shape[0] else 0


def check_shape(path: Path, shape: tuple[Any, ...]) -> None:
    """Raises ``FeatureFileError`` for what is no shape."""
    if not shape or not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in shape):
        refuse(path, f"its shape is {shape!r}")
    if math.prod(max(1, one) for one in shape) > 2**60:
        refuse(path, f"its shape {shape!r} has more numbers than there are bytes in the world's disks")


def refuse(path: Path, reason: str) -> NoReturn:
    """Raises ``FeatureFileError``."""
    raise FeatureFileError(f"{path} is damaged: {reason}. Write it once more, or restore it from a copy")
