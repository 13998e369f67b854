"""Accuracy of `penstock.advise`: its pick, peaks and ratios against training with every option, per model and budget.

For each model and budget `advise` is called once. Then every option trains as a user would write it (forward, backward,
optimizer step), set up from scratch with the public functions, in alternation with plain PyTorch. The options that keep
the budget are ranked. Reported per case: the regret of the pick (its step time over that of the best option that keeps
the budget, both as paired medians), its predicted peak over the measured one, and its predicted ratio to plain's step
over the measured one.

    python -m benchmarks.advisor --disk /nvme --json FILE

All cases run with a malloc that keeps freed memory; a single one, ``--case 6``, runs with the settings of your shell.
Page faults are reported for both (docs/design/main-memory.md).
"""

import argparse
import contextlib
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

import penstock
from benchmarks.common import Row, interleaved, paired_ratio, parser, show, write
from benchmarks.models import WORKLOADS, checkpointed
from benchmarks.models import make as make_workload
from penstock import offload, remat
from penstock.errors import PenstockError
from penstock.probe import peak_bytes
from penstock.tiers import Budget
from penstock.units import format_bytes

_MODELS = ("GPT-2", "BERT", "ViT", "ResNet-50", "U-Net", "LSTM")
_TIGHT = {"U-Net": 0.5, "LSTM": 0.65}  # no plan keeps a smaller budget
CASES = [(model, share) for model in _MODELS for share in (0.7, _TIGHT.get(model, 0.4))]
"""Models, each with the share of plain PyTorch's activation peak that its budget allows."""


_HEAP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**26)}
"""Settings with which freed memory stays with the process, as on a device with its allocator.

Otherwise page faults decide, and their number differs between the ways to set a step up.
"""
LEAST_S = 0.5
"""Seconds of a turn: shorter steps are run several times in it."""
REGRET, PEAK = "regret of the pick", "predicted peak over measured"
RATIO = "predicted ratio to plain over measured"


@dataclass(kw_only=True)
class Trained:
    """A model that trains in one way."""

    step: Callable[[], None]
    close: Callable[[], None]
    peak_bytes: int = 0
    error: str = ""
    seconds: list[float] = field(default_factory=list)
    page_faults: list[int] = field(default_factory=list)
    """Number of page faults of each timed step."""

    def timed_step(self) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        self.step()
        self.page_faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


def train(name: str, workload: str, batch: int, budget: Budget) -> Trained:
    """Set up the option ``name`` as a user would."""
    module, inputs = make_workload(workload, batch)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    if name.startswith("checkpoint"):
        checkpointed(WORKLOADS[workload], module)
    stack = contextlib.ExitStack()
    forward: Callable[..., torch.Tensor] = module
    if "offload" in name:
        offloader = offload.activations(module, budget=budget, checkpoint_inputs_only=name != "offload")
        stack.callback(offloader.close)
    if name.startswith("remat"):
        forward = remat.optimize(
            module, inputs, budget, optimizer=optimizer, method="hybrid" if "swap" in name else "recompute"
        )
        stack.callback(forward.close)

    def step() -> None:
        with offloader if "offload" in name else contextlib.nullcontext():
            forward(*inputs).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    result = Trained(step=step, close=stack.close)
    try:
        for _ in range(4 if "offload" in name else 1):
            step()
        result.peak_bytes = peak_bytes(step, device="cpu").peak_bytes
    except PenstockError as error:
        result.error = str(error)
    return result


def compare(workload: str, batch: int, share: float, disk: Path, rounds: int) -> list[Row]:
    """Run one case and return its rows."""
    module, inputs = make_workload(workload, batch)
    module(*inputs).backward()
    plain = peak_bytes(lambda: module(*inputs).backward(), device="cpu")
    limit = plain.start_bytes + int(share * plain.activation_bytes)
    module.zero_grad()
    budget = Budget(device=limit, disk=disk)
    advice = penstock.advise(module, inputs, budget, optimizer=torch.optim.SGD(module.parameters()), rounds=rounds)
    print(advice.explain(), flush=True)
    names = [option.name for option in advice.options if option.name != "fleet"]
    measured = measure(names, workload, batch, budget, rounds)
    plain_s = measured["plain"].seconds
    ratios = {name: paired_ratio(figures.seconds, plain_s)[0] for name, figures in measured.items()}
    keeps = {name: ratios[name] for name, figures in measured.items() if figures.peak_bytes <= limit}
    case = f"{workload} x {batch} within {format_bytes(limit)}"
    if advice.best_name is None or not keeps:
        raise SystemExit(f"{case}: nothing keeps the budget: {advice.explain()}")
    best = min(keeps, key=lambda name: keeps[name])
    pick = advice.best
    peak = measured[pick.name].peak_bytes
    assert pick.peak_bytes is not None and pick.ratio is not None
    regret = paired_ratio(measured[pick.name].seconds, measured[best].seconds)[0] - 1
    return [
        Row(name=case, metric=REGRET, value=regret, unit="share", peer=f"{pick.name} / {best}"),
        Row(
            name=case, metric=PEAK, value=pick.peak_bytes / peak, unit="ratio", peer=pick.name
        ),
        Row(
            name=case, metric=RATIO, value=pick.ratio / ratios[pick.name],
            unit="ratio", peer=pick.name,
        ),
        Row(name=case, metric="peak of the pick", value=peak, unit="B", peer="budget", ratio=peak / limit),
        *(
            Row(
                name=case, metric=f"step of {name}", value=median(figures.seconds), unit="s", peer="plain",
                ratio=ratios[name],
            )
            for name, figures in measured.items()
        ),
        *(
            Row(name=case, metric=f"page faults in a step of {name}", value=median(figures.page_faults), unit="faults")
            for name, figures in measured.items()
        ),
    ]  # fmt: skip


