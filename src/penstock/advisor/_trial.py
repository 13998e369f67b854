"""Trials of options that can run: their peaks, and their step times in rounds with plain PyTorch."""

import contextlib
import functools
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from penstock.advisor._advice import AS_FAST
from penstock.advisor._ways import Limits, Running, Way, quiet
from penstock.advisor._workload import Workload
from penstock.devices import backend_of
from penstock.probe import in_rounds, peak_bytes
from penstock.units import format_bytes

LEAST_S = 0.5
"""Seconds below which a step is run several times in its turn."""
LONG_ROUND_S = 10.0
"""Seconds of a round from which options are left out of the next one."""
_SURELY = 1.5
"""Ratio of times in all rounds so far from which an option is taken for slower."""
Progress = Callable[[str, int, int], None]
"""A function that is told what is being done, how much of it is done, and how much there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The outcome of trying an option."""

    reason: str = ""
    """The reason why it was given up; empty if it ran."""
    peak_bytes: int | None = None
    """Device peak of one step, with gradients that exist already."""
    ratio: float | None = None
    """Median over rounds of its step time divided by plain's in the same round; ``None`` without plain steps."""
    step_s: float | None = None
    """Median of its step times."""
    step_failed: bool = False
    """Whether it was given up while it was timed."""


def try_all(
    workload: Workload, ways: Sequence[Way], *, limits: Limits, rounds: int, progress: Progress
) -> dict[str, Trial]:
    """Try the options one after the other, and time them in rounds.

    An option whose peak is above the limit is not timed. Plain PyTorch is timed in any case, since all are compared to
    it.
    """
    trials: dict[str, Trial] = {}
    limit_bytes = limits.budget.device_bytes
    total = len(ways) * (1 + rounds)
    with workload.left_as_found(), quiet(), contextlib.ExitStack() as stack:
        running: dict[str, Running] = {}
        before_bytes = _held_bytes(workload)
        for number, way in enumerate(ways):
            progress(f"trying {way.name}", number, total)
            try:
                workload.drop_gradients()
                extra_bytes = limits.extra_bytes + _held_bytes(workload) - before_bytes  # others may still hold memory
                attempt = way.begin(extra_bytes)
                stack.callback(attempt.close)
                for _ in range(way.num_warm):
                    attempt.step()
                measured = peak_bytes(attempt.step, device=workload.device).peak_bytes - extra_bytes
            except Exception as error:  # a model may raise anything: this option does not work with it
                trials[way.name] = Trial(reason=first_line(error))
                continue
            is_above = limit_bytes is not None and measured > limit_bytes
            trials[way.name] = Trial(
                reason=f"its peak of {format_bytes(measured)} is above the budget" if is_above else "",
                peak_bytes=measured,
            )
            if not is_above or way.name == "plain":
                running[way.name] = attempt
        timed = _in_turn(workload, running, rounds, trials, lambda done: progress("timing", len(ways) + done, total))
    for name, seconds in timed.items():
        trials[name] = _timed(trials[name], seconds, timed.get("plain"))
    return trials


def plain_can_run(workload: Workload, peak: int) -> bool:
    """Return whether there is memory for a plain step at all, whatever the budget is."""
    backend = backend_of(workload.device)
    free_bytes, _ = backend.memory_bytes()
    if backend.allocator is None:
        return peak - _held_bytes(workload) < 0.9 * free_bytes
    return peak < 0.95 * (free_bytes + backend.allocator.reserved_bytes())


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _held_bytes(workload: Workload) -> int:
    gc.collect()
    return peak_bytes(lambda: None, device=workload.device).start_bytes


def _in_turn(
    workload: Workload,
    running: Mapping[str, Running],
    rounds: int,
    trials: dict[str, Trial],
    tell: Callable[[int], None],
) -> dict[str, list[float]]:
    """Return the step times of the options that run to the end; an option that raises is given up.

    If a round takes long, an option that cannot become the best is not timed any more, and nothing is once one option
    is left.
    """

    def step(name: str) -> None:
        if trials[name].step_failed:
            return
        try:
            running[name].step()
        except Exception as error:  # such as too little memory, or a budget that is exceeded after all
            trials[name] = replace(trials[name], reason=first_line(error), step_failed=True)

    seconds: dict[str, list[float]] = {name: [] for name in running}
    left = list(running)
    for number in range(rounds):
        if not left:
            break
        tell(number * len(running))
        order = left[number % len(left) :] + left[: number % len(left)]  # which comes first changes
        ways = {name: functools.partial(step, name) for name in order}
        for name, (taken_s,) in in_rounds(ways, rounds=1, device=str(workload.device), least_s=LEAST_S).items():
            seconds[name].append(taken_s)
        left = [name for name in left if not trials[name].step_failed]
        if sum(taken[-1] for taken in seconds.values()) < LONG_ROUND_S:
            continue
        times = {name: _beside(seconds[name], seconds.get("plain")) for name in left if not trials[name].reason}
        best = min(times, key=lambda name: median(times[name]), default="")
        lost = {name for name in times if name != best and cannot_win(times[name], times[best], rounds)}
        # plain stays: the others' times are given in its
        left = [name for name in left if name not in lost or name == "plain"]
        if len(times) - len(lost) <= 1:
            break
    return {name: taken for name, taken in seconds.items() if not trials[name].step_failed}


def cannot_win(own: Sequence[float], best: Sequence[float], rounds: int) -> bool:
    """Return whether the median of ``own`` exceeds that of ``best`` after all ``rounds``, whatever is still to come.

    Before half of the rounds are over, nothing is certain in that sense; then differences count that are larger than
    those between the steps of one option.
    """
    to_come = rounds - len(own)
    least = sorted([0.0] * to_come + list(own))[(rounds - 1) // 2]
    most = sorted(list(best) + [math.inf] * to_come)[rounds // 2]
    return least > AS_FAST * most or min(own) > _SURELY * max(best)


def _beside(own: Sequence[float], plain: Sequence[float] | None) -> list[float]:
    """Return an option's times in units of plain's in the same round, if plain is timed."""
    return list(own) if plain is None else [own_s / plain_s for own_s, plain_s in zip(own, plain, strict=False)]


def _timed(trial: Trial, seconds: list[float], plain: list[float] | None) -> Trial:
    ratio = median(_beside(seconds, plain)) if plain else None
    return replace(trial, ratio=ratio, step_s=median(seconds))
