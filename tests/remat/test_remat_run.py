"""Steps that `optimize` takes and refuses."""

import pytest
import torch
from breaking import MIB, batch, make
from torch import nn

from penstock import remat
from penstock.errors import GraphBreakWarning


def test_a_step_that_depends_on_numbers_is_planned_in_pieces():
    model, x = make("plain"), batch()

    def step(x):
        y = model.blocks[0](x)
        if y.mean() > 1e3:
            y = y * 2
        return model.loss(model.blocks[1](y))

    step(x).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad(set_to_none=False)
    with pytest.warns(GraphBreakWarning, match=r"the step is not one graph \(.*test_remat_run.py:\d+"):
        planned = remat.optimize(step, [x], "64MiB")
    with pytest.raises(ValueError, match="planned after its first run"):
        _ = planned.plan
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        planned(x).backward()
        assert all(
            torch.equal(parameter.grad, gradient)
            for parameter, gradient in zip(model.parameters(), expected, strict=True)
        )
    assert planned.plan.peak_bytes <= 64 * MIB
    planned.close()


def test_operators_without_a_shape_run_eagerly_in_between():
    layer, x = nn.Linear(16, 16), torch.randn(64, 16)

    def step(x):
        y = layer(x)
        return y[y > 0].square().mean() + layer(y).sum()

    step(x).backward()
    expected = layer.weight.grad.clone()
    layer.zero_grad()
    with pytest.warns(GraphBreakWarning):
        planned = remat.optimize(step, [x], "1MiB")
        planned(x).backward()
    assert torch.equal(layer.weight.grad, expected)


def test_a_tensor_instead_of_a_list_of_inputs_is_refused_with_the_call_that_works():
    with pytest.raises(TypeError, match=r"must be a list, got .*Tensor: penstock.remat.optimize\(step, \[batch\]"):
        remat.optimize(make("plain"), batch(), "64MiB")
