"""The demo: the same training in child processes, by four methods, under a memory cap that the kernel enforces."""

import json
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.cli import _demo_whole
from penstock.cli._answer import Answer, as_json
from penstock.cli._demo_process import Child, child
from penstock.cli._progress import Steps
from penstock.cli._tables import print_table
from penstock.errors import InternalError, PenstockError
from penstock.probe import machine, provenance
from penstock.report import memory_timeline, write_html
from penstock.tiers import ssd_life_s
from penstock.units import format_bytes, format_duration

_CAP_SHARE = 0.35
"""Share of the plain run's activation peak that the capped runs get in addition to their static bytes."""
_BUDGET_SHARE = 0.8
"""Share of the cap that Penstock gets as its budget: the cap also counts stacks, libraries and malloc's gaps."""


_CAPPED = {
    "checkpoint": "checkpoint per block",
    "offload": "Penstock: offload",
    "remat": "Penstock: remat plan",
}
"""Methods that run under the cap, with their labels in the table."""


@dataclass(slots=True)
class _Method:
    """Measurements of one method under the cap."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    peak: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Outcome:
    """All measurements of the demo, for ``summary.json``."""

    command: str
    """The command line that repeats the demo."""
    plain: dict[str, Any] = field(default_factory=dict)
    plain_steps: list[dict[str, Any]] = field(default_factory=list)
    failure: str = ""
    cap_bytes: int = 0
    budget_bytes: int = 0
    whole: dict[str, Any] = field(default_factory=dict)
    """Measurements of the second model, whose parameters, gradients and optimizer state exceed the cap."""
    methods: dict[str, _Method] = field(default_factory=lambda: {name: _Method() for name in _CAPPED})

    def largest_loss_difference(self, name: str) -> float:
        """Return the largest difference between a method's losses and those of plain training."""
        pairs = zip(self.plain_steps, self.methods[name].steps, strict=True)
        return max(abs(float.fromhex(plain["loss"]) - float.fromhex(ours["loss"])) for plain, ours in pairs)

    def step_time_ratio(self, name: str) -> float:
        """Return the median ratio to plain over paired steps, without the first two, which are recorded and cold."""
        pairs = list(zip(self.plain_steps, self.methods[name].steps, strict=True))[2:]
        return float(median(ours["step_s"] / plain["step_s"] for plain, ours in pairs))

    @property
    def best(self) -> str:
        """Name of the fastest method under the cap."""
        return min(self.methods, key=self.step_time_ratio)


def run(
    out: Path,
    disk: Path,
    num_steps: int,
    steps: Steps,
    console: Console | None = None,
    *,
    num_layers: int = 8,
    batch: int = 8,
    num_large_layers: int = 6,
) -> Answer:
    """Run the demo, print what it does, and write its files to ``out``."""
    size = ("--layers", str(num_layers), "--batch", str(batch))
    console = console or Console(quiet=not steps.is_wanted)
    out.mkdir(parents=True, exist_ok=True)
    command = ["penstock", "demo", "--out", str(out), "--disk", str(disk), "--steps", str(num_steps)]
    outcome = _Outcome(command=shlex.join(command))
    with ExitStack() as stack:
        plain = stack.enter_context(child(*size))
        hello = plain.hello
        console.print(
            f"A GPT of {hello['num_parameters'] / 1e6:.1f}M parameters ({num_layers} layers, width 256) trains on "
            f"Python's own standard library, {batch} x 512 bytes a step, with AdamW."
        )
        steps.phase("measuring the plain run")
        outcome.plain = plain.ask("measure")
        outcome.cap_bytes = int(_CAP_SHARE * outcome.plain["activation_bytes"])
        console.print(
            f"Plain, a step holds {format_bytes(outcome.plain['start_bytes'])} before it begins and "
            f"{format_bytes(outcome.plain['activation_bytes'])} of activations at its peak. From here on a process may "
            f"take {format_bytes(outcome.cap_bytes)} beyond what it holds when training begins "
            f"({_CAP_SHARE:.0%} of the activations, RLIMIT_DATA)."
        )
        steps.phase("running plainly under the cap")
        outcome.failure = _fail_plainly(size, outcome.cap_bytes)
        console.print(f"Plain under the cap: [red]fails[/]\n  [dim]{escape(outcome.failure)}[/]", highlight=False)
        outcome.budget_bytes = outcome.plain["start_bytes"] + int(_BUDGET_SHARE * outcome.cap_bytes)
        capped = {}
        for name, label in _CAPPED.items():
            steps.phase(f"starting {label}")
            limits = ("--cap", str(outcome.cap_bytes), "--budget", str(outcome.budget_bytes))
            files = ("--disk", str(disk), "--trace", str(out / "trace.json"))
            capped[name] = stack.enter_context(child(*size, "--method", name, *limits, *files))
            capped[name].ask("measure")  # takes the batch that the plain run took
        _train_in_turn(plain, capped, num_steps, outcome, steps)
        steps.phase("measuring the peaks of the capped runs")
        for name, process in capped.items():
            outcome.methods[name].peak = process.ask("measure")
            outcome.methods[name].last = process.ask("finish")
    outcome.whole, _ = _demo_whole.run(disk, num_steps, steps, console, num_large_layers)
    steps.end()
    return _report(outcome, out, disk, console)


