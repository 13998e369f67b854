"""`TieredFeatures`: one table over device, host memory and disk, indexed like a tensor."""

import contextlib
import dataclasses
import os
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, Self

import torch
from torch.utils._pytree import tree_leaves

from penstock.arguments import checked, renamed
from penstock.directio import warn_of_memory
from penstock.errors import BudgetError
from penstock.tiers import Budget, Charges, DiskSpec, Size
from penstock.unified._aligned import check, stride_for
from penstock.unified._counts import Counts
from penstock.unified._disk import RowFiles, buffer_bytes_for
from penstock.unified._files import find_table
from penstock.unified._functions import call, refusal
from penstock.unified._gather import gather_rows, has_triton, in_order, start_gather
from penstock.unified._library import address, library
from penstock.unified._memory import Memory, exact
from penstock.unified._plan import TierPlan, plan_tiers
from penstock.unified._problem import TierProblem
from penstock.unified._readers import Readers
from penstock.unified._rows import RowType, as_index, as_rows, check_range, gather, is_plain_table, out_of_range
from penstock.unified._share import ROW_NUMBER_BYTES, HostShare, share_host
from penstock.unified._table import Table
from penstock.unified._tensor import UnifiedTensor
from penstock.unified._write import spill
from penstock.units import format_bytes, parse_bytes

