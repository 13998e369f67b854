"""Gathering rows of a table in host memory, by the CPU's cores, or by a device that reads them in place."""

import functools
import importlib.util
import math
import threading
from collections.abc import Sequence
from typing import Any

import torch

from penstock.storages import as_plain
from penstock.unified._memory import Memory
from penstock.unified._rows import RowType, as_index, check_range, gather, is_plain_table, out_of_range, read_rows

_LINE_BYTES = 128
_TILE_NUMBERS = 4096
_SHORT_BYTES, _MANY_ROWS = 2048, 16_384
"""Row size below which, and number of rows from which, rows are read in the order in which they lie in memory.

An H100 translates 35 to 60 million addresses a second, fewer for larger tables. Rows of 512 bytes in random order come
at 54% of the link's rate, sorted rows at 90%, including the sort (benchmarks/results/2026-11-26-gpu-h100.json).
"""
_MOST_READERS = 256
"""The most instances of the gather kernel at once.

They are enough to keep a link busy (each has at least 4 KiB under way); every further one takes space on the device
from the computation.
"""


def gather_rows(
    table: torch.Tensor,
    index: torch.Tensor,
    device: torch.device | None,
    memory: Memory | None,
    kind: RowType,
    *,
    wraps: bool = True,
    sort: bool | None = None,
    verify: bool = False,
) -> torch.Tensor:
    """Gather rows of a table in host memory: ``[*index.shape, *row]`` on ``device`` (``None``: CPU).

    ``index`` has any shape. ``memory`` is the table's if it is registered. Raises ``IndexError`` for rows that do not
    exist; on a device, the next gather raises it, or this one if ``verify`` is set.
    """
    if type(index) is not torch.Tensor:  # a kernel reads its address
        index = as_plain("index", index)
    if not len(table) and index.numel():
        raise out_of_range(int(index.reshape(-1)[0]), 0, 0, wraps=wraps)
    if device is not None and memory is not None and memory.is_registered and is_plain_table(table):
        raise_bad(device)  # raised for an earlier gather
        memory.order.before_device(device, writes=False)
        rows = _on_device(table, index, device, memory, kind, wraps=wraps, sort=sort)
        memory.order.after_device(device, writes=False)
        if verify:
            raise_bad(device, now=True)
        return rows
    if memory is not None:
        memory.order.before_host(writes=False)
    if not sort and is_plain_table(table):
        out = read_rows(table, index, kind, wraps=wraps)
        return out if device is None else out.to(device)
    out, flat = kind.empty(*index.shape), as_index(index)
    if is_plain_table(table):
        check_range(flat, len(table), wraps=wraps)  # with the position in the original index
        order = flat.argsort()
        gather(table, flat[order], kind, out, order, wraps=wraps)
    else:  # rows are not contiguous
        out.copy_(kind.convert(table.index_select(0, check_range(flat, len(table), wraps=wraps))).view(out.shape))
    return out if device is None else out.to(device)


