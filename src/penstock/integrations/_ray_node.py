"""A node of a fleet on Ray: an actor that owns a machine's devices and runs an ordinary `Fleet` on them.

The driver writes a *lease* for each actor, a file in the shared folder. An actor that does not find it is not on that
folder, and does not begin. An actor whose lease disappears, or whose Ray node dies, ends at once, since its jobs now
belong to others.
"""

import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.fleet import DeviceStatistics, Fleet, Job, JobRow, JobState

_WATCH_S = 0.5

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of a job on this node."""

    name: str
    """Name of the job."""
    state: JobState | None
    """State of the job; ``None`` if it was released to continue elsewhere."""
    losses: tuple[float, ...] = ()
    """Losses, one per optimizer step."""
    validations: tuple[Metrics, ...] = ()
    """Metrics, one dict per validation."""
    error: str | None = None
    """The error with which it failed."""
    seconds_per_step: float = 0.0
    """Seconds that the units of one step took."""
    checkpoint: Path | None = None
    """Path of its last checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A node's report to the driver."""

    rows: tuple[JobRow, ...] = ()
    """The node's jobs as they are now."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the jobs that have begun."""
    endings: tuple[Ending, ...] = ()
    """Jobs that ended since the last report."""
    metrics: tuple[tuple[str, int, Metrics], ...] = ()
    """Metrics logged since the last report: job, step and values."""
    questions: tuple[tuple[str, int, Metrics], ...] = ()
    """Validations that wait for the stopper."""
    devices: tuple[DeviceStatistics, ...] = ()
    """Statistics of the devices since the node began."""


