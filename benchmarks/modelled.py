"""The papers' workloads on machines by their data sheets: results that our planners predict, next to reported ones.

    python -m benchmarks.modelled --json benchmarks/results/modelled.json
    python -m benchmarks.modelled --only ssdtrain

Nothing here is measured: times come from `penstock.machines`, and plans from the pure planners. The workloads are
below with their sources; comments next to them say what the papers leave open.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.models import make
from penstock import fleet, relational, remat
from penstock.machines import MACHINES, Machine
from penstock.offload import OffloadPlan, OffloadProblem, modelled_cycle
from penstock.offload import plan as offload_plan
from penstock.relational import Layer
from penstock.tiers import Budget
from penstock.units import format_bytes

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The comparison of one modelled figure with a reported one."""

    headline: str
    """The paper's claim, by a short name."""
    setting: str
    """The workload."""
    machine: str
    """Name of the machine in `penstock.machines`."""
    ours: float
    """The result with our defaults, under the model."""
    best: float | None
    """The result of the best schedule found under the same model; ``None`` if there is only one schedule."""
    paper: str
    """The result as reported, on the paper's machine."""
    what: str
    """The unit of ``ours`` and ``best``."""
    note: str = ""


# SSDTrain


class Attention(nn.Module):
    """The attention of a Megatron layer with two-way tensor parallelism: half of the heads."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads // 2
        self.before = nn.LayerNorm(hidden)
        self.to_qkv, self.out = nn.Linear(hidden, 3 * hidden // 2), nn.Linear(hidden // 2, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        qkv = self.to_qkv(self.before(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
        mixed = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0]
        return x + nn.functional.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1)


class Feedforward(nn.Module):
    """The feed-forward part of such a layer."""

    def __init__(self, hidden: int):
        super().__init__()
        self.before, self.up, self.down = (
            nn.LayerNorm(hidden),
            nn.Linear(hidden, 2 * hidden),
            nn.Linear(2 * hidden, hidden),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(self.before(x)))), 0.1)


class Transformer(nn.Module):
    """The layers alone: the papers' embeddings and heads are small compared with layers of this width."""

    def __init__(self, hidden: int, layers: int):
        super().__init__()
        heads = hidden // 128
        parts = [(Attention(hidden, heads), Feedforward(hidden)) for _ in range(layers)]
        self.layers = nn.Sequential(*(part for pair in parts for part in pair))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdTrain:
    """A setting of SSDTrain's evaluation: sequences of 1,024, batches of 16, float16, two A100s in parallel."""

    name: str
    hidden: int
    layers: int
    batch: int = 16
    length: int = 1024

    def problem(self, machine: Machine, *, to_disk: bool, max_in_flight_bytes: int | None = None) -> OffloadProblem:
        """Return the problem that the offloader would plan."""
        with torch.device("meta"):
            model = Transformer(self.hidden, self.layers).to(torch.float16)
            x = torch.empty(self.batch, self.length, self.hidden, dtype=torch.float16, requires_grad=True)
        return modelled_cycle(
            model, lambda: model(x).sum().backward(), machine, to_disk=to_disk, max_in_flight_bytes=max_in_flight_bytes
        )


SSDTRAIN = [
    SsdTrain(name=f"BERT or GPT, hidden {hidden}, {layers} layers", hidden=hidden, layers=layers)
    for hidden, layers in ((8192, 4), (12288, 3), (16384, 2))
]
"""Wu et al., arXiv 2408.10013: hidden 8,192 to 16,384, two to four layers. T5 is left out.

PyTorch counts as many operations for attention with a mask as without, so BERT and GPT are the same here.
"""


def best_schedule(problem: OffloadProblem) -> OffloadPlan:
    """Return the plan with the lowest peak without a stall, over bounds on bytes in flight that are powers of two."""
    total = sum(storage.size_bytes for storage in problem.storages)
    bounds = [2**power for power in range(24, max(25, total.bit_length() + 1))]
    plans = [offload_plan(replace(problem, max_in_flight_bytes=bound)) for bound in bounds]
    return min(plans, key=lambda plan: (plan.peak_bytes, plan.stall_s))


