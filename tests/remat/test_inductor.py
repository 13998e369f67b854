"""Planned graphs through Inductor: the same training within rounding, and never more bytes than allowed."""

import copy
import gc
import shutil
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from penstock import probe, remat
from penstock.errors import CompilerDeclinedWarning
from penstock.testing import GPT

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler for the CPU")


def make():
    torch.manual_seed(0)
    model = GPT(num_layers=3, width=64, num_heads=4, context=64)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model, (torch.randint(256, (8, 64)), torch.randint(256, (8, 64)))


def with_even_times(problem):
    """The same plan on every machine, however fast its operators are, and so the same pieces for Inductor."""
    return replace(problem, operators=tuple(replace(operator, duration_s=1e-3) for operator in problem.operators))


def gradients_of(model):
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("method", ["recompute", "swap"])
def test_a_compiled_plan_trains_as_plain_within_its_budget(tmp_path, method):
    plain, batch = make()
    plain(*batch).backward()
    model, batch = make()
    disk = tmp_path if method == "swap" else None
    problem = with_even_times(remat.optimize(model, batch, None, disk=disk).plan.problem)
    low = remat.smallest_budget_bytes(problem, method=method)
    high = remat.plan(problem, 2**62).keep_all_peak_bytes
    budget = low + (high - low) // 2
    step = remat.optimize(model, batch, budget, method=method, disk=disk, profile=problem, compiler="inductor")
    allowed = 1.2 * (budget - problem.static_bytes)  # another version of Inductor may fuse otherwise
    step._session.emitter.trials[0]._allowed_bytes = allowed
    with warnings.catch_warnings():
        warnings.simplefilter("error", CompilerDeclinedWarning)
        loss = step(*batch)
    assert step._session.emitter.trials[0].is_accepted
    loss.backward()
    torch.testing.assert_close(loss, plain(*batch))
    for mine, expected in zip(gradients_of(model), gradients_of(plain), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)
    del loss
    gc.collect()
    measured = probe.peak_bytes(lambda: step(*batch).backward(), device="cpu").activation_bytes
    assert measured <= allowed < 0.8 * (high - problem.static_bytes)


class Noisy(nn.Module):
    """Batch norm and dropout."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.GELU(),
            nn.Dropout(0.3),
            nn.Conv2d(16, 8, 3),
            nn.GELU(),
        )

    def forward(self, x):
        return self.body(x).square().mean()


def make_noisy():
    torch.manual_seed(0)
    return Noisy(), (torch.randn(8, 3, 16, 16),)


def test_masks_statistics_and_the_generator_are_those_of_plain():
    plain, batch = make_noisy()
    model, _ = make_noisy()
    problem = with_even_times(remat.optimize(model, batch, None).plan.problem)
    budget = problem.static_bytes + int(0.8 * (remat.plan(problem, 2**62).keep_all_peak_bytes - problem.static_bytes))
    step = remat.optimize(model, batch, budget, profile=problem, compiler="inductor")
    after = []
    for each, run in ((plain, plain), (model, step)):
        torch.manual_seed(3)
        run(*batch).backward()
        run(*batch).backward()
        after.append(torch.rand(1))
        assert int(each.body[1].num_batches_tracked) == 2
    assert step._session.emitter.trials[0].is_accepted
    assert torch.equal(*after)
    for mine, expected in zip(gradients_of(model), gradients_of(plain), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.body[1].running_mean, plain.body[1].running_mean)


def trains_as_plain(step, model, batch):
    plain, _ = make_noisy()
    for run in (plain, step):
        torch.manual_seed(3)
        run(*batch).backward()
    return all(
        torch.equal(mine, expected) for mine, expected in zip(gradients_of(model), gradients_of(plain), strict=True)
    )


def test_a_step_that_takes_more_than_allowed_runs_node_by_node():
    model, batch = make_noisy()
    step = remat.optimize(model, batch, None, compiler="inductor")
    step._session.emitter.trials[0]._allowed_bytes = 1000
    with pytest.warns(CompilerDeclinedWarning, match="takes .* but may take only 1000 B"):
        assert trains_as_plain(step, model, batch)


def test_what_inductor_cannot_compile_runs_node_by_node(monkeypatch):
    def broken(*_):
        raise RuntimeError("no such lowering")

    monkeypatch.setattr("penstock.remat._inductor._compile", broken)
    model, batch = make_noisy()
    with pytest.warns(CompilerDeclinedWarning, match="could not compile it .RuntimeError: no such lowering"):
        step = remat.optimize(model, batch, None, compiler="inductor")
    assert trains_as_plain(step, model, batch)


def test_each_plan_runs_its_own_compiled_backward():
    """Autograd compiles a backward when it is first needed, and by then another plan may have been made."""
    weight = torch.randn(8, 8, requires_grad=True)

    def function(x, scale):
        return (torch.tanh(x @ weight) * scale).sum()

    x = torch.randn(4, 8)
    step = remat.optimize(function, [x, 1.0], None, compiler="inductor", accumulates=False)
    seen = []
    for scale in (3.0, 1.0):
        step(x, scale).backward()
        seen.append(weight.grad)
        weight.grad = None
    torch.testing.assert_close(seen[0], 3 * seen[1])


def test_results_of_any_layout():
    plain = nn.Linear(8, 16)
    model = copy.deepcopy(plain)
    x = torch.randn(4, 8)
    step = remat.optimize(lambda x: torch.tanh(model(x)).t(), [x], None, compiler="inductor")
    (step(x) * torch.arange(4)).sum().backward()
    (torch.tanh(plain(x)).t() * torch.arange(4)).sum().backward()
    assert step._session.emitter.trials[0].is_accepted
    torch.testing.assert_close(model.weight.grad, plain.weight.grad)


def test_what_must_run_once_is_not_tried():
    @torch.library.custom_op("penstock_tests::count", mutates_args=("counter",))
    def count(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
        counter += 1
        return x.clone()

    count.register_fake(lambda x, counter: torch.empty_like(x))
    counter = torch.zeros(1)
    weight = torch.randn(8, requires_grad=True)

    def function(x):
        return (count(x, counter) * weight).sin().sum()

    with pytest.warns(CompilerDeclinedWarning, match="a trial would run"):
        step = remat.optimize(function, [torch.randn(8)], None, compiler="inductor")
    step(torch.randn(8)).backward()
    assert int(counter) == 1


def test_what_looks_at_operators_needs_them():
    model, batch = make_noisy()
    with pytest.raises(ValueError, match="needs compiler='eager'"):
        remat.optimize(model, batch, None, compiler="inductor", verify=True)


def test_another_compiler_is_refused():
    model, batch = make_noisy()
    with pytest.raises(ValueError, match="`compiler` must be 'eager' or 'inductor', got 'tensorrt'"):
        remat.optimize(model, batch, None, compiler="tensorrt")
