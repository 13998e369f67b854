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

from penstock.fleet import DeviceStatistics, Fleet, JobRow, JobState
from penstock.integrations._ray_outbox import Ending, Metrics, Outbox

_WATCH_S = 0.5


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
        self._outbox = Outbox()
        self._may_close = False
        self._reporting = threading.Lock()
        self._ready, self._ended = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._devices: tuple[DeviceStatistics, ...] = ()
        self._fleet = Fleet(
            **options,
            run_dir=self._local.name,
            jobs_dir=lease.parent.parent / "jobs",
            resume=True,
            trackers=[self._outbox],
            stopper=self._outbox.stops if asks_stopper else None,
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
            self._outbox.fail(name, f"{type(error).__name__}: {error}")

    def ask(self, verb: str, name: str) -> str:
        """Pause, resume or stop a job, as the user asks. Returns why not, or an empty text."""
        if verb == "stop":
            self._outbox.keep(name)
        try:
            {"pause": self._fleet.pause, "resume": self._fleet.resume, "stop": self._fleet.stop}[verb](name)
        except (ValueError, KeyError) as error:
            return str(error)
        return ""

    def release(self, name: str) -> None:
        """Let the job leave after its current mini-batch, with a checkpoint; a report says when."""
        self._outbox.release(name)
        with suppress(ValueError):  # it is over already
            self._fleet.stop(name)

    def report(self, verdicts: Mapping[tuple[str, int], bool | str], timeout_s: float) -> Report:
        """Return a report once there is news, or after ``timeout_s``. Raises the error that ended the fleet, if any.

        ``verdicts`` are the stopper's, by job and step; a text is the error with which it failed.
        """
        self._outbox.wait(verdicts, timeout_s)
        with self._reporting:
            if self._error is not None:
                raise self._error
            return Report() if self._may_close else self._news()

    def _news(self) -> Report:
        rows = self._fleet.rows()
        endings = self._take_endings(rows)
        metrics, questions = self._outbox.take_logged()
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
        self._outbox.close_down()
        with self._reporting:
            self._may_close = True
        self._ended.wait()
        units = Path(self._local.name) / "units.jsonl"
        if units.is_file():
            shutil.copy(units, self._lease.with_suffix(".units.jsonl"))
        self._local.cleanup()
        return self._devices

    def _take_endings(self, rows: list[JobRow]) -> tuple[Ending, ...]:
        over = [row.name for row in rows if JobState(row.state).is_over]
        results = self._fleet.results() if over else {}
        for name in over:
            self._outbox.note_ending(name, results[name])
            self._fleet.forget(name)
        return self._outbox.take_endings()

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
        self._outbox.say()

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
