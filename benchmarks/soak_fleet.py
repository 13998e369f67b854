"""Cases of the fleet: many jobs, steered, harmed, killed and resumed; losses equal the plain loop's."""

import os
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.soak_case import Case, Injected
from benchmarks.soak_models import OPTIMIZERS, Workload, draw
from benchmarks.soak_rooms import Faults
from penstock import fleet
from penstock.errors import CheckpointError, FleetStateError
from penstock.fleet import JobState

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fleet"))
from fleet_jobs import train_plainly  # the loop that jobs have to equal

KINDS = ("gpt", "mlp", "convnet", "lstm", "hugging face")
PROGRESS_S = 60.0
MOST_REFUSALS = 8
"""A refusal names what one shard takes; others may take more."""


class Data:
    """Batches that may raise, or hold no number, at one step of one process."""

    def __init__(self, case: Case, workload: Workload):
        self.case, self.workload, self.harm, self.at = case, workload, "", -1

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.workload.batches):
            if number == self.at and self.harm == "exception":
                self.case.injected("exception in data")
                raise Injected("in the middle")
            yield batch


def draw_jobs(case: Case, least: int = 2, most: int = 4) -> tuple[list[fleet.Job], list[Data]]:
    jobs, data = [], []
    for number in range(case.choices.randint(least, most)):
        workload = draw(case, KINDS)
        if workload.kind == "lstm":  # whose weights a cut may come between: see the limits of the fleet's page
            workload = replace(workload, dtype=None)
        source, optimizer = Data(case, workload), OPTIMIZERS[case.draw("optimizer", tuple(OPTIMIZERS))]
        precision = "float32" if workload.dtype is None else "bfloat16"
        jobs.append(
            fleet.Job(
                name=f"job {number}",
                model=workload.build,
                data=lambda source=source: source,
                seed=number,
                loss=lambda model, batch: model(*batch),
                optimizer=optimizer,
                steps=case.draw("steps", (3, 6)),
                accumulate=case.draw("accumulate", (1, 1, 2)),
                clip_norm=case.draw("clip", (None, 0.5)),
                precision=precision,
                lr_scheduler=case.draw(
                    "scheduler", (None, lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
                ),
            )
        )
        data.append(source)
        case.drawn[f"job {number}"] = {
            key: str(case.drawn.get(key)) for key in ("model", "width", "batch", "optimizer")
        }
    return jobs, data


def expected_losses(jobs: list[fleet.Job]) -> dict[str, list[float]]:
    return {job.name: train_plainly(job)[0] for job in jobs}


def fleets(case: Case) -> None:
    """Train jobs on CPU devices within a budget, under random faults and commands."""
    jobs, data = draw_jobs(case)
    expected = expected_losses(jobs)
    harm = case.draw(
        "harm",
        ("none", "none", "steer", "steer", "exception", "kill", "terminate", "small files", "tiers", "no folder"),
    )
    options: dict[str, Any] = {
        "run_dir": case.folder / "run", "checkpoint_every": case.draw("checkpoints", (1, 2, None)), "progress": None,
        "verify": case.draw("verify", (False, False, True)), "keep": case.draw("keep", (1, 2)),
        "scheduler": case.draw("scheduler name", ("sharded-lrtf", "sharded-lrtf", "round-robin", "fifo", "random")),
    }  # fmt: skip
    options["scheduler"] = options["scheduler"] if options["scheduler"] in _schedulers() else "sharded-lrtf"
    size = case.draw("budget", ("1MB", "3MB", "16MB", "128MB"))
    host = case.draw("host", ("256MiB", "256MiB", "4MiB", None))
    places = {"host": host, "disk": {case.disk(): None} if host in (None, "4MiB") else None}
    devices = [fleet.Device(name="cpu", threads=1)] * case.draw("devices", (1, 2))
    faults = Faults(case, ("full", "write_error", "read_error", "short_write", "short_read") if harm == "tiers" else ())
    if faults.probability.get("read_error"):
        options["verify"] = True

    def run(**changes: Any) -> fleet.Results:
        with fleet.Fleet(devices, case.budget(device=size, **places), **{**options, **changes}) as running:
            for job in jobs:
                running.add(job)
            steering = Steering(case, running, jobs)
            results = running.wait(steering if harm == "steer" else None)
        expected.update(expected_losses(steering.clones))  # afterwards: the plain loop shares flags with whoever traces
        return results

    may_fail, hit = set[str](), case.choices.randrange(len(jobs))
    if harm == "exception":
        data[hit].harm, data[hit].at = "exception", case.choices.randrange(4)
        may_fail.add(jobs[hit].name)
    with faults.injected():
        if harm in ("kill", "terminate"):
            num_kills = _killed(case, lambda: run(resume=True), harm)
            case.injected(harm, num_kills)
            results = run(resume=True)
        elif harm == "small files":
            case.injected("files may not grow")
            small = case.choices.choice((0, 4096, 2**16))
            results = _with_small_files(case, run, small, options["run_dir"])
            may_fail |= {job.name for job in jobs}
            if results is None:
                return
        else:
            if harm == "tiers":
                may_fail |= {job.name for job in jobs}
            if harm == "no folder":
                data[hit].harm = "none"
                case.injected("folder removed")
                _check_states(
                    case, _without_folder(case, run, options["run_dir"]), expected, {job.name for job in jobs}
                )
                return
            results = run()
    _check_states(case, results, expected, may_fail)
    _refused(case, results, jobs, devices, expected, places)


def _schedulers() -> tuple[str, ...]:
    from typing import get_args

    return get_args(fleet.SchedulerName)


class Steering:
    """The user's commands: it pauses, resumes, stops and clones jobs while they run."""

    def __init__(self, case: Case, running: fleet.Fleet, jobs: list[fleet.Job]):
        self.case, self.fleet, self.jobs = case, running, list(jobs)
        self.paused, self.num_left, self.clones = set[str](), 6, list[fleet.Job]()

    def __call__(self) -> bool:
        """Return whether more may come."""
        if self.num_left <= 0:
            for name in sorted(self.paused):
                self._try("resume", name)
            self.paused.clear()
            return False
        self.num_left -= 1
        job = self.case.choices.choice(self.jobs)
        verb = self.case.choices.choice(("pause", "resume", "stop", "clone", "nothing"))
        self.case.figures[f"asked: {verb}"] += 1
        if verb == "clone":
            number = len(self.clones)
            clone = job.with_changes(name=f"clone {number}", seed=50 + number)
            self.clones.append(clone)
            self.fleet.clone(job.name, clone.name, seed=clone.seed)
            self.jobs.append(clone)
        elif verb != "nothing":
            self._try(verb, job.name)
        return True

    def _try(self, verb: str, name: str) -> None:
        try:
            getattr(self.fleet, verb)(name)
        except ValueError as error:
            if "already" not in str(error):
                raise
            return
        if verb == "pause":
            self.paused.add(name)


def _check_states(
    case: Case, results: fleet.Results | None, expected: dict[str, list[float]], may_fail: set[str]
) -> None:
    for name, result in (results or {}).items():
        losses = list(result.losses)
        case.figures["steps"] += len(losses)
        case.figures[f"jobs: {result.state.value}"] += 1
        case.equal(f"losses of {name}", losses, expected[name][: len(losses)])
        is_refused = result.error is not None and "BudgetError" in result.error
        if result.state is JobState.FAILED and name not in may_fail and not is_refused:
            case.found("undocumented error", f"{name} was not hit and failed: {result.error}")
        if result.state is JobState.FAILED and result.error and not re.search(_DOCUMENTED, result.error):
            case.found("undocumented error", f"{name}: {result.error}")
        if result.state is JobState.DONE and len(losses) != len(expected[name]):
            case.found("wrong value", f"{name} is done after {len(losses)} steps")
        if not result.state.is_over:
            case.found("wrong value", f"{name} is {result.state.value} at the end")


_DOCUMENTED = r"penstock\.errors\.\w+|Injected"


def _refused(
    case: Case, results: fleet.Results, jobs: list[fleet.Job], devices: list[fleet.Device],
    expected: dict[str, list[float]], places: dict[str, Any],
) -> None:  # fmt: skip
    """Check that a job trains within the budget that an error names."""
    for job in jobs:
        result, sizes = results[job.name], list[int]()
        while result.error is not None and (match := re.search(r"`budget` must be at least (\d+)", result.error)):
            case.figures["refused budgets"] += 1
            if len(sizes) == MOST_REFUSALS or int(match[1]) <= max(sizes, default=0):
                case.found("budget", f"refused after {sizes}: {result.error}")
                break
            case.figures["refused budgets, named before"] += bool(sizes)
            sizes.append(int(match[1]))
            roomy = {"host": "1GiB", "disk": places["disk"]}
            result = fleet.run([job], devices[:1], case.budget(device=sizes[-1], **roomy), progress=None)[job.name]
        if sizes and result.state is JobState.DONE:
            case.equal(f"losses of {job.name} in {sizes[-1]}", list(result.losses), expected[job.name])


def _killed(case: Case, run: Any, how: str) -> int:
    """Kill processes that train, at random moments. Nothing has started a thread in this one yet."""
    for number in range(case.choices.randint(1, 3)):
        start_s, child = time.time(), os.fork()
        if child == 0:
            try:
                run()
            finally:
                os._exit(0)
        end_s = time.monotonic() + PROGRESS_S
        while time.monotonic() < end_s and os.waitpid(child, os.WNOHANG) == (0, 0):
            paths = list((case.folder / "run").glob("jobs/*/metrics.jsonl"))
            if any(path.stat().st_mtime >= start_s for path in paths):
                time.sleep(case.choices.uniform(0.0, 0.3))
                os.kill(child, signal.SIGKILL if how == "kill" else signal.SIGTERM)
                os.waitpid(child, 0)
                break
            time.sleep(0.005)
        else:
            return number
    return number + 1


def _with_small_files(case: Case, run: Any, size: int, run_dir: Path) -> fleet.Results | None:
    """Run on a file system on which files cannot grow, then continue the run with room."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    try:
        results = run()
        text = [result.error for result in results.values()]
    except (FleetStateError, CheckpointError, OSError) as error:
        case.figures[f"raised: {type(error).__name__}"] += 1
        text, results = [str(error)], None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    case.drawn["refused"] = [error and error[:200] for error in text]
    if results is None:
        shutil.rmtree(run_dir, ignore_errors=True)
        return run()
    return results


def _without_folder(case: Case, run: Any, run_dir: Path) -> fleet.Results | None:
    """Remove the run's folder while jobs train."""
    import threading

    def remove() -> None:
        end_s = time.monotonic() + PROGRESS_S
        while time.monotonic() < end_s and not list(run_dir.glob("jobs/*/metrics.jsonl")):
            time.sleep(0.002)
        shutil.rmtree(run_dir, ignore_errors=True)

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        return run()
    except (FleetStateError, CheckpointError, OSError) as error:
        case.figures[f"raised: {type(error).__name__}"] += 1
        return None
    finally:
        thread.join()
