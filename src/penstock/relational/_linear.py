"""A linear map for each type of rows, on a CPU: one operator for all types, whose parts are separate tensors.

With a `Linear` for each type, the parts of its result (keys, queries, values) would be copied out of it, and those of
all types together.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module

from penstock.errors import DoubleBackwardError
from penstock.relational._native import DTYPES, CompiledC, threads
from penstock.relational._operator import NO_SECOND_DERIVATIVE
from penstock.relational._products import Typed
from penstock.relational._run import constant_while_traced

_GLOBAL_HOOKS = (
    module._global_forward_hooks, module._global_forward_pre_hooks, module._global_backward_hooks,
    module._global_backward_pre_hooks,
)  # fmt: skip


def may_map(modules: Sequence[nn.Module], x: torch.Tensor) -> bool:
    """Return whether `map_by_type` computes what modules do with rows like ``x``: all ``nn.Linear`` but the first.

    It calls no module, so none may have hooks, or be something else than PyTorch's.
    """
    if not (x.device.type == "cpu" and x.dtype in DTYPES and type(x) in (torch.Tensor, nn.Parameter)):
        return False
    if torch.is_autocast_enabled("cpu") or not _can_multiply() or any(_GLOBAL_HOOKS):
        return False
    return not any(map(_is_watched, modules)) and all(_is_plain(lin, x) for lin in modules[1:])


def map_by_type(x: torch.Tensor, lins: Sequence[nn.Linear], sizes: Sequence[int], num_parts: int) -> list[torch.Tensor]:
    """Return the parts of every type's map of its rows, ``[rows, out / num_parts]`` each.

    ``x [rows, in]``: ``sizes`` rows of each type, one type after the other.
    """
    weight, bias = _stacked(lins)
    parts: list[torch.Tensor] = torch.ops.penstock.linear_by_type(x, weight, bias, list(sizes), num_parts, None, None)
    return parts


def blend_by_type(
    x: torch.Tensor, lins: Sequence[nn.Linear], sizes: Sequence[int], other: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """Return ``torch.lerp(other, map of x, share)`` for every row, with a share for each type, ``[types]``.

    The share is multiplied into the map's weights, so that no more than the result is written.
    """
    weight, bias = _stacked(lins)
    weight, bias = weight * shares[:, None, None], bias * shares[:, None]
    blended: torch.Tensor = torch.ops.penstock.linear_by_type(x, weight, bias, list(sizes), 1, other, 1 - shares)[0]
    return blended


def _stacked(lins: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([lin.weight for lin in lins]), torch.stack([lin.bias for lin in lins])


@constant_while_traced
def _can_multiply() -> bool:
    return CompiledC.is_available()


def _is_watched(of: nn.Module) -> bool:
    hooks = (of._forward_hooks, of._forward_pre_hooks, of._backward_hooks, of._backward_pre_hooks)
    return any(hooks) or "forward" in vars(of)  # libraries that place a model's parts also replace the method


def _is_plain(lin: nn.Module, x: torch.Tensor) -> bool:
    if type(lin) is not nn.Linear or type(lin.weight) is not nn.Parameter or lin.bias is None:
        return False
    return lin.weight.dtype == x.dtype and lin.weight.shape[1] == x.shape[1]


_LIBRARY = torch.library.Library("penstock", "FRAGMENT")
_LIBRARY.define(
    "linear_by_type(Tensor x, Tensor weight, Tensor bias, int[] sizes, int num_parts, Tensor? other, Tensor? kept)"
    " -> Tensor[]"
)
_LIBRARY.define(
    "linear_by_type_backward(Tensor[] gradients, Tensor x, Tensor weight, int[] sizes, Tensor? other, Tensor? kept)"
    " -> Tensor[]"
)


def _typed(x: torch.Tensor, sizes: Sequence[int]) -> Typed:
    return Typed(torch.tensor([0, *sizes], device="cpu").cumsum(0), x.dtype, threads())


@torch.library.impl(_LIBRARY, "linear_by_type", "CompositeExplicitAutograd")
def _forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    sizes: Sequence[int],
    num_parts: int,
    other: torch.Tensor | None,
    kept: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Return the parts of ``x @ weight.T + bias`` (+ ``kept * other``, which has one part), type by type."""
    x, typed, parts = x.contiguous(), _typed(x, sizes), []
    for matrices, added in zip(weight.chunk(num_parts, 1), bias.chunk(num_parts, 1), strict=True):
        part = x.new_empty(len(x), added.shape[1])
        parts.append(part)
        if other is None or kept is None:
            typed.multiply(x, matrices, part, transposed=True, bias=added)
            continue
        rows = zip(added, other.split(list(sizes)), part.split(list(sizes)), kept.tolist(), strict=True)
        for of_type, others, results, share in rows:
            torch.add(of_type, others, alpha=share, out=results)
        typed.multiply(x, matrices, part, transposed=True, adds=True)
    return parts


