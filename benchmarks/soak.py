"""A long random test of all rooms, alone and together, under faults: nothing may differ, leak, hang or crash.

    python -m benchmarks.soak --minutes 60 --seed 0 --json benchmarks/results/soak.json
    python -m benchmarks.soak --case 17            # one case again, with what it found
    python -m benchmarks.soak --tiers --fleet-faults   # the campaigns of one room

Each case draws a model, a loop, rooms, budgets and faults from its seed, runs in its own process under a time limit,
and is compared with plain PyTorch bit for bit. Afterwards all budgets must be at zero, no thread, open file or file may
be left, and nothing may have been written outside of the given folders. Findings do not end the campaign; they make its
exit code 1.
"""

import argparse
import faulthandler
import json
import os
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import soak_fleet, soak_mixes, soak_rooms
from benchmarks.common import Row, parser, show, write
from benchmarks.soak_case import Case, watched

LIMIT_S = 180.0
FLUSH_S = 60.0
PLACES: dict[str, tuple[int, Callable[[Case], None]]] = {
    "offload": (6, soak_rooms.offloaded),
    "offload, checkpoints": (3, lambda case: soak_rooms.offloaded(case, ("gpt", "mlp"), checkpoints=True)),
    "offload, workers": (1, soak_rooms.workers),
    "remat": (5, soak_rooms.planned),
    "fleet": (6, soak_fleet.fleets),
    "unified": (5, soak_rooms.features),
    "relational": (2, soak_rooms.relational),
    "mix: offload, relational, unified": (2, soak_mixes.offloaded_relational_features),
    "mix: remat beside fleet": (2, soak_mixes.planned_beside_a_fleet),
    "mix: two offloaders": (2, soak_mixes.two_offloaders),
    "mix: fleet and features": (2, soak_mixes.fleet_and_features),
}
"""Weights of the places, and the functions that run them."""


def place_of(seed: int) -> str:
    """Return the rooms of a case; every place comes early, and then as often as its weight says."""
    names = [name for name, (weight, _) in PLACES.items() for _ in range(weight)]
    return names[(seed * 11) % len(names)]  # 11 and their number have no common factor


def in_this_process(seed: int, folder: Path, report: Path) -> None:
    """Run a case, and write its outcome."""
    for name in ("home", "tmp", "cwd"):
        (folder / name).mkdir(parents=True)
    os.environ.update(
        HOME=str(folder / "home"), TMPDIR=str(folder / "tmp"), TORCHINDUCTOR_CACHE_DIR=str(folder / "torchinductor")
    )
    tempfile.tempdir = None
    os.chdir(folder / "cwd")
    soak_rooms.quiet()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    case = Case(seed=seed, folder=folder)
    start_s = time.monotonic()
    watched(case, PLACES[place_of(seed)][1])
    content = {
        "figures": dict(case.figures), "findings": case.findings,
        "drawn": {key: str(value) for key, value in case.drawn.items()}, "duration_s": time.monotonic() - start_s,
    }  # fmt: skip
    report.write_text(json.dumps(content))


def forked(seed: int, folder: Path, limit_s: float) -> dict[str, Any]:
    """Return the outcome of a case in a forked process. The parent has one thread, so that the fork is safe."""
    assert threading.active_count() == 1
    log, report = folder / "log.txt", folder / "report.json"
    folder.mkdir()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            with log.open("wb", buffering=0) as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            faulthandler.enable()
            faulthandler.dump_traceback_later(limit_s, exit=False)
            in_this_process(seed, folder / "case", report)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(3)
    status, end_s = None, time.monotonic() + limit_s + 5
    while status is None and time.monotonic() < end_s:
        done, code = os.waitpid(child, os.WNOHANG)
        status = code if done else None
        time.sleep(0.01)
    hangs = status is None
    if status is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    said = log.read_text(errors="replace")[-6000:]
    if not hangs and report.is_file():
        return {**json.loads(report.read_text()), "log": said}
    kind = "hang" if hangs else "crash"
    text = said if hangs else f"exit status {os.waitstatus_to_exitcode(status or 0)}: {said}"
    return {"figures": {}, "findings": [{"kind": kind, "text": text}], "drawn": {}, "log": said}


