"""The demo of one room: the same training plainly and by Penstock, under a memory cap that the kernel enforces."""

import json
import shlex
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.cli import _demo_whole
from penstock.cli._answer import Answer, as_json
from penstock.cli._choices import DemoRoom
from penstock.cli._demo_process import Child, child
from penstock.cli._progress import Steps
from penstock.cli._tables import print_table
from penstock.errors import InternalError, PenstockError
from penstock.probe import provenance
from penstock.report import memory_timeline, write_html
from penstock.units import format_bytes

_CHILD = "penstock.cli._demo_room_child"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Story:
    """The rules of a demo of one room."""

    cap_share: float
    """Share of the plain run's memory that the capped processes may take."""
    largest_loss_difference: float
    """Difference of losses above which something is wrong, relative to the loss; 0 for the same bits."""
    num_rounds: int
    """Number of times that both train, in turn."""


_STORIES = {
    DemoRoom.FLEET: _Story(cap_share=0.5, largest_loss_difference=0.0, num_rounds=1),
    DemoRoom.UNIFIED: _Story(cap_share=0.45, largest_loss_difference=0.0, num_rounds=4),
    DemoRoom.RELATIONAL: _Story(cap_share=0.45, largest_loss_difference=1e-4, num_rounds=6),
}


def run(room: DemoRoom, out: Path, disk: Path, num_steps: int, steps: Steps, *, small: bool = False) -> Answer:
    """Run the demo of a room, print what it does, and write its files to ``out``."""
    console = Console(quiet=not steps.is_wanted)
    out.mkdir(parents=True, exist_ok=True)
    command = ["penstock", "demo", "--room", room.value, "--out", str(out), "--disk", str(disk)]
    if room is DemoRoom.TRAINING:
        return _train_whole([*command, "--steps", str(num_steps)], out, disk, num_steps, steps, console, small=small)
    story = _STORIES[room]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=disk, prefix="penstock-demo-"))
        arguments = ["--room", room.value, "--disk", folder, "--out", str(out), *(["--small"] if small else [])]
        steps.phase("starting the plain run")
        plain = stack.enter_context(child(*arguments, module=_CHILD))
        console.print(plain.hello["story"], highlight=False)
        steps.phase("measuring the plain run")
        rounds = {"plain": [plain.ask("round")]}
        cap_bytes = int(story.cap_share * rounds["plain"][0]["taken_bytes"])
        console.print(
            f"Plain PyTorch takes {format_bytes(rounds['plain'][0]['taken_bytes'])} for that. From here on a process "
            f"may take {format_bytes(cap_bytes)} (RLIMIT_DATA)."
        )
        steps.phase("running plainly under the cap")
        capped = [*arguments, "--cap", str(cap_bytes)]
        with child(*capped, module=_CHILD) as process:
            failure = str(process.ask("round", may_fail=True).get("error", ""))
        if not failure:
            raise PenstockError("the plain run did not fail under the cap, so this machine cannot show the difference")
        console.print(f"Plain under the cap: [red]fails[/]\n  [dim]{escape(failure)}[/]", highlight=False)
        steps.phase("starting Penstock under the cap")
        ours = stack.enter_context(child(*capped, "--penstock", module=_CHILD))
        rounds["Penstock"] = [ours.ask("round")]
        _train_in_turn({"plain": plain, "Penstock": ours}, rounds, story.num_rounds, steps)
        ended = ours.ask("finish")
    steps.end()
    results = _compared(rounds) | {
        "command": shlex.join(command), "machine": provenance("cpu"), "cap_bytes": cap_bytes,
        "story": plain.hello["story"], "failures": {"plain": failure}, **ended,
    }  # fmt: skip
    _show(results, rounds, console)
    answer = _written(out, results, {name: some[-1]["timeline"] for name, some in rounds.items()}, console)
    if results["largest_loss_difference"] > story.largest_loss_difference:
        raise InternalError(f"the losses differ from plain training's; add {out / 'summary.json'} to the report")
    return answer