_FILL_BYTES = 4 * 2**20
"""Bytes of rows that are copied at once when tiers are filled."""
_CLOSED = "these features were closed; read rows inside of `with TieredFeatures(...) as features:`"
_PLAIN_INDEX = (int, slice, type(Ellipsis), type(None))
"""Types of index that may follow the rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureStatistics:
    """The cost of reading rows so far."""

    device_rows: int = 0
    """Rows that came from the device."""
    host_rows: int = 0
    """Rows that came from host memory."""
    disk_rows: int = 0
    """Rows that came from the disk."""
    disk_requests: int = 0
    """Requests to the disk; adjacent rows share one."""
    disk_read_bytes: int = 0
    """Bytes that these requests read, in whole sectors."""
    disk_row_bytes: int = 0
    """Bytes of the rows that came from the disk."""
    disk_s: float = 0.0
    """Seconds spent reading from the disk, in all threads."""

    @property
    def hit_rate(self) -> float:
        """Share of rows that needed no disk; 1 if none were read."""
        total = self.device_rows + self.host_rows + self.disk_rows
        return 1 - self.disk_rows / total if total else 1.0

    @property
    def read_amplification(self) -> float:
        """Bytes read from the disk for each byte of a row; 1 if none were read."""
        return self.disk_read_bytes / self.disk_row_bytes if self.disk_row_bytes else 1.0


class TieredFeatures(torch.Tensor):
    """A table ``[rows, ...]`` whose most wanted rows are on the device, the next in host memory, the rest on an SSD.

    ``features[index]`` gives rows like ``tensor[index]``, on ``device``. It is a ``torch.Tensor`` subclass, so that
    PyG's loaders and PyTorch's data sets can select rows of it. It is read-only: ``index_select`` and ``embedding``
    give rows, and functions that would need the whole table as one tensor raise ``ValueError``.

    ``source`` is a tensor in host memory, or a .npy, .safetensors (``key``) or `write_features` file, which is read in
    place. ``scores``, one number per row, say which rows are wanted: `expected_accesses`, `count_accesses` or
    ``graph.out_degrees()``; without them the first rows count as the hottest. ``plan.explain()`` says what to expect,
    ``statistics()`` what happened.

    ``host`` bounds what is held in host memory: rows, the list of where each row is, disk buffers, and rows that
    a `Loader` has read in advance (``in_flight``, an eighth of it by default); ``None`` holds all rows there.
    ``device_budget`` is space on a CUDA device; it must be 0 on a CPU.

    ``disk`` is a directory, or several, or a dict of limits. A tensor's rows are written there if memory does not hold
    them all; the files have no name and disappear with the process. ``dtype=torch.float32`` widens rows stored as
    float16, bfloat16 or int8 (with ``scale``). ``verify`` first reads all of a `write_features` file and compares its
    checksums. ``budget``, an account that other rooms share, is charged for what is held; unless you give
    ``host`` and ``disk``, they are what it has left.

    Raises ``BudgetError`` if the host budget is below what must be held or no disk is given for the rest,
    ``FeatureFileError`` for damaged files, ``ValueError`` for arguments that do not go together.
    """

    @staticmethod
    @renamed(host_budget="host")
    @checked("TieredFeatures(tensor, host='8GiB', disk='/nvme')")
    def __new__(
        cls,
        source: torch.Tensor | str | os.PathLike[str],
        *,
        host: Size | None = None,
        device_budget: Size = 0,
        in_flight: Size | None = None,
        disk: DiskSpec = None,
        scores: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
        key: str | None = None,
        dtype: torch.dtype | None = None,
        scale: torch.Tensor | float | None = None,
        budget: Budget | None = None,
        verify: bool = False,
        progress: bool = True,
    ) -> Self:
        """Make a table from ``source``. As a tensor it has no storage, since its rows lie in several."""
        device_bytes = parse_bytes(device_budget)
        place = _device_with(device_bytes, device)
        if budget is not None:
            host = budget.room_bytes("host") if host is None else host
            disk = budget.disk_bytes or None if disk is None else disk  # type: ignore[assignment]
        table, tensor = _source(source, key)
        shape = table.shape if table else tuple(tensor.shape)  # type: ignore[union-attr]
        kind = RowType.of(shape[1:], table.dtype if table else tensor.dtype, dtype, scale)  # type: ignore[union-attr]
        self = cls._without_rows(shape[0], kind, place, Readers(_CLOSED))
        self._share = share_host(
            None if host is None else parse_bytes(host), num_rows=self._num_rows,
            row_bytes=self.kind.row_bytes, device_bytes=device_bytes,
            in_flight=None if in_flight is None else parse_bytes(in_flight),
            buffer_bytes=buffer_bytes_for(table.stride_bytes if table else stride_for(self.kind.row_bytes)),
        )  # fmt: skip
        if self._share.needs_disk and table is None and disk is None:
            raise BudgetError(
                f"{format_bytes(self._num_rows * self.kind.row_bytes)} of rows do not fit host={host!r}; "
                "give a directory on an SSD for the remaining rows: TieredFeatures(..., disk='/nvme')"
            )
        problem = TierProblem(
            num_rows=self._num_rows, row_bytes=self.kind.row_bytes, device_bytes=device_bytes,
            host_bytes=self._share.rows_bytes, scores=scores,
        )  # fmt: skip
        self.plan = plan_tiers(problem)
        self._account = Charges(budget, "unified")
        self._closer = weakref.finalize(self, self._account.give_back)
        try:
            if table is not None:
                if verify and table.is_aligned:
                    check(table.path)
                self._files = RowFiles([table])
            elif self._share.needs_disk:
                self._files = _spilled(tensor, disk, self._account, progress)  # type: ignore[arg-type]
            self._fill(tensor)
        except BaseException:
            self.close()
            raise
        return self

    kind: RowType
    """The type of stored rows, and the type they are read as."""
    plan: TierPlan
    """The tier of every row."""
    _num_rows: int
    _place: torch.device
    _readers: Readers
    _counts: Counts[FeatureStatistics]
    _share: HostShare
    _account: Charges
    _closer: Callable[[], Any]
    _files: RowFiles | None
    _host: torch.Tensor
    """Rows in host memory."""
    _memory: Memory
    _table: torch.Tensor | None
    """Rows on the device."""
    _places: torch.Tensor | None
    """Place of each row; ``None`` if all are in host memory, in order."""

    @classmethod
    def _without_rows(cls, num_rows: int, kind: RowType, place: torch.device, readers: Readers) -> Self:
        self: Self = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, (num_rows, *kind.shape), dtype=kind.dtype, device=place
        )
        self._num_rows, self.kind, self._place, self._readers = num_rows, kind, place, readers
        self._counts = Counts(FeatureStatistics())
        self._host = torch.empty(0, device="cpu")
        self._memory = Memory.of(self._host)
        self._files = self._table = self._places = None
        return self

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device on which rows are returned."""
        return self._place

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Shape of the whole table."""
        return torch.Size((self._num_rows, *self.kind.shape))

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Dtype of rows as they are read."""
        return self.kind.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as it is read."""
        return self.kind.width * self.kind.dtype.itemsize

    @property
    def host_bytes(self) -> int:
        """The most bytes held in host memory: rows, their places, disk buffers, and rows read in advance."""
        numbers = 0 if self._places is None else ROW_NUMBER_BYTES * len(self.plan.host_rows)
        return self._host.nbytes + numbers + self._share.beside_bytes

    @property
    def in_flight_bytes(self) -> int | None:
        """Bytes of rows that a loader may hold in advance; ``None`` for no limit."""
        return self._share.in_flight_bytes

    def __len__(self) -> int:
        return self._num_rows

    def __iter__(self) -> Iterator[torch.Tensor]:  # type: ignore[override]
        """Yield one row after the other; reading a mini-batch of rows at once is faster."""
        return (self[row] for row in range(len(self)))

    def dim(self) -> int:
        """Return the number of dimensions of the whole table."""
        return 1 + len(self.kind.shape)

    @checked("features.size(0)")
    def size(self, dim: int | None = None) -> Any:
        """Return the size, like a tensor's."""
        return self.shape if dim is None else self.shape[dim]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        counts = len(self.plan.device_rows), len(self.plan.host_rows), self.plan.num_disk_rows
        return (
            f"TieredFeatures({tuple(self.shape)}, {self.dtype}, rows on device, host and disk: "
            f"{counts[0]:,}, {counts[1]:,}, {counts[2]:,})"
        )

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return rows by an ``int``, a slice, a list, a mask or row numbers of any shape, on ``device``.

        Raises ``IndexError`` for rows that do not exist, ``TierReadError`` if the disk fails.
        """
        if isinstance(index, torch.Tensor) and index.dtype in (torch.int64, torch.int32):
            return self._rows(index)
        if isinstance(index, tuple):
            return self._part(*index)
        if isinstance(index, slice):
            start, stop, step = index.indices(self._num_rows)
            if step < 1:
                raise ValueError(f"negative slice steps are not supported, got [::{step}]")
            return self._rows(torch.arange(start, max(start, stop), step, device="cpu"))
        if isinstance(index, int) and not isinstance(index, bool):
            if not -self._num_rows <= index < self._num_rows:
                raise out_of_range(index, 0, self._num_rows)
            return self._rows(torch.tensor([index], device="cpu"))[0]
        if index is Ellipsis or index is None:
            return self._part(index)
        chosen = index if isinstance(index, torch.Tensor) else as_rows(index)
        if chosen.dtype in (torch.bool, torch.uint8):
            if chosen.shape != (self._num_rows,):
                raise IndexError(f"a mask must have {self._num_rows} entries, one per row, got {tuple(chosen.shape)}")
            return self._rows(chosen.nonzero().view(-1))
        if not chosen.numel():
            chosen = chosen.to(torch.int64)
        if chosen.dtype.is_floating_point or chosen.dtype.is_complex:
            raise IndexError(f"rows must be chosen by whole numbers or a mask, got {chosen.dtype}")
        return self._rows(chosen)

    def _part(self, rows: Any = slice(None), *rest: Any) -> torch.Tensor:
        """Index rows first, then the parts of each row."""
        if rows is Ellipsis or rows is None or any(not isinstance(one, _PLAIN_INDEX) for one in rest):
            raise IndexError(
                "the first index of tiered features must choose rows, and all others must be whole numbers, slices, "
                "... or None: features[rows, 2:5]. For anything else read rows first: features[rows][:, columns]"
            )
        found = self[rows]
        num_dims = found.dim() - len(self.kind.shape)
        return found[(*[slice(None)] * num_dims, *rest)]

    @checked("features.index_select(0, index)")
    def index_select(self, dim: int, index: torch.Tensor) -> torch.Tensor:
        """Select rows like a tensor, along dimension 0; negative row numbers are not allowed."""
        if dim not in (0, -self.dim()):
            raise ValueError(f"`dim` must be 0 for tiered features, got {dim}: features.index_select(0, index)")
        if index.dtype not in (torch.int64, torch.int32) or index.dim() > 1:
            raise IndexError(f"`index` must be a vector of int64 rows, got {tuple(index.shape)} {index.dtype}")
        flat = as_index(index)
        return self._rows(check_range(flat, self._num_rows, wraps=False))

    def __setitem__(self, index: Any, value: Any) -> None:
        raise refusal("features[index] = value", self)

    def __contains__(self, value: Any) -> bool:
        raise refusal("value in features", self)

    def __bool__(self) -> bool:
        raise refusal("bool(features)", self)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise refusal("numpy.asarray(features)", self)

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        raise refusal("features.__dlpack__", self)

    def __format__(self, form: str) -> str:
        return format(repr(self), form)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Read rows, answer questions about the table, or raise an error."""
        return call(func, args, kwargs or {}, _features_in(args, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Raise an error for what bypassed ``__torch_function__``."""
        raise refusal(str(func), _features_in(args, kwargs))

    def statistics(self) -> FeatureStatistics:
        """Return the rows, requests and bytes since the last `reset_statistics`."""
        return self._counts.now()

    def reset_statistics(self) -> FeatureStatistics:
        """Return the statistics so far, and start again."""
        return self._counts.reset()

    def close(self) -> None:
        """Close files and free memory once nobody reads. Idempotent; later reads raise an error."""
        self._readers.close()
        if self._files is not None:
            self._files.close()
        self._host = torch.empty(0, device="cpu")
        self._memory = Memory.of(self._host)
        self._table = self._places = None
        self._closer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __copy__(self) -> Self:
        """Return the table itself: all copies share one table and one budget."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise refusal("copy.deepcopy(features)", self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if get_spawning_popen() is not None:
            return _absent, (self._num_rows, self.kind)
        raise TypeError(
            f"tiered features of {format_bytes(self.nbytes)} cannot be pickled, since that would copy them. Save them "
            "with penstock.unified.write_features(path, features) and open TieredFeatures(path) in other processes"
        )

    def _rows(self, index: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return self._rows_beside_graphs(index)
        with self._readers:
            if self.device.type == "cpu":
                return self._rows_by_cpu(index)
            with torch.cuda.device(self.device):
                return self._rows_for_device(index)

    @torch._disable_dynamo  # type: ignore[attr-defined]  # a graph breaks here; calls of C within one end the process
    def _rows_beside_graphs(self, index: torch.Tensor) -> torch.Tensor:
        return self._rows(index)

    def _rows_by_cpu(self, index: torch.Tensor) -> torch.Tensor:
        self._memory.order.before_host(writes=False)
        flat = as_index(index)
        out = self.kind.empty(*index.shape)
        if self._places is None:
            gather(self._host, flat, self.kind, out)
            self._counts.add(host_rows=len(flat))
            return out
        (slots, positions), counts = split(self._places, 0, flat)
        num_host = counts[1]
        self._read_cold(slots[num_host:], out, positions[num_host:])
        gather(self._host, slots[:num_host], self.kind, out, positions[:num_host])
        self._counts.add(host_rows=num_host)
        return out

    def _rows_for_device(self, index: torch.Tensor) -> torch.Tensor:
        """Read cold rows into pinned memory first; the device reads the others by itself."""
        if self._places is None:
            self._counts.add(host_rows=index.numel())
            return gather_rows(self._host, index, self.device, self._memory, self.kind)
        flat = as_index(index)
        places, counts = split(self._places, len(self.plan.device_rows), flat, is_pinned=True)
        ends = counts[0], counts[0] + counts[1]
        cold = self.kind.empty(counts[2], is_pinned=True)
        self._read_cold(places[0, ends[1] :], cold, None)
        out = self.kind.empty(*index.shape, device=self.device)
        slots, positions = places.to(self.device, non_blocking=True)
        rows = out.view(-1, *self.kind.shape)
        self._by_device(self._table, slots[: ends[0]], positions[: ends[0]], rows)
        self._memory.order.before_device(self.device, writes=False)
        self._by_device(self._host, slots[ends[0] : ends[1]], positions[ends[0] : ends[1]], rows)
        self._memory.order.after_device(self.device, writes=False)
        if counts[2]:
            rows[positions[ends[1] :]] = cold.to(self.device, non_blocking=True)
        self._counts.add(device_rows=counts[0], host_rows=counts[1])
        return out

    def _by_device(
        self, table: torch.Tensor | None, slots: torch.Tensor, positions: torch.Tensor, out: torch.Tensor
    ) -> None:
        if table is None or not len(slots):
            return
        if has_triton() and (table.device.type == "cuda" or self._memory.is_registered):
            bad = torch.empty(1, dtype=torch.int64, device=self.device)  # slots are in range
            rows, places = in_order(table, slots, positions, self.kind)
            start_gather(table, rows, places, out, bad, self.kind, wraps=False)
        elif table.device.type == "cuda":
            out[positions] = self.kind.convert(table[slots])
        else:
            out[positions] = gather_rows(table, slots.cpu(), self.device, None, self.kind)

    def _read_cold(self, rows: torch.Tensor, out: torch.Tensor, positions: torch.Tensor | None) -> None:
        if not len(rows):
            return
        assert self._files is not None
        start_s = time.perf_counter()
        report = self._files.read(rows, self.kind, out, positions)
        self._counts.add(
            disk_rows=len(rows), disk_requests=report.num_requests, disk_read_bytes=report.read_bytes,
            disk_row_bytes=len(rows) * self.kind.row_bytes, disk_s=time.perf_counter() - start_s,
        )  # fmt: skip

    def _fill(self, tensor: torch.Tensor | None) -> None:
        """Fill the tiers above the disk."""
        plan, stored = self.plan, RowType(self.kind.shape, self.kind.stored, self.kind.stored)
        num_device, num_host = len(plan.device_rows), len(plan.host_rows)
        holds_all = num_host == self._num_rows
        stays = tensor is not None and num_host + num_device == self._num_rows and (holds_all or self._files is None)
        numbers = 0 if holds_all else ROW_NUMBER_BYTES * num_host
        self._account.charge("host", self._share.beside_bytes + numbers)
        if stays:  # used in place; nothing is copied
            assert tensor is not None
            self._account.charge("host", 0 if is_plain_table(tensor) else tensor.nbytes)
            self._host = tensor if is_plain_table(tensor) else tensor.contiguous()
        else:
            self._account.charge("host", num_host * plan.row_bytes)
            self._host = _shaped(exact(num_host * plan.row_bytes), stored, num_host)
            self._take(tensor, plan.host_rows, self._host, stored)
        self._memory = Memory.of(self._host)
        if holds_all:
            return
        if num_device:
            self._account.charge("device", num_device * plan.row_bytes)
            self._table = stored.empty(num_device, device=self.device)
            self._take(tensor, plan.device_rows, self._table, stored)
        places = torch.full((self._num_rows,), -1, dtype=torch.int32, device="cpu")
        places[plan.device_rows] = torch.arange(num_device, dtype=torch.int32, device="cpu")
        slots = plan.host_rows if stays else torch.arange(num_host, dtype=torch.int32, device="cpu")
        places[plan.host_rows] = (slots + num_device).to(torch.int32)
        self._places = places

    def _take(self, tensor: torch.Tensor | None, rows: torch.Tensor, into: torch.Tensor, stored: RowType) -> None:
        step = max(1, _FILL_BYTES // max(1, stored.row_bytes))
        for at in range(0, len(rows), step):
            some = rows[at : at + step]
            out = into[at : at + len(some)] if into.device.type == "cpu" else stored.empty(len(some))
            if tensor is not None:
                torch.index_select(tensor, 0, some, out=out)
            else:
                assert self._files is not None
                self._files.read(some.long(), stored, out, None)
            if out.device != into.device:
                into[at : at + len(some)].copy_(out)


def _absent(num_rows: int, kind: RowType) -> TieredFeatures:
    """Return features for a spawned process: PyG's workers can sample with them, but every read raises."""
    readers = Readers(
        "tiered features cannot be read in a spawned process. In PyG, workers only sample if you set "
        "filter_per_worker=False; workers can read rows if you set multiprocessing_context='fork'"
    )
    readers.close()
    made = TieredFeatures._without_rows(num_rows, kind, torch.device("cpu"), readers)
    nothing = torch.empty(0, dtype=torch.int32, device="cpu")
    made.plan = TierPlan(
        device_rows=nothing, host_rows=nothing, num_disk_rows=num_rows, device_share=0.0, host_share=0.0,
        row_bytes=kind.row_bytes,
    )  # fmt: skip
    made._share = HostShare(rows_bytes=0, places_bytes=0, buffer_bytes=0, in_flight_bytes=None, needs_disk=False)
    made._closer = weakref.finalize(made, lambda: None)
    return made


def _features_in(args: Any, kwargs: Any) -> TieredFeatures:
    return next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, TieredFeatures))


def split(
    places: torch.Tensor, num_device: int, index: torch.Tensor, *, is_pinned: bool = False
) -> tuple[torch.Tensor, list[int]]:
    """Split rows by tier: device, host, disk. Return slots and positions in the index, and the counts.

    The former are ``int64 [2, rows]``, in memory that a device copies from by itself if ``is_pinned``. Raises
    ``IndexError`` for rows that do not exist.
    """
    made = torch.empty(2, len(index), dtype=torch.int64, device="cpu", pin_memory=is_pinned)
    compiled = library()
    if compiled is None:
        rows = check_range(index, len(places))
        found = places[rows]
        tier = torch.where(found < 0, 2, (found >= num_device).long())
        order = tier.argsort(stable=True)
        made[0] = torch.where(found < 0, rows, found - torch.where(tier == 1, num_device, 0))[order]
        made[1] = order
        return made, torch.bincount(tier, minlength=3).tolist()
    found, counts = (
        torch.empty(len(index), dtype=torch.int32, device="cpu"),
        torch.empty(3, dtype=torch.int64, device="cpu"),
    )
    bad = compiled.penstock_split(
        address(places), len(places), num_device, address(index), len(index), address(made[0]), address(made[1]),
        address(counts), address(found),
    )  # fmt: skip
    if bad >= 0:
        raise out_of_range(int(index[bad]), bad, len(places))
    return made, counts.tolist()


def _device_with(budget_bytes: int, name: torch.device | str) -> torch.device:
    device = torch.device(name)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"`device` must be the CPU or a CUDA device, whose kernels read host memory in place, got {str(device)!r}: "
            "TieredFeatures(source, host='1GiB', device='cpu')"
        )
    if budget_bytes and device.type == "cpu":
        raise ValueError(
            "`device_budget` is for CUDA devices only; on a CPU give `host` alone: TieredFeatures(source, host='1GiB')"
        )
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _source(source: Any, key: str | None) -> tuple[Table | None, torch.Tensor | None]:
    if isinstance(source, UnifiedTensor):
        return None, source.cpu().detach().resolve_conj().resolve_neg()
    if isinstance(source, torch.Tensor):
        if source.device.type != "cpu" or not source.dim() or source.layout is not torch.strided:
            raise ValueError(
                f"`source` must be a dense tensor [rows, ...] in host memory, got shape {tuple(source.shape)} on "
                f"{source.device}: TieredFeatures(tensor.cpu(), ...)"
            )
        return None, source.detach().resolve_conj().resolve_neg()
    return find_table(source, key), None


def _spilled(tensor: torch.Tensor, disk: DiskSpec, account: Charges, progress: bool) -> RowFiles:
    """Write a tensor's rows to unnamed files, one in each directory."""
    limits = Budget(disk=disk).disk_bytes
    warn_of_memory(limits, stacklevel=3)
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
        files = RowFiles(tables)  # this opens them again
    files.tables = [
        dataclasses.replace(one, path=Path(directory) / "<nameless file of rows>")
        for one, directory in zip(tables, limits, strict=True)
    ]
    return files


def _shaped(raw: torch.Tensor, kind: RowType, num_rows: int) -> torch.Tensor:
    return raw.view(kind.stored).view(num_rows, *kind.shape) if raw.numel() else kind.empty(num_rows)
