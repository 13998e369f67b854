"""Mini-batches that take other paths through a model than the measured one."""

import pytest
import torch
from fleet_jobs import train
from torch import nn
from whole_jobs import assert_as_plain

from penstock import fleet
from penstock.errors import BudgetNotKeptWarning


class Dropping(nn.Module):
    """Half of it is left out where the numbers say so."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))

    def forward(self, x):
        for layer in self.layers[: 4 if x.sum() < 0 else 8]:
            x = torch.tanh(layer(x))
        return x


def test_mini_batches_that_take_more_than_the_first_are_said():
    job = fleet.Job(
        name="dropping",
        model=Dropping,
        data=lambda: [torch.full((64, 32), sign) for sign in (-1.0, -0.5, 1.0, -1.0, 0.5)],
        loss=lambda model, x: model(x).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        epochs=1,
    )
    refused = train([job], budget=1000, num_devices=1)["dropping"]
    named = int(refused.error.split("must be at least ")[1].split()[0])
    with pytest.warns(BudgetNotKeptWarning, match=r"step 3 took \d+ bytes") as caught:
        train([job], budget=named, num_devices=1)
    assert len(caught) == 1
    taken = int(str(caught[0].message).split(" took ")[1].split()[0])
    assert taken > 1.05 * named
    results = train([job], budget=2 * taken, num_devices=1, verify=True)
    assert_as_plain(job, results["dropping"])
    assert results.devices[0].measured_peak_bytes <= 2 * taken