def measure(names: list[str], workload: str, batch: int, budget: Budget, rounds: int) -> dict[str, Trained]:
    """Time every option that trains."""
    result: dict[str, Trained] = {}
    with contextlib.ExitStack() as stack:
        for name in names:
            gc.collect()
            try:
                alone = Budget(device=budget.device_bytes, disk=budget.disk_bytes)
                alone.device_bytes += peak_bytes(lambda: None, device="cpu").start_bytes
                with warnings.catch_warnings(action="ignore"):
                    trained = train(name, workload, batch, alone if "offload" in name else budget_of(budget))
            except PenstockError as error:
                print(f"{name}: {error}")
                continue
            stack.callback(trained.close)
            if not trained.error:
                trained.peak_bytes -= alone.device_bytes - budget.device_bytes
                result[name] = trained
        seconds = interleaved(
            {name: trained.timed_step for name, trained in result.items()}, rounds=rounds, device="cpu", least_s=LEAST_S
        )
    for name, trained in result.items():
        trained.seconds = seconds[name]
    return result


def budget_of(budget: Budget) -> Budget:
    return Budget(device=budget.device_bytes, disk=budget.disk_bytes)


def main(arguments: list[str] | None = None) -> list[Row]:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--case", type=int, help="this of the twelve alone")
    options.add_argument("--scale", type=float, default=1.0, help="of the batches in benchmarks/models.py")
    settings = options.parse_args(arguments)
    if settings.device != "cpu":
        raise SystemExit("advice is compared on the CPU, whose peaks a profiler measures: --device cpu")
    configuration = {name: getattr(settings, name) for name in ("device", "quick", "rounds", "scale")}
    if settings.case is None and not settings.quick:
        return in_processes(settings, configuration)
    workload, share = ("ViT", 0.5) if settings.quick else CASES[settings.case]
    batch = 1 if settings.quick else max(1, int(settings.scale * WORKLOADS[workload].batch))
    rows = compare(workload, batch, share, settings.disk, 1 if settings.quick else settings.rounds)
    write(settings.json, configuration, rows, device=settings.device)
    summarize(rows)
    return rows


def in_processes(settings: argparse.Namespace, configuration: dict[str, object]) -> list[Row]:
    """Run each case in its own process, so that no case affects another."""
    rows: list[Row] = []
    for case in range(len(CASES)):
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [sys.executable, "-m", "benchmarks.advisor", "--case", str(case), "--json", file.name]
            command += ["--rounds", str(settings.rounds), "--scale", str(settings.scale), "--disk", str(settings.disk)]
            subprocess.run(command, check=True, env={**os.environ, **_HEAP})
            rows += [Row(**row) for row in json.loads(Path(file.name).read_text())["rows"]]
        write(settings.json, configuration | {"malloc": _HEAP}, rows, device=settings.device)
    summarize(rows)
    return rows


def summarize(rows: list[Row]) -> None:
    """Print a line per case."""
    cases = dict.fromkeys(row.name for row in rows)
    lines = []
    for case in cases:
        by_metric = {row.metric: row for row in rows if row.name == case}
        regret, peak = by_metric[REGRET], by_metric[PEAK]
        lines.append([case, regret.peer, f"{regret.value:+.1%}", f"{peak.value:.4f}", f"{by_metric[RATIO].value:.3f}"])
    header = ["case", "pick / best", "regret", "peak, predicted/measured", "ratio to plain, predicted/measured"]
    show("advise against training with every option", header, lines)


if __name__ == "__main__":
    main()