class NodeFleet:
    """The actor. Several of Ray's threads call its methods."""

    def begin(self, lease: Path, *, asks_stopper: bool, options: Mapping[str, Any]) -> int | None:
        """Make the fleet; return its host memory in bytes. Raises what `Fleet` raises for invalid options.

        Raises ``ValueError`` if the run's folder is not the driver's.
        """
        if not lease.is_file():
            raise ValueError(
                f"{lease.parent.parent} is not the same folder on all nodes: {os.uname().nodename} does not see what "
                "the driver wrote there; give a run_dir on a file system that all machines share"
            )
        self._lease = lease
        self._local = tempfile.TemporaryDirectory(prefix="penstock-node-")  # SQLite needs a local disk
        self._changed = threading.Condition()
        self._metrics: list[tuple[str, int, Metrics]] = []
        self._questions: list[tuple[str, int, Metrics]] = []
        self._verdicts: dict[tuple[str, int], bool | str] = {}
        self._endings: list[Ending] = []
        self._releasing: set[str] = set()
        self._has_news = self._is_closing = self._may_close = False
        self._reporting = threading.Lock()
        self._ready, self._ended = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._devices: tuple[DeviceStatistics, ...] = ()
        self._fleet = Fleet(
            **options,
            run_dir=self._local.name,
            jobs_dir=lease.parent.parent / "jobs",
            resume=True,
            trackers=[self],
            stopper=self._stops if asks_stopper else None,
            progress=None,
        )
        threading.Thread(target=self._watch, name="penstock lease", daemon=True).start()
        threading.Thread(target=self._train, name="penstock node", daemon=True).start()
        self._ready.wait()
        return self._fleet.host_bytes

    def add(self, name: str, packed: bytes, *, is_paused: bool) -> None:
        """Add a job. A job that cannot be unpickled here counts as failed."""
        from ray import cloudpickle

        if self._error is not None:
            return  # the next report raises the error
        try:
            self._fleet.add(cloudpickle.loads(packed))
            if is_paused:
                self._fleet.pause(name)
        except Exception as error:
            with self._changed:
                text = f"{type(error).__name__}: {error}"
                self._endings.append(Ending(name=name, state=JobState.FAILED, error=text))
            self._say()

    def ask(self, verb: str, name: str) -> str:
        """Pause, resume or stop a job, as the user asks. Returns why not, or an empty text."""
        with self._changed:
            if verb == "stop":
                self._releasing.discard(name)
        try:
            {"pause": self._fleet.pause, "resume": self._fleet.resume, "stop": self._fleet.stop}[verb](name)
        except (ValueError, KeyError) as error:
            return str(error)
        return ""

    def release(self, name: str) -> None:
        """Let the job leave after its current mini-batch, with a checkpoint; a report says when."""
        with self._changed:
            self._releasing.add(name)
        with suppress(ValueError):  # it is over already
            self._fleet.stop(name)

    def report(self, verdicts: Mapping[tuple[str, int], bool | str], timeout_s: float) -> Report:
        """Return a report once there is news, or after ``timeout_s``. Raises the error that ended the fleet, if any.

        ``verdicts`` are the stopper's, by job and step; a text is the error with which it failed.
        """
        with self._changed:
            self._verdicts.update(verdicts)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._has_news or self._is_closing, timeout=timeout_s)
            self._has_news = False
        with self._reporting:
            if self._error is not None:
                raise self._error
            return Report() if self._may_close else self._news()

    def _news(self) -> Report:
        rows = self._fleet.rows()
        endings = self._take_endings(rows)
        with self._changed:
            metrics, self._metrics = tuple(self._metrics), []
            questions, self._questions = tuple(self._questions), []
        return Report(
            rows=tuple(rows),
            sizes=self._fleet.sizes(),
            endings=endings,
            metrics=metrics,
            questions=questions,
            devices=self._fleet.results().devices,
        )

    def finish(self) -> tuple[DeviceStatistics, ...]:
        """End after the current mini-batches, with checkpoints; return the statistics of the devices."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        with self._reporting:
            self._may_close = True
        self._ended.wait()
        units = Path(self._local.name) / "units.jsonl"
        if units.is_file():
            shutil.copy(units, self._lease.with_suffix(".units.jsonl"))
        self._local.cleanup()
        return self._devices

    # The fleet's tracker and stopper; device threads call them

    def log(self, job: Job, step: int, metrics: Metrics) -> None:
        """Keep metrics for the driver's trackers."""
        with self._changed:
            self._metrics.append((job.name, step, dict(metrics)))

    def end(self, job: Job, state: JobState) -> None:  # noqa: ARG002  # the protocol's
        """Note that there is an ending to report."""
        self._say()

    def close(self) -> None:
        """Do nothing, since nothing is open."""

    def _stops(self, job: Job, step: int, metrics: Metrics) -> bool:
        with self._changed:
            self._questions.append((job.name, step, dict(metrics)))
        self._say()
        with self._changed:
            self._changed.wait_for(lambda: (job.name, step) in self._verdicts or self._is_closing)
            verdict = self._verdicts.pop((job.name, step), False)
            if verdict is True:
                self._releasing.discard(job.name)
        if isinstance(verdict, str):
            raise RuntimeError(f"the stopper failed: {verdict}")
        return verdict

    def _say(self) -> None:
        with self._changed:
            self._has_news = True
            self._changed.notify_all()

    def _take_endings(self, rows: list[JobRow]) -> tuple[Ending, ...]:
        over = [row.name for row in rows if JobState(row.state).is_over]
        results = self._fleet.results() if over else {}
        for name in over:
            found = results[name]
            with self._changed:
                is_released = name in self._releasing and found.state is JobState.STOPPED
                self._releasing.discard(name)
                self._endings.append(
                    Ending(
                        name=name,
                        state=None if is_released else found.state,
                        losses=found.losses,
                        validations=found.validations,
                        error=found.error,
                        seconds_per_step=found.seconds_per_step,
                        checkpoint=found.checkpoint,
                    )
                )
            self._fleet.forget(name)
        with self._changed:
            endings, self._endings = tuple(self._endings), []
        return endings

    # Threads of this node

    def _train(self) -> None:
        try:
            with self._fleet:
                self._ready.set()
                self._fleet.wait(self._may_come)
        except _Closed:
            pass
        except BaseException as error:
            self._error = error
        self._ready.set()
        self._ended.set()
        self._say()

    def _may_come(self) -> bool:
        if self._may_close:
            self._devices = self._fleet.results().devices
            raise _Closed
        return True

    def _watch(self) -> None:
        """End the process if its lease disappears or its Ray node, which is its parent process, dies."""
        parent = os.getppid()
        while not self._ended.wait(_WATCH_S):
            if os.getppid() != parent or not self._lease.exists():
                os._exit(1)


class _Closed(Exception):
    """The signal to the fleet's thread that the driver has closed it."""
