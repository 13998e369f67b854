"""Preparation of jobs: budgets that hold, and those that are refused."""

import re

import pytest
import torch
from fleet_jobs import Mixed, make_job, train, train_plainly
from torch import nn

from penstock import fleet


class Quantized(nn.Module):
    """Convolutions that are alike but for what they need: no gradient before the cut, each of its input's after it."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = (nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3))) for _ in "ab")

    def forward(self, images):
        codes = self.encoder(images).mul(255).round().byte()
        return self.decoder(codes.float() / 255).square().mean()


class Transposed(nn.Module):
    """Norms of the same shapes, the later ones of values whose last dimension is not contiguous: these are copied."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.ModuleList(nn.LayerNorm(64) for _ in range(2)) for _ in "ab")

    def forward(self, images):
        x = images.flatten(2)[:, :, :64]
        for norm in self.first:
            x = norm(x)
        for norm in self.second:
            x = norm(x.mT.contiguous().mT.mT.mT)
        return x.square().mean()


def images():
    generator = torch.Generator().manual_seed(5)
    return [torch.rand(2, 16, 32, 32, generator=generator) for _ in range(3)]


STEPS = {
    "each batch": {},
    "accumulated": {"accumulate": 2},
    "clipped": {"clip_norm": 0.5},
    "accumulated and clipped": {"accumulate": 2, "clip_norm": 0.5},
    "scaled": {"precision": "float16"},
}


@pytest.mark.parametrize("model", [Quantized, Transposed, Mixed])
@pytest.mark.parametrize("steps", STEPS)
def test_a_budget_that_a_refusal_names_holds(model, steps):
    """Where shards look alike and are not, where two use the same parameters, and with all that AdamW makes."""
    options = {} if model is Mixed else {"data": images, "loss": lambda model, batch: model(batch)}
    job = make_job(model=model, steps=3, **options, **STEPS[steps])
    refused = train([job], num_devices=1, budget="1KiB")["job"].error
    smallest = int(re.search(r"must be at least (\d+) ", refused)[1])
    results = train([job], num_devices=1, budget=smallest, verify=True)
    assert results["job"].state is fleet.JobState.DONE, results["job"].error
    (device,) = results.devices
    assert list(results["job"].losses) == train_plainly(job)[0]
    assert 0 < device.measured_peak_bytes <= device.budget_bytes == smallest


def test_what_does_not_fit_is_refused_by_name_and_size():
    results = train([make_job(name="large"), make_job(name="small", model=Tiny)], budget="300KB")
    assert results["large"].state is fleet.JobState.FAILED
    assert "needs" in results["large"].error or "takes" in results["large"].error
    assert "KiB" in results["large"].error
    assert results["small"].state is fleet.JobState.DONE


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, tokens, targets):
        return (self.weight * tokens.float() - targets.float()).square().mean()