def ssdtrain() -> Iterator[Row]:
    """Yield activation peaks without a stall."""
    for machine, to_disk in (("a100-40gb-optane", True), ("h200", False), ("rtx4090", False), ("gh200", False)):
        for setting in SSDTRAIN:
            problem = setting.problem(MACHINES[machine], to_disk=to_disk)
            ours, best = offload_plan(problem), best_schedule(problem)
            before = offload_plan(replace(problem, max_in_flight_bytes=128 * 2**20))
            yield Row(
                headline="SSDTrain: activation peak",
                setting=setting.name,
                machine=machine,
                ours=_saving(ours),
                best=_saving(best),
                paper="-28% to -40%, at most -47%, on two A100s" if to_disk else "",
                what="of the activation peak, at no stall",
                note=(
                    f"peak {format_bytes(ours.peak_bytes)} of {format_bytes(ours.keep_all_peak_bytes)}, stall "
                    f"{ours.stall_s / problem.step_s:.1%}, {format_bytes(ours.max_in_flight_bytes)} in flight; with "
                    f"128 MiB in flight {_saving(before):.0%}" + (", declined" if ours.declined else "")
                ),
            )


def _saving(plan: OffloadPlan) -> float:
    return plan.peak_bytes / plan.keep_all_peak_bytes - 1


# Hydra

