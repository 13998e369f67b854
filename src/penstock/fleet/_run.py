"""`fleet.run` and `Fleet`: jobs, devices and a folder, put together; the only file that starts and ends things."""

import contextlib
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch

from penstock.arguments import checked
from penstock.fleet import _checkpoint
from penstock.fleet._devices import account_of, devices_of
from penstock.fleet._engine import Engine
from penstock.fleet._job import Ablation, Device, Job, JobSource
from penstock.fleet._life import JobRun, JobState
from penstock.fleet._records import Records, Tracker
from penstock.fleet._results import DeviceStatistics, JobResult, Results, stored_result
from penstock.fleet._schedulers import Scheduler, SchedulerName, scheduler_of
from penstock.fleet._state import Command, FleetState, JobRow
from penstock.fleet._training import Training
from penstock.fleet._upkeep import Stopper, Upkeep
from penstock.fleet._worker import UnitRecord, Worker, trains_jobs
from penstock.links import DISK
from penstock.probe import bandwidths, can_record, record_memory
from penstock.tiers import (
    Budget,
    Charges,
    DiskSpec,
    Footprint,
    HeapKeeper,
    Size,
    gate,
    trim_freed_memory,
    waterfalls_for,
)
from penstock.units import parse_bytes

_TICK_S = 0.1
_WRITE_S = 0.5
_WAITS_S = 1.0
"""A job that is between two turns for so long is shown as one that waits."""
_HOST_RATE = 4e9
_LEAST_SLACK_BYTES = 512 * 2**20
"""That heaps of CPU devices may grow by, beyond what is alive, before they are trimmed."""
_COPIES = 5
"""Times a checkpoint is copied that goes meanwhile."""
_SWITCH_S = 5e-4
"""Python's threads change places that often at most: a device's thread must not wait 5 ms for the interpreter."""


@checked("penstock.fleet.run(jobs, devices=['cuda:0'], budget='40GiB')")
def run(
    jobs: Iterable[Job],
    devices: Sequence[str | torch.device | Device] | None = None,
    budget: Size | Budget | None = None,
    **options: Any,  # those of Fleet
) -> Results:
    """Trains all jobs and returns what came of them. Options are those of `Fleet`.

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
    >>> results = fleet.run([job], devices=["cpu"], budget="64MiB", host_budget="64MiB", progress=None)
    >>> results["a line"].losses[-1] < 1e-4
    True
    """
    jobs = list(jobs)
    if not jobs:
        raise ValueError("`jobs` must have at least one job, got none: fleet.run([job], devices=['cuda:0'])")
    with Fleet(devices, budget, **options) as made:
        for job in jobs:
            made.add(job)
        return made.wait()


