"""Fleets on a GPU: losses equal to plain training on it, under an artificial cap."""

import pytest
import torch

from penstock import fleet
from penstock.testing import GPT

MIB = 2**20


def batches():
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(256, (4, 128), generator=generator) for _ in range(2)) for _ in range(4)]


def job(name, **changes):
    settings = {
        "model": lambda: GPT(num_layers=6, width=256, num_heads=4, context=128),
        "data": batches,
        "loss": lambda model, batch: model(*batch),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=False),
        "steps": 8,
    }
    return fleet.Job(name=name, **{**settings, **changes})


def train_plainly(one):
    torch.manual_seed(one.seed)
    model = one.model().to("cuda")
    optimizer = one.optimizer(list(model.parameters()))
    losses = []
    while len(losses) < one.steps:
        for batch in batches():
            loss = one.loss(model, tuple(part.to("cuda") for part in batch))
            loss.backward()
            if one.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), one.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses[: one.steps]


@pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "saved"])
@pytest.mark.parametrize("below", ["host", "disk"])
def test_losses_equal_plain_training(tmp_path, below, recompute):
    """At one shard or ten: the device never holds a whole model."""
    jobs = [job("a"), job("b", seed=1, clip_norm=0.5), job("c", seed=2)]
    expected = {one.name: train_plainly(one) for one in jobs}
    options = {"host_budget": "2GiB"} if below == "host" else {"host_budget": "512MiB", "disk": tmp_path}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = fleet.run(
        jobs, ["cuda:0"], "48MiB", progress=None, ablation=fleet.Ablation(recompute=recompute), **options
    )
    for one in jobs:
        assert results[one.name].error is None
        assert results[one.name].losses == pytest.approx(expected[one.name], rel=1e-6)
    assert torch.cuda.max_memory_allocated() - before <= 48 * MIB


def test_dropout_draws_what_plain_training_draws():
    class Noisy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            layers = [(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Dropout(0.2)) for _ in range(8)]
            self.body = torch.nn.Sequential(*[layer for group in layers for layer in group])

        def forward(self, tokens, targets):
            return (self.body(tokens.float().repeat(1, 2)) - targets.float().repeat(1, 2)).square().mean()

    one = job("noisy", model=Noisy, data=batches)
    expected = train_plainly(one)
    results = fleet.run([one], ["cuda:0"], "6MiB", host_budget="256MiB", progress=None)
    assert results["noisy"].error is None
    assert results["noisy"].losses == pytest.approx(expected, rel=1e-6)
