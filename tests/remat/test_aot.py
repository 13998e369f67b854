"""Operators that AOTAutograd would decompose."""

import pytest
import torch
from torch import nn

from penstock import remat


@pytest.mark.parametrize(
    ("mode", "shape", "size"),
    [
        ("linear", (2, 3, 8), 13),
        ("bilinear", (2, 3, 8, 8), 13),
        ("bicubic", (2, 3, 8, 8), 5),
        ("trilinear", (1, 2, 4, 4, 4), 7),
    ],
)
def test_interpolation_is_eager_pytorchs(mode, shape, size):
    torch.manual_seed(0)
    x = torch.randn(shape, requires_grad=True)
    step = remat.optimize(lambda x: nn.functional.interpolate(x, size, mode=mode).square().sum(), [x], None)
    (expected,) = torch.autograd.grad(nn.functional.interpolate(x, size, mode=mode).square().sum(), x)
    (ours,) = torch.autograd.grad(step(x), x)
    assert torch.equal(ours, expected)
