"""The demo: the same training in child processes, plain and with Penstock, under a cap that the kernel enforces."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from penstock.errors import PenstockError
from penstock.probe import machine
from penstock.report import memory_timeline
from penstock.tiers import ssd_life_s
from penstock.units import format_bytes, format_duration

_CAP_SHARE = 0.35
"""Share of the plain run's activation peak that the capped runs get beside their static bytes."""
_BUDGET_SHARE = 0.8
"""Share of the cap that Penstock is given as its budget: the cap also counts stacks, libraries and malloc's gaps."""


@dataclass(slots=True)
class _Outcome:
    """Everything measured, as it goes into summary.json."""

    plain: dict[str, Any] = field(default_factory=dict)
    penstock: dict[str, Any] = field(default_factory=dict)
    failure: str = ""
    cap_bytes: int = 0
    budget_bytes: int = 0
    plain_steps: list[dict[str, Any]] = field(default_factory=list)
    penstock_steps: list[dict[str, Any]] = field(default_factory=list)
    tiers: dict[str, Any] = field(default_factory=dict)

    @property
    def largest_loss_difference(self) -> float:
        pairs = zip(self.plain_steps, self.penstock_steps, strict=True)
        return max(abs(float.fromhex(one["loss"]) - float.fromhex(two["loss"])) for one, two in pairs)

    @property
    def step_time_ratio(self) -> float:
        """Median over pairs of steps run in turn; the first two, recorded and cold, are left out."""
        pairs = list(zip(self.plain_steps, self.penstock_steps, strict=True))[2:]
        return float(median(two["step_s"] / one["step_s"] for one, two in pairs))


def run(out: Path, disk: Path, num_steps: int, console: Console) -> None:
    """Runs the demo and writes its files into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    outcome = _Outcome()
    with _child() as plain:
        hello = plain.hello
        console.print(
            f"A GPT of {hello['num_parameters'] / 1e6:.1f}M parameters (8 layers, width 256) trains on Python's own "
            "standard library, 16 x 512 bytes a step, with AdamW."
        )
        with console.status("measuring the plain run"):
            outcome.plain = plain.ask("measure")
        outcome.cap_bytes = int(_CAP_SHARE * outcome.plain["activation_bytes"])
        console.print(
            f"Plain, a step holds {format_bytes(outcome.plain['start_bytes'])} before it begins and "
            f"{format_bytes(outcome.plain['activation_bytes'])} of activations at its peak. From here on a process may "
            f"take {format_bytes(outcome.cap_bytes)} beyond what it holds when training begins "
            f"({_CAP_SHARE:.0%} of the activations, RLIMIT_DATA)."
        )
        outcome.failure = _fail_plainly(outcome.cap_bytes)
        console.print(f"Plain under the cap: [red]fails[/]\n  [dim]{outcome.failure}[/]", highlight=False)
        outcome.budget_bytes = outcome.plain["start_bytes"] + int(_BUDGET_SHARE * outcome.cap_bytes)
        files = ("--disk", str(disk), "--trace", str(out / "trace.json"))
        limits = ("--cap", str(outcome.cap_bytes), "--budget", str(outcome.budget_bytes))
        with _child(*files, *limits) as capped:
            capped.ask("measure")  # takes the batch that the plain run took, and records the first step
            _train_in_turn(plain, capped, num_steps, outcome, console)
            outcome.penstock = capped.ask("measure")
            plain.ask("measure")
            outcome.tiers = capped.ask("finish")["tiers"]
    _report(outcome, out, disk, console)


def _fail_plainly(cap_bytes: int) -> str:
    """PyTorch's own error when the plain script meets the cap."""
    with _child("--cap", str(cap_bytes)) as capped:
        answer = capped.ask("step", may_fail=True)
    if "error" not in answer:
        raise PenstockError("the plain run did not fail under the cap, so this machine cannot show the difference")
    return str(answer["error"])


