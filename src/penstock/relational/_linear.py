"""A linear map for each type of rows, on a CPU: one operator for all types, whose parts are separate tensors.

With a `Linear` for each type, the parts of its result (keys, queries, values) are copied out of it, and those of all
types together: as much time again as the products take.
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
    return not any(map(_has_hooks, modules)) and all(_is_plain(lin, x) for lin in modules[1:])


def map_by_type(
    x: torch.Tensor, lins: Sequence[nn.Linear], sizes: Sequence[int], num_parts: int = 1
) -> list[torch.Tensor]:
    """Return the parts of every type's map of its rows, ``[rows, out / num_parts]`` each.

    ``x [rows, in]``: ``sizes`` rows of each type, one type after the other.
    """
    weight = torch.stack([lin.weight for lin in lins])
    bias = torch.stack([lin.bias for lin in lins])
    parts: list[torch.Tensor] = torch.ops.penstock.linear_by_type(x, weight, bias, list(sizes), num_parts)
    return parts


@constant_while_traced
def _can_multiply() -> bool:
    return CompiledC.is_available()


def _has_hooks(of: nn.Module) -> bool:
    return any((of._forward_hooks, of._forward_pre_hooks, of._backward_hooks, of._backward_pre_hooks))


def _is_plain(lin: nn.Module, x: torch.Tensor) -> bool:
    if type(lin) is not nn.Linear or type(lin.weight) is not nn.Parameter or lin.bias is None:
        return False
    return lin.weight.dtype == x.dtype and lin.weight.shape[1] == x.shape[1]


_LIBRARY = torch.library.Library("penstock", "FRAGMENT")
_LIBRARY.define("linear_by_type(Tensor x, Tensor weight, Tensor bias, int[] sizes, int num_parts) -> Tensor[]")
_LIBRARY.define(
    "linear_by_type_backward(Tensor[] gradients, Tensor x, Tensor weight, int[] sizes) -> (Tensor, Tensor, Tensor)"
)


def _typed(x: torch.Tensor, sizes: Sequence[int]) -> Typed:
    return Typed(torch.tensor([0, *sizes], device="cpu").cumsum(0), x.dtype, threads())


@torch.library.impl(_LIBRARY, "linear_by_type", "CompositeExplicitAutograd")
def _forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, sizes: Sequence[int], num_parts: int
) -> list[torch.Tensor]:
    x, typed = x.contiguous(), _typed(x, sizes)
    parts = []
    for matrices, added in zip(weight.chunk(num_parts, 1), bias.chunk(num_parts, 1), strict=True):
        parts.append(x.new_empty(len(x), added.shape[1]))
        typed.multiply(x, matrices, parts[-1], transposed=True, bias=added)
    return parts


@torch.library.impl(_LIBRARY, "linear_by_type_backward", "CompositeExplicitAutograd")
def _backward(
    gradients: Sequence[torch.Tensor], x: torch.Tensor, weight: torch.Tensor, sizes: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, typed = x.contiguous(), _typed(x, sizes)
    of_x, of_weight, of_bias = torch.empty_like(x), [], []
    for number, (gradient, matrices) in enumerate(zip(gradients, weight.chunk(len(gradients), 1), strict=True)):
        rows = gradient.contiguous()
        typed.multiply(rows, matrices, of_x, transposed=False, adds=number > 0)
        of_weight.append(x.new_empty(matrices.shape))
        typed.sum_outer(rows, x, of_weight[-1])
        of_bias.append(torch.stack([part.sum(0) for part in rows.split(list(sizes))]))
    return of_x, torch.cat(of_weight, 1), torch.cat(of_bias, 1)


def _fake_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, sizes: Sequence[int], num_parts: int
) -> list[torch.Tensor]:
    del bias, sizes
    return [x.new_empty(x.shape[0], weight.shape[1] // num_parts) for _ in range(num_parts)]


def _fake_backward(
    gradients: Sequence[torch.Tensor], x: torch.Tensor, weight: torch.Tensor, sizes: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    del gradients, sizes
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape[:2])


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, _, sizes, _ = inputs
    ctx.save_for_backward(x, weight)
    ctx.sizes, ctx.shapes = sizes, [part.shape for part in output]


def _gradients(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> Any:
    x, weight = ctx.saved_tensors
    filled = [
        x.new_zeros(shape) if gradient is None else gradient
        for gradient, shape in zip(gradients, ctx.shapes, strict=True)
    ]
    return *torch.ops.penstock.linear_by_type_backward(filled, x, weight, ctx.sizes), None, None


def _refuse(ctx: Any, *gradients: Any) -> Any:
    del ctx, gradients
    raise DoubleBackwardError(NO_SECOND_DERIVATIVE)


torch.library.register_fake("penstock::linear_by_type", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("penstock::linear_by_type_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_autograd("penstock::linear_by_type", _gradients, setup_context=_setup_context, lib=_LIBRARY)
torch.library.register_autograd("penstock::linear_by_type_backward", _refuse, lib=_LIBRARY)
