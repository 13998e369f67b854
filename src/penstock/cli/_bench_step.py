"""`penstock bench step`: one training step of a GPT by four methods, in alternation, in one process.

The planned step gets the peak memory of checkpointing per block as its budget. Offloading decides for itself how much
it can move without a stall. The first two steps of each method are not counted: they are cold, and are recorded.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock import probe, remat
from penstock.cli._fault import Misuse
from penstock.cli._progress import Steps
from penstock.cli._tables import print_table
from penstock.cli._trainer import METHODS, NUM_HEADS, Batch, Size, Trainer
from penstock.devices import kinds
from penstock.errors import PenstockError
from penstock.units import format_bytes

PLAIN, CHECKPOINT, OFFLOAD, REMAT = METHODS
_NUM_COLD = 2
_SIZES = {
    ("cpu", True): Size(num_layers=3, width=128, length=128, batch=4),
    ("cpu", False): Size(num_layers=8, width=256, length=512, batch=8),
    ("cuda", True): Size(num_layers=8, width=1024, length=512, batch=8),
    ("cuda", False): Size(num_layers=16, width=2048, length=1024, batch=8),
}


def measure(quick: bool, device: str, disk: Path, given: Mapping[str, int], steps: Steps) -> dict[str, Any]:
    """Return machine, configuration and rows in the format of the benchmarks of the source tree."""
    if device not in kinds():
        raise PenstockError(f"PyTorch finds no {device} device here; --device cpu measures main memory and the disk")
    rounds = given.get("rounds", 4 if quick else 9)
    size = Size(**{**asdict(_SIZES[device, quick]), **{key: value for key, value in given.items() if key != "rounds"}})
    if size.width % NUM_HEADS:
        raise Misuse(f"a width of {size.width} does not divide into {NUM_HEADS} heads; give a multiple of them")
    trainers = _trainers(size, quick, device, disk, steps)
    try:
        rows = _rows(trainers, rounds, device, steps)
    finally:
        for trainer in trainers.values():
            trainer.close()
    configuration = {**asdict(size), "rounds": rounds, "device": device}
    return {"machine": probe.provenance(device), "configuration": configuration, "rows": rows}


def show(document: Mapping[str, Any], console: Console) -> None:
    """Print the table."""
    by_name = {(row["name"], row["metric"]): row for row in document["rows"]}
    table = Table("method", "step time", "95% interval", "activation peak", "moved out", "losses equal")
    for name in METHODS:
        step, low, high = (by_name[name, metric]["value"] for metric in ("step time ratio", _LOW, _HIGH))
        peak, moved = by_name[name, "activation peak"], by_name.get((name, "moved out a step"))
        table.add_row(
            name,
            f"{step:.2f}",
            "" if name == PLAIN else f"{low:.2f} to {high:.2f}",
            f"{format_bytes(peak['value'])}, {peak['ratio']:.0%}",
            "" if moved is None else format_bytes(moved["value"]),
            "" if name == PLAIN else f"{by_name[name, _EQUAL]['value']} of {document['configuration']['rounds']}",
        )
    print_table(table, console)
    sizes = document["configuration"]
    console.print(
        f"{sizes['num_layers']} layers of width {sizes['width']}, {sizes['batch']} x {sizes['length']} tokens on "
        f"{sizes['device']}. Steps are medians of ratios to plain's over {sizes['rounds']} rounds in turn. A "
        "checkpoint per block sets the bytes that the planned step may take; offload moves what it can hide.",
        highlight=False,
    )


_LOW, _HIGH, _EQUAL = "step time ratio, 95% low", "step time ratio, 95% high", "losses equal to plain's"


def _trainers(size: Size, quick: bool, device: str, disk: Path, steps: Steps) -> dict[str, Trainer]:
    """Return one trainer per method, with gradients and optimizer state allocated and the step planned."""
    steps.phase("making four copies of the model")
    tiers: dict[str, Any] = {"disk": disk}
    if device == "cuda":
        tiers["host"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") // 4
    eager = {"min_size": "16KiB", "max_stall": 1.0} if quick else {}  # tiny tensors, whose copies hide badly
    trainers = {
        name: Trainer(name, size, device=device, **({**tiers, **eager} if name == OFFLOAD else {})) for name in METHODS
    }
    for trainer in trainers.values():
        trainer.run_tiny_step()
    steps.phase("planning the step")
    planned, batch = trainers[REMAT], trainers[PLAIN].batch()
    peak = trainers[CHECKPOINT].peak(batch)
    planned.plan(None, batch=batch, **tiers)
    assert planned.planned is not None
    problem = planned.planned.plan.problem
    budget = max(problem.static_bytes + peak.activation_bytes, remat.smallest_budget_bytes(problem))
    planned.plan(budget, batch=batch, profile=problem, **tiers)
    return trainers


def _rows(trainers: Mapping[str, Trainer], rounds: int, device: str, steps: Steps) -> list[dict[str, Any]]:
    """Return rows of times, peaks and equal losses. All methods start from the same weights, with the same batches."""
    source = trainers[REMAT]
    batches = [source.batch() for _ in range(rounds + _NUM_COLD)]
    losses: dict[str, list[float]] = {name: [] for name in trainers}
    steps.phase("warming up", _NUM_COLD)
    for number in range(_NUM_COLD):
        for name, trainer in trainers.items():
            losses[name].append(trainer.train(batches[number]))
        steps.advance(number + 1, _NUM_COLD)
    steps.phase("training in turn", rounds)
    ways = {name: _step(trainer, batches, losses[name]) for name, trainer in trainers.items()}
    seconds = probe.in_rounds(
        ways, rounds=rounds, device=device, after_round=lambda number: steps.advance(number, rounds)
    )
    steps.phase("measuring peaks")
    peaks = {name: trainer.peak(batches[-1]) for name, trainer in trainers.items()}
    rows: list[dict[str, Any]] = []
    for name, trainer in trainers.items():
        ratio = probe.paired_ratio(seconds[name], seconds[PLAIN])
        num_equal = sum(a == b for a, b in list(zip(losses[name], losses[PLAIN], strict=True))[_NUM_COLD:])
        share = peaks[name].activation_bytes / max(peaks[PLAIN].activation_bytes, 1)
        rows += [
            _row(name, "step time", median(seconds[name]), "s", ratio.median),
            _row(name, "step time ratio", ratio.median, ""),
            _row(name, _LOW, ratio.low, ""),
            _row(name, _HIGH, ratio.high, ""),
            _row(name, "activation peak", peaks[name].activation_bytes, "bytes", share),
            _row(name, "device peak", peaks[name].peak_bytes, "bytes"),
            _row(name, _EQUAL, num_equal, "steps"),
        ]
        moved = _moved_bytes(trainer)
        if moved is not None:
            rows.append(_row(name, "moved out a step", moved, "bytes"))
    return rows


def _step(trainer: Trainer, batches: list[Batch], losses: list[float]) -> Callable[[], None]:
    """Return a function that trains one step on the next batch."""
    return lambda: losses.append(trainer.train(batches[len(losses)]))


def _moved_bytes(trainer: Trainer) -> int | None:
    if trainer.offloader is not None:
        return trainer.offloader.statistics().parked_bytes
    if trainer.planned is not None:
        plan, problem = trainer.planned.plan.plan, trainer.planned.plan.problem
        return sum(problem.storages[storage].size_bytes for storage in plan.gone_slots)
    return None


def _row(name: str, metric: str, value: float, unit: str, ratio: float | None = None) -> dict[str, Any]:
    return {"name": name, "metric": metric, "value": value, "unit": unit, "peer": PLAIN, "ratio": ratio}
