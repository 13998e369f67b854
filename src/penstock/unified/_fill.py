"""Filling the tiers of a table: where its rows come from, which files hold them, and what memory keeps."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.directio import warn_of_memory
from penstock.errors import BudgetError
from penstock.storages import as_plain
from penstock.tiers import Budget, Charges, DiskSpec
from penstock.unified._aligned import check_all, stride_for
from penstock.unified._disk import RowFiles, RowReader
from penstock.unified._files import find_table
from penstock.unified._memory import InPlace, Memory, exact
from penstock.unified._plan import TierPlan
from penstock.unified._rows import RowType, is_plain_table
from penstock.unified._share import ROW_NUMBER_BYTES, HostShare
from penstock.unified._store import HeldRows, RowStore
from penstock.unified._table import Table
from penstock.unified._tensor import UnifiedTensor
from penstock.unified._write import spill
from penstock.units import format_bytes

_FILL_BYTES = 4 * 2**20
"""Bytes of rows that are copied at once when tiers are filled."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSource:
    """The rows that a table is made from: a file's, which are read in place, or a tensor's."""

    shape: tuple[int, ...]
    """Shape of the whole table."""
    dtype: torch.dtype
    """Dtype of the stored numbers."""
    table: Table | None = None
    """Rows in a file; ``None`` for a tensor's."""
    tensor: torch.Tensor | None = None
    """Rows in host memory; ``None`` for a file's."""


def source_of(source: Any, key: str | None) -> RowSource:
    """Return the rows of a tensor or a file. Raises ``ValueError`` for other tensors, and as `find_table` does."""
    if isinstance(source, UnifiedTensor):
        tensor = source.cpu().detach().resolve_conj().resolve_neg()
    elif isinstance(source, torch.Tensor):
        if source.device.type != "cpu" or not source.dim() or source.layout is not torch.strided:
            raise ValueError(
                f"`source` must be a dense tensor [rows, ...] in host memory, got shape {tuple(source.shape)} on "
                f"{source.device}: TieredFeatures(tensor.cpu(), ...)"
            )
        tensor = as_plain("source", source).detach().resolve_conj().resolve_neg()
    else:
        table = find_table(source, key)
        return RowSource(shape=table.shape, dtype=table.dtype, table=table)
    return RowSource(shape=tuple(tensor.shape), dtype=tensor.dtype, tensor=tensor)


def open_files(
    source: RowSource,
    share: HostShare,
    disk: DiskSpec,
    account: Charges,
    *,
    verify: bool,
    progress: bool,
    alive: Callable[[], None] = lambda: None,
) -> RowFiles | None:
    """Return the file of a table, or new files with a tensor's rows; ``None`` if memory holds a tensor's rows.

    ``alive`` is called now and then while a file is verified.
    """
    if source.table is not None:
        if verify and source.table.is_aligned:  # not always: to read all rows at each start costs more than it saves
            check_all(source.table.path, alive)
        return RowFiles([source.table])
    if not share.needs_disk:
        return None
    assert source.tensor is not None
    limits = Budget(disk=disk).disk_bytes
    warn_of_memory(limits, stacklevel=6)  # who made the features, behind `checked` and `renamed`
    with _spilled(source.tensor, limits, account, progress) as tables:
        files = RowFiles(tables)  # this opens them again
    files.tables = [
        dataclasses.replace(table, path=directory / "<nameless file of rows>")
        for table, directory in zip(tables, limits, strict=True)
    ]
    return files


@contextlib.contextmanager
def _spilled(
    tensor: torch.Tensor, limits: Mapping[Path, int | None], account: Charges, progress: bool
) -> Iterator[list[Table]]:
    """Write a tensor's rows to unnamed files, one in each directory; they disappear when nobody has them open."""
    with contextlib.ExitStack() as stack:
        tables = []
        for number, (directory, limit) in enumerate(limits.items()):
            rows = tensor[number :: len(limits)]
            size_bytes = len(rows) * stride_for(rows[:1].nbytes)
            if limit is not None and size_bytes > limit:
                raise BudgetError(
                    f"{format_bytes(size_bytes)} of rows do not fit into {directory}, which may hold "
                    f"{format_bytes(limit)}: disk={{{str(directory)!r}: {size_bytes}}}, or several directories"
                )
            account.charge(str(directory), size_bytes)
            file = stack.enter_context(spill(directory, rows, progress=progress))
            tables.append(find_table(f"/proc/self/fd/{file.fileno()}"))
        yield tables


