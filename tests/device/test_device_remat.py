"""Plans on an accelerator: the same training to the bit, within the budget, with swaps to pinned host memory."""

import pytest
import torch
from torch import nn

from penstock import probe, remat
from penstock.testing import GPT


@pytest.fixture(autouse=True)
def _no_compilation_of_before():
    torch._dynamo.reset()


class Noisy(nn.Module):
    """Convolutions, batch norm and dropout."""

    def __init__(self):
        super().__init__()
        layers = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2)) for _ in range(3)]
        self.body = nn.Sequential(*[layer for group in layers for layer in group])

    def forward(self, x):
        return self.body(x).square().mean()


def gpt():
    return GPT(num_layers=2, width=64, num_heads=2, context=64)


def tokens(device):
    return tuple(torch.randint(256, (4, 64)).to(device) for _ in range(2))


CASES = {"gpt": (gpt, tokens), "noisy": (Noisy, lambda device: (torch.randn(8, 8, 32, 32).to(device),))}


def make(name, device):
    torch.manual_seed(0)
    model = CASES[name][0]().to(device)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model, CASES[name][1](device)


def train(step, model, batch, num_steps=3):
    """Losses and gradients of a few steps; random numbers are the same for all."""
    losses = []
    for index in range(num_steps):
        torch.manual_seed(index)
        for parameter in model.parameters():
            parameter.grad.zero_()
        loss = step(*batch)
        loss.backward()
        losses.append(loss.detach().clone())
    return losses, [parameter.grad.clone() for parameter in model.parameters()]


def assert_equal(found, expected, *, is_close=False):
    for ours, theirs in zip(found[0] + found[1], expected[0] + expected[1], strict=True):
        assert torch.equal(ours, theirs) or (is_close and torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6))


def budgets(problem, method):
    low = remat.smallest_budget_bytes(problem, method=method)
    high = remat.plan(problem, 2**62).keep_all_peak_bytes
    return low + (high - low) // 20, (low + high) // 2


@pytest.mark.parametrize("name", CASES)
def test_swaps_train_as_plain_within_every_budget(device, name):
    train_within_budgets(device, name, "hybrid")


@pytest.mark.parametrize("name", CASES)
def test_recomputation_trains_as_plain_within_every_budget(prompt_device, name):
    train_within_budgets(prompt_device, name, "recompute")


def train_within_budgets(device, name, method):
    model, batch = make(name, device)
    expected = train(model, model, batch)
    model, _ = make(name, device)
    assert_equal(train(model, model, batch), expected)  # plain training repeats itself
    model, _ = make(name, device)
    options = {"method": method, "host": "1GiB" if method == "hybrid" else None}
    problem = remat.optimize(model, batch, None, **options).plan.problem
    for budget in budgets(problem, method):
        model, _ = make(name, device)
        step = remat.optimize(model, batch, budget, profile=problem, **options)
        # Captured, batch norm runs PyTorch's kernel, where plain training on CUDA has cuDNN's.
        assert_equal(train(step, model, batch), expected, is_close=name == "noisy" and device != "sim")
        torch.accelerator.synchronize()
        report = probe.peak_bytes(lambda: step(*batch).backward(), device=device)  # noqa: B023
        allowed = 1.01 * (budget - problem.static_bytes) + 2**16
        assert report.activation_bytes <= allowed


def test_the_peak_of_a_step_is_predicted(prompt_device):
    model, batch = make("gpt", prompt_device)
    step = remat.optimize(model, batch, None)
    train(step, model, batch, num_steps=1)
    report = probe.peak_bytes(lambda: step(*batch).backward(), device=prompt_device)
    predicted = step.plan.peak_bytes - step.plan.problem.static_bytes
    assert report.activation_bytes == pytest.approx(predicted, rel=0.05)


def test_on_a_stream_of_the_callers_own(device):
    model, batch = make("gpt", device)
    expected = train(model, model, batch)
    model, _ = make("gpt", device)
    step = remat.optimize(model, batch, 0.6)
    stream, default = torch.Stream(device=device), torch.accelerator.current_stream()
    stream.wait_stream(default)
    with stream:
        found = train(step, model, batch)
    default.wait_stream(stream)
    assert_equal(found, expected)


def test_autocast(prompt_device):
    model, batch = make("gpt", prompt_device)

    def cast(step):
        def run(*batch):
            with torch.autocast(prompt_device, torch.bfloat16):
                return step(*batch)

        return run

    expected = train(cast(model), model, batch)
    model, _ = make("gpt", prompt_device)
    step = remat.optimize(cast(model), batch, 0.7)
    assert_equal(train(step, model, batch), expected)


@pytest.mark.cuda_only("Inductor compiles for no simulated device")
def test_through_inductor(prompt_device):
    model, batch = make("gpt", prompt_device)
    expected = train(model, model, batch)
    model, _ = make("gpt", prompt_device)
    step = remat.optimize(model, batch, 0.7, compiler="inductor")
    found = train(step, model, batch)
    assert step._session.emitter.trials[0].is_accepted is not None
    for ours, theirs in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
