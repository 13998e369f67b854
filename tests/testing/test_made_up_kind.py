"""An accelerator that nobody has heard of: what PyTorch has names for, our rooms can train on."""

import subprocess
import sys

import pytest

from penstock.testing import simulated

TRAINING = """
import sys

import torch

from penstock import fleet, offload, probe, remat
from penstock.devices import backend_of, kinds
from penstock.testing import GPT, simulated
from penstock.testing.simulated import _load

_load.NAME = "acme"
simulated.load()
torch.set_num_threads(1)
folder = sys.argv[1]
tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0))


def make():
    torch.manual_seed(0)
    return GPT(num_layers=2, width=64, num_heads=2, context=32).to("acme")


def train(model, run=None, around=None):
    losses = []
    for _ in range(3):
        with around or torch.enable_grad():
            loss = (run or model)(tokens.to("acme"), tokens.to("acme"))
            loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()
        losses.append(loss.item())
    return losses


expected = train(make())
model = make()
with offload.activations(model, disk=folder, min_size="4KiB", min_saving=0, max_stall=1) as offloader:
    pass
assert train(model, around=offloader) == expected
assert offloader.statistics().parked_bytes > 0
offloader.close()
model = make()
step = remat.optimize(model, [tokens.to("acme"), tokens.to("acme")], "1GiB")
assert train(model, run=step) == expected
step.close()
job = fleet.Job(
    name="one", model=lambda: GPT(num_layers=2, width=64, num_heads=2, context=32), data=lambda: [(tokens, tokens)],
    loss=lambda model, batch: model(*batch), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), steps=3,
)
found = fleet.run([job], ["acme:0"], "2MiB", host="64MiB", progress=None)["one"]
assert found.error is None and list(found.losses) == expected, (found.losses, expected)
assert probe.peak_bytes(lambda: train(make()), device="acme").peak_bytes > 0
assert "acme" in kinds() and backend_of("acme:0").streams is not None
assert simulated.take_races() == []
print("equal")
"""


def test_a_kind_that_no_file_names_trains_in_four_rooms(tmp_path):
    """Files touched for it: none."""
    if simulated.why_not() is not None:
        pytest.skip(simulated.why_not())
    simulated.compile_device()
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRAINING, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert told.stdout.endswith("equal\n"), told.stderr[-3000:]
