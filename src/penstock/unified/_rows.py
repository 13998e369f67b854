"""Reading rows of a table in host memory on all cores: copied, or widened from the type they are stored in."""

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import torch

from penstock.storages import address, as_plain
from penstock.unified._library import library, threads_for

_KINDS = {torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}
"""Stored types that are widened to float32, with the C library's number for each; 0 means copy."""


_FEW_ROWS = 4_096
"""Number of rows up to which PyTorch's own kernel is as fast as ours, and sooner called."""


class CResult(ctypes.Structure):
    """The ``Result`` struct of native/unified.c."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("stride_bytes", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("scale", ctypes.c_void_p),
        ("kind", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True, eq=False)
class RowType:
    """The type of stored rows, and the type they are read as."""

    shape: tuple[int, ...]
    """Shape of a row."""
    stored: torch.dtype
    """Dtype of the stored numbers."""
    dtype: torch.dtype
    """Dtype of the numbers in results: the stored one, or float32."""
    scale: torch.Tensor | None = None
    """Factors for integers, ``float32 [width]`` in host memory; ``None`` if there are none."""

    @staticmethod
    def of(
        shape: tuple[int, ...], stored: torch.dtype, dtype: torch.dtype | None, scale: torch.Tensor | float | None
    ) -> "RowType":
        """Return a checked row type. Raises ``ValueError`` for an unsupported conversion."""
        dtype = dtype or (torch.float32 if scale is not None else stored)
        width = math.prod(shape)
        if dtype is stored and scale is None:
            return RowType(shape, stored, dtype)
        if dtype is not torch.float32 or stored not in _KINDS:
            raise ValueError(
                f"rows of {stored} cannot be read as {dtype}; float16, bfloat16 and int8 (with scale=...) can be read "
                "as torch.float32. Convert the rows after reading them: features[index].to(...)"
            )
        if (scale is not None) != (stored is torch.int8):
            raise ValueError(
                f"rows of {stored} cannot be read {'with' if scale is not None else 'without'} scale=: int8 needs a "
                "scale, one number or one for each column, for instance scale=torch.full((width,), 0.05); other types "
                "take none"
            )
        if scale is not None:
            scale = as_plain("scale", torch.as_tensor(scale)).to(device="cpu", dtype=torch.float32)
            if scale.numel() not in (1, width):
                raise ValueError(f"`scale` must have one number or {width}, one for each column, got {scale.numel()}")
            scale = scale.reshape(-1).expand(width).contiguous()
        return RowType(shape, stored, dtype, scale)

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored row."""
        return self.width * self.stored.itemsize

    @property
    def is_converted(self) -> bool:
        """Whether results have another dtype."""
        return self.stored is not self.dtype

    def into(self, out: torch.Tensor) -> CResult:
        """Return ``out``, ``[rows, *shape]`` and contiguous, as a struct for the C library."""
        width, kind = self.width, _KINDS[self.stored] if self.is_converted else 0
        return CResult(
            address(out), width * self.dtype.itemsize, width * self.stored.itemsize, width, address(self.scale), kind
        )

    def empty(self, *leading: int, device: torch.device | str = "cpu", is_pinned: bool = False) -> torch.Tensor:
        """Allocate rows; in main memory they may be pinned, so that a device copies them by itself."""
        return torch.empty((*leading, *self.shape), dtype=self.dtype, device=device, pin_memory=is_pinned)

    def convert(self, rows: torch.Tensor) -> torch.Tensor:
        """Convert stored rows ``[.., *shape]`` to the dtype in which they are read, with PyTorch."""
        rows = rows.to(self.dtype)
        return rows if self.scale is None else rows * self.scale.to(rows.device).view(self.shape)


def is_plain_table(table: torch.Tensor) -> bool:
    """Return whether rows are contiguous, so that a row is one copy."""
    if table.is_conj() or table.is_neg():
        return False
    return table.dim() > 0 and (table.is_contiguous() or (len(table) > 0 and table[0].is_contiguous()))