def _train_whole(
    command: list[str], out: Path, disk: Path, num_steps: int, steps: Steps, console: Console, *, small: bool
) -> Answer:
    """Show the second part of the tour alone."""
    whole, timelines = _demo_whole.run(disk, num_steps, steps, console, 3 if small else 6)
    moved = sum(sum(whole["statistics"][name].values()) for name in ("step_fetched", "step_parked"))
    results = {
        "command": shlex.join(command), "machine": provenance("cpu"), "cap_bytes": whole["cap_bytes"],
        "story": f"Parameters, gradients and AdamW's state of a GPT are {format_bytes(whole['state_bytes'])}.",
        "failures": whole["failures"], "losses": whole["losses"], "time_ratio": whole["step_time_ratio"],
        "largest_loss_difference": whole["largest_loss_difference"],
        "taken_bytes": {name: max(held for _, held in timeline) for name, timeline in timelines.items()},
        "told": f"{format_bytes(moved)} moved between memory and the disk in a step.",
    }  # fmt: skip
    return _written(out, results, timelines, console)


def _train_in_turn(
    processes: dict[str, Child], rounds: dict[str, list[dict[str, Any]]], num_rounds: int, steps: Steps
) -> None:
    """Train both in alternation, so that other load on the machine affects them alike."""
    steps.phase("training in turn, plainly and under the cap", num_rounds)
    for number in range(2, num_rounds + 1):
        for name, process in processes.items():
            rounds[name].append(process.ask("round"))
        steps.advance(number, num_rounds)


def _compared(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    losses = {
        name: [float.fromhex(loss) for some in taken for loss in some["losses"]] for name, taken in rounds.items()
    }
    pairs = list(zip(rounds["plain"], rounds["Penstock"], strict=True))
    return {
        "losses": losses["plain"],
        "largest_loss_difference": max(
            abs(ours - plain) / max(abs(plain), 1e-30)
            for plain, ours in zip(losses["plain"], losses["Penstock"], strict=True)
        ),
        "time_ratio": median(ours["round_s"] / plain["round_s"] for plain, ours in pairs[1:] or pairs),
        "taken_bytes": {name: max(some["taken_bytes"] for some in taken) for name, taken in rounds.items()},
    }


def _show(results: dict[str, Any], rounds: dict[str, list[dict[str, Any]]], console: Console) -> None:
    table = Table("", "under the cap", "memory taken", "time", "losses off by")
    table.add_row("plain", "[red]fails[/]", format_bytes(results["taken_bytes"]["plain"]), "1", "")
    table.add_row(
        "[bold]Penstock[/]", "[green]trains[/]", format_bytes(results["taken_bytes"]["Penstock"]),
        f"{results['time_ratio']:.2f}", f"{results['largest_loss_difference']:.2g}",
    )  # fmt: skip
    print_table(table, console)
    console.print(
        f"{results['told']} The loss went from {results['losses'][0]:.4f} to {results['losses'][-1]:.4f}. Times are "
        f"relative to plain training's without the cap{', in turn' if len(rounds['plain']) > 1 else ''}.",
        highlight=False,
    )


def _written(out: Path, results: dict[str, Any], timelines: dict[str, list[list[float]]], console: Console) -> Answer:
    summary, memory = out / "room.json", out / "room-memory.json"
    summary.write_text(as_json(results))
    memory.write_text(json.dumps(timelines))
    files = [summary, memory, write_html(out / "report.html", out, title="penstock demo")[0]]
    if find_spec("matplotlib") is not None:  # an extra
        files.append(out / "memory.png")
        memory_timeline(files[-1], timelines, limit_bytes=results["cap_bytes"], limit_label="cap", title="Memory taken")
    for path in files:
        console.print(f"  {path}", highlight=False, markup=False, soft_wrap=True)
    return Answer(data={**results, "files": [str(path) for path in files]}, show=lambda _: None)
