"""A fuzz test of every format that Penstock reads: a damaged file gives a correct read or a documented error.

    python -m benchmarks.fuzz --minutes 5 --seed 0 --json benchmarks/results/fuzz.json
    python -m benchmarks.fuzz --format "saved graph" --case 17     # one case again

A case damages one intact file (its bytes, its text, values inside with fresh checksums, or puts something else in its
place) and reads it in a process with a limit on memory and time. Content is never executed, nothing is written outside
of the given folder, and every error is a `PenstockError`, ``ValueError`` or ``OSError`` that names the file.
"""

import argparse
import contextlib
import faulthandler
import gc
import json
import os
import random
import resource
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Row, parser, show, write
from benchmarks.fuzz_formats import FORMATS, Format, damaged_inside
from benchmarks.fuzz_mutations import damaged_bytes, in_place_of, payloads
from benchmarks.soak_case import no_writes_outside
from penstock.errors import PenstockError

LIMIT_S = 12.0
MEMORY_BYTES = 3 * 2**30
"""Bytes that a case may take in addition to the process's own."""
BATCH = 100
FLUSH_S = 60.0


class Findings:
    """Findings of one process, each written at once."""

    def __init__(self, fuzzed: Format, folder: Path, out: Path):
        self.format, self.folder, self.out, self.number, self.damage = fuzzed, folder, out, -1, ""

    def found(self, kind: str, text: str) -> None:
        self.note({"finding": kind, "text": text[-3000:]})

    def note(self, content: dict[str, Any]) -> None:
        line = json.dumps({"number": self.number, "damage": self.damage, **content})
        with self.out.open("a") as file:
            file.write(line + "\n")


def read_damaged(fuzzed: Format, seed: int, numbers: range, folder: Path, out: Path) -> None:
    """Read damaged files one after the other, in this process."""
    findings = Findings(fuzzed, folder, out)
    pristine, work, canary = folder / "whole", folder / "work", folder / "canary"
    for path in (pristine, work, folder / "home", folder / "tmp"):
        shutil.rmtree(path, ignore_errors=True)
    pristine.mkdir()
    (folder / "tmp").mkdir()
    os.environ.update(HOME=str(folder / "home"), TMPDIR=str(folder / "tmp"))
    tempfile.tempdir = None
    warnings.simplefilter("ignore")
    fuzzed.make(pristine)
    shutil.copytree(pristine, work)
    expected = fuzzed.read(work)
    gc.collect()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))
    for number in numbers:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(pristine, work)
        findings.number = number
        findings.damage = damage(fuzzed, random.Random(f"{fuzzed.name}:{seed}:{number}"), work, canary)
        findings.note({"begun": True})
        with no_writes_outside(findings):
            findings.note({"outcome": _outcome(fuzzed, findings, work, expected)})
        if canary.exists():
            findings.found("executed", "content was executed")
            canary.unlink()
        if left := [path for path in (folder / "tmp").iterdir() if path.name.startswith("penstock")]:
            if "compiled" not in fuzzed.name:
                findings.found("leak", f"{left}")
            shutil.rmtree(left[0], ignore_errors=True)
    faulthandler.cancel_dump_traceback_later()


def damage(fuzzed: Format, choices: random.Random, work: Path, canary: Path) -> str:
    """Damage one file in ``work``, and return how."""
    files = sorted(path for path in work.rglob("*") if path.is_file())
    path = choices.choice(files)
    how = choices.choice(("bytes", "bytes", "inside", "inside", "payload", "place"))
    said: str | None = None
    if how == "inside":
        said = damaged_inside(fuzzed, path, choices)
    if how == "payload":
        said, raw = choices.choice(sorted(payloads(canary).items()))
        path.write_bytes(raw)
    elif how == "place":
        said = in_place_of(path, choices)
    elif said is None:
        said, raw = damaged_bytes(path.read_bytes(), choices)
        path.write_bytes(raw)
    return f"{path.relative_to(work)}: {said}"


def _outcome(fuzzed: Format, findings: Findings, work: Path, expected: Any) -> str:
    try:
        value = fuzzed.read(work)
    except (PenstockError, ValueError, OSError) as error:
        if type(error) is UnicodeDecodeError or isinstance(error, json.JSONDecodeError) or fuzzed.never_fails:
            findings.found("undocumented error", traceback.format_exc())
        elif str(findings.folder) not in str(error):
            findings.found("unclear error", traceback.format_exc())
        return type(error).__name__
    except BaseException as error:
        findings.found("undocumented error", traceback.format_exc())
        return type(error).__name__
    refused = isinstance(value, dict) and "refused" in value.values()
    is_another = fuzzed.inside is not None and findings.damage.endswith("another value inside")  # with its own checksum
    if fuzzed.is_checked and value != expected and not refused and not is_another:
        findings.found("wrong value", f"{str(value)[:500]} instead of {str(expected)[:500]}")
    if isinstance(value, str):
        findings.found("wrong value", value)
    return "refused" if refused else "read"


