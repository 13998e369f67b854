"""What all benchmarks share: options, the machine, interleaved timing, statistics of ratios, tables and JSON."""

import argparse
import json
import os
import platform
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from penstock import __version__
from penstock.remat import RematProblem


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured number, as it goes into the JSON."""

    name: str
    metric: str
    value: float
    unit: str
    peer: str = ""
    ratio: float | None = None


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark takes."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options.add_argument("--quick", action="store_true", help="small sizes, few rounds: shows that it runs")
    options.add_argument("--json", type=Path, help="write the rows here")
    options.add_argument("--disk", type=Path, default=Path("."), help="directory in which to spill")
    return options


def interleaved(
    steps: Mapping[str, Callable[[], Any]], *, rounds: int, device: str, after_round: Callable[[], None] | None = None
) -> dict[str, list[float]]:
    """Seconds of every step in every round: all of them in turn, in another order each round."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    shuffle = random.Random(0).shuffle
    for number in range(rounds):
        shuffle(order)
        for name in order:
            synchronize(device)
            start_s = time.perf_counter()
            steps[name]()
            synchronize(device)
            seconds[name].append(time.perf_counter() - start_s)
        if after_round is not None:
            after_round()
        print(
            f"round {number + 1} of {rounds}: " + ", ".join(f"{one} {seconds[one][-1]:.2f} s" for one in steps),
            flush=True,
        )
    return seconds


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Median of the paired ratios and its 95% interval (bootstrap over pairs, 10,000 resamples)."""
    ratios = [one / two for one, two in zip(ours, theirs, strict=True)]
    choices = random.Random(0)
    medians = sorted(median(choices.choices(ratios, k=len(ratios))) for _ in range(10_000))
    return median(ratios), medians[249], medians[9749]


def rerun_by_checkpoints(problem: RematProblem, blocks: Sequence[str]) -> list[str]:
    """Forward operators that checkpoints of these modules run again: up to the last whose results backward reads."""
    found: list[str] = []
    for block in blocks:
        own = [at for at, one in enumerate(problem.operators) if f"{one.module}.".startswith(f"{block}.")]
        read = {one for at in own if at >= problem.num_forward for one in problem.operators[at].inputs}
        producers = {problem.storages[one].producer for one in read}
        last = max((at for at in own if at < problem.num_forward and at in producers), default=-1)
        found += [problem.operators[at].name for at in own if at <= last]
    return found


def machine() -> dict[str, Any]:
    """Where and with what the numbers were measured."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "penstock": __version__,
    }


def write(path: Path | None, configuration: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Writes machine, configuration and rows as JSON."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine(), "configuration": dict(configuration), "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"wrote {path}")


def show(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Prints a table with aligned columns: the GPU machine has no more than PyTorch."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *lines, strict=True)]
    print(f"\n{title}")
    for line in (header, ["-" * width for width in widths], *lines):
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print(flush=True)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
