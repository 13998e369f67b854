"""Operators that capture replaces by others which round differently, run as eager PyTorch runs them.

On a CPU, eager dropout multiplies by a mask that was divided by ``1 - p`` in the tensor's own dtype. Captured dropout
becomes ``native_dropout``, which multiplies by ``1 / (1 - p)``, rounded once. For bfloat16 and float16 the two differ
in the third digit; for float32 in the last one, for 15 of the 99 whole percentages.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from penstock.remat._whole import BACKWARD, FORWARD, run_backward, run_forward

_ROUNDED = (torch.bfloat16, torch.float16, torch.float32)


def function_of(call: fx.Node) -> Callable[..., Any]:
    """Return the function to run for an operator of a captured graph. It takes the same arguments and as many bytes."""
    assert callable(call.target)
    if call.target in FORWARD:  # called directly, because a dispatcher's kernel has no autograd
        return run_forward
    if call.target is BACKWARD:
        return run_backward
    function = _FUNCTIONS.get(call.target)
    value = call.args[0].meta.get("val") if function is not None and isinstance(call.args[0], fx.Node) else None
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dtype in _ROUNDED:
        return function or call.target
    return call.target


def _dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    if train is False or not 0 < p < 1:
        return torch.ops.aten.native_dropout.default(x, p, train)  # type: ignore[no-any-return]
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
    return _times(x, mask.to(x.dtype).div_(1 - p)), mask


def _dropout_backward(gradient: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    if scale == 0:
        return torch.ops.aten.native_dropout_backward.default(gradient, mask, scale)  # type: ignore[no-any-return]
    return _times(gradient, mask.to(gradient.dtype).div_(1 / scale))


def _times(x: torch.Tensor, scaled_mask: torch.Tensor) -> torch.Tensor:
    """Return the product in the layout that it has in eager PyTorch, on which later sums depend.

    It is computed in place if possible.
    """
    return scaled_mask.mul_(x) if x.stride() == scaled_mask.stride() else x * scaled_mask


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.native_dropout.default: _dropout,
    torch.ops.aten.native_dropout_backward.default: _dropout_backward,
}
