"""PyTorch's functions on tiered features: some read rows, some only ask about the table, all others are refused.

A function that is not listed here would need the whole table as one tensor, or write to it. It raises ``ValueError``
with the call that works, so that no caller reads a table larger than memory, or other rows, without knowing. Not
``TypeError``: PyTorch's operators take that for "try the other operand", and ``features == 1`` would be ``False``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import resolve_name

from penstock.units import format_bytes

_functions: Any = torch._C._VariableFunctions
"""PyTorch's own: PyG puts a function of its own in the place of ``torch.index_select`` when it is imported."""
_NAMES_OF_VALUES = (
    "dtype", "device", "layout", "shape", "ndim", "nbytes", "itemsize", "requires_grad", "grad", "grad_fn", "is_leaf",
    "is_cuda", "is_cpu", "is_sparse", "is_sparse_csr", "is_quantized", "is_meta", "is_mkldnn", "is_nested",
)  # fmt: skip
_NAMES_OF_QUESTIONS = (
    "dim", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "is_signed", "is_contiguous",
    "is_conj", "is_neg", "get_device", "stride",
)  # fmt: skip
_NAMES_OF_MAKERS = ("new", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")
_NAMES_OF_ITSELF = ("detach", "contiguous")


def call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], features: Any) -> Any:
    """The result of a function of PyTorch with ``features`` among its arguments. Raises ``ValueError`` for most."""
    if not args and kwargs.get("input") is features:
        args, kwargs = (features,), {name: value for name, value in kwargs.items() if name != "input"}
    if func in _ABOUT and args and args[0] is features:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    handler = _HANDLERS.get(func)
    if handler is not None and args and args[0] is features:
        return handler(*args, **kwargs)
    if func is torch.nn.functional.embedding:
        return _embedding(*args, **kwargs)
    raise refusal(_name(func), features)


def refusal(name: str, features: Any) -> ValueError:
    """The error for a function that needs the whole table, or writes to it."""
    return ValueError(
        f"{name} needs all {format_bytes(features.nbytes)} of the tiered features as one tensor, or writes to them; "
        "they are read by rows, and only read. Read rows first: rows = features[index]"
    )


def _index_select(features: Any, dim: int, index: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    rows: torch.Tensor = features.index_select(dim, index)
    if out is None:
        return rows
    if out.dtype is not rows.dtype:
        raise RuntimeError(f"out= is of {out.dtype}; rows are of {rows.dtype}")
    return out.resize_(rows.shape).copy_(rows)


def _embedding(
    index: torch.Tensor,
    weight: Any,
    padding_idx: int | None = None,  # noqa: ARG001  # it is about gradients, of which there are none
    max_norm: float | None = None,
    norm_type: float = 2.0,  # noqa: ARG001
    scale_grad_by_freq: bool = False,  # noqa: ARG001
    sparse: bool = False,  # noqa: ARG001
) -> torch.Tensor:
    if max_norm is not None:
        raise refusal("embedding(..., max_norm=...)", weight)
    if not hasattr(weight, "_rows"):
        raise TypeError("embedding(index, features) takes row numbers first, then tiered features")
    rows: torch.Tensor = weight.index_select(0, index.reshape(-1))
    return rows.view(*index.shape, *weight.shape[1:])


def _moved(features: Any, *args: Any, **kwargs: Any) -> Any:
    """The features themselves where they are as asked. Raises ``ValueError`` where they would have to be others."""
    device, dtype, _, _ = torch._C._nn._parse_to(*_without_options(args), **_without_copy(kwargs, features))
    wanted = features.device if device is None else torch.device(device)
    same_device = wanted.type == features.device.type and wanted.index in (None, features.device.index)
    if same_device and dtype in (None, features.dtype):
        return features
    raise ValueError(
        f"tiered features of {features.dtype} that give rows on {features.device} do not become "
        f"{dtype or features.dtype} on {wanted}, since their rows stay where they are. Move the mini-batch: "
        "batch.to(device), or make them so: TieredFeatures(..., device=device)"
    )


def _without_options(args: Sequence[Any]) -> Sequence[Any]:
    """Another tensor stands for its device and type."""
    if args and isinstance(args[0], torch.Tensor):
        return (args[0].device, args[0].dtype, *args[1:])
    return args


def _without_copy(kwargs: Mapping[str, Any], features: Any) -> dict[str, Any]:
    if kwargs.get("copy"):
        raise refusal("to(copy=True)", features)
    return {name: value for name, value in kwargs.items() if name not in ("memory_format", "copy")}


def _on_cpu(features: Any, **_: Any) -> Any:
    return _moved(features, "cpu")


def _on_cuda(features: Any, device: Any = None, **_: Any) -> Any:
    return _moved(features, "cuda" if device is None else device)


def _no_storage(features: Any) -> torch.UntypedStorage:  # noqa: ARG001
    """Of which PyG's workers make shared memory for the rows that they select."""
    return torch.UntypedStorage(0)


def _maker(name: str) -> Callable[..., Any]:
    """Of new tensors of the same type: nothing of the table is read."""
    return lambda features, *args, **kwargs: getattr(
        torch.empty(0, dtype=features.dtype, device=features.device), name
    )(*args, **kwargs)


def _name(func: Callable[..., Any]) -> str:
    """As a user would write it."""
    name: str = resolve_name(func) or getattr(func, "__name__", str(func))
    return name.removesuffix(".__get__").removesuffix(".__set__")


_ABOUT = {
    *(getattr(torch.Tensor, name).__get__ for name in _NAMES_OF_VALUES),
    *(getattr(torch.Tensor, name) for name in _NAMES_OF_QUESTIONS),
    *(getattr(_functions, name) for name in ("numel", "is_floating_point", "is_complex", "is_signed")),
}  # fmt: skip
"""What only asks about the table."""
_HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {
    _functions.index_select: _index_select,
    torch.Tensor.index_select: _index_select,
    torch.Tensor.to: _moved,
    torch.Tensor.cpu: _on_cpu,
    torch.Tensor.cuda: _on_cuda,
    torch.Tensor.untyped_storage: _no_storage,
    torch.Tensor.is_pinned: lambda features, *_: False,  # noqa: ARG005
    torch.Tensor.is_shared: lambda features: False,  # noqa: ARG005
    _functions.detach: lambda features: features,
    **{getattr(torch.Tensor, name): lambda features, **_: features for name in _NAMES_OF_ITSELF},
    **{getattr(torch.Tensor, name): _maker(name) for name in _NAMES_OF_MAKERS},
}
"""What is answered here, by function; features are its first argument."""
