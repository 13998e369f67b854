"""Graphs for each kind of arguments, and what their backward takes."""

import threading
import warnings

import pytest
import torch
from breaking import assert_same, batch, make, through, train
from torch import nn

from penstock import remat
from penstock.errors import CaptureError, PenstockWarning


@pytest.mark.parametrize(
    ("sizes", "options"), [([32, 24, 16, 32, 1, 7, 24], {}), (range(8, 28, 2), {"dynamic": False})]
)
def test_every_shape_of_a_compiled_model_is_planned(sizes, options):
    batches = [batch(rows) for rows in sizes]
    expected = train(model := make("plain", num_blocks=3), model, batches)
    budget = int(0.75 * max(peak for *_, peak in expected))
    model = make("plain", num_blocks=3)
    got = train(through("string", model, budget, **options), model, batches)
    assert_same(expected, got)
    assert all(peak <= 1.01 * budget for *_, peak in got), [peak / budget for *_, peak in got]


def test_variants_are_bounded(monkeypatch):
    monkeypatch.setattr("penstock.remat._piece._MAX_VARIANTS", 2)
    model = make("plain", num_blocks=1)
    step = remat.compile(model, budget="64MiB")
    for rows in (2, 3, 4, 5, 2):
        step(batch(rows)).backward()
    assert [len(piece._variants) for piece in step._step.door.session.pieces] == [1, 2]


def test_gradients_of_any_layout_are_taken_as_eager_pytorch_takes_them():
    torch.manual_seed(0)
    plain, ours = (nn.Conv2d(16, 5, 1) for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(2, 24, 24, 16).permute(0, 3, 1, 2)
    gradient = torch.randn(2, 5, 24, 24)
    plain(x).backward(gradient)
    remat.optimize(ours, [x], None)(x).backward(gradient)
    assert torch.equal(plain.weight.grad, ours.weight.grad)
    assert torch.equal(plain.bias.grad, ours.bias.grad)


def test_a_parameter_that_changes_before_backward_is_noticed():
    model, x = make("plain", num_blocks=1), batch()
    step = remat.compile(model, budget="64MiB")
    loss = step(x)
    with torch.no_grad():
        model.head.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_second_backward_needs_the_graph():
    model, x = make("plain", num_blocks=1), batch()
    loss = remat.compile(model, budget="64MiB")(x)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_graph_is_kept_for_a_second_backward_also_after_one_that_was_not():
    model, x = make("plain", num_blocks=1), batch()
    step = remat.compile(model, budget="64MiB")
    for retains in (False, True, False, True):
        model.zero_grad(set_to_none=False)
        loss = step(x)
        loss.backward(retain_graph=retains)
        if retains:
            once = model.head.weight.grad.clone()
            loss.backward()
            assert torch.equal(model.head.weight.grad, 2 * once)


def test_numbers_among_the_arguments_are_part_of_the_kind():
    model, x = make("plain"), batch()
    step = remat.compile(lambda x, scale, times: model.loss(x * scale) * times, budget="64MiB")
    for scale, times in ((1.0, 2), (0.5, 3), (0.25, 4), (0.125, 5)):
        model.zero_grad(set_to_none=False)
        (model.loss(x * scale) * times).backward()
        expected = model.head.weight.grad.clone()
        model.zero_grad(set_to_none=False)
        step(x, scale, times).backward()
        assert torch.equal(model.head.weight.grad, expected)


def test_a_number_of_another_sign_and_another_kernel_are_kinds_of_their_own():
    step = remat.compile(lambda x, number: x / number, budget="8MiB")
    x = torch.ones(3, requires_grad=True)
    assert step(x, 2.0)[0] == 0.5
    assert step(x, 4.0)[0] == 0.25
    assert step(x, 0.0)[0] == float("inf")
    assert step(x, -0.0)[0] == float("-inf")
    attention = nn.functional.scaled_dot_product_attention
    step = remat.compile(attention, budget="8MiB")
    inputs = [torch.randn(2, 4, 64, 16, requires_grad=True) for _ in range(3)]
    assert torch.equal(step(*inputs), attention(*inputs))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert torch.equal(step(*inputs), attention(*inputs))


def test_a_number_that_changes_with_every_call_is_warned_of_once():
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PenstockWarning)
        step = remat.compile(lambda x, scale: (layer(x) * scale).sum(), budget="1MiB")
        for number in range(10):
            step(x, 1.0 + number / 8).backward()
    (warning,) = caught
    assert "in each of 9 calls, the last 2" in str(warning.message)
    assert warning.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", PenstockWarning)
        step = remat.compile(lambda x, scale: (layer(x) * scale).sum(), budget="1MiB")
        for number in range(10):
            step(x, torch.tensor(1.0 + number / 8)).backward()
    assert len(step.plans) == 1