_HIDDEN, _LENGTH, _LAYERS = 1600, 1024, 48
"""GPT-2 XL. Hydra (Nagrecha and Kumar, arXiv 2110.08633): 12 models of this size, 6 learning rates by 2 batch sizes."""
_STEPS = 100
"""Steps per job: the ratios do not change with more."""
_SCHEDULERS: tuple[fleet.SchedulerName, ...] = ("fair", "sharded-lrtf", "fifo", "shortest-first", "random")


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The bytes with which the twelve jobs are trained."""

    name: str
    dtype: torch.dtype
    parameter_bytes: int
    """Bytes per parameter; its gradient takes as many."""
    state_bytes: int
    """Bytes of optimizer state per parameter."""


HYDRA = (
    Training(name="SGD, float32", dtype=torch.float32, parameter_bytes=4, state_bytes=0),
    Training(name="Adam, bfloat16", dtype=torch.bfloat16, parameter_bytes=2, state_bytes=12),
)
"""Training as in the published code, and as is usual today: with float32 copies and moments."""


def gpt2_xl_job(machine: Machine, training: Training, name: str, batch: int, *, layers_per_shard: int) -> fleet.JobCost:
    """Return one of the twelve jobs; backward recomputes, as in Hydra."""
    num_parameters = 12 * _HIDDEN**2
    flops = batch * _LENGTH * (2 * num_parameters + 4 * _LENGTH * _HIDDEN)
    saved_bytes = 17 * training.parameter_bytes * batch * _LENGTH * _HIDDEN
    stepped_bytes = (2 * training.parameter_bytes + 2 * training.state_bytes) * num_parameters

    def seconds(flops: float, size_bytes: float) -> float:
        return layers_per_shard * machine.operator_s(flops=flops, size_bytes=size_bytes, dtype=training.dtype)

    shard = fleet.ShardCost(
        forward_s=seconds(flops, saved_bytes),
        backward_s=seconds(2 * flops, 2 * saved_bytes),
        step_s=seconds(0, stepped_bytes),
        parameter_bytes=training.parameter_bytes * layers_per_shard * num_parameters,
        state_bytes=training.state_bytes * layers_per_shard * num_parameters,
        boundary_bytes=training.parameter_bytes * batch * _LENGTH * _HIDDEN,
        activation_bytes=layers_per_shard * saved_bytes,
        recomputes=True,
    )
    return fleet.JobCost(name=name, shards=(shard,) * (_LAYERS // layers_per_shard), num_steps=_STEPS)


def hydra_problem(machine: Machine, training: Training) -> fleet.FleetProblem:
    """Return the problem of twelve jobs on eight devices, in shards of four layers."""
    jobs = tuple(
        gpt2_xl_job(machine, training, f"{batch}-{rate}", batch, layers_per_shard=4)
        for batch in (8, 16)
        for rate in range(6)
    )
    out, back = machine.lane_rates(to_disk=False)
    device = fleet.DeviceCost(
        name="cuda",
        budget_bytes=machine.memory_bytes,
        in_bandwidth_bytes_per_s=back,
        out_bandwidth_bytes_per_s=out,
    )
    return fleet.FleetProblem(jobs=jobs, devices=(device,) * 8)


def hydra() -> Iterator[Row]:
    """Yield the results of twelve fine-tuning jobs on eight devices."""
    for name in ("a100", "rtx4090"):
        for training in HYDRA:
            problem = hydra_problem(MACHINES[name], training)
            taken_s = {
                scheduler: fleet.simulate(problem, scheduler, records=False).makespan_s for scheduler in _SCHEDULERS
            }
            ours_s, naive_s = taken_s["fair"], fleet.model_parallel_s(problem)
            single_s = fleet.simulate(problem, double_buffer=False, records=False).makespan_s
            setting = f"12 x GPT-2 XL, 8 devices, {training.name}"
            yield Row(
                headline="Hydra: over model parallelism",
                setting=setting,
                machine=name,
                ours=naive_s / ours_s,
                best=naive_s / min(taken_s.values()),
                paper="over 7x",
                what="x",
                note=f"no schedule can reach more than {naive_s / fleet.lower_bound_s(problem):.2f}x: shards recompute",
            )
            yield Row(
                headline="Hydra: double buffer",
                setting=setting,
                machine=name,
                ours=single_s / ours_s,
                best=None,
                paper="1.5-2x",
                what="x",
            )


# Libra

LIBRA = ("VGG-16", "ResNet-50", "BERT", "GPT-2")


def libra() -> Iterator[Row]:
    """Yield batch ratios: the bytes of a sample in plain PyTorch over those at the smallest peak."""
    for name in LIBRA:
        model, inputs = make(name, 4)
        step = remat.optimize(model, list(inputs), Budget(host=2**40), machine=MACHINES["h200"], fullgraph=True)
        problem = step.plan.problem
        step.close()
        plain_bytes = remat.plan(problem, 2**62).keep_all_peak_bytes - problem.static_bytes
        for method, at_most in (("recompute", 0.10), ("hybrid", 0.10), ("hybrid", None)):
            result = _smallest(problem, method, at_most)
            yield Row(
                headline="Libra: largest batch",
                setting=f"{name}, {method}, " + ("any time" if at_most is None else f"at most {at_most:.0%} slower"),
                machine="h200",
                ours=plain_bytes / (result.peak_bytes - problem.static_bytes),
                best=None,
                paper="3.12x" if at_most is None else "",
                what="x",
                note=f"{result.extra_s / result.step_s:.1%} slower; beside parameters, gradients and state",
            )


def _smallest(problem: remat.RematProblem, method: remat.Method, at_most: float | None) -> remat.RematPlan:
    """Return the plan with the smallest peak that costs at most the given share of the step."""
    least, most = remat.smallest_budget_bytes(problem, method=method), remat.plan(problem, 2**62).keep_all_peak_bytes
    budgets = [least + (most - least) * part // 8 for part in range(9)]
    plans = [plan for plan in remat.pareto(problem, budgets, method=method) if plan is not None]
    fits = [plan for plan in plans if at_most is None or plan.extra_s <= at_most * plan.step_s]
    return min(fits, key=lambda plan: plan.peak_bytes)


# Hector


@relational.layer
def rgcn(g, x, weight, norm):  # type: ignore[no-untyped-def]
    """Compute messages with the matrix of the edge's relation."""
    for e in g.edges():
        message = norm[e] * (x[e.src] @ weight[e.etype])
    for n in g.nodes():
        total = n.sum(message)
    return total