class Fleet:
    """Devices that train jobs, more of which may come while it runs. ``with Fleet(...) as fleet: fleet.add(job)``.

    ``devices``: names or `Device`s, by default all accelerators, else one CPU device. ``budget``: bytes of true peak
    per device. ``host_budget`` and ``disk``: where jobs are while they are not on a device; host memory fills first. By
    default host memory takes up to 60% of what is free, if no disk is given. ``run_dir``: folder of checkpoints,
    metrics and state, on a local disk; by default a temporary one that goes with the results. ``jobs_dir``: folder of
    checkpoints and metrics, if they are to be apart from it. ``resume=True`` goes on with what an earlier process left
    there; otherwise a folder with a fleet in it is refused. ``scheduler``: which job a free device takes; by default
    all have equal turns, see `Scheduler`. ``stopper``: sees every validation and may stop the job.
    ``checkpoint_every``: steps between checkpoints of a job; by default ten minutes. ``keep``: checkpoints kept per
    job. ``trackers``: where metrics go beside the folder. ``progress``: ``"auto"`` shows a live table on a terminal and
    lines elsewhere, ``None`` nothing. ``verify=True`` checks a checksum on every fetch from disk and measures the
    memory of every unit, one at a time.

    Raises ``ValueError`` or ``TypeError`` for settings that cannot work, and what `tiers` raises for its directories.
    """

    @checked("fleet.Fleet(['cuda:0'], '40GiB')", checkpoint_every=1, keep=1)
    def __init__(
        self,
        devices: Sequence[str | torch.device | Device] | None = None,
        budget: Size | Budget | None = None,
        *,
        host_budget: Size | None = None,
        disk: DiskSpec = None,
        run_dir: str | Path | None = None,
        jobs_dir: str | Path | None = None,
        resume: bool = False,
        scheduler: SchedulerName | Scheduler = "fair",
        stopper: Stopper | None = None,
        checkpoint_every: int | None = None,
        keep: int = 1,
        trackers: Sequence[Tracker] = (),
        progress: str | None = "auto",
        verify: bool = False,
        ablation: Ablation | None = None,
    ):
        self._devices = devices_of(devices)
        self._budget = account_of(self._devices, budget, host_budget, disk)
        self._charges = Charges(budget if isinstance(budget, Budget) else None, "fleet")
        sizes = [parse_bytes(one.budget) for one in self._devices if one.budget is not None]
        self._progress = progress
        self._resume = resume
        self._temporary = None if run_dir is not None else _TemporaryFolder()
        self.run_dir = Path(self._temporary.path if self._temporary is not None else str(run_dir))
        """Where checkpoints, metrics and the fleet's state are."""
        self.host_bytes = None if self._budget.disk_bytes or self._budget.tiers else self._budget.host_bytes
        """Bytes that jobs may take while they are not on a device; ``None``: a disk takes what host memory cannot."""
        self.state = FleetState(self.run_dir)
        self.state.refuse_strangers(resume=resume)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._records = Records(self.run_dir, trackers, jobs_dir)
        self._news = threading.Event()
        self._upkeep = Upkeep(
            self._records, stopper, every=checkpoint_every, keep=keep, resume=resume, ended=self._news.set
        )
        self._ablation = ablation or Ablation()
        self._rates: tuple[float, float] | None = None
        self._sources: dict[str, JobSource] = {}
        self._over: dict[str, JobResult] = {}
        self._known: dict[str, JobRow] | None = None
        """Jobs of an earlier process, by name; ``None`` until the fleet is entered."""
        self._has_ended = False
        self._num_places = 0
        self._engine = Engine(
            scheduler_of(scheduler),
            self._upkeep,
            budget_bytes=min(sizes),
            sharp=self._ablation.sharp,
            recompute=self._ablation.recompute,
            vertical=self._ablation.vertical,
            lane_rate=self._lane_rate,
        )
        self._engine.workers = self._make_workers(sizes, verify)
        self._is_started = False
        self._written_s = 0.0

    def _make_workers(self, sizes: Sequence[int], verify: bool) -> list[Worker]:
        """A thread and a waterfall per device, over tiers that all share."""
        places = [torch.device(one.name) for one in self._devices]
        self._waterfalls = waterfalls_for(places, self._budget, verify=verify)
        workers, keeper = [], HeapKeeper(max(_LEAST_SLACK_BYTES, 2 * sum(sizes)))
        for index, (one, size) in enumerate(zip(self._devices, sizes, strict=True)):
            worker = Worker(
                index,
                places[index],
                self._waterfalls[index],
                size,
                num_threads=one.threads or 1,
                take=self._engine.take,
                look_ahead=self._engine.look_ahead,
                double_buffer=self._ablation.double_buffer,
            )
            worker.measuring, worker.verifies = self._engine.pilot_lock, verify
            worker.keeper = keeper if places[index].type == "cpu" else None
            workers.append(worker)
        return workers

    def __enter__(self) -> Self:
        if trains_jobs():
            raise ValueError("a fleet cannot train inside of a job of another fleet, whose device would wait for it")
        if self._known is not None:
            raise ValueError(
                "this fleet was entered before; make another: with fleet.Fleet(devices, budget) as running:"
            )
        sizes = [worker.memory.budget_bytes for worker in self._engine.workers]
        with contextlib.ExitStack() as stack:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            stack.callback(sys.setswitchinterval, sys.getswitchinterval())
            stack.callback(trim_freed_memory)
            stack.callback(self._charges.give_back)
            stack.callback(self._close_waterfalls)
            self._charges.enter(Footprint(step_bytes=max(sizes), runs_beside=True))
            self.state.create()
            self._known = {row.name: row for row in self.state.jobs()} if self._resume else {}
            sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
            self._started_s = time.time()
            if can_record("cpu"):
                with record_memory("cpu", this_thread_only=True):  # PyTorch's profiler begins; pilots are other threads
                    pass
            self._taken = stack.pop_all()
        return self

    def _close_waterfalls(self) -> None:
        for waterfall in self._waterfalls:
            waterfall.drain()
        for waterfall in self._waterfalls:
            waterfall.close()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._has_ended = True
        with contextlib.ExitStack() as stack:
            stack.callback(self.state.say_ended)
            stack.callback(self._write_state)  # late, since the folder may be gone
            stack.callback(self._records.close)
            stack.enter_context(self._taken)
            with self._engine.condition:
                self._engine.is_stopping = True
                self._engine.condition.notify_all()
            if self._is_started:
                with gate.released():  # a worker may wait to trace
                    for worker in self._engine.workers:
                        worker.join()

    @checked("running.add(job)")
    def add(self, job: Job, source: JobSource | None = None) -> None:
        """Another job. Raises ``ValueError`` if one has its name already, and outside of ``with``."""
        before = self._known_before()
        with self._engine.condition:
            if job.name in self:
                raise ValueError(f"two jobs are called {job.name!r}; a name is a job's own: Job(name='lr=3e-4', ...)")
            place, self._num_places = self._num_places, self._num_places + 1
            if source is not None:
                self._sources[job.name] = source
            known = before.get(job.name)
            if not self._resume and _checkpoint.latest(self._records.folder(job)) is not None:
                raise ValueError(
                    f"{self._records.folder(job)} holds checkpoints of such a job already; go on with them, "
                    "fleet.run(..., resume=True), or give another run_dir"
                )
            if known is not None and JobState(known.state).is_over:
                state, folder = JobState(known.state), self._records.folder(job)
                self._over[job.name] = stored_result(job, folder, state, known.error, known.seconds_per_step)
                return
            run = JobRun(job=job, place=place, training=Training(job))
            if known is not None and known.state == JobState.PAUSED.value:
                run.state = JobState.PAUSED
            self._engine.add(run)

    def _known_before(self) -> dict[str, JobRow]:
        if self._known is None or self._has_ended:
            raise ValueError(
                "a fleet takes and trains jobs while it is entered: with fleet.Fleet(devices, budget) as running: "
                "running.add(job); running.wait()"
            )
        return self._known

    def __contains__(self, name: object) -> bool:
        """Whether a job has that name."""
        return name in self._over or any(run.job.name == name for run in self._engine.runs)

    def pause(self, name: str) -> None:
        """The job leaves its device after the mini-batch at hand, until `resume`."""
        self._want(name, JobState.PAUSED)

    def resume(self, name: str) -> None:
        """A paused job goes on."""
        self._want(name, JobState.RUNNING)

    def stop(self, name: str) -> None:
        """The job ends after the optimizer step at hand, with a checkpoint."""
        self._want(name, JobState.STOPPED)

    def forget(self, name: str) -> None:
        """A job that is over leaves the fleet: its name is free again, its folder stays. ``ValueError`` for another."""
        run = self._find(name)
        with self._engine.condition:
            if not run.state.is_over:
                raise ValueError(f"job {name!r} is {run.state.value}; stop it first")
            self._engine.runs.remove(run)

    def clone(self, name: str, new_name: str, *, warm: bool = False, **changes: Any) -> None:  # any: hyperparameters
        """A new job like ``name`` with other hyperparameters; ``warm`` begins with its last checkpoint's parameters.

        A job that was added with its `JobSource` takes that function's parameters as ``changes``; another takes
        fields of `Job`. Raises ``ValueError`` or ``TypeError`` for changes that it cannot have.
        """
        over = self._over.get(name)
        original = self._find(name).job if over is None else over.job
        if new_name in self:
            raise ValueError(f"a job is called {new_name!r} already; a clone needs a name of its own")
        source = self._sources.get(name)
        if source is not None:
            parameters = {**source.parameters, **changes}
            job = source.make(**parameters).with_changes(name=new_name)
            source = replace(source, parameters=parameters)
        else:
            job = original.with_changes(name=new_name, **changes)
        if warm:
            self._copy_checkpoint(self._records.folder(original), self._records.folder(job) / "origin", name)
        self.add(job, source)

    def _copy_checkpoint(self, folder: Path, origin: Path, name: str) -> None:
        """The newest, whole or not at all: the source's own goes when its next one is there."""
        for attempt in range(_COPIES):
            path = _checkpoint.latest(folder)
            if path is None:
                raise ValueError(f"job {name!r} has no checkpoint yet to begin a clone from; clone it cold, or later")
            draft = origin.with_name(f"{origin.name}-draft")
            shutil.rmtree(draft, ignore_errors=True)
            try:
                shutil.copytree(path, draft / path.name)
                if not path.is_dir():
                    raise FileNotFoundError(f"{path} went while it was copied")
            except (OSError, shutil.Error):
                if path.is_dir() or attempt == _COPIES - 1:
                    raise
                continue
            shutil.rmtree(origin, ignore_errors=True)
            draft.rename(origin)
            return

    def wait(self, more: Callable[[], bool] | None = None) -> Results:
        """Trains until every job is over and returns the results. ``KeyboardInterrupt`` lets mini-batches at hand end.

        ``more`` is asked by this thread, at first, whenever a job has ended and every 0.1 s, whether jobs may still
        come; while it says so, devices wait for them. It may `add` some itself. Raises what ``more`` raises, and what
        a device's thread died of, if one did.
        """
        from torch._subclasses.fake_tensor import FakeTensorMode

        from penstock.fleet._show import Show

        self._known_before()
        if self._is_started:
            raise ValueError("this fleet waited before, and its devices have ended; make another for more jobs")
        self._ask(more)
        self._is_started = True
        with FakeTensorMode():  # without a GPU, CUDA builds leave with the first thread what later traces use
            pass
        for worker in self._engine.workers:
            worker.start()
        with gate.released(), Show(self._progress, self.rows, self._engine.workers) as show:
            while any(worker.is_alive for worker in self._engine.workers):
                self._news.wait(_TICK_S)
                self._news.clear()
                self._ask(more)
                self._obey()
                if time.time() - self._written_s > _WRITE_S:
                    self._write_state()
                self._records.write_units(self._engine.workers)
                show.update()
                if any(worker.error is not None for worker in self._engine.workers):
                    with self._engine.condition:
                        self._engine.is_stopping = True
        self._write_state()
        self._records.write_units(self._engine.workers)
        for worker in self._engine.workers:
            if worker.error is not None:
                raise worker.error
        return self.results()

    def results(self) -> Results:
        """As of now."""
        found = [self._result_of(run) for run in self._engine.runs] + list(self._over.values())
        order = {row.name: row.place for row in self.state.jobs()}
        found.sort(key=lambda one: order.get(one.name, len(order)))
        return Results(
            found, [self._statistics_of(worker) for worker in self._engine.workers], self.run_dir, self._temporary
        )

    def rows(self) -> list[JobRow]:
        """What is known of the jobs of this process now."""
        with self._engine.condition:
            found = [self._row_of(run) for run in self._engine.runs]
        known = self._known or {}
        return sorted([*found, *(known[name] for name in self._over)], key=lambda row: row.place)

    def sizes(self) -> dict[str, int]:
        """Bytes of parameters, gradients and optimizer state of the jobs that have begun, by name."""
        with self._engine.condition:
            return {run.job.name: run.size_bytes for run in self._engine.runs if run.size_bytes}

    @property
    def records(self) -> list[UnitRecord]:
        """Units that ran, on all devices."""
        return [record for worker in self._engine.workers for record in list(worker.records)]

    # The thread that waits

    def _ask(self, more: Callable[[], bool] | None) -> None:
        may_come = more is not None and more()
        with self._engine.condition:
            self._engine.accepts_jobs = may_come

    def _obey(self) -> None:
        for command in self.state.commands():
            try:
                self._carry_out(command)
            except Exception as error:  # whatever a user's function raises: the fleet goes on
                self.state.answer(command.id, str(error) or type(error).__name__)
            else:
                self.state.answer(command.id, "")

    def _carry_out(self, command: Command) -> None:
        if command.verb == "clone":
            arguments = dict(command.arguments)
            if command.job not in self._sources:
                raise ValueError(
                    f"job {command.job!r} was not given by import path, so another process cannot make one like it; "
                    "use fleet.clone(...) where it was made"
                )
            self.clone(
                command.job, arguments["name"], warm=arguments.get("warm", False), **arguments.get("changes", {})
            )
            return
        verbs = {"pause": self.pause, "resume": self.resume, "stop": self.stop}
        if command.verb not in verbs:
            raise ValueError(f"{command.verb!r} is none of pause, resume, stop, clone")
        verbs[command.verb](command.job)

    def _want(self, name: str, state: JobState) -> None:
        run = self._find(name)
        with self._engine.condition:
            if run.state.is_over:
                raise ValueError(f"job {name!r} is {run.state.value} already")
            run.wanted = state
            self._engine.condition.notify_all()

    def _find(self, name: str) -> JobRun:
        with self._engine.condition:
            for run in self._engine.runs:
                if run.job.name == name:
                    return run
            raise ValueError(
                f"no job is called {name!r}; there are {', '.join(run.job.name for run in self._engine.runs)}"
            )

    def _write_state(self) -> None:
        self._written_s = time.time()
        self.state.say_alive()
        self.state.write(self.rows())

    def _row_of(self, run: JobRun) -> JobRow:
        training, source = run.training, self._sources.get(run.job.name)
        known = (self._known or {}).get(run.job.name)
        is_fresh = run.is_prepared or known is None
        return JobRow(
            name=run.job.name,
            place=run.place,
            state=self._shown_state(run).value,
            step=training.position.step if is_fresh or known is None else known.step,
            num_steps=run.num_steps or (known.num_steps if known else run.job.steps or 0),
            epoch=training.position.epoch,
            loss=training.losses[-1] if training.losses else (known.loss if known and not is_fresh else None),
            validation=dict(training.validations[-1]) if training.validations else {},
            device="" if run.home is None else f"{run.home.device} #{run.home.index}",
            seconds_per_step=run.seconds_per_step,
            error=run.error,
            tags=dict(run.job.tags),
            source=None if source is None else {"path": source.path, "parameters": dict(source.parameters)},
            updated_s=time.time(),
        )

    def _shown_state(self, run: JobRun) -> JobState:
        waits = run.state is JobState.RUNNING and not run.is_taken
        return JobState.WAITING if waits and self._engine.now_s - run.since_s >= _WAITS_S else run.state

    def _result_of(self, run: JobRun) -> JobResult:
        return JobResult(
            job=run.job,
            state=run.state,
            losses=tuple(run.training.losses),
            validations=tuple(run.training.validations),
            error=run.error,
            seconds_per_step=run.seconds_per_step,
            checkpoint=_checkpoint.latest(self._records.folder(run.job)),
        )

    def _statistics_of(self, worker: Worker) -> DeviceStatistics:
        tiers = worker.memory.waterfall.statistics()
        return DeviceStatistics(
            name=str(worker.device),
            wall_s=time.time() - self._started_s,
            compute_s=worker.busy.compute_s,
            recompute_s=worker.busy.recompute_s,
            stall_s=worker.busy.stall_s,
            num_units=worker.busy.num_units,
            peak_bytes=worker.memory.peak_bytes,
            measured_peak_bytes=worker.measured_peak_bytes,
            budget_bytes=worker.memory.budget_bytes,
            parked_bytes=tiers.parked_bytes,
            fetched_bytes=tiers.fetched_bytes,
            written_to_disk_bytes=tiers.written_to_disk_bytes,
        )

    def _lane_rate(self) -> tuple[float, float]:
        """Bytes per second out and in, for one device."""
        if self._rates is None:
            self._rates = (_HOST_RATE, _HOST_RATE)
            if self._budget.host_bytes is None and self._budget.disk_bytes:
                rates = [
                    (one.link, one.bandwidth_bytes_per_s) for one in bandwidths(next(iter(self._budget.disk_bytes)))
                ]
                self._rates = (
                    min(rate for link, rate in rates if link.target == DISK),
                    min(rate for link, rate in rates if link.source == DISK),
                )
            elif self._budget.host_bytes is None:
                self._rates = self._budget.tiers[0].rates_bytes_per_s()
            self._rates = self._rates[0] / len(self._devices), self._rates[1] / len(self._devices)
        return self._rates


class _TemporaryFolder:
    """A folder that goes when the last who needs it has gone."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="penstock-fleet-")
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
