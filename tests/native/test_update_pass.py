"""Optimizers' updates in one pass over host memory: right to the bound of float32, and casts to the bit."""

import os

import pytest
import torch
from torch import nn

from penstock.host_stepping import step_in_one_pass, step_on_host
from penstock.native import HostUpdatePass
from penstock.native._updates import _library, _num_threads

pytestmark = pytest.mark.skipif(_library() is None, reason="needs a C compiler")
ULP = 2.0**-24
SETTINGS = {
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True, "maximize": True}),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1, "betas": (0.8, 0.95)}),
    "SGD": (torch.optim.SGD, {"maximize": True}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1}),
}
HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stepped(name, shape=(70_001,), dtype=torch.float32, num_gradients=1, scale=1.0):
    """One first step of PyTorch's, and three in one pass; beside them the same steps in float64."""
    kind, options = SETTINGS[name]
    parameter = nn.Parameter(randn(*shape))
    exact = nn.Parameter(parameter.detach().double())
    optimizer, reference = (kind([each], lr=0.01, **options) for each in (parameter, exact))
    casts = [torch.empty(shape, dtype=each) for each in HALF.values()]
    for step in range(4):
        gradients = [randn(*shape, seed=10 * step + number).to(dtype) for number in range(num_gradients)]
        summed = sum(each.double() for each in gradients) * scale
        exact.grad = summed
        reference.step()
        state = optimizer.state[parameter]
        if step:
            args = optimizer, optimizer.param_groups, parameter, parameter.data
            changed = step_in_one_pass(*args, gradients, state, casts, scale)
            assert changed is not None
            state.update(changed)
        else:
            parameter.grad = summed.float()
            optimizer.step()
    return optimizer, parameter, reference, exact, casts


@pytest.mark.parametrize("dtype", [torch.float32, *HALF.values()])
@pytest.mark.parametrize("name", SETTINGS)
def test_updates_keep_the_bound_of_their_precision(name, dtype):
    optimizer, parameter, reference, exact, casts = stepped(name, dtype=dtype)
    # per step some ten roundings of numbers that are at most a few times the weight's size
    assert ((parameter.double() - exact).abs() <= 60 * ULP * (1 + exact.abs())).all()
    state, expected = optimizer.state[parameter], reference.state[exact]
    assert state.keys() == expected.keys()
    for field, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert ((state[field].double() - value).abs() <= 60 * ULP * (1 + value.abs())).all(), field
    for cast in casts:
        assert torch.equal(cast, parameter.detach().to(cast.dtype))


@pytest.mark.parametrize("num_gradients", [2, 4])
def test_gradients_are_summed_in_their_order_and_scaled(num_gradients):
    _, parameter, _, exact, _ = stepped("SGD", dtype=torch.bfloat16, num_gradients=num_gradients, scale=0.37)
    assert ((parameter.double() - exact).abs() <= 60 * ULP * (1 + exact.abs())).all()
    parts = [randn(5000, seed=number).bfloat16() for number in range(num_gradients)]
    zeros = nn.Parameter(torch.zeros(5000))
    optimizer = torch.optim.SGD([zeros], lr=1.0)
    assert step_in_one_pass(optimizer, optimizer.param_groups, zeros, zeros.data, parts, {}, (), 0.37) == {}
    total = parts[0].float()
    for part in parts[1:]:
        total += part.float()
    assert torch.equal(zeros, 0 - total * 0.37)


