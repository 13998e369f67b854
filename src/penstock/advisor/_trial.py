"""Ways that run: their peaks, and their steps in turn with plain PyTorch's."""

import contextlib
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from penstock.advisor._task import Task
from penstock.advisor._ways import Limits, Running, Way, quiet
from penstock.errors import PenstockError
from penstock.probe import peak_bytes
from penstock.units import format_bytes

Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What came of trying a way."""

    reason: str = ""
    """Why it was given up; empty where it ran."""
    peak_bytes: int | None = None
    """Of the device in one step, with gradients that exist already."""
    ratio: float | None = None
    """Median over rounds of its step over plain's in the same round; ``None`` without a plain one."""
    step_s: float | None = None
    """Median of its steps."""


def try_all(task: Task, ways: Sequence[Way], *, limits: Limits, rounds: int, progress: Progress) -> dict[str, Trial]:
    """Tries the ways in turn.

    A way whose peak is above the limit is not timed; but for plain PyTorch, with which all are compared.
    """
    trials: dict[str, Trial] = {}
    limit_bytes = limits.budget.device_bytes
    total = len(ways) * (1 + rounds)
    with task.left_as_found(), quiet(), contextlib.ExitStack() as stack:
        running: dict[str, Running] = {}
        before_bytes = _held_bytes(task)
        for number, way in enumerate(ways):
            progress(f"trying {way.name}", number, total)
            try:
                task.drop_gradients()
                extra_bytes = limits.extra_bytes + _held_bytes(task) - before_bytes  # other ways have left something
                found = way.begin(extra_bytes)
                stack.callback(found.close)
                for _ in range(way.num_warm):
                    found.step()
                measured = peak_bytes(found.step, device=task.device).peak_bytes - extra_bytes
            except (PenstockError, RuntimeError, ValueError, TypeError, OSError) as error:
                trials[way.name] = Trial(reason=first_line(error))
                continue
            is_above = limit_bytes is not None and measured > limit_bytes
            trials[way.name] = Trial(
                reason=f"its peak of {format_bytes(measured)} is above the budget" if is_above else "",
                peak_bytes=measured,
            )
            if not is_above or way.name == "plain":
                running[way.name] = found
        timed = _in_turn(task, running, rounds, lambda done: progress("timing", len(ways) + done, total))
    for name, seconds in timed.items():
        trials[name] = _timed(trials[name], seconds, timed.get("plain"))
    return trials


def plain_can_run(task: Task, peak: int) -> bool:
    """Whether there is memory for a plain step at all, whatever the budget."""
    if task.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(task.device)
        return peak < 0.95 * (free + torch.cuda.memory_allocated(task.device))
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return peak < 0.9 * int(line.split()[1]) * 1024
    return True


def first_line(error: BaseException) -> str:
    """Of a message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _held_bytes(task: Task) -> int:
    gc.collect()
    return peak_bytes(lambda: None, device=task.device).start_bytes


def _in_turn(
    task: Task, running: Mapping[str, Running], rounds: int, tell: Callable[[int], None]
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in running}
    order, done = list(running), 0
    for number in range(rounds):
        order = [*order[1:], *order[:1]] if number % 2 else order[::-1]  # nobody always comes after the same one
        for name in order:
            tell(done)
            _synchronize(task)
            start_s = time.perf_counter()
            running[name].step()
            _synchronize(task)
            seconds[name].append(time.perf_counter() - start_s)
            done += 1
    return seconds


def _timed(trial: Trial, seconds: list[float], plain: list[float] | None) -> Trial:
    ratio = median(one / other for one, other in zip(seconds, plain, strict=True)) if plain else None
    return Trial(reason=trial.reason, peak_bytes=trial.peak_bytes, ratio=ratio, step_s=median(seconds))


def _synchronize(task: Task) -> None:
    if task.device.type == "cuda":
        torch.cuda.synchronize(task.device)
