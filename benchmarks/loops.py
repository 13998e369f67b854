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
import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common, loops_case, loops_door, processes
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


def _target(case: tuple[str, str], disk: Path, tell: processes.Tell, budgets: Sequence[str]) -> None:
    """Run a case, and tell its row after each of its runs."""
    import torch

    torch.set_num_threads(1)
    loops = load()
    gc.freeze()  # half a million objects of libraries, which each collection would look at
    tell(loops_case.case(loops[case[0]], case[1], disk, tell, budgets))


def _row(ended: processes.Ended[tuple[str, str]]) -> dict[str, Any]:
    """Return the row of a case. If it did not come to its end, what it was in the middle of gives the verdict."""
    name, door = ended.case
    row: dict[str, Any] = {"name": name, "theme": LOOPS[name].theme, "door": door, "parts": []} | (ended.row or {})
    if ended.is_late or ended.exit_code != 0:
        row |= {"trace": ended.log}
        if not row["parts"]:
            row |= {"verdict": "PLAIN", "message": "plain training failed or took too long"}
        else:
            code = ended.exit_code
            said = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            late = {"verdict": "TIMEOUT", "message": f"more than {ended.duration_s:.0f} s"}
            row["parts"][-1] |= late if ended.is_late else {"message": said}
            row |= loops_case.summary(row["parts"])
    return row | {"duration_s": ended.duration_s}


def run(cases: Sequence[tuple[str, str]], settings: argparse.Namespace, scratch: Path) -> Iterator[dict[str, Any]]:
    """Run cases, ``settings.jobs`` at once, and yield each row when it is complete."""
    before = os.environ.get("LD_PRELOAD", "")
    os.environ["LD_PRELOAD"] = f"{_meter(scratch)} {before}".strip()  # for the process that cases are forked from
    try:
        ended = processes.run(
            _target,
            cases,
            arguments=(settings.budget or loops_case.BUDGETS,),
            preloaded=_PRELOADED,
            jobs=settings.jobs,
            limit_s=settings.limit,
            scratch=scratch,
        )
        yield from map(_row, ended)
    finally:
        os.environ["LD_PRELOAD"] = before


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
    options.add_argument("--budget", action="append", choices=loops_case.BUDGETS, help="by default both")
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
