"""Planned steps of models larger than the device, simulated on a modelled H100: time, bytes, and what limits them.

The order of a step is recorded from the model itself, on tensors without bytes; planner, verifier and simulator are the
product's. Only the operators' times are modelled, scaled to the plain step that was measured on an H100. Nothing here
ran on a GPU.

    python -m benchmarks.state_plans --json plans.json
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks import common
from benchmarks.common import Row
from penstock.machines import MACHINES
from penstock.state import (
    Place,
    Rates,
    StatePlanner,
    StepKind,
    StepRecord,
    best_split,
    modelled_record,
    plain_s,
    simulate,
    step_problem,
    verify,
)
from penstock.testing import GPT

H100 = replace(
    MACHINES["h200"],
    name="h100",
    title="NVIDIA H100 SXM, PCIe 5.0",
    memory_bytes=80 * 10**9,
    memory_bytes_per_s=3.35e12,
    sources=("NVIDIA H100 Tensor Core GPU data sheet (2023)",),
    matmul_share=6e14 / 989e12,
    memory_share=2.6 / 3.35,
)
"""Rates that its operators reach: 600 TFLOP/s of matrix products and 2.6 TB/s of memory."""
RATES = Rates(in_bytes_per_s=54e9, out_bytes_per_s=54e9, both_in_bytes_per_s=48e9, both_out_bytes_per_s=44e9)
_GPT_TOKENS = 1024
_UPDATE_PASSES = 14.0
"""Bytes of device memory that an update moves by the measured share of a step, as a multiple of its parameter's."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model at full size, and one micro-batch."""

    name: str
    make: Callable[[], nn.Module]
    batch: int
    length: int
    plain_s: float
    """Measured seconds of a plain step, with its update. Nobody has measured the 8B model: for it 8 FLOP per parameter
    and token at 400 TFLOP/s are assumed, and the update at the memory's rate.
    """


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row of the table."""

    model: str
    what: str
    """What is planned, in words."""
    budget: float = 0.25
    """Share of parameters, gradients and states (16 bytes a parameter); above 1 in bytes."""
    elsewhere: Place = "backward"
    host_bytes_per_s: float = 0.0
    num_micro_batches: int = 1
    waits_for_step: bool = False
    aim: float = 0.0
    """The step over plain that the design asks for."""


class Llama(nn.Module):
    """A decoder of Llama's shape whose blocks and loss are recomputed in backward."""

    def __init__(self, num_layers: int, width: int, hidden: int, heads: int, key_heads: int, vocabulary: int):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, hidden, heads, key_heads) for _ in range(num_layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        x, targets = self.norm(x).flatten(0, 1), targets.flatten()
        parts = zip(x.split(1024), targets.split(1024), strict=True)
        return sum(checkpoint(self.loss, *part, use_reentrant=False) for part in parts) / len(targets)

    def loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(x), targets, reduction="sum")


