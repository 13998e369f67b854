"""PyTorch's functions on tiered features: some read rows, some only ask about the table, all others raise an error.

A function that is not listed here would need the whole table as one tensor, or write to it. It raises ``ValueError``
with the call that works, so that nobody reads a table larger than memory, or the wrong rows, without noticing. It is
not ``TypeError``, because PyTorch's operators then try the other operand, and ``features == 1`` would be ``False``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import resolve_name

from penstock.units import format_bytes

_ABOUT = frozenset((
    "dtype", "device", "layout", "shape", "ndim", "nbytes", "itemsize", "requires_grad", "grad", "grad_fn", "is_leaf",
    "is_cuda", "is_cpu", "is_sparse", "is_sparse_csr", "is_quantized", "is_meta", "is_mkldnn", "is_nested", "dim",
    "numel", "nelement", "element_size", "is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_conj",
    "is_neg", "get_device", "stride",
))  # fmt: skip
"""Names of functions and attributes that only ask about the table."""


def call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], features: Any) -> Any:
    """Return the result of a PyTorch function with ``features`` among its arguments. Raises ``ValueError`` for most."""
    if func is torch.nn.functional.embedding:
        return _embedding(type(features), *args, **kwargs)
    if not args and kwargs.get("input") is features:
        args, kwargs = (features,), {name: value for name, value in kwargs.items() if name != "input"}
    name = _short_name(func)
    if args and args[0] is features and name in _ABOUT:
        return torch.Tensor.__torch_function__(func, (), tuple(args), dict(kwargs))  # type: ignore[no-untyped-call]
    if args and args[0] is features and name in _HANDLERS:
        return _HANDLERS[name](*args, **kwargs)
    raise refusal(resolve_name(func) or name, features)


def refusal(name: str, features: Any) -> ValueError:
    """Return the error for a function that needs the whole table, or writes to it."""
    return ValueError(
        f"{name} needs all {format_bytes(features.nbytes)} of the tiered features as one tensor, or writes to them, "
        "but they are read-only and read row by row. Read rows first: rows = features[index]"
    )


def _short_name(func: Callable[..., Any]) -> str:
    """Return the name of a function, method or attribute; by name, since PyG replaces ``torch.index_select``."""
    name: str = getattr(func, "__name__", str(func))
    return str(func.__self__.__name__) if name == "__get__" else name  # type: ignore[attr-defined]


def _index_select(features: Any, dim: int, index: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    rows: torch.Tensor = features.index_select(dim, index)
    if out is None:
        return rows
    if out.dtype is not rows.dtype:
        raise RuntimeError(f"out= must have the dtype of the rows, {rows.dtype}, got {out.dtype}")
    return out.resize_(rows.shape).copy_(rows)


def _embedding(
    table_type: type[Any],
    /,
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
    if not isinstance(weight, table_type):
        raise TypeError("embedding expects row numbers first, then tiered features: embedding(index, features)")
    rows: torch.Tensor = weight.index_select(0, index.reshape(-1))
    return rows.view(*index.shape, *weight.shape[1:])


def _moved(features: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the features themselves if they already are as asked.

    Raises ``ValueError`` if they would have to change.
    """
    device, dtype, copies = kwargs.get("device"), kwargs.get("dtype"), bool(kwargs.get("copy"))
    flags = [value for value in args if isinstance(value, bool)]  # non_blocking, copy
    for value in (*args, kwargs.get("other")):
        if isinstance(value, torch.Tensor):
            device, dtype = value.device, value.dtype
        elif isinstance(value, torch.dtype):
            dtype = value
        elif value is not None and not isinstance(value, bool):
            device = value
    wanted = features.device if device is None else torch.device(device)
    is_there = wanted.type == features.device.type and wanted.index in (None, features.device.index)
    if is_there and dtype in (None, features.dtype) and not copies and not any(flags[1:]):
        return features
    raise ValueError(
        f"tiered features of {features.dtype} that give rows on {features.device} cannot be converted to "
        f"{dtype or features.dtype} on {wanted}, because their rows stay where they are. Move the mini-batch: "
        "batch.to(device), or create the features for that device: TieredFeatures(..., device=device)"
    )


def _on_cuda(features: Any, device: Any = None, **_: Any) -> Any:
    return _moved(features, "cuda" if device is None else device)


def _maker(name: str) -> Callable[..., Any]:
    """Return a function that makes new tensors of the same type without reading the table."""
    return lambda features, *args, **kwargs: getattr(
        torch.empty(0, dtype=features.dtype, device=features.device), name
    )(*args, **kwargs)


_HANDLERS: dict[str, Callable[..., Any]] = {
    "index_select": _index_select,
    "to": _moved,
    "cpu": lambda features, **_: _moved(features, "cpu"),
    "cuda": _on_cuda,
    "detach": lambda features: features,
    "contiguous": lambda features, **_: features,
    "is_pinned": lambda features, *_: False,  # noqa: ARG005
    "is_shared": lambda features: False,  # noqa: ARG005
    "untyped_storage": lambda features: torch.UntypedStorage(0),  # noqa: ARG005
    **{name: _maker(name) for name in ("new", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")},
}
"""Functions that are handled here, by name; the features are their first argument.

PyG's workers make shared memory of an empty storage for the rows that they select (``untyped_storage``, ``new``).
"""
