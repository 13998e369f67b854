"""`TieredFeatures`: one table over device, host memory and disk, indexed like a tensor."""

import contextlib
import os
import weakref
from collections.abc import Iterator
from multiprocessing.context import get_spawning_popen
from typing import Any, Self

import torch
from torch import distributed
from torch.utils._pytree import tree_leaves

from penstock.arguments import checked, renamed
from penstock.errors import BudgetError
from penstock.ranks import PATIENCE_S, RankGroup
from penstock.tiers import Budget, Charges, DiskSpec, Size
from penstock.unified._aligned import stride_for
from penstock.unified._disk import buffer_bytes_for
from penstock.unified._fill import RowSource, fill, open_files, source_of
from penstock.unified._functions import call, refusal
from penstock.unified._plan import TierPlan, plan_tiers
from penstock.unified._problem import TierProblem
from penstock.unified._rows import RowType, as_index, as_rows, check_range, out_of_range
from penstock.unified._share import ROW_NUMBER_BYTES, HostShare, share_host
from penstock.unified._store import FeatureStatistics, RowStore
from penstock.unified._together import ROUNDING_BYTES, Spread, Together
from penstock.units import format_bytes, parse_bytes

_CLOSED = "these features were closed; read rows inside of `with TieredFeatures(...) as features:`"
_SPAWNED = (
    "tiered features cannot be read in a spawned process. In PyG, workers only sample if you set "
    "filter_per_worker=False; workers can read rows if you set multiprocessing_context='fork'"
)
_PLAIN_INDEX = (int, slice, type(Ellipsis), type(None))
"""Types of index that may follow the rows."""


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

    ``group``, of ``torch.distributed``: all its ranks make this call, and those of one machine hold one copy of the
    rows in shared memory. ``host`` and ``in_flight`` are then for all ranks of a machine together (by default a
    sixteenth of ``host`` for rows read in advance, and a sixteenth for cold rows that one rank has read for the
    others); ``device_budget`` is each rank's own. The source must be a file that all ranks can read; ``scores`` may be
    given by one rank. The memory has no name, and is gone when the last rank has ended.

    ``peers``: machines of the group hold the table together, and read rows from each other's memory. With ``"copies"``
    each has a file with all rows, with ``"parts"`` the next part of them, in the order of the machines' first ranks.
    One rank of each machine gives the scores, and all the same ones.

    Raises ``BudgetError`` if the host budget is below what must be held or no disk is given for the rest,
    ``FeatureFileError`` for damaged files, ``ValueError`` for arguments that do not go together, ``RankError`` on all
    ranks if one of them fails, disagrees about the file or the budget, or gives no sign of life for ``patience_s``
    seconds.

    The class is wide because it has a tensor's methods; those that need the whole table raise errors.
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
        group: distributed.ProcessGroup | None = None,
        peers: Spread | None = None,
        patience_s: float = PATIENCE_S,
        verify: bool = False,
        progress: bool = True,
    ) -> Self:
        """Make a table from ``source``. As a tensor it has no storage, since its rows lie in several."""
        if peers is not None and group is None:
            raise ValueError(
                "`peers` goes with a `group`, whose ranks are on the machines that hold the table together: "
                "TieredFeatures(path, host='8GiB', group=torch.distributed.group.WORLD, peers='copies')"
            )
        ranks = None if group is None else RankGroup(group, patience_s)
        with contextlib.nullcontext() if ranks is None else ranks.all_or_none():
            together = None if ranks is None else Together(ranks, peers)
            device_bytes = parse_bytes(device_budget)
            place = _device_with(device_bytes, device)
            if budget is not None:
                host = budget.room_bytes("host") if host is None else host
                disk = budget.disk_bytes or None if disk is None else disk  # type: ignore[assignment]
            rows = source_of(source, key)
            kind = RowType.of(rows.shape[1:], rows.dtype, dtype, scale)
            limits = {
                "host": None if host is None else parse_bytes(host),
                "in_flight": None if in_flight is None else parse_bytes(in_flight),
                "device_budget": device_bytes,
            }
            if together is not None:
                together.check(rows, kind, scores, verify=verify, **limits)
                rows = together.whole(rows)
            share = _shared_out(rows, kind, limits, disk, together)
            if together is not None and not together.holds_all(share) and limits["host"] is not None:
                share = _shared_out(rows, kind, limits, disk, together, may_hold_all=False)
            problem = TierProblem(
                num_rows=rows.shape[0], row_bytes=kind.row_bytes, device_bytes=device_bytes,
                host_bytes=share.rows_bytes, scores=scores,
            )  # fmt: skip
            store = RowStore(rows.shape[0], kind, place, _CLOSED)
            return cls._filled(
                store, rows, problem, share, disk, Charges(budget, "unified"), together, verify, progress
            )

    @classmethod
    def _filled(
        cls,
        store: RowStore,
        rows: RowSource,
        problem: TierProblem,
        share: HostShare,
        disk: DiskSpec,
        account: Charges,
        together: Together | None,
        verify: bool,
        progress: bool,
    ) -> Self:
        """Return the table with its rows planned, charged for and read."""
        store.give_back = account.give_back
        try:
            verify = verify and (together is None or together.number == 0)  # once a machine
            alive = (lambda: None) if together is None else together.ranks.beat
            store.files = open_files(rows, share, disk, account, verify=verify, progress=progress, alive=alive)
            if together is None:
                plan = plan_tiers(problem)
                fill(store, rows.tensor, plan, share.beside_bytes, account)
            else:
                shared = together.plan(together.connect(store, problem), share, account)
                together.fill(store, shared, account)
                plan = shared.plan
        except BaseException:
            store.close()
            store.let_go()  # nobody can need its rows, since no rank has the table
            raise
        return cls._over(store, plan, share)

    kind: RowType
    """The type of stored rows, and the type they are read as."""
    plan: TierPlan
    """The tier of every row."""
    _store: RowStore
    _share: HostShare

    @classmethod
    def _over(cls, store: RowStore, plan: TierPlan, share: HostShare) -> Self:
        self: Self = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, (store.num_rows, *store.kind.shape), dtype=store.kind.dtype, device=store.device
        )
        self.kind, self.plan, self._store, self._share = store.kind, plan, store, share
        weakref.finalize(self, store.abandon)
        return self

    @classmethod
    def _absent(cls, num_rows: int, kind: RowType) -> Self:
        """Return features for a spawned process: PyG's workers can sample with them, but every read raises."""
        store = RowStore(num_rows, kind, torch.device("cpu"), _SPAWNED)
        store.close()
        nothing = torch.empty(0, dtype=torch.int32, device="cpu")
        plan = TierPlan(
            device_rows=nothing, host_rows=nothing, num_disk_rows=num_rows, device_share=0.0, host_share=0.0,
            row_bytes=kind.row_bytes,
        )  # fmt: skip
        share = HostShare(rows_bytes=0, places_bytes=0, buffer_bytes=0, in_flight_bytes=None, needs_disk=False)
        return cls._over(store, plan, share)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device on which rows are returned."""
        return self._store.device

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Shape of the whole table."""
        return torch.Size((self._store.num_rows, *self.kind.shape))

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
        """The most bytes held in host memory: rows, their places, disk buffers, and rows read in advance.

        With a ``group`` it is what all ranks of this machine hold.
        """
        held = self._store.held
        numbers = 0 if held.places is None else ROW_NUMBER_BYTES * len(self.plan.host_rows)
        return held.host.plain.nbytes + numbers + self._share.beside_bytes

    @property
    def in_flight_bytes(self) -> int | None:
        """Bytes of rows that a loader may hold in advance; ``None`` for no limit."""
        return self._share.in_flight_bytes

    def __len__(self) -> int:
        return self._store.num_rows

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
        plan = self.plan
        counts = len(plan.device_rows), len(plan.host_rows), plan.num_disk_rows
        num_elsewhere = plan.num_peer_rows + plan.num_peer_disk_rows
        peers = f"; on other machines: {num_elsewhere:,}" if num_elsewhere else ""
        return (
            f"TieredFeatures({tuple(self.shape)}, {self.dtype}, rows on device, host and disk: "
            f"{counts[0]:,}, {counts[1]:,}, {counts[2]:,}{peers})"
        )

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return rows by an ``int``, a slice, a list, a mask or row numbers of any shape, on ``device``.

        Raises ``IndexError`` for rows that do not exist, ``TierReadError`` if the disk fails.
        """
        if isinstance(index, torch.Tensor) and index.dtype in (torch.int64, torch.int32):
            return self._read(index)
        if isinstance(index, tuple):
            return self._part(*index)
        num_rows = self._store.num_rows
        if isinstance(index, slice):
            start, stop, step = index.indices(num_rows)
            if step < 1:
                raise ValueError(f"negative slice steps are not supported, got [::{step}]")
            return self._read(torch.arange(start, max(start, stop), step, device="cpu"))
        if isinstance(index, int) and not isinstance(index, bool):
            if not -num_rows <= index < num_rows:
                raise out_of_range(index, 0, num_rows)
            return self._read(torch.tensor([index], device="cpu"))[0]
        if index is Ellipsis or index is None:
            return self._part(index)
        chosen = index if isinstance(index, torch.Tensor) else as_rows(index)
        if chosen.dtype in (torch.bool, torch.uint8):
            if chosen.shape != (num_rows,):
                raise IndexError(f"a mask must have {num_rows} entries, one per row, got {tuple(chosen.shape)}")
            return self._read(chosen.nonzero().view(-1))
        if not chosen.numel():
            chosen = chosen.to(torch.int64)
        if chosen.dtype.is_floating_point or chosen.dtype.is_complex:
            raise IndexError(f"rows must be chosen by whole numbers or a mask, got {chosen.dtype}")
        return self._read(chosen)

    def _part(self, rows: Any = slice(None), *rest: Any) -> torch.Tensor:
        """Index rows first, then the parts of each row."""
        if rows is Ellipsis or rows is None or any(not isinstance(part, _PLAIN_INDEX) for part in rest):
            raise IndexError(
                "the first index of tiered features must choose rows, and all others must be whole numbers, slices, "
                "... or None: features[rows, 2:5]. For anything else read rows first: features[rows][:, columns]"
            )
        chosen = self[rows]
        num_dims = chosen.dim() - len(self.kind.shape)
        return chosen[(*[slice(None)] * num_dims, *rest)]

    @checked("features.index_select(0, index)")
    def index_select(self, dim: int, index: torch.Tensor) -> torch.Tensor:
        """Select rows like a tensor, along dimension 0; negative row numbers are not allowed."""
        if dim not in (0, -self.dim()):
            raise ValueError(f"`dim` must be 0 for tiered features, got {dim}: features.index_select(0, index)")
        if index.dtype not in (torch.int64, torch.int32) or index.dim() > 1:
            raise IndexError(f"`index` must be a vector of int64 rows, got {tuple(index.shape)} {index.dtype}")
        flat = as_index(index)
        return self._read(check_range(flat, self._store.num_rows, wraps=False))

    def _read(self, index: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return _read_outside_of_graphs(self._store, index)
        return self._store.read(index)

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
        return self._store.counts.now()

    def reset_statistics(self) -> FeatureStatistics:
        """Return the statistics so far, and start again."""
        return self._store.counts.reset()

    def close(self) -> None:
        """Close files and free memory once nobody reads. Idempotent; later reads raise an error.

        With ``peers`` it waits a few seconds until the ranks of other machines that read rows here have closed the
        table too. Else threads keep the rows for them, while this process lives.
        """
        self._store.close(wait_s=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._store.close(wait_s=None if kind is None else 0.0)  # who fails lets nobody wait

    def __copy__(self) -> Self:
        """Return the table itself: all copies share one table and one budget."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise refusal("copy.deepcopy(features)", self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # data loaders pickle the data set for each worker that they spawn, also for workers that only sample
        if get_spawning_popen() is not None:
            return self._absent, (self._store.num_rows, self.kind)
        raise TypeError(
            f"tiered features of {format_bytes(self.nbytes)} cannot be pickled, since that would copy them. Save them "
            "with penstock.unified.write_features(path, features) and open TieredFeatures(path) in other processes"
        )


