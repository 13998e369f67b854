"""Gradients are added where they are made, and returned wherever that is not what the caller asked for."""

import gc
import threading

import pytest
import torch
from torch import nn

from penstock import probe, remat
from penstock.remat import _accumulate


class Wide(nn.Module):
    """Large parameters, small activations."""

    def __init__(self, num_layers=6, width=256):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def make(has_gradients=True):
    torch.manual_seed(0)
    model = Wide()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if has_gradients else None
    return model, (torch.randn(4, 256),)


def gradients_of(model):
    return [parameter.grad for parameter in model.parameters()]


def assert_equal(ours, plain):
    assert all(torch.equal(mine, expected) for mine, expected in zip(ours, plain, strict=True))


def pair(has_gradients=True, **options):
    """The plain model, the planned one and its step, and a batch."""
    plain, batch = make(has_gradients)
    model, _ = make(has_gradients)
    return plain, model, remat.optimize(model, batch, None, **options), batch


def peak(function):
    function()
    gc.collect()
    return probe.peak_bytes(function, device="cpu").activation_bytes


def test_new_gradients_do_not_pile_up_beside_the_old():
    plain, model, step, batch = pair()
    total = sum(parameter.nbytes for parameter in model.parameters())
    measured = peak(lambda: step(*batch).backward())
    assert measured < total / 3
    assert measured <= 1.02 * peak(lambda: plain(*batch).backward()) + 4096
    predicted = step.plan.peak_bytes - step.plan.problem.static_bytes
    assert abs(measured - predicted) <= 4096


@pytest.mark.parametrize("has_gradients", [True, False])
def test_gradients_add_up_over_batches(has_gradients):
    plain, model, step, batch = pair(has_gradients)
    for scale in (1.0, 2.0, 3.0):
        plain(batch[0] * scale).backward()
        step(batch[0] * scale).backward()
    assert_equal(gradients_of(model), gradients_of(plain))


def test_asked_for_gradients_are_returned_and_not_added():
    plain, model, step, batch = pair()
    before = [gradient.clone() for gradient in gradients_of(model)]
    wanted = torch.autograd.grad(plain(*batch), list(plain.parameters()))
    assert_equal(torch.autograd.grad(step(*batch), list(model.parameters())), wanted)
    assert_equal(gradients_of(model), before)


def test_backward_for_some_leaves_adds_to_those_alone():
    plain, model, step, batch = pair()
    plain(*batch).backward(inputs=[plain.layers[2].weight])
    step(*batch).backward(inputs=[model.layers[2].weight])
    assert_equal(gradients_of(model), gradients_of(plain))
    assert torch.equal(model.layers[1].weight.grad, torch.ones_like(model.layers[1].weight))


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_leaves_are_called(when):
    def hook(model):
        seen = []
        model.layers[1].weight.register_hook(lambda gradient: gradient * 2)
        model.layers[3].bias.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.clone()))
        return seen

    plain, batch = make()
    model, _ = make()
    seen = [hook(plain), hook(model)] if when == "before" else []
    step = remat.optimize(model, batch, None)
    seen = seen or [hook(plain), hook(model)]
    plain(*batch).backward()
    step(*batch).backward()
    assert_equal(gradients_of(model), gradients_of(plain))
    assert_equal(seen[1], seen[0])
    assert len(seen[1]) == 1


def test_a_leaf_may_change_between_forward_and_backward_if_backward_does_not_read_it():
    plain, model, step, batch = pair()
    for each, loss in ((plain, plain(*batch)), (model, step(*batch))):
        with torch.no_grad():
            each.layers[0].bias += 1
        loss.backward()
    assert_equal(gradients_of(model), gradients_of(plain))


def test_hooks_of_autograds_own_nodes_need_gradients_to_be_handed_out():
    seen = []
    plain, model, step, batch = pair(adds_gradients=False)
    node = torch.autograd.graph.get_gradient_edge(model.layers[0].weight).node
    node.register_prehook(lambda gradients: seen.append(gradients[0].clone()))
    step(*batch).backward()
    plain(*batch).backward()
    assert torch.equal(seen[0] + 1, plain.layers[0].weight.grad)
    assert step.plan.problem.static_bytes == pair()[2].plan.problem.static_bytes


def test_gradients_of_gradients_are_refused_as_ever():
    _, model, step, batch = pair()
    step(*batch).backward(create_graph=True)
    penalty = sum(parameter.grad.square().sum() for parameter in model.parameters())
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        penalty.backward()


def test_a_gradient_that_the_step_reads_is_not_overwritten():
    def function(first, second, gradient):
        return (first * gradient.sin()).sum() + (first.square() * second).sum()

    def run(make):
        torch.manual_seed(0)
        first, second = (torch.randn(8, requires_grad=True) for _ in range(2))
        for leaf in (first, second):
            leaf.grad = torch.randn(8)
        step = make([first, second, first.grad])
        step(first, second, first.grad).backward()
        return first.grad, second.grad

    expected = run(lambda inputs: remat.optimize(function, inputs, None, accumulates=False))
    assert_equal(run(lambda inputs: remat.optimize(function, inputs, None)), expected)


def test_a_trial_on_one_thread_discards_nothing_of_another():
    _, model, step, batch = pair()
    with _accumulate.discarding():
        thread = threading.Thread(target=lambda: step(*batch).backward())
        thread.start()
        thread.join()
    assert not torch.equal(model.layers[0].weight.grad, torch.ones(256, 256))


def test_where_none_accumulate_gradients_are_handed_out():
    plain, model, step, batch = pair(has_gradients=False, accumulates=False)
    plain(*batch).backward()
    step(*batch).backward()
    assert_equal(gradients_of(model), gradients_of(plain))
    assert not any(operator.target == "accumulate" for operator in step.plan.problem.operators)
