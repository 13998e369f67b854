"""Misuse of every public name: each call gives right numbers, or an error that names what is wrong.

    python -m benchmarks.misuse --json benchmarks/results/misuse.json
    python -m benchmarks.misuse --room offload            # one room
    python -m benchmarks.misuse --case "offload.activations(model=None)"   # one case again, with its traceback

From one working call per public name (`misuse_table`) the campaign derives arguments of wrong types and at their edges,
calls in wrong order, twice, after close, from other threads, in forked children, on copies and inside of each other;
`misuse_scenes` adds objects that two objects of ours share. Each case runs in a forked process with a time limit. Its
outcome is right, our error (which names the argument or says what works), an error of PyTorch or Python that says it
better (`misuse_theirs` lists them with reasons), or a fault. Rows are kept next to the JSON file until the campaign has
ended, so a campaign that was stopped continues where it was.
"""

import argparse
import contextlib
import faulthandler
import gc
import importlib
import itertools
import json
import os
import re
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from benchmarks import misuse_case, misuse_table
from benchmarks.common import Row, parser, show, write
from benchmarks.misuse_case import FAULTS, OUTCOMES, Misuse, misuses, outcome_of
from benchmarks.misuse_table import ROOMS
from benchmarks.soak_case import Case, watched

LIMIT_S = 20.0
_MOST_SAID = 200
"""The most characters of a fault's text in the JSON."""
_RANK = {kind: rank for rank, kind in enumerate(("wrong number", "leak", "outside"))}


def in_this_process(misuse: Misuse, folder: Path) -> dict[str, str]:
    """Run a case, and return its outcome and text."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("home", "tmp", "cwd", "out"):
        (folder / name).mkdir(parents=True)
    os.environ.update(
        HOME=str(folder / "home"), TMPDIR=str(folder / "tmp"), TORCHINDUCTOR_CACHE_DIR=str(folder / "torchinductor"),
        COLUMNS="120",
    )  # fmt: skip
    tempfile.tempdir = None
    os.chdir(folder / "out")  # where files go that a case asks for
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    case = Case(seed=0, folder=folder)
    said: list[tuple[str, str]] = []

    def run(case: Case) -> None:
        said.append(outcome_of(misuse, case))

    watched(case, run)
    outcome, text = said[0] if said else ("raw", "")
    for finding in sorted(case.findings, key=lambda finding: _RANK.get(finding["kind"], 9)):
        if outcome in OUTCOMES:
            kind = {"wrong value": "wrong number", "undocumented error": "raw"}.get(finding["kind"], finding["kind"])
            outcome, text = kind, f"{finding['text']} (after: {outcome} {text})"
    return {"name": misuse.name, "outcome": outcome, "text": text[-1500:]}


def forked(cases: Sequence[Misuse], folder: Path) -> Iterator[tuple[Misuse, dict[str, str]]]:
    """Yield the outcomes of some cases. They share a process until one shows a fault; the next starts in a new one."""
    waiting = list(cases)
    while waiting:
        log, report = folder / "log.txt", folder / "report.jsonl"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        child = os.fork()
        if child == 0:
            _in_child(waiting, folder / "case", log, report)
        status = _waited(child, len(waiting))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # its children too
        lines = report.read_text().splitlines() if report.is_file() else []
        for line in lines:
            yield waiting.pop(0), json.loads(line)
        if status != 0:
            text = log.read_text(errors="replace")
            kind = "hang" if status is None or "Timeout (" in text else "crash"
            yield waiting.pop(0), {"outcome": kind, "text": f"exit status {status}: {text[-3000:]}"}


def _in_child(cases: Sequence[Misuse], folder: Path, log: Path, report: Path) -> NoReturn:
    code = 3
    try:
        os.setsid()
        with log.open("wb", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        faulthandler.enable()
        for misuse in cases:
            faulthandler.dump_traceback_later(LIMIT_S, exit=True)
            result = in_this_process(misuse, folder)
            with report.open("a") as lines:
                lines.write(json.dumps(result) + "\n")
            if result["outcome"] in FAULTS:
                break
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _waited(child: int, num_cases: int) -> int | None:
    """Return the child's exit status; ``None`` if even its own time limit did not end it."""
    end_s, pause_s = time.monotonic() + LIMIT_S * (1 + num_cases), 0.001
    while time.monotonic() < end_s:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause_s)
        pause_s = min(0.02, 1.3 * pause_s)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