@torch._disable_dynamo  # type: ignore[attr-defined]  # a graph breaks here; calls of C within one end the process
def _read_outside_of_graphs(store: RowStore, index: torch.Tensor) -> torch.Tensor:
    return store.read(index)


def _features_in(args: Any, kwargs: Any) -> TieredFeatures:
    return next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, TieredFeatures))


def _shared_out(
    rows: RowSource,
    kind: RowType,
    limits: dict[str, int | None],
    disk: DiskSpec,
    together: Together | None,
    *,
    may_hold_all: bool = True,
) -> HostShare:
    """Divide the host budget. Raises ``BudgetError`` if that needs a disk, and none is given."""
    num_rows, device_bytes = rows.shape[0], limits["device_budget"] or 0
    stride_bytes = rows.table.stride_bytes if rows.table else stride_for(kind.row_bytes)
    answer_bytes = buffer_bytes_for(stride_bytes, 0)
    share = share_host(
        limits["host"], num_rows=num_rows, row_bytes=kind.row_bytes, device_bytes=device_bytes,
        in_flight=limits["in_flight"], buffer_bytes=buffer_bytes_for(stride_bytes, num_rows),
        num_ranks=1 if together is None else together.num_here,
        peer_bytes=0 if together is None else together.peer_bytes(kind.row_bytes, num_rows, answer_bytes),
        page_bytes=0 if together is None else ROUNDING_BYTES, may_hold_all=may_hold_all,
    )  # fmt: skip
    if share.needs_disk and rows.table is None and disk is None:
        raise BudgetError(
            f"{format_bytes(num_rows * kind.row_bytes)} of rows do not fit host={format_bytes(limits['host'] or 0)!r}; "
            "give a directory on an SSD for the remaining rows: TieredFeatures(..., disk='/nvme')"
        )
    return share


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
