"""Loops: training loops as people write them, through each door, next to plain PyTorch.

    python -m benchmarks.loops --json loops.json              # rows that are in the file are not run again
    python -m benchmarks.loops --loop gan --door training     # one case, with its message
    python -m benchmarks.loops --verdict RAW --again --json loops.json

Each case (a loop and a door) runs in its own process under a time limit, within a generous budget and a tight one.
Models, optimizers, losses and the state of random numbers are compared bit for bit with plain PyTorch's; the peak of
late steps is measured in a repetition. The verdict is the worst of:

- equal: as in plain PyTorch, and within the budget;
- told: the same, and a warning of Penstock's own said what does not hold, such as the budget;
- refused: an error of Penstock's own, or a ``TypeError`` or ``ValueError`` that it raised and phrased;
- PYTORCH: PyTorch's own tracing (``aot_eager``) does the same;
- OVER: the peak was above the budget, and nothing said so; TIMEOUT: it ran past the limit;
- RAW: an error from below; DIFFERENT: it trained, and differs in silence; CRASH: the process ended.
"""

import argparse
import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from benchmarks import common, loops_case, loops_door
from benchmarks.coverage import _without_folders
from benchmarks.loops_door import LOOPS

LIMIT_S = 240.0
THEMES = tuple(
    sorted(
        file.stem.removeprefix("loops_")
        for file in Path(__file__).parent.glob("loops_*.py")
        if file.stem not in ("loops_case", "loops_common", "loops_door")
    )
)
_PRELOADED = ("benchmarks.loops_case", "benchmarks.loops_optimizers", "torch._dynamo", "torch.profiler")
_QUICK = ("classifier",)


def load() -> dict[str, loops_door.Loop]:
    """Return all loops by name."""
    for theme in THEMES:
        importlib.import_module(f"benchmarks.loops_{theme}")
    return LOOPS


def _child(name: str, door: str, folder: Path) -> None:
    """Run a case in a forked process, which leads a group so that every process that it starts ends with it."""
    import faulthandler

    import torch

    os.setsid()
    with (folder / "log.txt").open("wb", buffering=0) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    faulthandler.enable()
    torch.set_num_threads(1)
    disk = folder / "disk"
    disk.mkdir()

    def tell(row: dict[str, Any]) -> None:
        draft = folder / "row.new"
        draft.write_text(json.dumps(row))
        draft.replace(folder / "row.json")

    loops = load()
    gc.freeze()  # half a million objects of libraries, which each collection would look at
    tell(loops_case.case(loops[name], door, disk, tell))
    sys.stdout.flush()
    os._exit(0)  # what libraries do at exit is no part of the case


class Running:
    """A case that is running in a process."""

    def __init__(self, context: ForkServerContext, case: tuple[str, str], limit_s: float, scratch: Path):
        self.case = case
        self._folder = Path(tempfile.mkdtemp(dir=scratch))
        self._process: ForkServerProcess = context.Process(target=_child, args=(*case, self._folder))
        self._start_s, self._limit_s = time.monotonic(), limit_s
        self._process.start()
        self.sentinel = self._process.sentinel

    @property
    def left_s(self) -> float:
        """Seconds until its limit."""
        left_s: float = self._start_s + self._limit_s - time.monotonic()
        return max(0.0, left_s)

    def row(self) -> dict[str, Any] | None:
        """Return its row when it is over, or past its limit."""
        is_late = self._process.is_alive()
        if is_late and self.left_s > 0:
            return None
        if is_late:
            with contextlib.suppress(ProcessLookupError):  # it leads no group yet
                os.killpg(self._process.pid or 0, signal.SIGKILL)
            self._process.kill()
        self._process.join()
        report, log = self._folder / "row.json", self._folder / "log.txt"
        said = log.read_text(errors="replace")[-6000:] if log.is_file() else ""
        row: dict[str, Any] = {"name": self.case[0], "theme": LOOPS[self.case[0]].theme, "door": self.case[1]}
        row |= json.loads(report.read_text()) if report.is_file() else {"parts": []}
        if is_late or self._process.exitcode != 0:
            row |= self._cut_short(row["parts"], is_late) | {"trace": said}
        row = _without_folders(row)
        return row | {"duration_s": round(time.monotonic() - self._start_s, 1)}

    def _cut_short(self, parts: list[dict[str, Any]], is_late: bool) -> dict[str, Any]:
        """Return verdict and message of a case that did not come to its end."""
        if not parts:
            return {"verdict": "PLAIN", "message": "plain training failed or took too long"}
        if is_late:
            parts[-1] |= {"verdict": "TIMEOUT", "message": f"more than {self._limit_s:.0f} s"}
        else:
            code = self._process.exitcode or 0
            parts[-1]["message"] = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return loops_case.summary(parts)


