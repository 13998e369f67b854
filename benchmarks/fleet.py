"""Makespans of twelve jobs on few devices, simulated from unit times measured on this machine.

The setting of Hydra's paper: 12 jobs (6 learning rates x 2 batch sizes) of a GPT on 8 devices, each model cut into
shards, with AdamW. Forward and backward of every shard are timed on one core; the links have the given bandwidths. All
contenders use the same unit times, and ours also pays for its recomputation.

Run it with ``python -m benchmarks.fleet --devices 8 --json fleet.json``.
"""

import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.common import Row, parser, show, synchronize, write
from penstock import fleet
from penstock.report import gantt
from penstock.testing import GPT

LINKS_BYTES_PER_S = (0.5e9, 2e9, 8e9)
"""Bandwidths of a slow SSD, a fast SSD, and a share of PCIe."""
RUNS = 5


class _Head(nn.Module):
    """The last layers of a GPT, with the loss."""

    def __init__(self, model: GPT):
        super().__init__()
        self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(
            self.head(self.norm(x)).flatten(0, 1), torch.zeros(x.shape[0] * x.shape[1]).long()
        )


class _Beginning(nn.Module):
    """The embeddings of a GPT."""

    def __init__(self, model: GPT):
        super().__init__()
        self.token, self.position = model.token, model.position

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.token(tokens) + self.position(torch.arange(tokens.shape[1]))


def shards_of(model: GPT, num_shards: int) -> list[nn.Module]:
    """Return shards of consecutive layers, with the blocks spread evenly."""
    layers: list[nn.Module] = [_Beginning(model), *model.blocks, _Head(model)]
    cuts = [round(index * len(layers) / num_shards) for index in range(num_shards + 1)]
    return [nn.Sequential(*layers[begin:end]) for begin, end in itertools.pairwise(cuts)]


def measured(batch: int, settings: Any) -> tuple[fleet.ShardCost, ...]:
    """Measure the costs of every shard of the benchmark's GPT on a batch."""
    torch.manual_seed(0)
    model = GPT(num_layers=settings.layers, width=settings.width, num_heads=4, context=settings.length).to(
        settings.device
    )
    x: torch.Tensor = torch.randint(256, (batch, settings.length), device=settings.device)
    costs = []
    for shard in shards_of(model, settings.shards):
        cost, x = _measure(shard, x, settings.device)
        costs.append(cost)
    return tuple(costs)


def _measure(shard: nn.Module, x: torch.Tensor, device: str) -> tuple[fleet.ShardCost, torch.Tensor]:
    saved: dict[int, int] = {}
    known = {parameter.untyped_storage()._cdata for parameter in shard.parameters()}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    x = x.detach().requires_grad_(x.is_floating_point())
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        result = shard(x)
    gradient = torch.ones_like(result)
    forward_s = _seconds(lambda: shard(x), device)
    both_s = _seconds(lambda: shard(x).backward(gradient), device)
    parameter_bytes = sum(parameter.nbytes for parameter in shard.parameters())
    optimizer = torch.optim.AdamW(shard.parameters(), foreach=True)
    step_s = _seconds(optimizer.step, device)
    cost = fleet.ShardCost(
        forward_s=forward_s,
        backward_s=max(both_s - forward_s, 0.0),
        step_s=step_s,
        parameter_bytes=parameter_bytes,
        state_bytes=2 * parameter_bytes,
        boundary_bytes=result.nbytes,
        activation_bytes=sum(saved.values()),
    )
    return cost, result.detach()


def _seconds(run: Callable[[], Any], device: str) -> float:
    run()
    taken = []
    for _ in range(RUNS):
        synchronize(device)
        start_s = time.perf_counter()
        run()
        synchronize(device)
        taken.append(time.perf_counter() - start_s)
    return median(taken)


