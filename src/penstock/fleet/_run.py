"""`fleet.run` and `Fleet`: jobs, devices and a folder, put together. Only this file starts and ends things."""

import contextlib
import shutil
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import torch

from penstock.arguments import checked, renamed
from penstock.errors import JobResumedWarning
from penstock.fleet._devices import account_of, devices_of
from penstock.fleet._engine import Engine
from penstock.fleet._job import Ablation, Device, Job, JobSource
from penstock.fleet._life import JobState
from penstock.fleet._pilot import Pilots
from penstock.fleet._records import Records, Tracker
from penstock.fleet._results import DeviceStatistics, Results
from penstock.fleet._roster import Board, Roster
from penstock.fleet._schedulers import Scheduler, SchedulerName, scheduler_of
from penstock.fleet._state import FleetState, JobRow
from penstock.fleet._turn import JobTurns
from penstock.fleet._unit_log import UnitRecord
from penstock.fleet._upkeep import Stopper, Upkeep
from penstock.fleet._worker import Worker, trains_jobs
from penstock.links import DISK
from penstock.probe import bandwidths
from penstock.tiers import (
    Budget,
    Charges,
    DiskSpec,
    Footprint,
    HeapKeeper,
    Size,
    Waterfall,
    gate,
    trim_freed_memory,
    waterfalls_for,
)
from penstock.units import parse_bytes

_TICK_S = 0.1
_HOST_RATE = 4e9
_LEAST_SLACK_BYTES = 512 * 2**20
"""Bytes that heaps of CPU devices may grow beyond live data before they are trimmed."""
_SWITCH_S = 5e-4
"""Longest time between switches of Python's threads: a device's thread must not wait 5 ms for the interpreter."""


@renamed(host_budget="host")
@checked("penstock.fleet.run(jobs, devices=['cuda:0'], budget='40GiB')")
def run(
    jobs: Iterable[Job],
    devices: Sequence[str | torch.device | Device] | None = None,
    budget: Size | Budget | None = None,
    **options: Any,  # the options of Fleet
) -> Results:
    """Train all jobs and return their results. Options are those of `Fleet`.

    Several machines: `penstock.integrations.run_on_ray`.

    >>> import torch
    >>> from penstock import fleet
    >>> job = fleet.Job(
    ...     name="a line",
    ...     model=lambda: torch.nn.Linear(1, 1),
    ...     data=lambda: [(torch.ones(4, 1), torch.ones(4, 1))],
    ...     loss=lambda model, batch: ((model(batch[0]) - batch[1]) ** 2).mean(),
    ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    ...     steps=50,
    ... )
    >>> results = fleet.run([job], devices=["cpu"], budget="64MiB", host="64MiB", progress=None)
    >>> results["a line"].losses[-1] < 1e-4
    True
    """
    jobs = list(jobs)
    if not jobs:
        raise ValueError("`jobs` must have at least one job, got none: fleet.run([job], devices=['cuda:0'])")
    with Fleet(devices, budget, **options) as running:
        for job in jobs:
            running.add(job)
        return running.wait()


