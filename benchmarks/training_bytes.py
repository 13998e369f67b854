"""Bytes that `offload.training` and a fleet of one job copy per parameter and step, on the simulated device.

A GPT of 4.9 million parameters takes AdamW steps of 32 tokens within budgets that hold a smaller or larger share of its
parameters, gradients and Adam's state: plainly, with clipping, with updates in backward or on the host, and under
autocast in bfloat16, with and without four micro-batches. Host memory is below. A fleet's bytes are the difference
between two runs of different lengths, with their activations.

Run it with ``python -m benchmarks.training_bytes --json bytes.json``.
"""

import gc
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import common
from penstock import fleet, offload, probe
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
_IN_FLEETS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "clipped": {"clip_norm": 1.0},
    "on the host": {"update": "host"},
    "on the host, clipped": {"update": "host", "clip_norm": 1.0},
    "as it is, bfloat16": {"precision": "bfloat16"},
    "on the host, bfloat16": {"update": "host", "precision": "bfloat16"},
    "on the host, bfloat16, clipped": {"update": "host", "precision": "bfloat16", "clip_norm": 1.0},
    "as it is, 4 micro-batches, clipped": {"accumulate": 4, "clip_norm": 1.0},
    "on the host, 4 micro-batches, clipped": {"update": "host", "accumulate": 4, "clip_norm": 1.0},
    "on the host, bfloat16, 4 micro-batches, clipped": {
        "update": "host", "precision": "bfloat16", "accumulate": 4, "clip_norm": 1.0,
    },
}  # fmt: skip
"""Options of the job."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = common.parser(str(__doc__).splitlines()[0])
    settings = options.parse_args(arguments)
    simulated.load()
    torch.set_num_threads(1)
    rows: list[common.Row] = []
    lines = []
    for budget_mib in _BUDGETS_MIB[:1] if settings.quick else _BUDGETS_MIB:
        for way in _WAYS:
            result, share = counted(budget_mib * 2**20, way)
            into, out = (size / result.num_parameters for size in (result.step_fetched_bytes, result.step_parked_bytes))
            moved = result.step_fetched["activations"] + result.step_parked["activations"]
            name = f"{way}, budget {share:.0%} of the state"
            figures = {"in": into, "out": out, "total": into + out, "activations": moved / result.num_parameters}
            rows += [common.Row(name=name, metric=key, value=value, unit="B") for key, value in figures.items()]
            lines.append([name, *(f"{value:.1f}" for value in figures.values())])
        for way, job_options in _IN_FLEETS.items():
            into, out, share = counted_in_fleet(budget_mib * 2**20, job_options)
            name = f"fleet, {way}, budget {share:.0%} of the state"
            figures = {"in": into, "out": out, "total": into + out}
            rows += [common.Row(name=name, metric=key, value=value, unit="B") for key, value in figures.items()]
            lines.append([name, *(f"{value:.1f}" for value in figures.values()), ""])
    common.write(settings.json, {"device": "simulated", "steps": _NUM_STEPS}, rows)
    common.show("Bytes per parameter and step", ["way", "in", "out", "total", "activations"], lines)


def make_model() -> GPT:
    """Make the model that all ways train."""
    torch.manual_seed(0)
    return GPT(num_layers=6, width=256, num_heads=4, context=32)


def make_tokens() -> torch.Tensor:
    """Make one sequence."""
    return torch.randint(256, (1, 33), generator=torch.Generator().manual_seed(0))


def counted_in_fleet(budget_bytes: int, options: dict[str, Any]) -> tuple[float, float, float]:
    """Return bytes in and out per parameter and step of a fleet of one job, and the budget as a share of its state."""
    tokens = make_tokens()
    collected = []
    for num_steps in (_NUM_STEPS, 2 * _NUM_STEPS):
        job = fleet.Job(
            name="job",
            model=make_model,
            data=lambda: [(tokens[:, :-1], tokens[:, 1:])] * 4,  # a pass holds whole steps
            loss=lambda model, batch: model(*batch),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
            steps=num_steps,
            **options,
        )
        results = fleet.run([job], ["sim:0"], budget_bytes, host="400MiB", progress=None)
        if results["job"].error is not None:
            raise RuntimeError(results["job"].error)
        collected.append((results.devices[0].fetched_bytes, results.devices[0].parked_bytes))
    num_parameters = sum(parameter.numel() for parameter in make_model().parameters())
    into, out = (
        (after - before) / _NUM_STEPS / num_parameters for before, after in zip(collected[0], collected[1], strict=True)
    )
    return into, out, budget_bytes / (16 * num_parameters)


def counted(budget_bytes: int, way: str) -> tuple[offload.TrainingStatistics, float]:
    """Return the last step's statistics, and the budget as a share of parameters, gradients and Adam's state."""
    gc.collect()
    model = make_model().to("sim")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = make_tokens().to("sim")
    own_bytes = sum(parameter.nbytes for parameter in model.parameters())
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