class Campaign:
    """Outcomes of all cases so far, kept in a file. Rooms that are not run again keep their rows in the JSON file."""

    def __init__(self, settings: argparse.Namespace):
        self.settings = settings
        self.before: list[Row] = []
        self.findings: list[dict[str, str]] = []
        if settings.room and settings.json is not None and settings.json.is_file():
            before = json.loads(settings.json.read_text())
            others = set(ROOMS) - set(settings.room)
            self.before = [Row(**row) for row in before["rows"] if row["name"] in others]
            self.findings = [finding for finding in before["configuration"]["findings"] if finding["room"] in others]
        self.file: Path | None = settings.json and settings.json.with_suffix(".rows")
        self.found: dict[str, dict[str, str]] = {}
        if self.file is not None and self.file.is_file():
            lines = map(json.loads, self.file.read_text().splitlines())
            self.found = {line["name"]: line for line in lines}

    def add(self, misuse: Misuse, result: dict[str, str]) -> None:
        line = {"room": misuse.room, **result, "name": misuse.name}
        self.found[misuse.name] = line
        if self.file is not None:
            with self.file.open("a") as file:
                file.write(json.dumps(line) + "\n")
        if result["outcome"] in FAULTS:
            print(f"{result['outcome']}: {misuse.name}: {result['text'].strip()[-600:]}", flush=True)

    def finish(self) -> list[Row]:
        """Write the JSON and remove the file of outcomes."""
        kinds = ("cases", *OUTCOMES, *FAULTS)
        rows: list[Row] = []
        for room in ROOMS:
            counts = Counter(line["outcome"] for line in self.found.values() if line["room"] == room)
            rows += [row for row in self.before if row.name == room]
            if counts:
                counts["cases"] = sum(counts.values())
                rows += [Row(name=room, metric=kind, value=counts[kind], unit="") for kind in kinds]
        for kind in kinds:
            total = sum(row.value for row in rows if row.metric == kind)
            rows.append(Row(name="misuse", metric=kind, value=total, unit=""))
        faults = [line for line in self.found.values() if line["outcome"] in FAULTS]
        findings = [*self.findings, *({**line, "text": _shown(line["text"])} for line in faults)]
        theirs = sorted({f"{entry.reason}: {entry.public}, {entry.parameter}" for entry in misuse_case.THEIRS})
        write(self.settings.json, {"quick": self.settings.quick, "findings": findings, "their errors": theirs}, rows)
        if self.file is not None:
            self.file.unlink(missing_ok=True)
        return rows


def _shown(text: str) -> str:
    """Return the beginning of a fault's text, without folders of this machine."""
    return re.sub(r"(/[\w.@+-]+)+/", "", text.strip())[:_MOST_SAID]


def table(rows: Iterable[Row]) -> None:
    kinds = ("cases", *OUTCOMES, *FAULTS)
    by_name: dict[str, dict[str, float]] = {}
    for row in rows:
        by_name.setdefault(row.name, {})[row.metric] = row.value
    show("misuse", ["room", *kinds], [[name, *(str(entry[kind]) for kind in kinds)] for name, entry in by_name.items()])


def run(settings: argparse.Namespace) -> list[Row]:
    campaign = Campaign(settings)
    cases = [
        misuse
        for misuse in misuses(quick=settings.quick, rooms=tuple(settings.room or ROOMS))
        if re.search(settings.match, misuse.name)
    ]
    if settings.quick:
        cases = cases[:: settings.every]
    with tempfile.TemporaryDirectory(dir=settings.disk, prefix="misuse-") as text:
        root = Path(text).resolve()
        os.environ["XDG_CACHE_HOME"] = str(root / "cache")
        gc.collect()
        gc.freeze()  # a case's own objects are all that its collections look at
        waiting = [case for case in cases if case.name not in campaign.found]
        for _, group in itertools.groupby(
            waiting, key=lambda entry: (entry.public, entry.parameter) if entry.public else entry.name
        ):
            for misuse, result in forked(list(group), root / "case"):
                campaign.add(misuse, result)
    rows = campaign.finish()
    table(rows)
    return rows


def _warm_up(rooms: Iterable[str]) -> None:
    """Import what cases need, so that none of them pays for it. Nothing here starts a thread."""
    import tqdm
    from torch._dynamo import testing  # noqa: F401

    tqdm.tqdm.monitor_interval = 0  # PyTorch's bars would start a thread

    if "integrations" in rooms:
        with contextlib.suppress(ImportError):
            import transformers  # noqa: F401
        with contextlib.suppress(ImportError):
            import lightning.pytorch  # noqa: F401
        with contextlib.suppress(ImportError):
            import optuna  # noqa: F401
    if "report" in rooms:
        with contextlib.suppress(ImportError):
            importlib.import_module("matplotlib.pyplot")


def main(arguments: list[str] | None = None) -> list[Row]:
    options = parser(__doc__ or "")
    options.add_argument("--room", action="append", choices=ROOMS)
    options.add_argument("--case", help="one case, by its name; with its traceback")
    options.add_argument("--match", default="", help="cases whose name has this regular expression")
    options.add_argument("--every", type=int, default=1, help="of the quick form, each so-manieth case alone")
    settings = options.parse_args(arguments)
    torch.set_num_threads(1)
    misuse_table.load()
    if settings.case:
        settings.room = [settings.case.replace(":", ".").partition(".")[0]]
    _warm_up(settings.room or ROOMS)
    if settings.case is None:
        return run(settings)
    misuse = next(misuse for misuse in misuses(rooms=tuple(settings.room)) if misuse.name == settings.case)
    with tempfile.TemporaryDirectory(dir=settings.disk, prefix="misuse-") as text:
        root = Path(text).resolve()
        os.environ["XDG_CACHE_HOME"] = str(root / "cache")
        case = Case(seed=0, folder=root)
        try:
            misuse.run(case)
        except BaseException:
            traceback.print_exc()
        for _, result in forked([misuse], root / "case"):
            print(result["outcome"], result["text"], sep="\n")
    return []


if __name__ == "__main__":
    raise SystemExit(any(row.value for row in main() if row.metric in FAULTS))