class Fleet:
    """Devices that train jobs. You can add more jobs while it runs: ``with Fleet(...) as fleet: fleet.add(job)``.

    ``devices``: names or `Device`s, by default all accelerators, else one CPU device. ``budget``: bytes of true
    peak memory per device. ``host`` (bytes of host memory) and ``disk``: where jobs are while they are not on a
    device; host memory fills first. By default host memory takes up to 60% of what is free, if no disk is given.
    ``run_dir``: folder of checkpoints, metrics and state, on a local disk; by default a temporary one that is
    deleted with the results. ``jobs_dir``: another folder for checkpoints and metrics. ``resume=True`` continues
    with what an earlier process left there, also jobs that were done and now have more epochs or steps;
    ``resume="failed"`` also tries those again that had failed. Otherwise a folder that holds a fleet is refused.
    ``retry``: how often a job that fails goes on from its last checkpoint before it counts as failed. ``scheduler``:
    chooses the job that a free device takes; by default all have equal turns, see `Scheduler`. ``stopper``: sees
    every validation and may stop the job. ``checkpoint_every``: steps between checkpoints of a job; by default ten
    minutes. ``keep``: checkpoints kept per job. ``trackers``: receivers of metrics in addition to the folder.
    ``progress``: ``"auto"`` shows a live table on a terminal and lines elsewhere, ``None`` nothing. ``verify=True``
    checks a checksum on every fetch from disk and measures the memory of every unit, one at a time.

    Raises ``ValueError`` or ``TypeError`` for settings that cannot work, and what `tiers` raises for its directories.
    """

    @renamed(host_budget="host")
    @checked("fleet.Fleet(['cuda:0'], '40GiB')", checkpoint_every=1, keep=1, retry=0)
    def __init__(
        self,
        devices: Sequence[str | torch.device | Device] | None = None,
        budget: Size | Budget | None = None,
        *,
        host: Size | None = None,
        disk: DiskSpec = None,
        run_dir: str | Path | None = None,
        jobs_dir: str | Path | None = None,
        resume: bool | Literal["failed"] = False,
        retry: int = 0,
        scheduler: SchedulerName | Scheduler = "fair",
        stopper: Stopper | None = None,
        checkpoint_every: int | None = None,
        keep: int = 1,
        trackers: Sequence[Tracker] = (),
        progress: str | None = "auto",
        verify: bool = False,
        ablation: Ablation | None = None,
    ):
        places = devices_of(devices)
        account = account_of(places, budget, host, disk)
        self._charges = Charges(budget if isinstance(budget, Budget) else None, "fleet")
        self._progress = progress
        self._temporary = None if run_dir is not None else _TemporaryFolder()
        self.run_dir = Path(self._temporary.path if self._temporary is not None else str(run_dir))
        """Folder of checkpoints, metrics and the fleet's state."""
        self.host_bytes = None if account.disk_bytes or account.tiers else account.host_bytes
        """Bytes that jobs may take while they are not on a device; ``None``: a disk takes what exceeds host memory."""
        self.state = FleetState(self.run_dir)
        self.state.refuse_strangers(resume=bool(resume))
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._records = Records(self.run_dir, trackers, jobs_dir)
        self._news = threading.Event()
        upkeep = Upkeep(
            self._records,
            stopper,
            every=checkpoint_every,
            keep=keep,
            resume=bool(resume),
            retry=retry,
            ended=self._news.set,
        )
        ablation = ablation or Ablation()
        pilots = Pilots(
            budget_bytes=min(parse_bytes(device.budget) for device in places if device.budget is not None),
            recompute=ablation.recompute,
            vertical=ablation.vertical,
            lane_rate=_LaneRates(account, len(places)),
        )
        self._engine = Engine(scheduler_of(scheduler), upkeep, pilots, sharp=ablation.sharp)
        self._engine.workers = _workers(self._engine, places, account, ablation, verify=verify)
        self._roster = Roster(self._engine, self._records, resume=resume)
        self._board = Board(self.state, self._roster)
        self._session = _Session()

    def __enter__(self) -> Self:
        if trains_jobs():
            raise ValueError(
                "a fleet cannot train inside a job of another fleet, because that job's device would have to wait for "
                "it"
            )
        if self._session.taken is not None:
            raise ValueError(
                "a fleet can be entered only once; create a new one: with fleet.Fleet(devices, budget) as running:"
            )
        sizes = [worker.memory.budget_bytes for worker in self._engine.workers]
        with contextlib.ExitStack() as stack:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            stack.callback(sys.setswitchinterval, sys.getswitchinterval())
            stack.callback(trim_freed_memory)
            stack.callback(self._charges.give_back)
            stack.callback(_close, [worker.memory.waterfall for worker in self._engine.workers])
            self._charges.enter(Footprint(step_bytes=max(sizes), runs_beside=True))
            self.state.create(resume=self._roster.resumes)
            self._roster.recall(self.state)
            sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
            self._session.started_s = time.time()
            self._session.taken = stack.pop_all()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._session.has_ended = True
        with contextlib.ExitStack() as stack:
            stack.callback(self.state.say_ended)
            stack.callback(self._board.write)  # late, since the folder may be gone
            stack.callback(self._records.close)
            if self._session.taken is not None:
                stack.enter_context(self._session.taken)
            with self._engine.condition:
                self._engine.is_stopping = True
                self._engine.condition.notify_all()
            if self._session.is_started:
                with gate.released():  # a worker may be waiting to trace
                    for worker in self._engine.workers:
                        worker.join()

    @checked("running.add(job)")
    def add(self, job: Job, source: JobSource | None = None) -> None:
        """Add a job. Raise ``ValueError`` if its name is taken, or outside of ``with``."""
        self._session.refuse_outside()
        self._roster.add(job, source)

    def __contains__(self, name: object) -> bool:
        """Whether a job has that name."""
        return name in self._roster

    def pause(self, name: str) -> None:
        """Pause the job after its current mini-batch. It leaves its device until `resume`."""
        self._roster.want(name, JobState.PAUSED)

    def resume(self, name: str) -> None:
        """Resume a paused job."""
        self._roster.want(name, JobState.RUNNING)

    def stop(self, name: str) -> None:
        """Stop the job after its current optimizer step, with a checkpoint."""
        self._roster.want(name, JobState.STOPPED)

    def forget(self, name: str) -> None:
        """Remove a job that is over. Its name becomes free, and its folder stays.

        Raises ``ValueError`` if the job is not over.
        """
        self._roster.forget(name)

    def clone(self, name: str, new_name: str, *, warm: bool = False, **changes: Any) -> None:  # any: hyperparameters
        """Add a new job like ``name`` with other hyperparameters.

        ``warm`` starts from its last checkpoint's parameters.

        For a job that was added with its `JobSource`, ``changes`` are parameters of that function; for any other they
        are fields of `Job`. Raises ``ValueError`` or ``TypeError`` for changes that the job cannot have.
        """
        self._session.refuse_outside()
        self._roster.clone(name, new_name, warm=warm, **changes)

    def wait(self, more: Callable[[], bool] | None = None) -> Results:
        """Train until every job is over and return the results. ``KeyboardInterrupt`` lets current mini-batches end.

        ``more`` tells whether more jobs may be added. This thread calls it at the start, whenever a job has ended, and
        every 0.1 s. While it returns true, devices wait for jobs. It may `add` some itself. Raises what ``more``
        raises, and the error that ended a device's thread, if any.
        """
        from torch._subclasses.fake_tensor import FakeTensorMode

        from penstock.fleet._show import Show

        self._session.refuse_outside()
        if self._session.is_started:
            raise ValueError(
                "wait() was already called on this fleet and its devices have stopped; create a new fleet for more jobs"
            )
        self._ask(more)
        self._tell_failed()
        self._session.is_started = True
        with FakeTensorMode():  # without a GPU, CUDA builds lose with their first thread what later traces use
            pass
        for worker in self._engine.workers:
            worker.start()
        with gate.released(), Show(self._progress, self.rows, self._engine.workers) as show:
            while any(worker.is_alive for worker in self._engine.workers):
                self._news.wait(_TICK_S)
                self._news.clear()
                self._ask(more)
                self._board.update()
                self._records.write_units(self._engine.workers)
                show.update()
                if any(worker.error is not None for worker in self._engine.workers):
                    with self._engine.condition:
                        self._engine.is_stopping = True
        self._board.write()
        self._records.write_units(self._engine.workers)
        for worker in self._engine.workers:
            if worker.error is not None:
                raise worker.error
        return self.results()

    def results(self) -> Results:
        """Return the results so far."""
        devices = [_statistics_of(worker, self._session.started_s) for worker in self._engine.workers]
        return Results(self._roster.results(), devices, self.run_dir, self._temporary)

    def rows(self) -> list[JobRow]:
        """Return what is known now about the jobs of this process."""
        return self._roster.rows()

    def sizes(self) -> dict[str, int]:
        """Return the bytes of parameters, gradients and optimizer state of the jobs that have started, by name."""
        return self._roster.sizes()

    @property
    def records(self) -> list[UnitRecord]:
        """Units that ran, on all devices."""
        return [record for worker in self._engine.workers for record in list(worker.log.records)]

    # The thread that waits

    def _tell_failed(self) -> None:
        names = self._roster.left_failed
        if names:
            warnings.warn(
                f"{len(names)} jobs failed in an earlier run and are left as they are ({', '.join(names[:5])}"
                f"{', ...' if len(names) > 5 else ''}): fleet.run(..., resume='failed') tries them again",
                JobResumedWarning,
                stacklevel=3,
            )

    def _ask(self, more: Callable[[], bool] | None) -> None:
        may_come = more is not None and more()
        with self._engine.condition:
            self._engine.accepts_jobs = may_come