def fill(store: RowStore, tensor: torch.Tensor | None, plan: TierPlan, beside_bytes: int, account: Charges) -> None:
    """Fill the store's tiers above the disk, from ``tensor``, or from its files for ``None``.

    ``account`` is charged before memory is taken, first for ``beside_bytes``: everything except the rows.
    """
    stored = RowType(store.kind.shape, store.kind.stored, store.kind.stored)
    num_device, num_host = len(plan.device_rows), len(plan.host_rows)
    holds_all = num_host == store.num_rows
    stays = tensor is not None and num_host + num_device == store.num_rows and (holds_all or store.files is None)
    numbers = 0 if holds_all else ROW_NUMBER_BYTES * num_host
    account.charge("host", beside_bytes + numbers)
    if stays:  # used in place; nothing is copied
        assert tensor is not None
        account.charge("host", 0 if is_plain_table(tensor) else tensor.nbytes)
        host = tensor if is_plain_table(tensor) else tensor.contiguous()
    else:
        account.charge("host", num_host * plan.row_bytes)
        host = shaped(exact(num_host * plan.row_bytes), stored, num_host)
        copy_rows(store.files, tensor, plan.host_rows, host, stored)
    in_place, device, places = InPlace(host, Memory.of(host)), None, None
    if not holds_all:
        device = held_on_device(store, tensor, plan.device_rows, stored, account)
        places = torch.full((store.num_rows,), -1, dtype=torch.int32, device="cpu")
        places[plan.device_rows] = torch.arange(num_device, dtype=torch.int32, device="cpu")
        slots = plan.host_rows if stays else torch.arange(num_host, dtype=torch.int32, device="cpu")
        places[plan.host_rows] = (slots + num_device).to(torch.int32)
    store.held = HeldRows(host=in_place, device=device, places=places)


def held_on_device(
    store: RowStore,
    tensor: torch.Tensor | None,
    rows: torch.Tensor,
    stored: RowType,
    account: Charges,
    alive: Callable[[], None] = lambda: None,
) -> torch.Tensor | None:
    """Return rows of ``tensor``, or of the store's files for ``None``, on the device; ``None`` if there are none.

    ``alive`` is called now and then.
    """
    if not len(rows):
        return None
    account.charge("device", len(rows) * stored.row_bytes)
    device = stored.empty(len(rows), device=store.device)
    copy_rows(store.peers or store.files, tensor, rows, device, stored, alive)
    return device


def copy_rows(
    files: RowReader | None,
    tensor: torch.Tensor | None,
    rows: torch.Tensor,
    into: torch.Tensor,
    stored: RowType,
    alive: Callable[[], None] = lambda: None,
) -> None:
    """Copy rows of the tensor, or of the files for ``None``, with memory for a few on the way to a device.

    ``alive`` is called now and then.
    """
    step = max(1, _FILL_BYTES // max(1, stored.row_bytes))
    for begin in range(0, len(rows), step):
        numbers = rows[begin : begin + step]
        end = begin + len(numbers)
        out = into[begin:end] if into.device.type == "cpu" else stored.empty(len(numbers))
        if tensor is not None:
            torch.index_select(tensor, 0, numbers, out=out)
        else:
            assert files is not None
            files.read(numbers.long(), stored, out, None)
        if out.device != into.device:
            into[begin:end].copy_(out)
        alive()


def shaped(raw: torch.Tensor, kind: RowType, num_rows: int) -> torch.Tensor:
    """Return bytes as rows."""
    return raw.view(kind.stored).view(num_rows, *kind.shape) if raw.numel() else kind.empty(num_rows)
