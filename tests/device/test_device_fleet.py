"""Fleets on accelerators: losses equal to plain training on one, within a budget, whatever lies below."""

import gc
import re

import pytest
import torch

from penstock import fleet
from penstock.devices import backend_of
from penstock.fleet import _random
from penstock.testing import GPT

KIB = 2**10


def batches():
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(256, (2, 32), generator=generator) for _ in range(2)) for _ in range(4)]


def job(name, **changes):
    settings = {
        "model": lambda: GPT(num_layers=4, width=64, num_heads=2, context=32),
        "data": batches,
        "loss": lambda model, batch: model(*batch),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=False),
        "steps": 6,
    }
    return fleet.Job(name=name, **{**settings, **changes})


def train_plainly(one, device):
    torch.manual_seed(one.seed)
    model = one.model().to(device)
    optimizer = one.optimizer(list(model.parameters()))
    losses = []
    while len(losses) < one.steps:
        for batch in batches():
            loss = one.loss(model, tuple(part.to(device) for part in batch))
            loss.backward()
            if one.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), one.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses[: one.steps]


def equal(losses, expected, device):
    """To the bit where every operator repeats itself; hardware's attention need not."""
    return list(losses) == expected if device == "sim" else losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("below, recompute", [("host", True), ("disk", False)], ids=["host-recomputed", "disk-saved"])
def test_losses_equal_plain_training(device, tmp_path, below, recompute):
    """Of a model larger than the budget: the device never holds a whole one."""
    jobs = [job("a"), job("b", seed=1, clip_norm=0.5), job("c", seed=2)]
    expected = {one.name: train_plainly(one, device) for one in jobs}
    options = {"host": "64MiB"} if below == "host" else {"disk": tmp_path}
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    budget = 1536 * KIB
    results = fleet.run(
        jobs, [f"{device}:0"], budget, progress=None, ablation=fleet.Ablation(recompute=recompute), **options
    )
    for one in jobs:
        assert results[one.name].error is None
        assert equal(results[one.name].losses, expected[one.name], device)
    assert torch.accelerator.max_memory_allocated() - before <= budget


def test_two_devices_share_the_jobs(device, tmp_path):
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two devices")
    jobs = [job(name, seed=seed) for seed, name in enumerate("abcd")]
    expected = {one.name: train_plainly(one, f"{device}:0") for one in jobs}
    results = fleet.run(jobs, [f"{device}:0", f"{device}:1"], "1536KiB", host="64MiB", progress=None)
    for one in jobs:
        assert results[one.name].error is None
        assert equal(results[one.name].losses, expected[one.name], device)


def test_dropout_draws_what_plain_training_draws(device):
    class Noisy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            layers = [(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Dropout(0.2)) for _ in range(6)]
            self.body = torch.nn.Sequential(*[layer for group in layers for layer in group])

        def forward(self, tokens, targets):
            return (self.body(tokens.float().repeat(1, 2)) - targets.float().repeat(1, 2)).square().mean()

    one = job("noisy", model=Noisy, data=batches)
    expected = train_plainly(one, device)
    budget = "256KiB" if device == "sim" else "640KiB"  # with room for workspaces of matrix products
    results = fleet.run([one], [f"{device}:0"], budget, host="16MiB", progress=None)
    assert results["noisy"].error is None
    assert equal(results["noisy"].losses, expected, device)


def test_a_shard_that_only_makes_tensors(device):
    """A range of positions, cut off from whoever uses it: it has neither parameters nor inputs, and a device."""

    class Ranged(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(512, 64)
            self.body = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))

        def forward(self, tokens, targets):
            positions = torch.arange(512, device=tokens.device) % 32
            x = self.table(positions[: tokens.shape[1]]) + self.table(tokens)
            for layer in self.body:
                x = layer(x).relu()
            return (x.sum(-1) - targets).square().mean()

    one = job("ranged", model=Ranged)
    expected = train_plainly(one, device)
    budget = "960KiB" if device == "sim" else "1280KiB"
    results = fleet.run([one], [f"{device}:0"], budget, host="16MiB", progress=None)
    assert results["ranged"].error is None
    assert equal(results["ranged"].losses, expected, device)