def run(cases: Sequence[tuple[str, str]], settings: argparse.Namespace, scratch: Path) -> Iterator[dict[str, Any]]:
    """Run cases, ``settings.jobs`` at once, and yield each row when it is complete."""
    os.environ["LD_PRELOAD"] = str(_meter(scratch))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    waiting, running = list(reversed(cases)), list[Running]()
    while waiting or running:
        while waiting and len(running) < settings.jobs:
            running.append(Running(context, waiting.pop(), settings.limit, scratch))
        connection.wait([process.sentinel for process in running], min(process.left_s for process in running))
        for process in tuple(running):
            row = process.row()
            if row is not None:
                running.remove(process)
                yield row


def _meter(scratch: Path) -> Path | str:
    """Return the compiled meter; an empty text where there is no compiler: then no peak is judged."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return ""
    source, library = Path(__file__).parent / "loops_meter.c", scratch / "loops_meter.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library


def rows_of(cases: Sequence[dict[str, Any]]) -> list[common.Row]:
    """Count verdicts by door."""
    rows = []
    for door in loops_door.NAMES:
        verdicts = Counter(case["verdict"] for case in cases if case["door"] == door)
        rows += [
            common.Row(name=door, metric=verdict, value=verdicts[verdict], unit="loops")
            for verdict in loops_case.VERDICTS
            if verdicts
        ]
    return rows


def summary(cases: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return a line of counts per door for the terminal."""
    counts = {(row.name, row.metric): int(row.value) for row in rows_of(cases)}
    doors = [door for door in loops_door.NAMES if (door, "equal") in counts]
    return [[door, *(str(counts[door, verdict]) for verdict in loops_case.VERDICTS)] for door in doors]


def table(cases: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return a line per case for the terminal."""
    return [[case["name"], case["door"], case["verdict"], case.get("message", "")[:150]] for case in cases]


def chosen(settings: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the requested cases."""
    known = load()
    names = settings.loop or (_QUICK if settings.quick else list(known))
    if unknown := set(names) - set(known):
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return [
        (name, door)
        for door in settings.door or loops_door.NAMES
        for name in names
        if known[name].theme in (settings.theme or THEMES) and (door != "fleet" or known[name].job is not None)
    ]


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    options = common.parser(str(__doc__).splitlines()[0])
    options.add_argument("--loop", action="append", help="a loop; may be given several times")
    options.add_argument("--theme", action="append", choices=THEMES)
    options.add_argument("--door", action="append", choices=loops_door.NAMES)
    options.add_argument("--verdict", action="append", help="with --again: only rows that had this verdict")
    options.add_argument("--jobs", type=int, default=1, help="cases that run at once")
    options.add_argument("--limit", type=float, default=LIMIT_S, help="seconds that a case may take")
    options.add_argument("--again", action="store_true", help="run cases again that are in the file of --json")
    settings = options.parse_args(arguments)
    cases = chosen(settings)
    known: dict[tuple[str, str], dict[str, Any]] = {}
    if settings.json is not None and settings.json.is_file():
        known = {(row["name"], row["door"]): row for row in json.loads(settings.json.read_text())["cases"]}
    if settings.verdict:
        cases = [case for case in cases if case in known and known[case]["verdict"] in settings.verdict]
    todo = [case for case in cases if settings.again or case not in known]
    results = []
    with tempfile.TemporaryDirectory(dir=settings.disk, prefix="loops-") as scratch:
        for row in run(todo, settings, Path(scratch)):
            known[row["name"], row["door"]] = row
            results.append(row)
            print("  ".join([f"{len(results)}/{len(todo)}", *table([row])[0], f"{row['duration_s']} s"]), flush=True)
            _write(settings.json, list(known.values()))
    wanted = set(cases)
    shown = [row for key, row in known.items() if key in wanted]
    common.show("Loops through doors", ["loop", "door", "verdict", ""], table(shown))
    common.show("Verdicts", ["door", *loops_case.VERDICTS], summary(shown))
    return shown


def _write(path: Path | None, cases: Sequence[dict[str, Any]]) -> None:
    """Write all rows; the old file stays complete until the new one is."""
    if path is None:
        return
    draft = path.with_name(path.name + ".new")
    draft.write_text(common.as_json({}, rows_of(cases), cases=cases))
    draft.replace(path)


if __name__ == "__main__":
    main()
