"""Sums of backward are written into a term, where and only where nobody reads the term later."""

import pytest
import torch
from torch import nn

from penstock import probe, remat
from penstock.remat import _piece

ADD, ADD_IN_PLACE = "aten.add.Tensor", "aten.add_.Tensor"


def backward_sums(step):
    """How many sums backward makes anew, and how many in place."""
    problem = step.plan.problem
    targets = [operator.target for operator in problem.operators[problem.num_forward :]]
    return targets.count(ADD), targets.count(ADD_IN_PLACE)


def gradients(function, leaves, *inputs):
    for leaf in leaves:
        leaf.grad = None
    function(*inputs).backward()
    return [leaf.grad.clone() for leaf in leaves]


def compare(function, leaves, inputs, sums, **options):
    """Gradients to the bit, first ones and added ones, and the sums that are made anew and in place."""
    expected = gradients(function, leaves, *inputs)
    step = remat.optimize(function, inputs, None, verify=True, **options)
    assert all(map(torch.equal, gradients(step, leaves, *inputs), expected))
    assert backward_sums(step) == sums
    step(*inputs).backward()
    assert all(torch.equal(leaf.grad, first + first) for leaf, first in zip(leaves, expected, strict=True))
    step.close()


class Loop(nn.Module):
    """One large weight that is used several times."""

    def __init__(self, times=6, width=192):
        super().__init__()
        self.layer, self.times = nn.Linear(width, width), times

    def forward(self, x):
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return x.square().mean()


def loop():
    torch.manual_seed(0)
    return Loop(), (torch.randn(4, 192),)


@pytest.mark.parametrize("adds_gradients", [True, False])
def test_a_weight_that_is_used_often(adds_gradients):
    model, batch = loop()
    compare(model, list(model.parameters()), batch, (0, 10), adds_gradients=adds_gradients)


def test_saves_a_gradient_at_the_peak_as_eager_pytorch_does(monkeypatch):
    model, batch = loop()
    model(*batch).backward()

    def peaks():
        step = remat.optimize(model, batch, None)
        step(*batch).backward()
        measured = probe.peak_bytes(lambda: step(*batch).backward(), device="cpu").activation_bytes
        return step.plan.plan.peak_bytes, measured

    planned, measured = peaks()
    monkeypatch.setattr(_piece, "add_in_place", lambda graph: None)
    torch._dynamo.reset()
    planned_anew, measured_anew = peaks()
    weight_bytes = model.layer.weight.nbytes
    assert planned_anew - planned == measured_anew - measured > 0.9 * weight_bytes


def test_residuals_add_into_the_branch_that_is_done():
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(3))

    def step(x):
        for block in model:
            x = x + block(x)
        return x.square().mean()

    compare(step, list(model.parameters()), (torch.randn(8, 32),), (0, 2))


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_backward_that_recomputes_between_the_sums(share):
    torch.manual_seed(0)
    model, batch = Loop(width=32), (torch.randn(512, 32),)
    expected = gradients(model, list(model.parameters()), *batch)
    step = remat.optimize(model, batch, None)
    step(*batch)
    static = step.plan.problem.static_bytes
    budget = static + int(share * (step.plan.plan.peak_bytes - static))
    step = remat.optimize(model, batch, budget, verify=True, method="recompute")
    assert all(map(torch.equal, gradients(step, list(model.parameters()), *batch), expected))
    assert backward_sums(step) == (0, 10)
    assert len(step.plan.plan.slots) > len(step.plan.problem.operators)


def both_terms_go_to_other_leaves(first, second, third, weight):
    return ((first + second) @ weight).tanh().sum() + ((first + third) @ weight).sin().sum()


def a_sum_is_a_term_itself(first, second, third, weight):
    """Once the sum of two branches is one leaf's gradient, another leaf's sum with it is made anew."""
    upper, lower = first + second, second + third
    return (upper @ weight).tanh().sum() + (upper @ weight.sin()).sin().sum() + (lower @ weight.cos()).sin().sum()


@pytest.mark.parametrize("adds_gradients", [True, False])
@pytest.mark.parametrize("function, sums", [(both_terms_go_to_other_leaves, (1, 0)), (a_sum_is_a_term_itself, (1, 1))])
def test_a_gradient_that_is_handed_out_is_not_written_to(function, sums, adds_gradients):
    torch.manual_seed(0)
    weight, leaves = torch.randn(16, 16), [torch.randn(4, 16, requires_grad=True) for _ in range(3)]
    compare(lambda: function(*leaves, weight), leaves, (), sums, adds_gradients=adds_gradients)


def test_the_other_term_is_taken_where_the_first_is_handed_out():
    torch.manual_seed(0)
    weight = torch.randn(16, 16)
    first, second = (torch.randn(4, 16, requires_grad=True) for _ in range(2))

    def step():
        return ((first + second) @ weight).tanh().sum() + (first @ weight).sin().sum()

    compare(step, [first, second], (), (0, 1))


def test_a_term_that_is_read_later_is_not_written_to():
    """Gradients of the layers below wait for both terms when the leaf's sum is made."""
    torch.manual_seed(0)
    weight, x = torch.randn(16, 16), torch.randn(4, 16)
    leaf, *below = [torch.randn(4, 16, requires_grad=True), *(torch.randn(16, 16, requires_grad=True) for _ in "ab")]

    def step(x):
        first, second = (x @ weight for weight in below)
        return ((first + leaf) @ weight).tanh().sum() + ((second + leaf) @ weight).sin().sum()

    compare(step, [leaf, *below], (x,), (1, 0))


def test_what_backward_was_given_is_not_written_to():
    torch.manual_seed(0)
    leaf, x, gradient = torch.randn(4, 16, requires_grad=True), torch.randn(4, 16), torch.randn(4, 16)
    kept = gradient.clone()
    planned = remat.optimize(lambda x: leaf + x * leaf, (x,), None, verify=True)
    planned(x).backward(gradient)
    assert torch.equal(gradient, kept)
    assert torch.equal(leaf.grad, gradient + gradient * x)
