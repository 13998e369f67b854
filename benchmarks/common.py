"""The shared parts of benchmarks: options, the machine, interleaved timing, statistics of ratios, tables and JSON."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.native import tell_what_is_slower
from penstock.probe import in_rounds, provenance
from penstock.probe import paired_ratio as paired_ratio  # noqa: PLC0414  # the benchmarks find it here
from penstock.remat import RematProblem


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured number, in the form of the JSON."""

    name: str
    metric: str
    value: float
    unit: str
    peer: str = ""
    ratio: float | None = None


def parser(description: str) -> argparse.ArgumentParser:
    """Return the options that every benchmark takes. First say what is slower on this machine."""
    tell_what_is_slower(lambda text: print(f"note: {text}", file=sys.stderr))
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options.add_argument("--quick", action="store_true", help="small sizes, few rounds: shows that it runs")
    options.add_argument("--json", type=Path, help="write the rows here")
    options.add_argument("--disk", type=Path, default=Path("."), help="directory in which to spill")
    return options


def data_folder() -> Path:
    """Return the folder of real data sets: ``$PENSTOCK_DATA``, by default ``shared/data`` next to the checkout."""
    folder = os.environ.get("PENSTOCK_DATA")
    return Path(folder) if folder else Path(__file__).parents[2] / "shared" / "data"


def interleaved(
    steps: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    device: str,
    least_s: float = 0.0,
    after_round: Callable[[], None] | None = None,
) -> dict[str, list[float]]:
    """Call `penstock.probe.in_rounds` and print its progress."""

    def told(number: int) -> None:
        if after_round is not None:
            after_round()
        print(f"round {number} of {rounds}", flush=True)

    return in_rounds(steps, rounds=rounds, device=device, least_s=least_s, after_round=told)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def rerun_by_checkpoints(problem: RematProblem, blocks: Sequence[str]) -> list[str]:
    """Return the forward operators that checkpoints of these modules recompute: up to the last that backward reads."""
    names: list[str] = []
    for block in blocks:
        own = [
            index for index, operator in enumerate(problem.operators) if f"{operator.module}.".startswith(f"{block}.")
        ]
        read = {storage for index in own if index >= problem.num_forward for storage in problem.operators[index].inputs}
        producers = {problem.storages[storage].producer for storage in read}
        last = max((index for index in own if index < problem.num_forward and index in producers), default=-1)
        names += [problem.operators[index].name for index in own if index <= last]
    return names


def write(path: Path | None, configuration: Mapping[str, Any], rows: Sequence[Row], *, device: str = "cpu") -> None:
    """Write machine, configuration and rows as JSON; ``device`` is the one that was measured."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_json(configuration, rows, device=device))
    print(f"wrote {path}")


def as_json(
    configuration: Mapping[str, Any], rows: Sequence[Row], *, device: str = "cpu", **more: Sequence[Mapping[str, Any]]
) -> str:
    """Return the text that `write` writes, with ``more`` for data that fit no row."""
    lines = [asdict(row) for row in rows]
    content = {"machine": provenance(device), "configuration": dict(configuration), "rows": lines, **more}
    return json.dumps(content, indent=1) + "\n"


def show(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a table with aligned columns, without rich: the GPU machine has only PyTorch."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *lines, strict=True)]
    print(f"\n{title}")
    for line in (header, ["-" * width for width in widths], *lines):
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print(flush=True)