def test_attention_without_dropout_costs_nothing_for_each_operator(prompt_device, monkeypatch):
    """PyTorch tags it as drawing. Only a pilot looks at every operator."""
    looked_at = []

    def counting(self, func, types, args=(), kwargs=None):
        looked_at.append(func)
        return dispatch(self, func, types, args, kwargs)

    dispatch = _random._Swapping.__torch_dispatch__
    monkeypatch.setattr(_random._Swapping, "__torch_dispatch__", counting)
    counts = []
    for steps in (1, 4):
        looked_at.clear()
        one = job("attends", steps=steps, clip_norm=0.5)
        results = fleet.run([one], [f"{prompt_device}:0"], "1536KiB", host="64MiB", progress=None)
        assert equal(results["attends"].losses, train_plainly(one, prompt_device), prompt_device)
        counts.append(len(looked_at))
    assert counts[0] == counts[1] > 0


def test_what_libraries_keep_for_a_fleets_thread_is_within_the_budget(prompt_device, monkeypatch):
    """As workspaces of matrix products on CUDA. A refusal names a budget that has room for them too."""
    kept, library_bytes = [], 512 * KIB
    kind = type(backend_of(prompt_device))
    warm_up = kind.warm_up

    def and_keep(self):
        kept.append(torch.empty(library_bytes, dtype=torch.uint8, device=self.device))
        return warm_up(self) + library_bytes

    monkeypatch.setattr(kind, "warm_up", and_keep)
    one = job("kept")
    expected = train_plainly(one, prompt_device)
    refused = fleet.run([one], [f"{prompt_device}:0"], "700KiB", host="64MiB", progress=None)["kept"].error
    least = int(re.search(r"at least (\d+)", refused)[1])
    for budget in (least, 1536 * KIB):
        kept.clear()
        gc.collect()
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        results = fleet.run([one], [f"{prompt_device}:0"], budget, host="64MiB", progress=None)
        assert equal(results["kept"].losses, expected, prompt_device), results["kept"].error
        assert library_bytes < torch.accelerator.max_memory_allocated() - before <= budget


def test_validation_and_other_shapes(device):
    """Graphs of a model that is on an accelerator by then."""

    def data():
        found = batches()
        return [found[0], tuple(one[:, :16] for one in found[1]), found[2], tuple(one[:1] for one in found[3])]

    one = job("a", data=data, validation=data, evaluate_every=2)
    result = fleet.run([one], [f"{device}:0"], "1536KiB", host="64MiB", progress=None)["a"]
    assert result.error is None
    assert [found["step"] for found in result.validations] == [2, 4, 6]
    torch.manual_seed(one.seed)
    model = one.model().to(device)
    optimizer = one.optimizer(list(model.parameters()))
    losses = []
    for batch in [*data(), *data()[:2]]:
        loss = model(*(part.to(device) for part in batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert equal(result.losses, losses, device)


class Signs(torch.optim.Optimizer):
    """Not PyTorch's: it has state from the beginning, where its parameters are, and looks at all gradients."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["mean"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure=None):
        parameters = self.param_groups[0]["params"]
        largest = torch.stack([parameter.grad.abs().max() for parameter in parameters]).max()
        for parameter in parameters:
            mean = self.state[parameter]["mean"].lerp_(parameter.grad / largest, 0.1)
            parameter.sub_(mean.sign(), alpha=self.param_groups[0]["lr"])


def test_jobs_that_are_not_cut_equal_plain_training(device):
    """Beside jobs that are, and with the budget that a refusal names."""
    jobs = [job("own", optimizer=Signs), job("cut"), job("again", optimizer=Signs, seed=3, clip_norm=0.5)]
    expected = {one.name: train_plainly(one, device) for one in jobs}
    options = {"host": "64MiB", "progress": None}
    results = fleet.run(jobs, [f"{device}:0"], "64MiB", **options)
    for one in jobs:
        assert results[one.name].error is None
        assert equal(results[one.name].losses, expected[one.name], device)
    refused = fleet.run(jobs[:1], [f"{device}:0"], "1MiB", **options)["own"]
    named = int(re.search(r"at least (\d+)", refused.error)[1])
    assert fleet.run(jobs[:1], [f"{device}:0"], named, **options)["own"].error is None