def as_index(index: torch.Tensor) -> torch.Tensor:
    """Return row numbers as a contiguous ``int64`` vector in host memory."""
    if index.dim() == 1 and index.dtype is torch.int64 and index.is_cpu and index.is_contiguous():
        return index  # the usual case, without four calls of PyTorch
    return index.detach().to(device="cpu", dtype=torch.int64).contiguous().view(-1)


def read_rows(table: torch.Tensor, index: torch.Tensor, kind: RowType, *, wraps: bool = True) -> torch.Tensor:
    """Return rows ``index`` (``int64`` or ``int32``, of any shape) of a plain table. Raises as ``gather`` does."""
    if (
        index.numel() <= _FEW_ROWS
        and type(table) is torch.Tensor
        and kind.stored is kind.dtype
        and index.dim() == 1
        and index.is_cpu
    ):
        try:
            return table.index_select(0, index)
        except (IndexError, RuntimeError):  # negative rows, or such as do not exist
            pass
    out = kind.empty(*index.shape)
    gather(table, as_index(index), kind, out, wraps=wraps)
    return out


def gather(
    table: torch.Tensor,
    index: torch.Tensor,
    kind: RowType,
    out: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    wraps: bool = True,
) -> None:
    """Copy rows ``index`` (``int64 [n]``, negative if it ``wraps``) of ``table`` into ``out`` (at ``positions``).

    ``table`` satisfies ``is_plain_table``; ``out`` is contiguous. Raises ``IndexError`` for a row that does not exist.
    """
    compiled = library()
    if compiled is None:
        _gather_by_torch(table, check_range(index, len(table), wraps=wraps), kind, out, positions)
        return
    num_rows, size = table.shape[0], index.shape[0]
    stride = table.stride(0) * table.element_size() if num_rows else kind.row_bytes
    bad = compiled.penstock_gather(
        address(table), num_rows, num_rows if wraps else 0, stride, address(index), address(positions), size,
        ctypes.byref(kind.into(out)), threads_for(size * kind.row_bytes),
    )  # fmt: skip
    if bad >= 0:
        raise out_of_range(int(index[bad]), bad, len(table), wraps=wraps)


def out_of_range(row: int, position: int, num_rows: int, *, wraps: bool = True) -> IndexError:
    """Return the error for a row that does not exist."""
    return IndexError(
        f"index {row} at position {position} is out of range: the table has {num_rows} rows, "
        f"{-num_rows if wraps else 0} to {num_rows - 1}"
    )


def check_range(index: torch.Tensor, num_rows: int, *, wraps: bool = True) -> torch.Tensor:
    """Return the index without negative numbers. Raises ``IndexError`` like ``gather``."""
    bad = ((index < (-num_rows if wraps else 0)) | (index >= num_rows)).nonzero()
    if len(bad):
        raise out_of_range(int(index[bad[0, 0]]), int(bad[0, 0]), num_rows, wraps=wraps)
    return torch.where(index < 0, index + num_rows, index)


def _gather_by_torch(
    table: torch.Tensor, index: torch.Tensor, kind: RowType, out: torch.Tensor, positions: torch.Tensor | None
) -> None:
    rows = kind.convert(table.index_select(0, index))
    if positions is None:
        out.copy_(rows.view(out.shape))
    else:
        out.view(-1, *kind.shape)[positions] = rows


_NO_ROW_NUMBERS = (list, tuple, range, slice, torch.Tensor, type(Ellipsis), type(None))
"""Element types for which PyTorch reads a list as a tuple of indexes."""


def as_rows(index: Any) -> torch.Tensor:
    """Convert lists, arrays and the like to row numbers or a mask. Raises ``IndexError`` for anything else."""
    if isinstance(index, list | range) and any(isinstance(part, _NO_ROW_NUMBERS) for part in index):
        raise IndexError(
            "PyTorch treats a list of lists, tensors, slices, ... or None as a tuple, which chooses single numbers, "
            "not rows: features[torch.tensor(rows)]"
        )
    try:
        return torch.as_tensor(index, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise IndexError(
            f"`index` must be a row number, a slice, a list, a mask or a tensor of row numbers, got {index!r}: "
            "features[torch.tensor([2, 0])]"
        ) from None
