"""`from_file`: tables in files as unified tensors."""

import mmap
import os
from pathlib import Path
from typing import Any

import torch

from penstock.arguments import checked
from penstock.errors import FeatureFileError
from penstock.tiers import Budget
from penstock.unified._aligned import read_all
from penstock.unified._files import find_table
from penstock.unified._memory import Memory, exact
from penstock.unified._placement import Preference
from penstock.unified._table import Table
from penstock.unified._tensor import UnifiedTensor, restored

_READ_BYTES = 16 * 2**20


@checked("penstock.unified.from_file('features.npy')", offset=0)
def from_file(
    path: str | os.PathLike[str],
    key: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    shape: tuple[int, ...] | None = None,
    offset: int = 0,
    shared: bool = False,
    prefer: Preference = "device",
    budget: Budget | None = None,
) -> UnifiedTensor:
    """Load the table of a file as a unified tensor.

    The file is .npy, .safetensors (``key``) or raw numbers (``dtype``, ``shape``, ``offset`` in bytes). By default the
    table is read into memory of exactly its size, which ``budget`` is charged for. With ``shared`` the file is mapped
    instead: all processes of the machine that do so share one copy, writes go to the file, and the tensor is pickled as
    the path. For CUDA keep such a file in ``/dev/shm``; not every system can register other files.

    Raises what ``find_table`` raises, and ``BudgetError``.
    """
    table = find_table(path, key, dtype=dtype, shape=shape, offset=offset)
    if table.stride_bytes != table.row_bytes and shared:
        raise ValueError(
            f"{path} has padded rows, which cannot be shared; TieredFeatures({str(path)!r}) reads it in place"
        )
    if shared:
        host = _mapped(table)
        options = {"key": key, "dtype": dtype, "shape": shape, "offset": offset, "shared": True}
        reference = _reopened, str(Path(path).resolve()), options
        return UnifiedTensor(host, Memory.of(host, reference), prefer)
    host = _read(table, budget)
    return UnifiedTensor(host, Memory.of(host), prefer)


def _reopened(
    path: str, options: dict[str, Any], prefer: Preference, requires_grad: bool, is_parameter: bool
) -> torch.Tensor:
    """Return a shared table that another process has pickled."""
    return restored(from_file(path, **options, prefer=prefer), requires_grad, is_parameter)


def _mapped(table: Table) -> torch.Tensor:
    if not table.size_bytes:
        return torch.empty(table.shape, dtype=table.dtype, device="cpu")
    start = table.first_byte // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    if (table.first_byte - start) % table.dtype.itemsize:
        raise ValueError(
            f"{table.path}: the table begins at byte {table.first_byte}, which is not a multiple of the size of its "
            "numbers, so it cannot be shared; read it instead: from_file(path, shared=False)"
        )
    with table.path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), table.end_byte - start, offset=start)
    raw = torch.frombuffer(mapped, dtype=torch.uint8)[table.first_byte - start :]
    return raw.view(table.dtype).view(table.shape)


def _read(table: Table, budget: Budget | None) -> torch.Tensor:
    raw = exact(table.size_bytes, budget)
    if table.stride_bytes == table.row_bytes:
        with table.path.open("rb", buffering=0) as file:
            file.seek(table.first_byte)
            _fill(table, file, raw)
    else:
        read_all(table, raw)
    return (
        raw.view(table.dtype).view(table.shape)
        if raw.numel()
        else torch.empty(table.shape, dtype=table.dtype, device="cpu")
    )


def _fill(table: Table, file: Any, raw: torch.Tensor) -> None:
    view, num_read = memoryview(raw.numpy()), 0  # type: ignore[arg-type]
    while num_read < len(view):
        count = file.readinto(view[num_read : num_read + _READ_BYTES])
        if not count:
            raise FeatureFileError(f"{table.path} ended at byte {table.first_byte + num_read} while it was read")
        num_read += count