def in_order(
    table: torch.Tensor, index: torch.Tensor, positions: torch.Tensor | None, kind: RowType, sort: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return row numbers sorted by their place in memory, and their positions in the result.

    With ``sort=None`` they are sorted only if that saves the reading device more time than the sort takes.
    """
    is_short = table.device.type == "cpu" and kind.width * table.element_size() < _SHORT_BYTES
    if not (is_short and index.numel() >= _MANY_ROWS if sort is None else sort):
        return index, positions
    index, order = index.sort()
    return index, order if positions is None else positions[order]


def launch(function: Any, grid: tuple[int, ...], arguments: Sequence[Any], flags: dict[str, Any], warps: int) -> None:
    """Start a kernel. Tests replace this function to look at the arguments."""
    function[grid](*arguments, **flags, num_warps=warps)


def has_triton() -> bool:
    """Return whether kernels can be compiled."""
    return importlib.util.find_spec("triton") is not None


def start_gather(
    table: torch.Tensor,
    index: torch.Tensor,
    positions: torch.Tensor | None,
    out: torch.Tensor,
    bad: torch.Tensor,
    kind: RowType,
    *,
    wraps: bool,
    readers: int = _MOST_READERS,
) -> None:
    """Launch the gather kernel. ``table`` is a plain table that the device can reach; all else is on the device."""
    if not index.numel() or not kind.width:
        return
    stored, result, width = _in_words(table, out, kind)
    item = stored.element_size()
    line, first = _LINE_BYTES // item, stored.data_ptr() % _LINE_BYTES // item
    stride = stored.stride(0) if len(stored) > 1 else width
    vector = math.gcd(16 // item, width, stride, first)
    columns = min(_TILE_NUMBERS, _power_of_two(width + (0 if _begins_lines(width, stride, first, line) else line - 1)))
    rows = max(1, min(32, _TILE_NUMBERS // 4 // columns))
    num_tiles = -(-index.numel() // rows)
    scale = index if kind.scale is None else kind.scale.to(out.device)
    launch(
        _kernels().gather_rows,
        (min(num_tiles, readers),),
        [
            stored, index, index if positions is None else positions, result, bad, scale, index.numel(), len(table),
            first, stride,
        ],
        {
            "WIDTH": width, "LINE": line, "VECTOR": vector, "ROWS": rows, "COLUMNS": columns, "WRAPS": wraps,
            "HAS_POSITIONS": positions is not None, "HAS_SCALE": kind.scale is not None,
        },
        warps=4,
    )  # fmt: skip


def raise_bad(device: torch.device, *, now: bool = False) -> None:
    """Raise the error for an index that a kernel found out of range; with ``now``, after waiting for the device."""
    flags = _flags.get(device)
    if flags is None:
        return
    if now:
        torch.cuda.synchronize(device)
    flags.raise_bad()


class _Flags:
    """The out-of-range flag of one device's kernels, in pinned memory, so that looking at it costs nothing."""

    def __init__(self) -> None:
        self.bad = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self.num_rows = 0

    def raise_bad(self) -> None:
        position = int(self.bad[0])
        if position:
            self.bad.zero_()
            raise IndexError(
                f"an index at position {position - 1} of an earlier gather on the device was out of range (tables had "
                f"up to {self.num_rows} rows), and its rows were filled with zeros. gather(table, index, verify=True) "
                "raises at once"
            )


_flags: dict[torch.device, _Flags] = {}
_lock = threading.Lock()


def _on_device(
    table: torch.Tensor, index: torch.Tensor, device: torch.device, memory: Memory, kind: RowType, *, wraps: bool,
    sort: bool | None,
) -> torch.Tensor:  # fmt: skip
    with torch.cuda.device(device):  # Triton launches on the current device
        flat = index.detach().to(device).reshape(-1).contiguous()
        if not has_triton():
            flat = torch.where(flat < 0, flat + len(table), flat) if wraps else flat
            return kind.convert(memory.on(table, device).index_select(0, flat)).view(*index.shape, *kind.shape)
        with _lock:
            flags = _flags.setdefault(device, _Flags())
        flags.num_rows = max(flags.num_rows, len(table))
        out = kind.empty(*index.shape, device=device)
        flat, positions = in_order(table, flat, None, kind, sort)
        start_gather(table, flat, positions, out, flags.bad, kind, wraps=wraps)
        return out


def _in_words(table: torch.Tensor, out: torch.Tensor, kind: RowType) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return table and result viewed as the largest words that fit rows, strides and addresses, for plain copies."""
    rows = table.as_strided((len(table), kind.width), (table.stride(0), 1))
    if kind.is_converted:
        return rows, out, kind.width
    if rows.is_complex():
        rows, out = torch.view_as_real(rows).flatten(1), torch.view_as_real(out)
    item, offset = rows.element_size(), rows.storage_offset() * rows.element_size()
    stride_bytes = rows.stride(0) * item if len(rows) > 1 else kind.row_bytes
    size = math.gcd(4, kind.row_bytes, stride_bytes, rows.data_ptr(), offset)
    word = {1: torch.int8, 2: torch.int16, 4: torch.int32}[size]
    return rows.view(word), out.view(-1).view(word), kind.row_bytes // size


def _begins_lines(width: int, stride: int, first: int, line: int) -> bool:
    """Return whether rows start at lines, or several fill one exactly, so that none straddles more than it must."""
    return first == 0 and (stride % line == 0 or (line % stride == 0 and width <= stride))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


@functools.cache
def _kernels() -> Any:
    from penstock.unified import _kernels as kernels  # it imports Triton, which machines without CUDA may lack

    return kernels