class Campaign:
    """Figures of all cases so far."""

    def __init__(self, settings: argparse.Namespace):
        self.settings, self.start_s = settings, time.monotonic()
        self.figures, self.cases = Counter[str](), Counter[str]()
        self.findings: list[dict[str, Any]] = []

    def add(self, seed: int, result: dict[str, Any]) -> None:
        place = place_of(seed)
        self.cases[place] += 1
        self.figures.update(result["figures"])
        for finding in result["findings"]:
            again = f"python -m benchmarks.soak --case {seed}"
            self.findings.append({"seed": seed, "place": place, "again": again, "drawn": result["drawn"], **finding})
            print(f"case {seed}, {place}: {finding['kind']}: {finding['text'].strip()[-600:]}", flush=True)

    def rows(self) -> list[Row]:
        kinds = Counter(finding["kind"] for finding in self.findings)
        name = "soak"
        rows = [Row(name=name, metric="duration", value=round((time.monotonic() - self.start_s) / 3600, 4), unit="h")]
        rows.append(Row(name=name, metric="cases", value=sum(self.cases.values()), unit=""))
        kinds_of = (
            "wrong value", "leak", "hang", "crash", "undocumented error", "over budget", "budget", "outside"
        )  # fmt: skip
        rows += [Row(name=name, metric=f"findings: {kind}", value=kinds[kind], unit="") for kind in kinds_of]
        rows += [Row(name=place, metric="cases", value=self.cases[place], unit="") for place in PLACES]
        rows += [Row(name=name, metric=key, value=value, unit="") for key, value in sorted(self.figures.items())]
        return rows

    def flush(self) -> list[Row]:
        rows = self.rows()
        options = {"minutes": self.settings.minutes, "seed": self.settings.seed, "findings": self.findings}
        write(self.settings.json, options, rows)
        return rows


def campaign(settings: argparse.Namespace, folder: Path) -> list[Row]:
    """Run cases until the time is over."""
    progress = Campaign(settings)
    end_s, flushed_s, number = progress.start_s + 60 * settings.minutes, progress.start_s, 0
    while (time.monotonic() < end_s) if settings.cases is None else (number < settings.cases):
        seed = settings.seed * 1_000_000 + number
        limit_s = LIMIT_S if settings.cases is not None else min(LIMIT_S, max(20.0, end_s - time.monotonic() + 20))
        progress.add(seed, forked(seed, folder / str(seed), limit_s))
        _remove(folder / str(seed))
        number += 1
        if time.monotonic() - flushed_s > FLUSH_S:
            flushed_s = time.monotonic()
            progress.flush()
    rows = progress.flush()
    show("soak", ["", "", ""], [[row.name, row.metric, f"{row.value} {row.unit}"] for row in rows if row.value])
    for finding in progress.findings:
        print(f"{finding['kind']}: {finding['place']}: {finding['again']}")
    return rows


def _remove(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _warm_up() -> None:
    """Import what cases need, so that none of them pays for it. Nothing here starts a thread."""
    import tqdm
    import transformers  # noqa: F401
    from torch._dynamo import testing  # noqa: F401
    from transformers.models.bert import modeling_bert  # noqa: F401
    from transformers.models.gpt2 import modeling_gpt2  # noqa: F401

    tqdm.tqdm.monitor_interval = 0  # PyTorch's bars would start a thread


def main(arguments: list[str] | None = None) -> list[Row]:
    options = parser(__doc__ or "")
    options.add_argument("--minutes", type=float, default=60.0)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--cases", type=int, help="so many cases instead of so many minutes")
    options.add_argument("--case", type=int, help="one case, by its seed")
    options.add_argument("--tiers", action="store_true", help="the campaign of soak_tiers, with its own length")
    options.add_argument("--fleet-faults", action="store_true", help="the campaign of fleet_faults")
    settings = options.parse_args(arguments)
    if settings.tiers or settings.fleet_faults:
        from benchmarks import fleet_faults, soak_tiers

        quick = ["--quick"] if settings.quick else []
        if settings.tiers:
            soak_tiers.main(["--cycles", "60" if settings.quick else "10000", "--disk", str(settings.disk)])
        if settings.fleet_faults:
            rows = fleet_faults.main([*quick, "--disk", str(settings.disk)])
            return [replace(row, metric="findings: fleet") for row in rows if row.metric == fleet_faults.WRONG]
        return []
    if settings.quick and settings.cases is None:
        settings.cases = len(PLACES)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(dir=settings.disk, prefix="soak-") as text:
        folder = Path(text).resolve()
        cache = os.environ.get("XDG_CACHE_HOME")
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        try:
            _warm_up()
            if settings.case is None:
                rows = campaign(settings, folder)
            else:
                result = forked(settings.case, folder / "case", LIMIT_S)
                print(json.dumps(result, indent=1).replace("\\n", "\n"))
                rows = [Row(name="soak", metric="findings: all", value=len(result["findings"]), unit="")]
                _remove(folder / "case")
        finally:
            os.environ.pop("XDG_CACHE_HOME")
            if cache is not None:
                os.environ["XDG_CACHE_HOME"] = cache
    return rows


if __name__ == "__main__":
    raise SystemExit(any(row.value for row in main() if row.metric.startswith("findings")))