@dataclass(slots=True)
class _Session:
    """Progress of a fleet: entered, started by `Fleet.wait`, ended."""

    taken: contextlib.ExitStack | None = None
    """Everything that ends with the fleet; set once the fleet is entered."""
    is_started: bool = False
    has_ended: bool = False
    started_s: float = 0.0

    def refuse_outside(self) -> None:
        """Raise ``ValueError`` unless the fleet is entered."""
        if self.taken is None or self.has_ended:
            raise ValueError(
                "a fleet must be entered before it can take and train jobs: with fleet.Fleet(devices, budget) as "
                "running: running.add(job); running.wait()"
            )


def _workers(
    engine: Engine, devices: Sequence[Device], budget: Budget, ablation: Ablation, *, verify: bool
) -> list[Worker]:
    """Return a worker per device, each with a waterfall over tiers that all of them share."""
    places = [torch.device(device.name) for device in devices]
    sizes = [parse_bytes(device.budget) for device in devices if device.budget is not None]
    # Heaps are trimmed now and then, because shards come and go all the time: mapping large blocks one by one, as
    # offloading does, cost 22% of a run in page faults, and doing nothing held 2 GiB for two devices of 96 MiB.
    keeper = HeapKeeper(max(_LEAST_SLACK_BYTES, 2 * sum(sizes)))
    turns = JobTurns(engine)
    workers = []
    for index, waterfall in enumerate(waterfalls_for(places, budget, verify=verify)):
        worker = Worker(
            index,
            places[index],
            waterfall,
            sizes[index],
            num_threads=devices[index].threads or 1,
            turns=turns,
            double_buffer=ablation.double_buffer,
            verifies=verify,
        )
        worker.keeper = keeper if places[index].type == "cpu" else None
        workers.append(worker)
    return workers