def problem_of(costs: dict[int, tuple[fleet.ShardCost, ...]], settings: Any, link: float) -> fleet.FleetProblem:
    """Return the problem of 6 learning rates x 2 batch sizes; both batch sizes see the same number of samples."""
    largest = max(costs)
    jobs = tuple(
        fleet.JobCost(name=f"batch {batch}, lr {rate}", shards=shards, num_steps=settings.steps * largest // batch)
        for batch, shards in costs.items()
        for rate in (1e-4, 3e-4, 6e-4, 1e-3, 3e-3, 6e-3)
    )
    most = max(unit.resident_bytes for job in jobs for unit in job.step_units)
    devices = tuple(
        fleet.DeviceCost(
            name=f"device {index}",
            budget_bytes=2 * most,
            in_bandwidth_bytes_per_s=link,
            out_bandwidth_bytes_per_s=link,
        )
        for index in range(settings.devices)
    )
    return fleet.FleetProblem(jobs=jobs, devices=devices)


def recomputing(problem: fleet.FleetProblem) -> fleet.FleetProblem:
    """Return the problem with every shard recomputed in backward."""
    jobs = [replace(job, shards=tuple(replace(shard, recomputes=True) for shard in job.shards)) for job in problem.jobs]
    return replace(problem, jobs=tuple(jobs))


def cheapest(problem: fleet.FleetProblem) -> fleet.FleetProblem:
    """Return the problem with activations parked or recomputed, whichever ends the fleet sooner."""
    other = recomputing(problem)
    ends = [fleet.simulate(setting, records=False).makespan_s for setting in (problem, other)]
    return problem if ends[0] <= ends[1] else other


def contenders(problem: fleet.FleetProblem, ours: fleet.FleetProblem) -> dict[str, float]:
    """Return the makespan of each in seconds; ``ours`` has activations parked or recomputed, as is cheaper."""
    result = {"Penstock": fleet.simulate(ours, records=False).makespan_s}
    for name in ("sharded-lrtf", "fifo", "shortest-first", "random"):
        result[f"scheduler {name}"] = fleet.simulate(ours, name, records=False).makespan_s  # type: ignore[arg-type]
    result["no double buffer"] = fleet.simulate(ours, double_buffer=False, records=False).makespan_s
    result["no SHARP"] = fleet.simulate(ours, sharp=False, records=False).makespan_s
    result["always recompute (Hydra)"] = fleet.simulate(recomputing(problem), records=False).makespan_s
    result["pipeline, 4 micro-batches"] = fleet.pipeline_s(problem, 4)
    result["model parallelism"] = fleet.model_parallel_s(problem)
    result["lower bound"] = fleet.lower_bound_s(ours)
    return result


def draw(path: Path, problem: fleet.FleetProblem, schedule: fleet.Schedule) -> None:
    """Draw the last twentieth of our schedule, in which all devices should end together."""
    rows: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for unit in schedule.units:
        if unit.end_s > 0.95 * schedule.makespan_s:
            rows[problem.devices[unit.device].name].append((unit.start_s, unit.end_s, problem.jobs[unit.job].name))
    gantt(path, dict(sorted(rows.items())), title="Which job is on which device at the end")


def main(arguments: list[str] | None = None) -> list[Row]:
    options = parser(__doc__ or "")
    options.add_argument("--layers", type=int, default=24)
    options.add_argument("--width", type=int, default=512)
    options.add_argument("--length", type=int, default=256)
    options.add_argument("--shards", type=int, default=8)
    options.add_argument("--devices", type=int, default=8)
    options.add_argument("--steps", type=int, default=100)
    settings = options.parse_args(arguments)
    if settings.quick:
        settings.layers, settings.width, settings.length, settings.steps = 6, 64, 32, 5
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    costs = {batch: measured(batch, settings) for batch in (4, 8)}
    torch.set_num_threads(num_threads)
    rows: list[Row] = []
    for link in LINKS_BYTES_PER_S:
        problem = problem_of(costs, settings, link)
        chosen = cheapest(problem)
        ends = contenders(problem, chosen)
        ours = ends["Penstock"]
        where = f"a link of {link / 1e9:g} GB/s"
        schedule = fleet.simulate(chosen)
        fleet.verify(chosen, schedule)
        show(
            f"12 jobs on {settings.devices} devices, {where}: devices compute {schedule.busy_share:.1%} of the time",
            ["", "ends after", "over ours"],
            [[name, f"{end_s:.1f} s", f"{end_s / ours:.2f}"] for name, end_s in ends.items()],
        )
        rows += [
            Row(name=name, metric=f"makespan, {where}", value=end_s, unit="s", peer="Penstock", ratio=end_s / ours)
            for name, end_s in ends.items()
        ]
        rows.append(Row(name="Penstock", metric=f"busy, {where}", value=schedule.busy_share, unit=""))
        if settings.json and link == LINKS_BYTES_PER_S[-1]:
            settings.json.parent.mkdir(parents=True, exist_ok=True)
            draw(settings.json.with_suffix(".png"), chosen, schedule)
    rows += _large()
    write(
        settings.json,
        {name: getattr(settings, name) for name in ("layers", "width", "length", "shards", "steps")},
        rows,
    )
    return rows


def _large() -> list[Row]:
    """Simulate 2,000 jobs on 256 devices."""
    shard = fleet.ShardCost(forward_s=1.0, backward_s=2.0)
    jobs = tuple(fleet.JobCost(name=str(index), shards=(shard,) * 8, num_steps=3 + index % 6) for index in range(2000))
    devices = tuple(fleet.DeviceCost(name=str(index)) for index in range(256))
    problem = fleet.FleetProblem(jobs=jobs, devices=devices)
    start_s = time.perf_counter()
    schedule = fleet.simulate(problem, records=False)
    taken_s = time.perf_counter() - start_s
    num_units = sum(job.num_units for job in jobs)
    over = schedule.makespan_s / fleet.lower_bound_s(problem)
    print(f"2,000 jobs on 256 devices, {num_units} units: simulated in {taken_s:.1f} s, {over:.4f} of the lower bound")
    return [
        Row(name="2,000 jobs on 256 devices", metric="simulated in", value=taken_s, unit="s"),
        Row(name="2,000 jobs on 256 devices", metric="over the lower bound", value=over, unit=""),
    ]


if __name__ == "__main__":
    main()