class LlamaBlock(nn.Module):
    """Attention with fewer heads for keys, and a gated feed-forward layer."""

    def __init__(self, width: int, hidden: int, heads: int, key_heads: int):
        super().__init__()
        self.heads, self.key_heads = heads, key_heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width // heads * key_heads, bias=False)
        self.value = nn.Linear(width, width // heads * key_heads, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, shape = self.norm1(x), (*x.shape[:2], -1, x.shape[2] // self.heads)
        query, key, value = (layer(y).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value))
        key, value = (part.repeat_interleave(self.heads // self.key_heads, 1) for part in (key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def gpt(num_layers: int, width: int) -> Callable[[], nn.Module]:
    """Return what makes a GPT whose blocks are recomputed."""
    return lambda: GPT(
        num_layers=num_layers, width=width, num_heads=width // 128, context=_GPT_TOKENS, checkpointed=True
    )


MODELS = {
    model.name: model
    for model in (
        Model(name="1.2B", make=gpt(24, 2048), batch=8, length=_GPT_TOKENS, plain_s=0.207),
        Model(name="2.4B", make=gpt(12, 4096), batch=8, length=_GPT_TOKENS, plain_s=0.351),
        Model(name="1.2B, 32,768 tokens", make=gpt(24, 2048), batch=32, length=_GPT_TOKENS, plain_s=0.660),
        Model(name="2.4B, 32,768 tokens", make=gpt(12, 4096), batch=32, length=_GPT_TOKENS, plain_s=1.362),
        Model(name="Llama 8B", make=lambda: Llama(32, 4096, 14336, 32, 8, 128256), batch=2, length=4096, plain_s=1.49),
    )
}
_SPLIT = {122e9: "host memory 122 GB/s", 200e9: "host memory 200 GB/s"}


def _cases() -> list[Case]:
    cases = []
    aims = {
        "backward": {"1.2B": (1.55, 1.30, 0.95), "2.4B": (1.80, 1.47, 1.02)},
        "forward": {"1.2B": (2.2, 1.42, 1.05), "2.4B": (2.4, 1.60, 1.10)},
        "clipped": {"1.2B": (0.0, 1.98, 1.57), "2.4B": (0.0, 2.16, 1.68)},
        "accumulated": {"1.2B": (1.30, 1.15, 0.0), "2.4B": (1.35, 1.20, 0.0)},
    }
    names = {
        "backward": "updates in backward", "forward": "plain defaults", "clipped": "clipped",
        "accumulated": "4 micro-batches",
    }  # fmt: skip
    for way, of_models in aims.items():
        for model, figures in of_models.items():
            for rate, aim in zip((0.0, *_SPLIT), figures, strict=True):
                if rate == 200e9 and way == "accumulated":
                    continue
                cases.append(
                    Case(
                        model=model,
                        what=names[way],
                        host_bytes_per_s=rate,
                        aim=aim,
                        elsewhere="forward" if way in ("forward", "clipped") else "backward",
                        waits_for_step=way == "clipped",
                        num_micro_batches=4 if way == "accumulated" else 1,
                    )
                )
    for rate, aim in ((0.0, 1.95), (122e9, 1.60)):
        cases.append(Case(model="1.2B", what="an eighth", budget=0.125, host_bytes_per_s=rate, aim=aim))
    for model in ("1.2B, 32,768 tokens", "2.4B, 32,768 tokens"):
        for rate, aim in ((0.0, 1.02), (122e9, 1.00)):
            cases.append(Case(model=model, what="updates in backward", host_bytes_per_s=rate, aim=aim))
    for number, exact, split in ((1, 1.65, 1.38), (4, 1.32, 1.18), (16, 1.10, 1.06)):
        for rate, aim in ((0.0, exact), (122e9, split)):
            cases.append(
                Case(
                    model="Llama 8B",
                    what=f"{number} times 8,192 tokens, 24 GiB",
                    budget=24 * 2.0**30,
                    host_bytes_per_s=rate,
                    num_micro_batches=number,
                    aim=aim,
                )
            )
    return cases


def recorded(model: Model) -> tuple[StepRecord, float, int]:
    """Return the record with times scaled to the measured step, the factor, and the number of parameters."""

    def make() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
        module, tokens = model.make(), torch.zeros(model.batch, model.length, dtype=torch.int64)
        return module, lambda: module(tokens, tokens)

    record = modelled_record(make, H100)
    num_parameters = sum(record.storages[index].size_bytes for index in record.parameters) // 4
    update_s = _UPDATE_PASSES * 4 * num_parameters / (H100.memory_share * H100.memory_bytes_per_s)
    factor = model.plain_s / (sum(record.seconds) + update_s)
    return record.scaled(factor), factor, num_parameters


def planned(case: Case, record: StepRecord, factor: float, num_parameters: int) -> list[Row]:
    """Plan, verify and simulate one case."""
    kind = StepKind(
        device_bytes_per_s=H100.memory_share * H100.memory_bytes_per_s / factor,
        device_passes=_UPDATE_PASSES,
        num_micro_batches=case.num_micro_batches,
        waits_for_step=case.waits_for_step,
    )
    budget_bytes = int(case.budget if case.budget > 1 else case.budget * 16 * num_parameters)
    rates = replace(RATES, host_bytes_per_s=case.host_bytes_per_s)
    start_s = time.thread_time()
    share, best = best_split(record, kind, rates, budget_bytes, elsewhere=case.elsewhere)
    planned_s = time.thread_time() - start_s
    verify(best.problem, best.plan)
    simulated = best.simulated
    whole_s = plain_s(record, kind)
    split = f", {_SPLIT[case.host_bytes_per_s]}" if case.host_bytes_per_s else ", exact"
    name = f"{case.model}: {case.what}{split}"
    bytes_in, bytes_out = (
        moved / num_parameters for moved in (best.plan.in_bytes(best.problem), best.plan.out_bytes(best.problem))
    )
    busy = {
        "computing": sum(best.problem.seconds), "copying in": simulated.in_s, "copying out": simulated.out_s,
        "updating on the host": simulated.update_s,
    }  # fmt: skip
    limit = max(busy, key=lambda lane: busy[lane])
    print(
        f"{name:66s} {simulated.step_s / whole_s:5.2f} (aim {case.aim or '-'}) in {bytes_in:5.1f} out {bytes_out:5.1f}"
        f" B/parameter, host {share:.0%}, {limit} {busy[limit] / simulated.step_s:.0%}; "
        f"{best.problem.num_operators} operators planned in {planned_s:.2f} s",
        flush=True,
    )
    return [
        Row(name=name, metric="step", value=simulated.step_s, unit="s", peer="plain", ratio=simulated.step_s / whole_s),
        Row(name=name, metric="aim", value=case.aim, unit="of plain"),
        Row(name=name, metric="in", value=bytes_in, unit="bytes/parameter"),
        Row(name=name, metric="out", value=bytes_out, unit="bytes/parameter"),
        Row(name=name, metric="updated on the host", value=share, unit="of parameters"),
        Row(name=name, metric="operators planned a second", value=best.problem.num_operators / planned_s, unit="1/s"),
        Row(name=name, metric=f"limit: {limit}", value=busy[limit] / simulated.step_s, unit="of the step"),
    ]


def waterfall(name: str, record: StepRecord, factor: float, num_parameters: int) -> list[Row]:
    """Return the step over plain as one part of the planner after another is added, a quarter of the state here."""
    whole = StepKind(
        device_bytes_per_s=H100.memory_share * H100.memory_bytes_per_s / factor,
        device_passes=_UPDATE_PASSES,
        slice_bytes=2**40,
        min_saved_bytes=2**40,
    )
    leaving = replace(whole, min_saved_bytes=StepKind(device_bytes_per_s=1.0).min_saved_bytes)
    sliced = replace(leaving, slice_bytes=StepKind(device_bytes_per_s=1.0).slice_bytes)
    parts = [
        ("by time held, whole updates", whole, 1.0),
        ("and the inputs of blocks may leave", leaving, 1.0),
        ("and updates in slices", sliced, 1.0),
        ("and memory is dear where the order turns", sliced, 0.02),
    ]
    budget_bytes = 4 * num_parameters
    whole_s = plain_s(record, whole)
    steps: list[tuple[str, float]] = []
    for part, kind, time_share in parts:
        problem = step_problem(record, kind, dict.fromkeys(record.parameters, "backward"), RATES, budget_bytes)
        plan = StatePlanner(problem).plan(time_share=time_share, margin=0.08, lag=20)
        steps.append((part, simulate(problem, plan).step_s))
    searched = {"and margins and lags are searched": 0.0} | {f"and split, {_SPLIT[rate]}": rate for rate in _SPLIT}
    for part, rate in searched.items():
        rates = replace(RATES, host_bytes_per_s=rate)
        _, best = best_split(record, sliced, rates, budget_bytes, elsewhere="backward")
        steps.append((part, best.simulated.step_s))
    rows = []
    for part, step_s in steps:
        ratio = step_s / whole_s
        print(f"{name}: {part:44s} {ratio:5.2f}", flush=True)
        rows.append(Row(name=f"{name}: {part}", metric="step", value=step_s, unit="s", peer="plain", ratio=ratio))
    return rows


def main(arguments: list[str] | None = None) -> list[Row]:
    options = common.parser(__doc__ or "")
    options.add_argument("--model", action="append", choices=list(MODELS), help="only these models")
    given = options.parse_args(arguments)
    rows = []
    chosen = given.model or (["2.4B"] if given.quick else list(MODELS))
    for name in chosen:
        record, factor, num_parameters = recorded(MODELS[name])
        cases = [case for case in _cases() if case.model == name]
        for case in cases[:1] if given.quick else cases:
            rows += planned(case, record, factor, num_parameters)
        if name in ("1.2B", "2.4B") and not given.quick:
            rows += waterfall(name, record, factor, num_parameters)
        if given.json:  # after each model, since the largest take long
            config = {"machine": H100.title, "modelled": True, "budget": "a quarter of 16 bytes a parameter"}
            given.json.write_text(common.as_json(config, rows))
    return rows


if __name__ == "__main__":
    main()
