"""Where the time of a fleet's devices goes on a CPU, next to plain trainings side by side.

Runs the fleet of `benchmarks.fleet_training` with the clocks of its threads read around what they do: wall time,
processor time of user and system, page faults. Plain trainings run before and after. The table is in percent of the
devices' time while all of them had work.

Run it with ``python -m benchmarks.fleet_table --disk /nvme --host 10GiB --json table.json``.
"""

import multiprocessing
import resource
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from benchmarks import fleet_training
from benchmarks.common import Row, show, write
from benchmarks.fleet_models import jobs_of
from benchmarks.fleet_peers import throughput
from penstock.fleet import _engine, _feed, _prepare, _turn, _upkeep, _worker
from penstock.tiers import HeapKeeper

BETWEEN = {
    "jobs are prepared": (_prepare.Preparation, "run"),
    "the next batch is read": (_feed.Feed, "next_batch"),
    "records and checkpoints are written": (_upkeep.Upkeep, "stepped"),
    "checkpoints are written": (_upkeep.Upkeep, "save"),
    "jobs end": (_engine.Engine, "end"),
    "a job is handed back": (_engine.Engine, "give_back"),
    "a job is waited for": (_turn.JobTurns, "take"),
    "the heap is trimmed": (HeapKeeper, "look"),
}
"""What devices do between units, with the method that does it."""
INSIDE = {
    "room is made and items brought in": (_worker._WorkerUnits, "_bring_in"),
    "the next unit's items are looked for": (_worker._WorkerUnits, "_look_at_next"),
    "units compute": (_worker._WorkerUnits, "compute"),
}
"""What they do in units."""


class Ledger:
    """Seconds of the devices' threads by what they did; what happens inside of another entry counts there."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, float, float, dict[str, float]]] = []
        """Name, begin and end (``time.time()``), and the thread's processor seconds and page faults."""
        self._open = threading.local()

    @contextmanager
    def entry(self, name: str) -> Iterator[None]:
        """Note what a device's thread does meanwhile."""
        if getattr(self._open, "is_open", False) or not _worker.trains_jobs():
            yield
            return
        self._open.is_open = True
        before, start_s = resource.getrusage(resource.RUSAGE_THREAD), time.time()
        try:
            yield
        finally:
            after, end_s = resource.getrusage(resource.RUSAGE_THREAD), time.time()
            self._open.is_open = False
            used = {
                "user": after.ru_utime - before.ru_utime,
                "system": after.ru_stime - before.ru_stime,
                "faults": float(after.ru_minflt - before.ru_minflt),
            }
            self.entries.append((name, start_s, end_s, used))

    def watching(self) -> ExitStack:
        """Read clocks around the methods of `BETWEEN` and `INSIDE`."""
        stack = ExitStack()
        for name, (owner, method) in {**BETWEEN, **INSIDE}.items():
            stack.enter_context(mock.patch.object(owner, method, self._wrapped(name, getattr(owner, method))))
        return stack

    def _wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with self.entry(name):
                return function(*args, **kwargs)

        return wrapper


def table(settings: Any, rows: list[Row]) -> None:
    """Run the fleet between plain trainings and print the table."""
    plain = [throughput(settings, "plain", settings.steps)]
    ledger = Ledger()
    with ledger.watching():
        run = fleet_training.Run(settings, jobs_of(settings, settings.jobs, settings.steps))
    plain.append(throughput(settings, "plain", settings.steps))
    moving = throughput(settings, "plain", settings.steps, run.moved)
    total_s = (run.end_s - run.begin_s) * settings.devices
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for name, start_s, end_s, used in ledger.entries:
        share = max(0.0, min(end_s, run.end_s) - max(start_s, run.begin_s)) / max(1e-9, end_s - start_s)
        sums[name]["wall"] += share * (end_s - start_s)
        for what, value in used.items():
            sums[name][what] += share * value
    computes = sums["units compute"]
    needed = run.samples_per_s / (sum(plain) / 2)
    beside = run.samples_per_s / moving
    lines = {
        "plain trainings would take": needed,
        "as many bytes moved beside them take longer": beside - needed,
        "units take longer than these": computes["wall"] / total_s - beside,
        **{name: sums[name]["wall"] / total_s for name in (*INSIDE, *BETWEEN) if name != "units compute"},
    }
    lines["the rest"] = 1 - sum(lines.values())
    of_units = {
        "processor time of user code": computes["user"] / total_s,
        "of the system: page faults": computes["system"] / total_s,
        "without a processor": (computes["wall"] - computes["user"] - computes["system"]) / total_s,
    }
    rows += [Row(name="fleet", metric=name, value=value, unit="of the time") for name, value in lines.items()]
    rows += [Row(name="units", metric=name, value=value, unit="of the time") for name, value in of_units.items()]
    rows += [
        Row(name="fleet", metric="throughput", value=run.samples_per_s, unit="samples/s"),
        Row(name="plain trainings side by side", metric="throughput", value=sum(plain) / 2, unit="samples/s"),
        Row(name="the same beside as many bytes moved", metric="throughput", value=moving, unit="samples/s"),
        Row(name="units", metric="page faults", value=computes["faults"], unit="pages"),
    ]
    show("share of the devices' time", ["", ""], [[name, f"{value:.1%}"] for name, value in lines.items()])
    show("while units compute", ["", ""], [[name, f"{value:.1%}"] for name, value in of_units.items()])


def main(arguments: list[str] | None = None) -> list[Row]:
    settings = fleet_training.parsed(str(__doc__), arguments)
    rows: list[Row] = []
    table(settings, rows)
    write(settings.json, fleet_training.configuration(settings), rows, device=settings.device)
    return rows


if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["benchmarks.fleet_peers"])
    main()
