"""Timing alternatives alternately, so that other load on the machine affects all of them alike."""

import os
import platform
import random
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any, NamedTuple

import torch

from penstock._version import __version__
from penstock.arguments import checked
from penstock.devices import backend_of, kinds

_NUM_RESAMPLES = 10_000
_MOST_RUNS = 4


class Ratio(NamedTuple):
    """The median of paired ratios, and its 95% interval."""

    median: float
    """The median; below 1 means faster than the peer."""
    low: float
    """Lower end: 2.5% of the resampled medians are below."""
    high: float
    """Upper end: 2.5% of the resampled medians are above."""


@checked("penstock.probe.in_rounds({'ours': step, 'theirs': other}, rounds=9)", rounds=1, least_s=0)
def in_rounds(
    ways: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    device: str = "cpu",
    least_s: float = 0.0,
    after_round: Callable[[int], None] | None = None,
) -> dict[str, list[float]]:
    """Return the seconds that each of ``ways`` took in every round. Each round runs all of them, in another order.

    A run that takes less than ``least_s`` is repeated, at most four times in all, and the mean counts. ``after_round``
    is called with the number of the round, from 1; its time is not counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    # shuffled, since a way may be slower right after another one; seeded, so that a run can be repeated
    order, shuffle = list(ways), random.Random(0).shuffle  # noqa: S311
    for number in range(1, rounds + 1):
        shuffle(order)
        for name in order:
            _synchronize(device)
            start_s, taken_s, count = time.perf_counter(), 0.0, 0
            while not count or (taken_s < least_s and count < _MOST_RUNS):
                ways[name]()
                _synchronize(device)
                taken_s, count = time.perf_counter() - start_s, count + 1
            seconds[name].append(taken_s / count)
        if after_round is not None:
            after_round(number)
    return seconds


@checked("penstock.probe.paired_ratio(times['ours'], times['theirs'])")
def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Return ``ours`` over ``theirs``, paired by round; the interval is a bootstrap over pairs (10,000 resamples)."""
    if len(ours) != len(theirs) or not ours or min(theirs) <= 0:
        raise ValueError(
            f"`ours` and `theirs` must have a time above 0 for each round, got {len(ours)} and {len(theirs)} times: "
            "penstock.probe.paired_ratio(times['ours'], times['theirs'])"
        )
    ratios = [ours_s / theirs_s for ours_s, theirs_s in zip(ours, theirs, strict=True)]
    choices = random.Random(0)  # noqa: S311
    medians = sorted(median(choices.choices(ratios, k=len(ratios))) for _ in range(_NUM_RESAMPLES))
    return Ratio(median(ratios), medians[249], medians[9749])  # 2.5% and 97.5% of the resamples


@checked("penstock.probe.provenance('cpu')")
def provenance(device: str = "cuda") -> dict[str, Any]:  # any: text and numbers, for JSON
    """Return where something was measured or failed: device, cores, memory, system, versions.

    ``device`` in the result is the name of the GPU, or of the CPU if you ask for "cpu" or there is no GPU.
    """
    wanted = device if torch.device(device).type in kinds() else "cpu"
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": backend_of(wanted).name,
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "penstock": __version__,
    }


def _synchronize(device: str) -> None:
    backend_of(device).finish()