@torch.library.impl(_LIBRARY, "linear_by_type_backward", "CompositeExplicitAutograd")
def _backward(
    gradients: Sequence[torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor,
    sizes: Sequence[int],
    other: torch.Tensor | None,
    kept: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Return the gradients of ``x``, ``weight`` and ``bias`` (and of ``other`` and ``kept``)."""
    x, weight = x.contiguous(), weight.contiguous()
    results = list(_typed(x, sizes).differentiate([gradient.contiguous() for gradient in gradients], x, weight))
    if other is None or kept is None:
        return results
    of_other, of_kept = x.new_empty(other.shape), []
    parts = (tensor.split(list(sizes)) for tensor in (gradients[0], other, of_other))
    for rows, others, into, share in zip(*parts, kept.tolist(), strict=True):
        torch.mul(rows, share, out=into)
        of_kept.append(torch.dot(rows.reshape(-1), others.reshape(-1)))
    return [*results, of_other, torch.stack(of_kept)]


def _fake_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, sizes: Sequence[int], num_parts: int, *blend: Any
) -> list[torch.Tensor]:
    del bias, sizes, blend
    return [x.new_empty(x.shape[0], weight.shape[1] // num_parts) for _ in range(num_parts)]


def _fake_backward(
    gradients: Sequence[torch.Tensor], x: torch.Tensor, weight: torch.Tensor, sizes: Sequence[int], *blend: Any
) -> list[torch.Tensor]:
    del gradients, sizes
    shapes = [x.shape, weight.shape, weight.shape[:2], *(tensor.shape for tensor in blend if tensor is not None)]
    return [x.new_empty(shape) for shape in shapes]


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, _, sizes, _, other, kept = inputs
    ctx.save_for_backward(x, weight, other, kept)
    ctx.sizes, ctx.shapes = sizes, [part.shape for part in output]


def _gradients(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> Any:
    x, weight, other, kept = ctx.saved_tensors
    filled = [
        x.new_zeros(shape) if gradient is None else gradient
        for gradient, shape in zip(gradients, ctx.shapes, strict=True)
    ]
    computed = torch.ops.penstock.linear_by_type_backward(filled, x, weight, ctx.sizes, other, kept)
    of_x, of_weight, of_bias, *of_blend = computed
    return of_x, of_weight, of_bias, None, None, *(of_blend or (None, None))


def _refuse(ctx: Any, *gradients: Any) -> Any:
    del ctx, gradients
    raise DoubleBackwardError(NO_SECOND_DERIVATIVE)


torch.library.register_fake("penstock::linear_by_type", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("penstock::linear_by_type_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_autograd("penstock::linear_by_type", _gradients, setup_context=_setup_context, lib=_LIBRARY)
torch.library.register_autograd("penstock::linear_by_type_backward", _refuse, lib=_LIBRARY)
