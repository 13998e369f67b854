"""What capture leans on in PyTorch's private interfaces, so that a move of theirs is seen here first."""

import logging

import pytest
import torch
from torch import nn

from penstock import remat
from penstock.remat import _aot, _capture, _dynamo


def captured_from(function, *inputs):
    """What ``read`` makes of the joint graph of a function."""
    graphs = []

    def partition(joint, num_forward_outputs):
        graphs.append(_capture.read(joint, num_forward_outputs))
        raise _Seen

    def backend(module, inputs):
        return _aot.compiled(module, inputs, partition, never, never, _aot.boxed)

    run = torch.compile(function, backend=backend, fullgraph=True)
    with pytest.raises(Exception) as caught:  # noqa: PT011  # Dynamo wraps it
        run(*inputs)
    assert isinstance(_dynamo.cause_of(caught.value), _Seen)
    return graphs[0]


class _Seen(Exception):
    pass


def never(_):
    raise AssertionError("nothing runs")


def targets(calls):
    return [str(call.target) for call in calls]


def test_forward_and_backward_are_told_apart():
    layer = nn.Linear(8, 8)
    captured = captured_from(lambda x: torch.tanh(layer(x)).sum(), torch.randn(4, 8))
    forward, backward = captured.calls[: captured.num_forward], captured.calls[captured.num_forward :]
    assert targets(forward) == ["aten.addmm.default", "aten.tanh.default", "aten.sum.default"]
    assert [call.op for call in captured.tangents] == ["placeholder"]
    assert "aten.tanh_backward.default" in targets(backward)
    assert "aten.tanh_backward.default" not in targets(forward)


def test_views_share_the_storage_of_what_they_look_at():
    x = torch.randn(6, 4, requires_grad=True)
    captured = captured_from(lambda x: (x * 2).view(4, 6).t()[1:].exp().sum(), x)
    assert targets(captured.calls[:3]) == ["aten.mul.Tensor", "aten.exp.default", "aten.sum.default"]
    of_product = [
        node for node, storage in captured.storage_of.items() if storage == captured.storage_of[captured.calls[0]]
    ]
    assert len(of_product) >= 4


def test_what_the_caller_overwrites_is_found():
    norm = nn.BatchNorm1d(8)
    captured = captured_from(lambda x: norm(x).square().sum(), torch.randn(4, 8))
    assert len(captured.changed) == 3  # mean, variance, and the number of batches
    assert captured.changed_bytes == 8 * 4 * 2 + 8


def test_random_operators_are_known():
    captured = captured_from(
        lambda x: nn.functional.dropout(torch.sin(x), 0.5).sum() + torch.rand_like(x).sum(),
        torch.randn(4, 8, requires_grad=True),
    )
    random = [str(call.target) for call in captured.calls if _capture.is_random(call)]
    assert "aten.rand_like.default" in random
    assert len(random) == 2


def test_gradients_are_known_by_their_leaves():
    layer = nn.Linear(8, 8)
    seen = []

    def partition(joint, num_forward_outputs):
        _capture.accumulate_early(joint.graph, num_forward_outputs, inputs[0])
        seen.append([node.all_input_nodes[0].name for node in joint.graph.nodes if node.target is _capture.accumulate])
        raise _Seen

    inputs = []

    def backend(module, arguments):
        inputs.append(arguments)
        return _aot.compiled(module, arguments, partition, never, never, _aot.boxed)

    with pytest.raises(Exception):  # noqa: B017, PT011  # Dynamo wraps it
        torch.compile(lambda x: layer(x).sum(), backend=backend)(torch.randn(4, 8))
    leaves = [tensor for tensor in inputs[0] if tensor.requires_grad]
    assert len(seen[0]) == len(leaves) == 2


def test_autograd_says_whether_it_accumulates():
    answers = []

    class Ask(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            answers.append(_capture.accumulates_now(leaf))
            return gradient

    leaf = torch.randn(3, requires_grad=True)
    Ask.apply(leaf).sum().backward()
    torch.autograd.grad(Ask.apply(leaf).sum(), leaf)
    unused = torch.randn(3, requires_grad=True)
    Ask.apply(leaf * unused).sum().backward(inputs=[unused])
    assert answers == [True, False, False]
    assert not _capture.accumulates_now(leaf)


def test_modules_are_named_as_the_user_names_them():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 1)))
    problem = remat.optimize(lambda x: model(x).sum(), [torch.randn(4, 8)], None).plan.problem
    modules = {operator.module for operator in problem.operators if operator.target not in ("tangent", "accumulate")}
    assert {"0", "1.0", "1.1"} <= modules
    assert any("model(x).sum()" in module for module in modules)
    torch._dynamo.reset()
    problem = remat.optimize(model, [torch.randn(4, 8)], None).plan.problem
    assert {"0", "1.0", "1.1"} <= {operator.module for operator in problem.operators}


def test_a_model_that_logs_is_captured():
    logger = logging.getLogger("a model")

    def step(x):
        logger.warning("a loss of its own")
        return x.square().mean()

    x = torch.randn(4, requires_grad=True)
    optimized = remat.optimize(step, [x], None)
    optimized(x).backward()
    assert torch.equal(x.grad, x.detach() / 2)
