"""A campaign of faults against fleets: killed processes, exceptions, NaNs, full disks.

Each trial trains four small jobs on two devices, none of which holds a whole model, and harms one of them or the
process at a random moment. Checked each time: nothing hangs, no job but the one that was hit is affected, and every
loss equals that of the plain loop, after as many resumes as it takes. Long: outside CI. ``--quick`` runs one trial of
each kind.

Run it with ``python -m benchmarks.fleet_faults --trials 100 --disk /nvme``.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Row, parser, show, write
from benchmarks.fleet_models import texts
from benchmarks.fleet_peers import train_plainly
from penstock import fleet
from penstock.fleet import JobState
from penstock.testing import GPT

STEPS = 10
NAMES = ("a", "b", "c", "d")
HANG_S = 120.0
WRONG = "trials with something wrong"
KINDS = ("kill", "exception", "not a number", "full tiers", "full disk of checkpoints")


class Harm:
    """A fault of a job in this process, and its time."""

    def __init__(self, kind: str = "", name: str = "", step: int = 0):
        self.kind, self.name, self.step = kind, name, step

    def data(self, name: str) -> Iterator[tuple[torch.Tensor, ...]]:
        for number, batch in enumerate(texts(2, 32, STEPS)):
            is_hit = name == self.name and number == self.step
            if is_hit and self.kind == "exception":
                raise OSError("injected")
            yield (*batch, torch.tensor(float("nan") if is_hit and self.kind == "not a number" else 1.0))


def job_of(name: str, harm: Harm) -> fleet.Job:
    return fleet.Job(
        name=name,
        model=lambda: GPT(num_layers=3, width=64, num_heads=2, context=32),
        data=lambda: harm.data(name),
        loss=lambda model, batch: model(*batch[:2]) * batch[2],
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        steps=STEPS,
        seed=NAMES.index(name),
    )


def run(run_dir: Path, harm: Harm, **changes: Any) -> fleet.Results:
    options = {"host": "64MiB", "run_dir": run_dir, "resume": True, "checkpoint_every": 1, "progress": None}
    devices = [fleet.Device(name="cpu", threads=1)] * 2
    return fleet.run([job_of(name, harm) for name in NAMES], devices, "2MB", **{**options, **changes})


def killed(run_dir: Path, choices: random.Random, least: int) -> tuple[fleet.Results, int]:
    """Kill processes at random moments until one comes through, ``least`` of them at least."""
    num_kills = 0
    while True:
        child = subprocess.Popen([sys.executable, "-m", "benchmarks.fleet_faults", "--child", str(run_dir)])
        wait_for_progress(run_dir, child)
        try:
            child.wait(timeout=choices.uniform(0.0, 1.5))
        except subprocess.TimeoutExpired:
            os.kill(child.pid, signal.SIGKILL)
            num_kills += 1
            child.wait()
            if num_kills < least:
                continue
        return run(run_dir, Harm()), num_kills


def wait_for_progress(run_dir: Path, child: "subprocess.Popen[bytes]") -> None:
    """Wait until the child writes something in the run's folder: before that there is nothing to lose."""
    start_s, deadline_s = time.time(), time.monotonic() + HANG_S
    while child.poll() is None:
        if any(path.stat().st_mtime >= start_s for path in run_dir.glob("jobs/*/metrics.jsonl")):
            return
        assert time.monotonic() < deadline_s, "the child hangs"
        time.sleep(0.01)


def trial(kind: str, choices: random.Random, run_dir: Path, least_kills: int) -> tuple[fleet.Results, str, int]:
    """Run a trial; return the results, the name of the job that may have failed, and the number of faults."""
    hit, step = choices.choice(NAMES), choices.randrange(STEPS)
    if kind == "kill":
        results, num_kills = killed(run_dir, choices, least_kills)
        return results, "", num_kills
    if kind in ("exception", "not a number"):
        return run(run_dir, Harm(kind, hit, step)), hit, 1
    if kind == "full tiers":
        return run(run_dir, Harm(), host=f"{choices.randrange(1500, 4000)}KB"), "any", 1
    return with_full_disk(run_dir, choices.randrange(1, 60)), "any", 1