@pytest.mark.parametrize("dtype", HALF.values())
def test_every_half_is_read_as_pytorch_reads_it(dtype):
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    zeros = nn.Parameter(torch.zeros(2**16))
    optimizer = torch.optim.SGD([zeros], lr=1.0)
    assert step_in_one_pass(optimizer, optimizer.param_groups, zeros, zeros.data, [halves], {}) == {}
    torch.testing.assert_close(zeros.detach(), 0 - halves.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", HALF.values())
def test_casts_round_as_pytorch_rounds(dtype):
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    bits = halves.view(torch.int32)
    step = 2 ** (15 if dtype is torch.bfloat16 else 12)  # half of the distance between two halves
    near = torch.cat([bits + step * way + more for way in (-1, 0, 1) for more in (-1, 0, 1)])
    random = torch.randint(-(2**31), 2**31 - 1, (10**6,), generator=torch.Generator().manual_seed(0))
    weights = torch.cat([near, random.to(torch.int32)]).view(torch.float32)
    parameter, cast = nn.Parameter(weights.clone()), torch.empty(len(weights), dtype=dtype)
    optimizer, gradient = torch.optim.SGD([parameter], lr=0.0), torch.zeros(len(weights))
    assert step_in_one_pass(optimizer, optimizer.param_groups, parameter, parameter.data, [gradient], {}, [cast]) == {}
    torch.testing.assert_close(cast, weights.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_the_number_of_threads_changes_no_bit(monkeypatch):
    outcomes = []
    for number in (1, 2, 3):
        monkeypatch.setattr("penstock.native._updates._num_threads", lambda number=number: number)
        outcomes.append(stepped("AdamW")[1].detach())
    assert torch.equal(outcomes[0], outcomes[1])
    assert torch.equal(outcomes[0], outcomes[2])


def test_threads_are_shared_among_the_processes_of_a_launcher(monkeypatch):
    alone = _num_threads()
    assert 1 <= alone <= len(os.sched_getaffinity(0))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert _num_threads() == alone
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(4 * len(os.sched_getaffinity(0))))
    assert _num_threads() == 1


def test_transposed_weights_and_tensors_of_no_or_one_element():
    for shape in ((0,), (1,), (3, 1, 5)):
        stepped("AdamW", shape)
    weight = nn.Parameter(randn(30, 40).t())
    optimizer = torch.optim.SGD([weight], lr=1.0)
    expected = weight.detach() - 1
    ones = torch.ones(30, 40).t()
    assert step_in_one_pass(optimizer, optimizer.param_groups, weight, weight.data, [ones], {}) == {}
    assert torch.equal(weight, expected)


IMPOSSIBLE = {
    "another order": lambda weight: (weight, [torch.ones(40, 30).t()], {}),
    "gaps": lambda weight: (weight[:, ::2], [torch.ones(30, 20)], {}),
    "two precisions": lambda weight: (weight, [torch.ones(30, 40), torch.ones(30, 40).bfloat16()], {}),
    "double": lambda weight: (weight.double(), [torch.ones(30, 40).double()], {}),
    "five gradients": lambda weight: (weight, [torch.ones(30, 40)] * 5, {}),
    "a state that is not its": lambda weight: (weight, [torch.ones(30, 40)], {"other": torch.ones(30, 40)}),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_it_cannot_do_it_leaves_alone(name):
    weight, gradients, state = IMPOSSIBLE[name](randn(30, 40))
    parameter = nn.Parameter(weight)
    before = parameter.detach().clone()
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    assert step_in_one_pass(optimizer, optimizer.param_groups, parameter, parameter.data, gradients, state) is None
    assert torch.equal(parameter, before)


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adamax])
def test_other_optimizers_step_as_they_do(kind):
    ours, plain = (nn.Parameter(randn(3000)) for _ in range(2))
    optimizer, other = kind([ours]), kind([plain])
    for number in range(3):
        gradient = randn(3000, seed=number)
        plain.grad = gradient.clone()
        other.step()
        if number:
            state = optimizer.state[ours]
            state.update(step_on_host(optimizer, optimizer.param_groups, ours, ours.data, gradient, state, ""))
        else:
            ours.grad = gradient.clone()
            optimizer.step()
    assert torch.equal(ours, plain)


def test_without_a_library_pytorchs_kernels_do_it(monkeypatch):
    monkeypatch.setattr(HostUpdatePass, "run", lambda *_: False)
    parameter = nn.Parameter(randn(3000))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = randn(3000, seed=1)
    optimizer.step()
    before, state = parameter.detach().clone(), optimizer.state[parameter]
    step_on_host(optimizer, optimizer.param_groups, parameter, parameter.data, randn(3000, seed=2), state, "")
    assert not torch.equal(parameter, before)
