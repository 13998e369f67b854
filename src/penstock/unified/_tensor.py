"""Tensors in host memory that operators on a device read and write in place (PyTorch-Direct, arXiv 2101.07956).

A `UnifiedTensor` is a CPU tensor; `_placement.place` decides where its operators run. On a device they run on a view of
the same memory. Our own kernels (`_gather`) gather rows. Views of a unified tensor are unified; results of other
operators are plain tensors.

A table that trains gets its gradient in host memory, where it lies itself. Gradients of rows leave the device, which
need not have memory for the table, and the optimizer updates in host memory. Autograd could not take a gradient on the
device for it anyway: for a CPU leaf the engine knows no stream to wait on (PyTorch 2.8 and later).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from penstock.arguments import checked
from penstock.storages import as_plain
from penstock.tiers import Budget
from penstock.unified._gather import gather_rows
from penstock.unified._memory import InPlace, Memory, exact
from penstock.unified._operators import aten, is_row_numbers, is_view, out_ids, rows_read, written_ids
from penstock.unified._placement import Preference, operand_of, place
from penstock.unified._rows import RowType, is_plain_table, read_rows
from penstock.units import format_bytes

_LIKE: dict[Any, Callable[..., Any]] = {
    aten.empty_like.default: lambda _: None,
    aten.zeros_like.default: lambda host: host.zero_(),
    aten.ones_like.default: lambda host: host.fill_(1),
    aten.full_like.default: lambda host, value: host.fill_(value),
}


class UnifiedTensor(torch.Tensor):
    """A tensor in host memory that devices use in place. Made by ``wrap``, ``empty`` and ``from_file``."""

    in_place: InPlace
    """The same memory as a plain tensor, and the order of accesses to it, for kernels of this room."""
    kind: RowType
    """The type of a row."""
    _prefer: Preference
    _is_plain: bool

    @staticmethod
    def __new__(cls, host: torch.Tensor, memory: Memory, prefer: Preference) -> "UnifiedTensor":
        """Make a unified tensor over ``host``, which lies in ``memory``."""
        # a subclass, not a wrapper: it is its host memory, with one storage, on which optimizers and NumPy work
        self: UnifiedTensor = torch.Tensor._make_subclass(cls, host.detach(), host.requires_grad)
        self.in_place, self._prefer = InPlace(host.detach(), memory), prefer
        self.kind = RowType(tuple(host.shape[1:]), host.dtype, host.dtype)
        self._is_plain = is_plain_table(self.in_place.plain)
        return self

    def __getitem__(self, index: Any) -> Any:
        """Index like a tensor. Row numbers take a shortcut that bypasses PyTorch's dispatcher."""
        if type(index) is not torch.Tensor or torch.compiler.is_compiling():
            return super().__getitem__(index)
        if not is_row_numbers(index) or not index.dim() or not self.in_place.plain.dim():
            return super().__getitem__(index)
        if index.is_cpu and self._is_plain and not (torch.is_grad_enabled() and _trains(self)):
            self.in_place.memory.order.before_host(writes=False)  # few calls on the way, which take as long as few rows
            return read_rows(self.in_place.plain, index, self.kind)
        return _read(self, index)

    @property
    def prefer(self) -> Preference:
        """Where operators run if all their operands are unified."""
        return self._prefer

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The tensor without gradients.

        You cannot assign to it, since its memory stays; ``tensor.copy_(...)`` fills it.
        """
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise RuntimeError(
            f"a unified tensor keeps its memory and its type, {self.dtype}; .data cannot become {tuple(value.shape)} "
            f"{value.dtype}. Fill it with tensor.copy_(...), and give it to a module after module.to(...)"
        )

    @property
    def is_registered(self) -> bool:
        """Whether CUDA devices can reach the memory. Always ``False`` on a machine without one."""
        return self.in_place.memory.is_registered

    @checked("table.cpu()")
    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:  # noqa: ARG002
        """Return the same memory as a plain tensor, after pending writes of devices; gradients flow through."""
        self.in_place.before(None, writes=True)  # the caller may write to it
        if self.requires_grad:
            return _Plain.apply(self)  # type: ignore[no-untyped-call, no-any-return]
        return self.in_place.plain.detach()

    @checked("table.numpy()")
    def numpy(self, *, force: bool = False) -> Any:  # NumPy's arrays have no type parameters here
        """Return the same memory as an array, after pending writes; ``force`` permits tensors with gradients."""
        if self.requires_grad and not force:
            raise RuntimeError("this tensor requires gradients; call tensor.detach().numpy()")
        self.in_place.before(None, writes=True)
        return self.in_place.plain.detach().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return an array for NumPy's functions."""
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def tolist(self) -> Any:
        """Return the numbers as nested lists."""
        self.in_place.before(None, writes=False)
        return self.in_place.plain.tolist()

    def is_pinned(self, device: Any = None) -> bool:  # noqa: ARG002
        """Return whether CUDA devices can reach the memory."""
        return self.in_place.memory.is_registered

    def share_memory_(self) -> torch.Tensor:
        """Return the tensor if its memory is shared, else raise: other memory would not be registered."""
        if self.in_place.plain.is_shared():
            return self
        raise ValueError(
            "a unified tensor keeps its memory, which is not shared; share the tensor before you wrap it: "
            "wrap(tensor.share_memory_())"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        self.in_place.before(None, writes=False)
        return f"UnifiedTensor({self.in_place.plain!r}, prefer={self._prefer!r})"

    def __copy__(self) -> torch.Tensor:
        """Return another tensor over the same memory."""
        copied = UnifiedTensor(self.in_place.plain, self.in_place.memory, self._prefer)
        return restored(copied, self.requires_grad, isinstance(self, torch.nn.Parameter))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a copy in memory of its own."""
        copied = _fresh(self, self.dtype)
        self.in_place.before(None, writes=False)
        copied.in_place.plain.copy_(self.in_place.plain)
        memo[id(self)] = restored(copied, self.requires_grad, isinstance(self, torch.nn.Parameter))
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reference = self.in_place.memory.reference
        host = self.in_place.plain
        is_whole = (host.data_ptr(), host.shape, host.stride(), host.dtype) == self.in_place.memory.whole
        if reference is None or not is_whole:
            raise TypeError(
                f"a unified tensor of {format_bytes(host.nbytes)} cannot be pickled, because that would copy it. "
                "Give other processes a file: penstock.unified.from_file(path, shared=True) is pickled as the path, "
                "and the processes share its memory. To save the numbers: torch.save(tensor.cpu(), path)"
            )
        reopen, *arguments = reference
        return reopen, (*arguments, self._prefer, self.requires_grad, isinstance(self, torch.nn.Parameter))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call PyTorch's function, except for rows whose gradient would be on a device."""
        read = _TRAINED.get(func)
        if read is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            rows = read(*args, **(kwargs or {}))
            if rows is not None:
                return rows
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Place one operator, and run it."""
        return _dispatch(func, args, kwargs or {})


def _read(
    table: UnifiedTensor, index: torch.Tensor, padding: int | None = None, *, is_sparse: bool = False
) -> torch.Tensor:
    """Return rows by number, with a gradient if one is needed."""
    if torch.is_grad_enabled() and _trains(table):
        return _Gathered.apply(table, index, padding, is_sparse)  # type: ignore[no-untyped-call, no-any-return]
    return _gathered(table, index)


def _trains(table: UnifiedTensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():  # else the question takes longer than some rows
        return table.requires_grad


def _gathered(table: UnifiedTensor, index: torch.Tensor) -> torch.Tensor:
    device = None if index.is_cpu else _where([index], [table])  # CPU indexes decide
    return gather_rows(table.in_place.plain, index, device, table.in_place.memory, table.kind)


class _Plain(torch.autograd.Function):
    """A unified tensor's memory as a plain tensor."""

    @staticmethod
    def forward(ctx: Any, unified: UnifiedTensor) -> torch.Tensor:  # noqa: ARG004
        return unified.in_place.plain.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # noqa: ARG004
        return gradient


class _Gathered(torch.autograd.Function):
    """Rows of a table that trains. Its gradient is in host memory, like the table."""

    @staticmethod
    def forward(
        ctx: Any, unified: UnifiedTensor, index: torch.Tensor, padding: int | None, is_sparse: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(index)  # autograd then notices if it is written to meanwhile
        ctx.shape, ctx.padding, ctx.is_sparse = unified.shape, padding, is_sparse
        return _gathered(unified, index)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        # all on the host: the device, where the gradient is, need not have room for zeros as large as the table
        (index,) = ctx.saved_tensors
        rows, numbers = index.reshape(-1).long().cpu(), gradient.reshape(index.numel(), *ctx.shape[1:]).cpu()
        rows = torch.where(rows < 0, rows + ctx.shape[0], rows)
        if ctx.padding is not None:
            counts = rows != ctx.padding
            rows, numbers = rows[counts], numbers[counts]
        if ctx.is_sparse:
            whole = aten.embedding_sparse_backward.default(numbers, rows, ctx.shape[0], -1, False)
        else:
            whole = torch.zeros(ctx.shape, dtype=numbers.dtype).index_add_(0, rows, numbers)
        return whole, None, None, None


def _trained(table: Any, index: Any) -> bool:
    """Return whether a device reads rows of a table that trains."""
    return (
        isinstance(table, UnifiedTensor)
        and table.requires_grad
        and type(index) is torch.Tensor
        and is_row_numbers(index)
        and _where([index], [table]) is not None
    )


def _embedded(
    index: torch.Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,  # noqa: ARG001  # as PyTorch names it
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor | None:
    if not _trained(weight, index) or max_norm is not None or scale_grad_by_freq:
        return None
    padding = None if padding_idx is None else range(len(weight))[padding_idx]
    return _read(weight, index, padding, is_sparse=sparse)


def _selected(input: Any, dim: Any, index: Any, *, out: Any = None) -> torch.Tensor | None:  # noqa: A002  # PyTorch's
    if out is not None or not _trained(input, index) or dim not in (0, -input.dim()) or index.dim() != 1:
        return None
    return _read(input, index)


_TRAINED: dict[Any, Callable[..., torch.Tensor | None]] = {
    torch.nn.functional.embedding: _embedded,
    torch.index_select: _selected,
    torch.Tensor.index_select: _selected,
}
"""Functions that read rows with a gradient; they return ``None`` if they do not apply."""


@checked("penstock.unified.wrap(torch.from_numpy(array))")
def wrap(tensor: torch.Tensor, *, prefer: Preference = "device") -> UnifiedTensor:
    """Return ``tensor``'s own memory as a unified tensor; nothing is copied, and writes show through both.

    If there is a CUDA device, the memory is registered with it at its exact size, as long as a tensor made from it
    lives. Several processes may wrap a tensor in shared memory; each registers it for its own devices.

    Raises ``ValueError`` for tensors that are not in CPU memory or that have a gradient history, ``TypeError`` for
    tensors that are not dense.
    """
    if isinstance(tensor, UnifiedTensor):
        same = UnifiedTensor(tensor.in_place.plain, tensor.in_place.memory, prefer)
        return same.requires_grad_(tensor.requires_grad)  # type: ignore[return-value]
    if tensor.device.type != "cpu":
        raise ValueError(
            f"`tensor` must be in host memory, got one on {tensor.device}, where operators already run at full speed: "
            "wrap(tensor.cpu())"
        )
    tensor = as_plain("tensor", tensor)
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError("`tensor` must not be a lazy conjugate or negative: wrap(tensor.resolve_conj().resolve_neg())")
    if not tensor.is_leaf:
        raise ValueError(
            "`tensor` must not be the result of an operation that autograd recorded: wrap(tensor.detach())"
        )
    return UnifiedTensor(tensor, Memory.of(tensor), prefer)


@checked("penstock.unified.empty(1000, 128, dtype=torch.float32)")
def empty(
    *shape: int | Sequence[int],
    dtype: torch.dtype | None = None,
    prefer: Preference = "device",
    budget: Budget | None = None,
) -> UnifiedTensor:
    """Return a unified tensor of zeros in memory of exactly its size; pages are taken when they are first written.

    ``budget`` is charged for the memory while it lives. Raises ``BudgetError`` if that would exceed it.
    """
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else tuple(shape)
    dtype = dtype or torch.get_default_dtype()
    if any(isinstance(size, str | bytes) for size in shape) or any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError(f"`shape` must hold whole numbers that are not negative, got {sizes}: empty(1000, 64)")
    raw = exact(math.prod(sizes) * dtype.itemsize, budget)  # type: ignore[arg-type]
    host = raw.view(dtype).view(sizes) if raw.numel() else torch.empty(sizes, dtype=dtype, device="cpu")  # type: ignore[arg-type]
    return UnifiedTensor(host, Memory.of(host), prefer)


@checked("penstock.unified.gather(table, index)")
def gather(
    table: torch.Tensor,
    index: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    scale: torch.Tensor | float | None = None,
    sort: bool | None = None,
    verify: bool = False,
) -> torch.Tensor:
    """Gather rows of a table in host memory: ``[*index.shape, *row]``, without gradients.

    ``index`` is ``int64`` of any shape. For a unified table, the rules of placement decide where the result is: with
    the index on a CUDA device it is there, and the rows are read over the link in place. For a plain table it is on the
    CPU. ``dtype=torch.float32`` widens rows that are stored as float16, bfloat16 or int8 while they are read; int8
    needs ``scale``, one number or one for each column. ``sort`` reads rows in ascending order, which saves address
    translations in large tables; by default a device does so for many short rows. ``verify`` waits for the device and
    raises at once for rows that do not exist; without it they become zeros, and the next gather raises.

    Raises ``IndexError`` for rows that do not exist, ``ValueError`` for unsupported conversions.
    """
    if not table.dim() or index.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            "gather expects a table of shape [rows, ...] and int64 row numbers, got a table of shape "
            f"{tuple(table.shape)} and row numbers of {index.dtype}"
        )
    kind = RowType.of(tuple(table.shape[1:]), table.dtype, dtype, scale)
    memory, device = None, None
    if isinstance(table, UnifiedTensor):
        host, memory, device = table.in_place.plain, table.in_place.memory, _where([index], [table])
    elif table.device.type != "cpu":
        raise ValueError(
            f"`table` must be in host memory, got one on {table.device}; table[index] reads it at full speed there"
        )
    else:
        host = as_plain("table", table).detach()
    return gather_rows(host, index, device, memory, kind, sort=sort, verify=verify)


def is_unified(tensor: object) -> bool:
    """Return whether ``tensor`` is a unified tensor."""
    return isinstance(tensor, UnifiedTensor)


def restored(tensor: UnifiedTensor, requires_grad: bool, is_parameter: bool) -> torch.Tensor:
    """Return a copy of a tensor as what the tensor was: one that requires gradients or not, or a parameter."""
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


def _fresh(like: UnifiedTensor, dtype: torch.dtype) -> UnifiedTensor:
    return empty(like.shape, dtype=dtype, prefer=like.prefer)


def _device() -> torch.device | None:
    """Return the device of operators that prefer the device; ``None`` without CUDA."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


@torch._disable_dynamo  # type: ignore[attr-defined]  # a graph breaks here, and goes on behind
def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    table, index = rows_read(func, args, kwargs) or (None, None)
    if isinstance(table, UnifiedTensor) and not isinstance(index, UnifiedTensor) and index is not None:
        return _read_by(func, table, index)  # the main use of a table, without the cost of the general path
    flat, spec = tree_flatten((args, kwargs))
    unified = [leaf for leaf in flat if isinstance(leaf, UnifiedTensor)]
    if func in _LIKE and not kwargs.get("device"):
        # in host memory, as it is as large as the table: gradients, and the state of optimizers
        fresh = _fresh(unified[0], kwargs.get("dtype") or unified[0].dtype)
        _LIKE[func](fresh.in_place.plain, *args[1:])
        return fresh
    if is_view(func):
        owner = unified[0]
        args, kwargs = _replaced(spec, flat, lambda table: table.in_place.plain)
        views = func(*args, **kwargs)
        return _map(views, lambda view: UnifiedTensor(view, owner.in_place.memory, owner.prefer))
    if torch.Tag.inplace_view in func.tags or func is aten.resize_.default:
        raise RuntimeError(
            f"{func} changes the shape of a tensor in place, but the shape of a unified tensor is fixed. Take a view: "
            "tensor.t(), tensor.unsqueeze(0), tensor.view(shape)"
        )
    others = [leaf for leaf in flat if isinstance(leaf, torch.Tensor) and not isinstance(leaf, UnifiedTensor)]
    device = _where(others, unified)
    _refuse_gradient(func, device, unified)
    written = written_ids(func, args, kwargs) if func._schema.is_mutable else set()
    for table in unified:
        table.in_place.before(device, writes=id(table) in written)
    results = _run(func, args, kwargs, device, written)
    for table in unified:
        table.in_place.after(device, writes=id(table) in written)
    return results


def _read_by(func: Any, table: UnifiedTensor, index: torch.Tensor) -> torch.Tensor:
    """Return rows for an operator; only ``[]`` counts negative rows from the end."""
    device = _where([index], [table])
    _refuse_gradient(func, device, [table])
    host, memory = table.in_place.plain, table.in_place.memory
    return gather_rows(host, index, device, memory, table.kind, wraps=func is aten.index.Tensor)


def _where(others: Iterable[torch.Tensor], unified: Iterable[UnifiedTensor]) -> torch.device | None:
    """Return the device on which an operator runs; ``None`` for the CPU."""
    others, unified = list(others), list(unified)
    if place(map(operand_of, others), (table.prefer for table in unified)) == "host":
        return None
    device = next((tensor.device for tensor in others if tensor.device.type != "cpu"), None)
    if device is not None:
        return device
    preferred = _device()
    if preferred is None or preferred.type != "cuda" or all(table.is_registered for table in unified):
        return preferred
    return None  # CUDA cannot reach it; a warning said so when it was wrapped


def _refuse_gradient(func: Any, device: torch.device | None, unified: Sequence[UnifiedTensor]) -> None:
    """Raise ``RuntimeError`` if autograd would bring a gradient on a device to a leaf in host memory."""
    if (
        device is None
        or device.type == "meta"
        or not torch.is_grad_enabled()
        or not any(table.requires_grad for table in unified)
    ):
        return
    if func is aten._to_copy.default:  # its backward brings the gradient back
        return
    raise RuntimeError(
        f"{func} on a device would create a gradient of the whole unified tensor, for which the device may not have "
        "enough memory. A unified tensor trains only by rows. Read rows, table[index] or "
        "torch.nn.functional.embedding(index, table); or copy a table that fits: table.cuda()"
    )


def _run(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device | None, written: set[int]
) -> Any:
    """Run the operator on plain tensors over the same memory; ``written`` are the ids of tensors that it writes to."""
    outs = out_ids(func, args, kwargs)
    kept: dict[int, tuple[UnifiedTensor, torch.Tensor]] = {}

    def stand_in(table: UnifiedTensor) -> torch.Tensor:
        if id(table) not in kept:
            plain = table.in_place.on(device)
            if id(table) in outs:  # PyTorch would replace the memory of one whose shape is not the result's
                plain = torch.empty(0, dtype=table.dtype, device=plain.device)
            kept[id(table)] = table, plain
        return kept[id(table)][1]

    flat, spec = tree_flatten((args, kwargs))
    args, kwargs = _replaced(spec, flat, stand_in)
    results = func(*args, **kwargs)
    for table, plain in kept.values():
        if id(table) in written and plain.shape != table.shape:
            raise RuntimeError(
                f"{func} returns shape {tuple(plain.shape)}, but out= is a unified tensor of shape "
                f"{tuple(table.shape)}, whose size is fixed: give one of the result's shape"
            )
        if id(table) in outs:
            table.in_place.on(device).copy_(plain)
    # a result is the table itself only if the operator has written to it
    tables = {id(plain): table for table, plain in kept.values() if id(table) in written}
    return _map(results, lambda result: tables.get(id(result), result))


def _replaced(spec: Any, flat: list[Any], by: Callable[[UnifiedTensor], torch.Tensor]) -> tuple[Any, Any]:
    args, kwargs = tree_unflatten([by(leaf) if isinstance(leaf, UnifiedTensor) else leaf for leaf in flat], spec)
    return args, kwargs


def _map(results: Any, by: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    leaves, spec = tree_flatten(results)
    return tree_unflatten([by(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)