def with_full_disk(run_dir: Path, after: int) -> fleet.Results:
    """Make writes fail for a while, after some number of files."""
    from penstock.fleet import _checkpoint

    original, calls = _checkpoint.save_file, Counter[str]()

    def save(*arguments: Any) -> None:
        calls["files"] += 1
        if after <= calls["files"] < after + 25:
            raise OSError(28, "No space left on device")
        original(*arguments)

    _checkpoint.save_file = save
    try:
        return run(run_dir, Harm())
    finally:
        _checkpoint.save_file = original


def check(results: fleet.Results, may_fail: str, expected: dict[str, list[float]]) -> list[str]:
    """Return what is wrong, in words."""
    wrong = []
    for name, result in results.items():
        losses = list(result.losses)
        if losses != expected[name][: len(losses)]:
            wrong.append(f"job {name} has other losses")
        if result.state is JobState.FAILED and may_fail not in (name, "any"):
            wrong.append(f"job {name} was not hit and failed: {result.error}")
        if result.state not in (JobState.DONE, JobState.FAILED):
            wrong.append(f"job {name} is {result.state.value}")
        if result.state is JobState.DONE and len(losses) != STEPS:
            wrong.append(f"job {name} is done after {len(losses)} steps")
    return wrong


def within_time(call: Any, *arguments: Any) -> Any:
    """Call a function that must not hang, and return its result."""
    box: list[Any] = []
    thread = threading.Thread(target=lambda: box.append(call(*arguments)), daemon=True)
    thread.start()
    thread.join(HANG_S)
    if not box:
        raise RuntimeError("the fleet hangs or died" if thread.is_alive() else "the trial raised")
    return box[0]


def main(arguments: list[str] | None = None) -> list[Row]:
    options = parser(__doc__ or "")
    options.add_argument("--trials", type=int, default=100)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--child", type=Path)
    settings = options.parse_args(arguments)
    torch.set_num_threads(1)
    if settings.child is not None:
        run(settings.child, Harm())
        return []
    warnings.simplefilter("ignore")
    kinds = KINDS if settings.quick else [KINDS[index % len(KINDS)] for index in range(settings.trials)]
    expected = {name: train_plainly(job_of(name, Harm()), "cpu", STEPS - 1)[0] for name in NAMES}
    faults, wrong, failed = Counter[str](), Counter[str](), Counter[str]()
    for number, kind in enumerate(kinds):
        choices = random.Random(settings.seed * 1_000_003 + number)
        with tempfile.TemporaryDirectory(dir=settings.disk) as folder:
            results, may_fail, count = within_time(
                trial, kind, choices, Path(folder) / "run", 1 if settings.quick else 3
            )
            problems = check(results, may_fail, expected)
            resumed = within_time(run, Path(folder) / "run", Harm()) if kind == "full disk of checkpoints" else results
            problems += check(resumed, may_fail, expected)
        faults[kind] += count
        failed[kind] += sum(result.state is JobState.FAILED for result in results.values())
        wrong[kind] += bool(problems)
        print(f"trial {number + 1} of {len(kinds)}, {kind}: {'; '.join(problems) or 'as it should be'}", flush=True)
    table = [[kind, str(faults[kind]), str(failed[kind]), str(wrong[kind])] for kind in KINDS]
    show("faults", ["", "injected", "jobs that failed", WRONG], table)
    rows = [Row(name=kind, metric="faults", value=faults[kind], unit="") for kind in KINDS]
    rows += [Row(name=kind, metric="jobs that failed", value=failed[kind], unit="") for kind in KINDS]
    rows += [Row(name=kind, metric=WRONG, value=wrong[kind], unit="") for kind in KINDS]
    write(settings.json, {"trials": len(kinds), "seed": settings.seed, "steps": STEPS}, rows)
    return rows


if __name__ == "__main__":
    raise SystemExit(any(row.value for row in main() if row.metric == WRONG))