def batch(fuzzed: Format, seed: int, numbers: range, folder: Path) -> list[dict[str, Any]]:
    """Run some cases in child processes, and yield their outcomes; a child that ends early is followed by another."""
    results: list[dict[str, Any]] = []
    while numbers:
        out = folder / "out.jsonl"
        out.unlink(missing_ok=True)
        log = folder / "log.txt"
        child = os.fork()
        if child == 0:
            try:
                with log.open("wb", buffering=0) as file:
                    os.dup2(file.fileno(), 1)
                    os.dup2(file.fileno(), 2)
                faulthandler.enable()
                read_damaged(fuzzed, seed, numbers, folder, out)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(3)
        status = _waited(child, len(numbers))
        lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        results += lines
        if status == 0:
            return results
        said = log.read_text(errors="replace")[-4000:]
        last = next((line for line in reversed(lines) if "begun" in line), None)
        if last is None:
            return [*results, {"number": numbers[0], "damage": "", "finding": "crash", "text": f"at the begin: {said}"}]
        kind = "hang" if "Timeout (" in said or status is None else "crash"
        results.append({**last, "finding": kind, "text": f"exit status {status}: {said}"})
        numbers = range(last["number"] + 1, numbers.stop)
    return results


def _waited(child: int, num_cases: int) -> int | None:
    """Return the child's exit status; ``None`` if even its own time limit did not end it."""
    end_s = time.monotonic() + LIMIT_S * (1 + num_cases)
    while time.monotonic() < end_s:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


class Campaign:
    """Figures of all cases so far."""

    def __init__(self, settings: argparse.Namespace):
        self.settings, self.start_s = settings, time.monotonic()
        self.cases, self.outcomes = Counter[str](), Counter[str]()
        self.findings: list[dict[str, Any]] = []

    def add(self, fuzzed: Format, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            self.cases[fuzzed.name] += "begun" in line
            if "outcome" in line:
                self.outcomes[line["outcome"]] += 1
            if "finding" in line:
                seed, number = self.settings.seed, line["number"]
                again = f"python -m benchmarks.fuzz --seed {seed} --format '{fuzzed.name}' --case {number}"
                self.findings.append({"format": fuzzed.name, "again": again, **line})
                print(f"{fuzzed.name}, {line['damage']}: {line['finding']}: {line['text'].strip()[-400:]}", flush=True)

    def flush(self) -> list[Row]:
        kinds = Counter(finding["finding"] for finding in self.findings)
        rows = [Row(name="fuzz", metric="duration", value=round((time.monotonic() - self.start_s) / 3600, 4), unit="h")]
        rows.append(Row(name="fuzz", metric="cases", value=sum(self.cases.values()), unit=""))
        known = (
            "crash",
            "hang",
            "executed",
            "wrong value",
            "undocumented error",
            "unclear error",
            "outside",
            "leak",
        )
        rows += [Row(name="fuzz", metric=f"findings: {kind}", value=kinds[kind], unit="") for kind in known]
        rows += [Row(name=name, metric="cases", value=count, unit="") for name, count in self.cases.items()]
        rows += [Row(name="outcomes", metric=key, value=value, unit="") for key, value in sorted(self.outcomes.items())]
        options = {"minutes": self.settings.minutes, "seed": self.settings.seed, "findings": self.findings}
        write(self.settings.json, options, rows)
        return rows


def main(arguments: list[str] | None = None) -> list[Row]:
    options = parser(__doc__ or "")
    options.add_argument("--minutes", type=float, default=5.0)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--cases", type=int, help="so many of each format instead of so many minutes")
    options.add_argument("--format", choices=[format_.name for format_ in FORMATS], help="this format alone")
    options.add_argument("--case", type=int, help="this case of it alone")
    settings = options.parse_args(arguments)
    settings.cases = 20 if settings.quick and settings.cases is None else settings.cases
    formats = [format_ for format_ in FORMATS if settings.format in (None, format_.name)]
    torch.set_num_threads(1)
    campaign = Campaign(settings)
    end_s, flushed_s, start = campaign.start_s + 60 * settings.minutes, campaign.start_s, settings.case or 0
    with tempfile.TemporaryDirectory(dir=settings.disk, prefix="fuzz-") as text, contextlib.ExitStack() as stack:
        before = os.environ.get("XDG_CACHE_HOME")
        stack.callback(lambda: os.environ.update(XDG_CACHE_HOME=before) if before else os.environ.pop("XDG_CACHE_HOME"))
        os.environ["XDG_CACHE_HOME"] = str(Path(text).resolve() / "cache")
        folder = Path(text).resolve() / "case"
        folder.mkdir()
        is_over = False
        while not is_over:
            for fuzzed in formats:
                count = 1 if settings.case is not None else max(5, int((settings.cases or BATCH) * fuzzed.speed))
                campaign.add(fuzzed, batch(fuzzed, settings.seed, range(start, start + count), folder))
                is_over = settings.cases is not None or settings.case is not None
                if time.monotonic() - flushed_s > FLUSH_S:
                    flushed_s = time.monotonic()
                    campaign.flush()
                if time.monotonic() > end_s and not is_over:
                    is_over = True
                    break
            start += BATCH
    rows = campaign.flush()
    show("fuzz", ["", "", ""], [[row.name, row.metric, f"{row.value} {row.unit}"] for row in rows])
    for finding in campaign.findings:
        print(f"{finding['finding']}: {finding['damage']}: {finding['again']}")
    return rows


if __name__ == "__main__":
    raise SystemExit(any(row.value for row in main() if row.metric.startswith("findings")))
