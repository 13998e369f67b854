"""Bytes that `penstock.offload.training` copies per parameter and step, counted on the simulated device.

A GPT of 4.9 million parameters takes AdamW steps of 32 tokens within budgets that hold a smaller or larger share of its
parameters, gradients and Adam's state: plainly, with clipping, with updates in backward or on the host, and under
autocast in bfloat16, with and without four micro-batches. Host memory is below.
"""

import gc
from collections.abc import Sequence

import torch

from benchmarks import common
from penstock import offload, probe
from penstock.testing import GPT, simulated

_NUM_STEPS = 6
_BUDGETS_MIB = (7, 12, 20, 40)
_WAYS = {
    "as it is": {},
    "clipped": {},
    "in backward": {"update_in_backward": True},
    "on the host": {"update": "host"},
    "on the host, clipped": {"update": "host"},
    "on the host, in backward": {"update": "host", "update_in_backward": True},
    "as it is, bfloat16": {},
    "on the host, bfloat16": {"update": "host"},
    "on the host, bfloat16, clipped": {"update": "host"},
    "as it is, 4 micro-batches, clipped": {},
    "on the host, bfloat16, 4 micro-batches": {"update": "host"},
    "on the host, bfloat16, 4 micro-batches, clipped": {"update": "host"},
}
"""Options of the training."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = common.parser(str(__doc__).splitlines()[0])
    given = options.parse_args(arguments)
    simulated.load()
    torch.set_num_threads(1)
    rows: list[common.Row] = []
    lines = []
    for budget_mib in _BUDGETS_MIB[:1] if given.quick else _BUDGETS_MIB:
        for way in _WAYS:
            found, share = counted(budget_mib * 2**20, way)
            into, out = (size / found.num_parameters for size in (found.step_fetched_bytes, found.step_parked_bytes))
            moved = found.step_fetched["activations"] + found.step_parked["activations"]
            name = f"{way}, budget {share:.0%} of the state"
            figures = {"in": into, "out": out, "total": into + out, "activations": moved / found.num_parameters}
            rows += [common.Row(name=name, metric=key, value=value, unit="B") for key, value in figures.items()]
            lines.append([name, *(f"{value:.1f}" for value in figures.values())])
    common.write(given.json, {"device": "simulated", "steps": _NUM_STEPS}, rows)
    common.show("Bytes per parameter and step", ["way", "in", "out", "total", "activations"], lines)


def counted(budget_bytes: int, way: str) -> tuple[offload.TrainingStatistics, float]:
    """The last step's, and the budget as a share of parameters, gradients and Adam's state."""
    gc.collect()
    torch.manual_seed(0)
    model = GPT(num_layers=6, width=256, num_heads=4, context=32).to("sim")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(256, (1, 33), generator=torch.Generator().manual_seed(0)).to("sim")
    own_bytes = sum(one.nbytes for one in model.parameters())
    budget = probe.held_bytes("sim") - own_bytes + budget_bytes
    training = offload.training(model, optimizer, budget, host="400MiB", **_WAYS[way])
    for _ in range(_NUM_STEPS):
        with training:
            for _ in range(4 if "4 micro-batches" in way else 1):
                with torch.autocast("sim", torch.bfloat16, enabled="bfloat16" in way):
                    loss = model(tokens[:, :-1], tokens[:, 1:])
                loss.backward()
            if way.endswith("clipped"):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    statistics = training.statistics()
    training.close()
    return statistics, budget_bytes / (4 * own_bytes)


if __name__ == "__main__":
    main()