def _train_in_turn(plain: "_Child", capped: "_Child", num_steps: int, outcome: _Outcome, console: Console) -> None:
    """One step here, one step there, so that whatever else the machine does meets both."""
    columns = (
        TextColumn("training in turn, plain and capped"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=num_steps)
        for _ in range(num_steps):
            outcome.plain_steps.append(plain.ask("step"))
            outcome.penstock_steps.append(capped.ask("step"))
            progress.advance(task)


def _report(outcome: _Outcome, out: Path, disk: Path, console: Console) -> None:
    last = outcome.penstock_steps[-1]["offload"]
    picture, summary = out / "memory.png", out / "summary.json"
    memory_timeline(
        picture,
        {"plain, no cap": outcome.plain["timeline"], "Penstock, under the cap": outcome.penstock["timeline"]},
        limit_bytes=outcome.plain["start_bytes"] + outcome.cap_bytes,
        limit_label="cap",
        title="One training step, memory held",
    )
    summary.write_text(json.dumps(_summary(outcome, disk), indent=2))
    table = Table("", "plain", "Penstock, capped", title_justify="left")
    table.add_row("under the cap", "[red]fails[/]", "[green]trains[/]")
    for label, key in (("memory peak", "peak_bytes"), ("of it activations", "activation_bytes")):
        table.add_row(label, format_bytes(outcome.plain[key]), format_bytes(outcome.penstock[key]))
    table.add_row("budget for Penstock", "", format_bytes(outcome.budget_bytes))
    table.add_row("step time", "1", f"{outcome.step_time_ratio:.2f} (median of paired ratios)")
    table.add_row("moved out / back, a step", "", f"{_size(last, 'parked_bytes')} / {_size(last, 'fetched_bytes')}")
    table.add_row("waited for copies, a step", "", format_duration(last["stall_s"]))
    first, final = (float.fromhex(outcome.plain_steps[at]["loss"]) for at in (0, -1))
    table.add_row("loss, first and last step", f"{first:.4f}, {final:.4f}", "the same")
    table.add_row("largest difference of losses", "", f"{outcome.largest_loss_difference:g}")
    console.print(table)
    for path in (summary, picture, out / "trace.json"):
        console.print(f"  {path}", highlight=False)
    if outcome.largest_loss_difference:
        raise PenstockError("the losses differ: this is a bug in Penstock, please report it with summary.json")


def _summary(outcome: _Outcome, disk: Path) -> dict[str, Any]:
    steps = [step["offload"] for step in outcome.penstock_steps]
    written = steps[-1]["written_to_disk_bytes"]
    capacity_bytes = machine(disk).places[-1].capacity_bytes
    step_s = median(step["step_s"] for step in outcome.penstock_steps)
    return {
        "cap_bytes": outcome.cap_bytes,
        "budget_bytes": outcome.budget_bytes,
        "plain_failure": outcome.failure,
        "plain": {key: value for key, value in outcome.plain.items() if key != "timeline"},
        "penstock": {key: value for key, value in outcome.penstock.items() if key != "timeline"},
        "activation_share": outcome.penstock["activation_bytes"] / outcome.plain["activation_bytes"],
        "step_time_ratio": outcome.step_time_ratio,
        "losses": [float.fromhex(step["loss"]) for step in outcome.penstock_steps],
        "largest_loss_difference": outcome.largest_loss_difference,
        "steps": steps,
        "tiers": outcome.tiers,
        "ssd_life_s": ssd_life_s(capacity_bytes=capacity_bytes, written_bytes=written, duration_s=step_s),
    }


def _size(statistics: dict[str, Any], name: str) -> str:
    return format_bytes(statistics[name])


class _Child:
    """A training process that answers lines with lines."""

    def __init__(self, process: "subprocess.Popen[str]", errors: IO[str]):
        self._process = process
        self._errors = errors
        self.hello = self._answer(may_fail=False)

    def ask(self, command: str, *, may_fail: bool = False) -> dict[str, Any]:
        """Sends a command and returns the answer. A dead child raises, unless it ``may_fail``."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer(may_fail=may_fail)

    def _answer(self, *, may_fail: bool) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        if "error" in answer and not may_fail:
            raise PenstockError(f"a training process of the demo failed: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        words = self._errors.read().strip().splitlines()
        return words[-1] if words else f"exit status {self._process.returncode}"


@contextmanager
def _child(*arguments: str) -> Iterator[_Child]:
    """Starts a training process. All have malloc's same settings: few arenas, and freed blocks go back at once."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli._demo_child", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": str(2**20)},
        )
        try:
            yield _Child(process, errors)
        finally:
            process.kill()
            process.communicate()