def _fail_plainly(size: Sequence[str], cap_bytes: int) -> str:
    """Return PyTorch's own error from the plain script under the cap."""
    with child(*size, "--cap", str(cap_bytes)) as capped:
        answer = capped.ask("step", may_fail=True)
    if "error" not in answer:
        raise PenstockError("the plain run did not fail under the cap, so this machine cannot show the difference")
    return str(answer["error"])


def _train_in_turn(plain: Child, capped: dict[str, Child], num_steps: int, outcome: _Outcome, steps: Steps) -> None:
    """Train one step of each method in alternation, so that other load on the machine affects all of them alike."""
    steps.phase("training in turn, plain and under the cap", num_steps)
    for number in range(1, num_steps + 1):
        outcome.plain_steps.append(plain.ask("step"))
        for name, process in capped.items():
            outcome.methods[name].steps.append(process.ask("step"))
        steps.advance(number, num_steps)


def _report(outcome: _Outcome, out: Path, disk: Path, console: Console) -> Answer:
    picture, summary = out / "memory.png", out / "summary.json"
    results = _summary(outcome, disk)
    timelines = {"plain, no cap": outcome.plain["timeline"]}
    timelines |= {label: outcome.methods[name].peak["timeline"] for name, label in _CAPPED.items()}
    summary.write_text(as_json(results))
    memory = out / "memory.json"
    memory.write_text(json.dumps(timelines))
    files = [summary, memory, out / "trace.json"]
    files.append(write_html(out / "report.html", out, title="penstock demo")[0])
    if find_spec("matplotlib") is not None:  # an extra
        memory_timeline(
            picture,
            timelines,
            limit_bytes=outcome.plain["start_bytes"] + outcome.cap_bytes,
            limit_label="cap",
            title="One training step, memory held",
        )
        files.append(picture)
    table = Table("", "under the cap", "activations", "step time", "moved out", "loss off by", title_justify="left")
    table.add_row("plain", "[red]fails[/]", format_bytes(outcome.plain["activation_bytes"]), "1", "", "")
    for name, label in _CAPPED.items():
        method = outcome.methods[name]
        table.add_row(
            f"[bold]{label}[/]" if name == outcome.best else label,
            "[green]trains[/]",
            format_bytes(method.peak["activation_bytes"]),
            f"{outcome.step_time_ratio(name):.2f}",
            format_bytes(_moved_bytes(method)),
            f"{outcome.largest_loss_difference(name):g}",
        )
    print_table(table, console)
    first, final = (float.fromhex(outcome.plain_steps[number]["loss"]) for number in (0, -1))
    console.print(
        f"Step times are medians of ratios to plain's. The fastest under the cap: {_CAPPED[outcome.best]}. The loss "
        f"went from {first:.4f} to {final:.4f}. Penstock's budget was {format_bytes(outcome.budget_bytes)}; offload "
        f"waited {format_duration(outcome.methods['offload'].steps[-1]['offload']['stall_s'])} a step for copies.",
        highlight=False,
    )
    for path in files:
        console.print(f"  {path}", highlight=False, markup=False, soft_wrap=True)
    if any(outcome.largest_loss_difference(name) for name in ("offload", "remat")):
        raise InternalError(f"the losses differ from plain training's; add {summary} to the report")
    return Answer(data={**results, "files": [str(path) for path in files]}, show=_was_told)


def _was_told(_: Console) -> None:
    """Print nothing: the demo has printed its story while it ran."""


def _moved_bytes(method: _Method) -> int:
    """Return the bytes that left the device in the last step."""
    offloaded = method.steps[-1].get("offload")
    return int(offloaded["parked_bytes"] if offloaded else method.last.get("swapped_bytes", 0))


def _summary(outcome: _Outcome, disk: Path) -> dict[str, Any]:
    offloaded = outcome.methods["offload"]
    written = offloaded.steps[-1]["offload"]["written_to_disk_bytes"]
    capacity_bytes = machine(disk).places[-1].capacity_bytes
    step_s = median(step["step_s"] for step in offloaded.steps)
    return {
        "command": outcome.command,
        "machine": provenance("cpu"),
        "cap_bytes": outcome.cap_bytes,
        "budget_bytes": outcome.budget_bytes,
        "plain_failure": outcome.failure,
        "plain": _without_timeline(outcome.plain),
        "losses": [float.fromhex(step["loss"]) for step in outcome.plain_steps],
        "methods": {
            name: {
                "label": _CAPPED[name],
                **_without_timeline(method.peak),
                **method.last,
                "activation_share": method.peak["activation_bytes"] / outcome.plain["activation_bytes"],
                "step_time_ratio": outcome.step_time_ratio(name),
                "largest_loss_difference": outcome.largest_loss_difference(name),
                "moved_bytes": _moved_bytes(method),
                "steps": [step.get("offload", {}) for step in method.steps],
            }
            for name, method in outcome.methods.items()
        },
        "best": outcome.best,
        "whole": outcome.whole,
        "ssd_life_s": ssd_life_s(capacity_bytes=capacity_bytes, written_bytes=written, duration_s=step_s),
    }


def _without_timeline(measured: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in measured.items() if key != "timeline"}