class Counting(nn.Module):
    """A forward that depends on how often it was called."""

    def __init__(self):
        super().__init__()
        self.layer, self.num_calls = nn.Linear(8, 8), 0

    def forward(self, x):
        self.num_calls += 1
        return self.layer(x) * (1 + self.num_calls)


def test_a_counter_that_makes_every_call_anew_is_warned_of_once():
    step = remat.compile(Counting(), budget="8MiB")
    with pytest.warns(PenstockWarning, match="planned again for the same shapes") as caught:
        for _ in range(11):
            step(torch.ones(4, 8)).sum().backward()
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", PenstockWarning)
        step = remat.compile(make("print", num_blocks=9), budget="64MiB")  # many graphs alike, of one call
        for _ in range(3):
            step(batch(2)).backward()


def test_a_tensor_between_graphs_may_change_where_nobody_wants_its_gradient():
    weights = [nn.Parameter(torch.randn(8)) for _ in range(3)]

    def step(x):
        y = x * weights[0]
        print(end="")
        z = (weights[1] * weights[1].sin()).sum()
        with torch.no_grad():
            y.mul_(0.5)
        return (z + y + weights[2].sin() * weights[2]).sum()

    x = torch.randn(8)
    compiled = remat.compile(step, budget="1MiB")
    for run in (step, compiled, compiled):
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        run(x).backward()
        if run is step:
            expected = [weight.grad.clone() for weight in weights]
        assert all(torch.equal(weight.grad, gradient) for weight, gradient in zip(weights, expected, strict=True))


def test_a_newer_pytorch_is_warned_of_once_and_named_where_capture_fails(monkeypatch):
    from penstock.remat import _aot, _dynamo

    monkeypatch.setattr(torch, "__version__", "2.16.0")
    _dynamo.warn_if_untested.cache_clear()
    model = make("plain", num_blocks=1)
    with pytest.warns(PenstockWarning, match="and this is 2.16.0") as caught:
        for _ in range(2):
            remat.compile(model, budget="64MiB")(batch(2)).backward()
    assert len(caught) == 1

    def moved(*_):
        raise AttributeError("no such thing")

    monkeypatch.setattr(_aot, "compiled", moved)
    with pytest.raises(CaptureError, match=r"by PyTorch 2.16.0, which is newer .* no such thing"):
        remat.compile(model, budget="64MiB")(batch(3))


def test_dynamo_compiles_nothing_in_other_threads_while_a_graph_is_captured(monkeypatch):
    from torch._dynamo import convert_frame

    from penstock.remat import _piece

    acquired, capture = [], _piece.GraphPiece._capture

    def captured(*arguments):
        thread = threading.Thread(target=lambda: acquired.append(convert_frame.compile_lock.acquire(blocking=False)))
        thread.start()
        thread.join()
        capture(*arguments)

    monkeypatch.setattr(_piece.GraphPiece, "_capture", captured)
    remat.compile(make("plain", num_blocks=1), budget="64MiB")(batch(2)).backward()
    assert acquired == [False]
