"""What runs outside of graphs: it is counted, offloaded, and gets its gradients as in eager PyTorch."""

import warnings

import numpy as np
import pytest
import torch
from breaking import batch, make, train
from torch import nn

from penstock import remat
from penstock.errors import BudgetNotKeptWarning


def test_the_eager_rest_is_offloaded_where_there_is_a_disk(tmp_path):
    x = batch(64)
    expected = train(model := make("disabled", num_blocks=2), model, [x] * 3)
    model = make("disabled", num_blocks=2)
    step = remat.compile(model, budget=None, disk=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the disk may be too slow to be worth it
        for _ in range(5):
            model.zero_grad(set_to_none=False)
            step(x).backward()
    assert all(
        np.array_equal(parameter.grad, gradient)
        for parameter, gradient in zip(model.parameters(), expected[0][1], strict=True)
    )
    assert step._step.door._offloading is not None
    step.close()


def test_what_has_no_gradient_counts_in_the_eager_rest():
    layer, x = nn.Linear(64, 64), torch.randn(1024, 64)
    noisy = torch.compiler.disable(lambda x: nn.functional.dropout(x, 0.5))
    step = remat.compile(lambda x: noisy(layer(x)).sum(), budget="64MiB")
    step(x).backward()
    assert step.door.session.beside.rest_bytes >= x.nbytes


def test_a_weight_that_graphs_and_an_eager_rest_share_gets_its_sum_at_once():
    torch.manual_seed(0)
    table, layer = nn.Embedding(50, 16), nn.Linear(16, 16)
    tokens = torch.randint(50, (8, 12))

    def run(step):
        for parameter in (*table.parameters(), *layer.parameters()):
            parameter.grad = torch.full_like(parameter, 0.1)
        step(tokens).backward()
        return [parameter.grad.clone() for parameter in (*table.parameters(), *layer.parameters())]

    def step(tokens):
        x = layer(table(tokens))
        print(end="")
        x = torch.compiler.disable(lambda x: x + 0.5 * table.weight.mean(0))(x)
        return nn.functional.cross_entropy((x @ table.weight.t()).flatten(0, 1), tokens.flatten())

    expected = run(step)
    compiled = remat.compile(step, budget="16MiB")
    for _ in range(2):
        assert all(map(torch.equal, run(compiled), expected))


def test_a_step_that_differentiates_by_itself():
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)

    def step(x):
        return (layer(x) * torch.func.grad(lambda y: layer(y).sum())(x)).sum()

    step(x).backward()
    expected = layer.weight.grad.clone()
    compiled = remat.compile(step, budget="1MiB")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetNotKeptWarning)
        for _ in range(2):
            layer.zero_grad()
            compiled(x).backward()
            assert torch.equal(layer.weight.grad, expected)
    with torch.autograd.graph.save_on_cpu():  # hooks are allowed as before
        layer(x).sum().backward()


def test_torch_func_around_a_compiled_model():
    model = nn.Linear(8, 1)
    step, x = remat.compile(model, budget="8MiB"), torch.randn(5, 8)
    with pytest.warns(BudgetNotKeptWarning, match=r"torch\.func"):
        gradient = torch.func.grad(lambda x: step(x).sum())(x)
    assert torch.equal(gradient, torch.func.grad(lambda x: model(x).sum())(x))
    assert torch.equal(torch.vmap(step)(x), torch.vmap(model)(x))