def _close(waterfalls: Sequence[Waterfall]) -> None:
    for waterfall in waterfalls:
        waterfall.drain()
    for waterfall in waterfalls:
        waterfall.close()


def _statistics_of(worker: Worker, started_s: float) -> DeviceStatistics:
    tiers = worker.memory.waterfall.statistics()
    return DeviceStatistics(
        name=str(worker.device),
        wall_s=time.time() - started_s,
        compute_s=worker.log.busy.compute_s,
        recompute_s=worker.log.busy.recompute_s,
        stall_s=worker.log.busy.stall_s,
        num_units=worker.log.busy.num_units,
        peak_bytes=worker.memory.peak_bytes,
        measured_peak_bytes=worker.verifier.peak_bytes,
        budget_bytes=worker.memory.budget_bytes,
        parked_bytes=tiers.parked_bytes,
        fetched_bytes=tiers.fetched_bytes,
        written_to_disk_bytes=tiers.written_to_disk_bytes,
    )


class _LaneRates:
    """Bytes per second out and in for one of ``num_devices``, measured on first use."""

    def __init__(self, budget: Budget, num_devices: int):
        self._budget, self._num_devices = budget, num_devices

    def __call__(self) -> tuple[float, float]:
        out, back = self._of_all
        return out / self._num_devices, back / self._num_devices

    @cached_property
    def _of_all(self) -> tuple[float, float]:
        if self._budget.host_bytes is not None:
            return _HOST_RATE, _HOST_RATE
        if not self._budget.disk_bytes:
            return self._budget.tiers[0].rates_bytes_per_s()
        rates = [(rate.link, rate.bandwidth_bytes_per_s) for rate in bandwidths(next(iter(self._budget.disk_bytes)))]
        return (
            min(rate for link, rate in rates if link.target == DISK),
            min(rate for link, rate in rates if link.source == DISK),
        )


class _TemporaryFolder:
    """A folder that is deleted when its last user is gone."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="penstock-fleet-")
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