@relational.layer
def rgat(g, x, weight, at_source, at_target):  # type: ignore[no-untyped-def]
    """Compute attention over all edges that enter a node, with a vector per relation."""
    for e in g.edges():
        source, target = x[e.src] @ weight[e.etype], x[e.dst] @ weight[e.etype]
        score = relational.dot(source, at_source[e.etype]) + relational.dot(target, at_target[e.etype])
        message = relational.softmax(relational.leaky_relu(score, 0.2)).unsqueeze(-1) * source
    for n in g.nodes():
        total = n.sum(message)
    return total


@relational.layer
def hgt(g, key, query, value, to_key, to_message, prior):  # type: ignore[no-untyped-def]
    """Compute attention with keys and messages that each relation maps."""
    for e in g.edges():
        score = relational.dot(key[e.src] @ to_key[e.etype], query[e.dst]) * prior[e.etype]
        message = relational.softmax(score).unsqueeze(-1) * (value[e.src] @ to_message[e.etype])
    for n in g.nodes():
        total = n.sum(message)
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class RelationalSetting:
    """A graph described by its published counts, reverse edges included."""

    name: str
    num_nodes: int
    num_edges: int
    num_types: int
    pairs_per_edge: float = 0.34
    """Distinct pairs of source and type per edge. Counted for FB15k-237; those of other graphs were not published."""

    def graph(self) -> relational.RelationalGraph:
        """Return a graph with these counts, drawn uniformly."""
        generator = torch.Generator().manual_seed(0)

        def drawn(below: int, count: int) -> torch.Tensor:
            return torch.randint(below, (count,), generator=generator)

        pairs = drawn(self.num_nodes * self.num_types, round(self.pairs_per_edge * self.num_edges)).unique()
        of_edge = torch.cat([pairs, pairs[drawn(len(pairs), self.num_edges - len(pairs))]])
        sources, types = of_edge // self.num_types, of_edge % self.num_types
        targets = drawn(self.num_nodes, self.num_edges)
        return relational.RelationalGraph(
            torch.stack([sources, targets]), types, num_nodes=self.num_nodes, num_edge_types=self.num_types
        )


HECTOR = [
    RelationalSetting(name="AIFB", num_nodes=7_262, num_edges=48_810, num_types=104),
    RelationalSetting(name="BGS", num_nodes=94_806, num_edges=672_884, num_types=122),
    RelationalSetting(name="FB15k", num_nodes=14_541, num_edges=620_232, num_types=474),
    RelationalSetting(name="AM", num_nodes=881_680, num_edges=5_668_682, num_types=108),
]
"""Wu et al., arXiv 2301.06284: one layer on the whole graph, one head, width 64."""
_WIDTH = 64
_PASSES = ("compact", "reorder", "sum_first")


def relational_layers(num_nodes: int, num_edges: int, num_types: int) -> dict[str, tuple[Layer, list[torch.Tensor]]]:
    """Return the three layers, on tensors without bytes."""

    def made(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, device="meta", requires_grad=True)

    x, matrices, vectors = (num_nodes, _WIDTH), (num_types, _WIDTH, _WIDTH), (num_types, _WIDTH)
    return {
        "RGCN": (rgcn, [made(*x), made(*matrices), made(num_edges, 1).detach()]),
        "RGAT": (rgat, [made(*x), made(*matrices), made(*vectors), made(*vectors)]),
        "HGT": (hgt, [made(*x), made(*x), made(*x), made(*matrices), made(*matrices), made(num_types)]),
    }


def relational_step_s(
    layer: Layer, graph: relational.RelationalGraph, tensors: list[torch.Tensor], machine: Machine
) -> float:
    """Return seconds of forward and backward, in which each step reads and writes only what it must."""
    return sum(
        machine.operator_s(flops=cost.flops, size_bytes=cost.bytes, dtype=torch.float32)
        for cost in layer.costs(graph, *tensors)
    )


