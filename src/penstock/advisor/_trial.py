"""Ways that run: their peaks, and their steps in turn with plain PyTorch's."""

import contextlib
import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from penstock.advisor._task import Task
from penstock.advisor._ways import Limits, Running, Way, quiet
from penstock.devices import backend_of
from penstock.probe import in_rounds, peak_bytes
from penstock.units import format_bytes

LEAST_S = 0.5
"""Shorter steps are run several times in their turn."""
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
    step_failed: bool = False
    """Whether it was given up while it was timed."""


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
            except Exception as error:  # whatever a model may raise: this way does not work with it
                trials[way.name] = Trial(reason=first_line(error))
                continue
            is_above = limit_bytes is not None and measured > limit_bytes
            trials[way.name] = Trial(
                reason=f"its peak of {format_bytes(measured)} is above the budget" if is_above else "",
                peak_bytes=measured,
            )
            if not is_above or way.name == "plain":
                running[way.name] = found
        timed = _in_turn(task, running, rounds, trials, lambda done: progress("timing", len(ways) + done, total))
    for name, seconds in timed.items():
        trials[name] = _timed(trials[name], seconds, timed.get("plain"))
    return trials


def plain_can_run(task: Task, peak: int) -> bool:
    """Whether there is memory for a plain step at all, whatever the budget."""
    backend = backend_of(task.device)
    free_bytes, _ = backend.memory_bytes()
    if backend.allocator is None:
        return peak - _held_bytes(task) < 0.9 * free_bytes
    return peak < 0.95 * (free_bytes + backend.allocator.reserved_bytes())


def first_line(error: BaseException) -> str:
    """Of a message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _held_bytes(task: Task) -> int:
    gc.collect()
    return peak_bytes(lambda: None, device=task.device).start_bytes


def _in_turn(
    task: Task, running: Mapping[str, Running], rounds: int, trials: dict[str, Trial], tell: Callable[[int], None]
) -> dict[str, list[float]]:
    """Seconds of those that run to the end; whatever raises is given up."""

    def step(name: str) -> None:
        if trials[name].step_failed:
            return
        try:
            running[name].step()
        except Exception as error:  # such as memory that is not there, or a budget that is exceeded after all
            trials[name] = replace(trials[name], reason=first_line(error), step_failed=True)

    def told(number: int) -> None:
        if number < rounds:
            tell(number * len(running))

    tell(0)
    ways = {name: functools.partial(step, name) for name in running}
    seconds = in_rounds(ways, rounds=rounds, device=str(task.device), least_s=LEAST_S, after_round=told)
    return {name: found for name, found in seconds.items() if not trials[name].step_failed}


def _timed(trial: Trial, seconds: list[float], plain: list[float] | None) -> Trial:
    ratio = median(one / other for one, other in zip(seconds, plain, strict=True)) if plain else None
    return replace(trial, ratio=ratio, step_s=median(seconds))
