"""What the units of a model that is run whole save for backward."""

import torch
from fleet_jobs import train
from torch import nn

from penstock import fleet


class Masked(nn.Module):
    """Layers that save one small mask, or each its own copy of it."""

    def __init__(self, is_shared):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.is_shared = is_shared

    def forward(self, x):
        mask = (x.sum((0, 1)) > 0).float() + 1
        for layer in self.layers[: 6 if x.sum() < 1e9 else 5]:  # a branch on numbers: run whole
            x = torch.tanh(layer(x)) * (mask if self.is_shared else mask.clone())
        return x


def test_a_small_tensor_that_many_units_save_pins_none_of_them():
    named = []
    for is_shared in (False, True):
        job = fleet.Job(
            name="masked",
            model=lambda is_shared=is_shared: Masked(is_shared),
            data=lambda: [torch.ones(64, 32, 64)],
            loss=lambda model, x: model(x).square().mean(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            epochs=1,
        )
        refused = train([job], budget=1000, num_devices=1)["masked"]
        named.append(int(refused.error.split("must be at least ")[1].split()[0]))
    assert named[1] <= named[0] + 4096