def hector() -> Iterator[Row]:
    """Yield a training step with our passes, against one without passes and the best choice of passes."""
    machine = MACHINES["h200"]
    for setting in HECTOR:
        graph = setting.graph()
        layers = relational_layers(setting.num_nodes, setting.num_edges, setting.num_types)
        for name, (layer, tensors) in layers.items():
            taken_s = {}
            for chosen in itertools.product((True, False), repeat=len(_PASSES)):
                alternative = layer.with_options(**dict(zip(_PASSES, chosen, strict=True)))
                taken_s[chosen] = relational_step_s(alternative, graph, tensors, machine)
            ours_s, plain_s = taken_s[True, True, True], taken_s[False, False, False]
            yield Row(
                headline="Hector: passes",
                setting=f"{name}, {setting.name}, width {_WIDTH}",
                machine="h200",
                ours=plain_s / ours_s,
                best=plain_s / min(taken_s.values()),
                paper="up to 3.8x by reordering and compaction",
                what="x",
                note=f"a step takes {ours_s * 1e3:.2f} ms; {setting.pairs_per_edge} pairs of source and type an edge",
            )


# PyTorch-Direct


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSetting:
    """Rows of features in host memory, float32, that a device reads in place."""

    name: str
    width: int


PYTORCH_DIRECT = [
    RowSetting(name="Reddit", width=602),
    RowSetting(name="ogbn-products", width=100),
    RowSetting(name="ogbn-papers100M", width=128),
]
"""Min et al., arXiv 2101.07956 and 2103.03330; widths as the data sets have them."""
_LINE_BYTES = 128


def pytorch_direct() -> Iterator[Row]:
    """Yield the share of bytes on the link that was requested: lines of 128 bytes are read whole."""
    for setting in PYTORCH_DIRECT:
        row_bytes, item = 4 * setting.width, _LINE_BYTES // 4
        firsts = torch.arange(item) * setting.width * 4
        least = ((firsts + row_bytes - 1) // _LINE_BYTES - firsts // _LINE_BYTES + 1).double().mean().item()
        for name in ("h200", "rtx4090", "gh200"):
            machine = MACHINES[name]
            rows_per_s = machine.link_share * machine.in_bytes_per_s / (_LINE_BYTES * least)
            yield Row(
                headline="PyTorch-Direct: wanted bytes of the link's",
                setting=f"{setting.name}, rows of {row_bytes} bytes",
                machine=name,
                ours=row_bytes / (_LINE_BYTES * least),
                best=row_bytes / (_LINE_BYTES * least),
                paper="transfers -47.1% of the time of gathering on the CPU first",
                what="of the bytes",
                note=f"{rows_per_s / 1e6:.0f} million rows a second at {machine.link_share:.0%} of the link's rate",
            )


SECTIONS: dict[str, Callable[[], Iterator[Row]]] = {
    "ssdtrain": ssdtrain,
    "hydra": hydra,
    "libra": libra,
    "hector": hector,
    "pytorch-direct": pytorch_direct,
}


def main(arguments: list[str] | None = None) -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS, action="append", help="a section")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    settings = parser.parse_args(arguments)
    rows = [row for name in settings.only or SECTIONS for row in SECTIONS[name]()]
    table = Table("headline", "setting", "machine", "ours", "best", "paper", "note")
    for row in rows:
        best = "" if row.best is None else shown(row, row.best)
        table.add_row(row.headline, row.setting, row.machine, shown(row, row.ours), best, row.paper, row.note)
    Console().print(table)
    if settings.json is not None:
        settings.json.write_text(json.dumps({"modelled": True, "rows": [vars_of(row) for row in rows]}, indent=1))


def shown(row: Row, value: float) -> str:
    """Return a value with its unit."""
    return f"{value:.2f}x" if row.what == "x" else f"{value:.1%}"


def vars_of(row: Row) -> dict[str, object]:
    """Return the row for JSON, as in all benchmarks; ``ratio`` is over the best schedule."""
    return {
        "name": f"{row.setting}, {row.machine}",
        "metric": row.headline,
        "value": row.ours,
        "unit": row.what,
        "peer": row.paper,
        "ratio": None if row.best is None else row.ours / row.best,
        "note": row.note,
    }


if __name__ == "__main__":
    main()
