"""Records written and sent while a fleet runs: metrics and units as JSON lines, and calls of trackers.

A tracker that raises receives no further updates, and the user gets one warning. Training is not affected.
"""

import json
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from penstock.errors import TrackerWarning
from penstock.fleet._job import Job
from penstock.fleet._life import JobState
from penstock.fleet._unit_log import UnitRecord
from penstock.fleet._worker import Worker

_MOST_RECORDS = 100_000
"""Units of a device that stay in memory. The file has all of them."""


class Tracker(Protocol):
    """A receiver of metrics. One thread of the fleet calls it at a time."""

    def log(self, job: Job, step: int, metrics: Mapping[str, float]) -> None:
        """Receive the metrics of a step or a validation of a job."""

    def end(self, job: Job, state: JobState) -> None:
        """Learn that the job is over."""

    def close(self) -> None:
        """Learn that the fleet has ended."""


class Records:
    """The growing files of a run's folder, and the trackers."""

    def __init__(self, run_dir: Path, trackers: Sequence[Tracker], jobs_dir: str | Path | None = None):
        self._run_dir = run_dir
        self._jobs_dir = run_dir / "jobs" if jobs_dir is None else Path(jobs_dir)
        self._trackers = list(trackers)
        self._lock = threading.RLock()
        self._num_written: dict[int, int] = {}

    def folder(self, job: Job) -> Path:
        """Return the folder of everything that belongs to a job."""
        return self._jobs_dir / job.name

    def log(self, job: Job, step: int, metrics: Mapping[str, float]) -> None:
        """Write a line of metrics. If the disk is full, only this line is lost."""
        try:
            self.folder(job).mkdir(parents=True, exist_ok=True)
            with (self.folder(job) / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "time_s": time.time(), **metrics}) + "\n")
        except OSError as error:
            self._warn(f"metrics of job {job.name!r} could not be written: {error}")
        self._tell(lambda tracker: tracker.log(job, step, metrics))

    def end(self, job: Job, state: JobState, trace: str) -> None:
        """Record that the job is over. ``trace`` is the traceback if it failed."""
        if trace:
            try:
                self.folder(job).mkdir(parents=True, exist_ok=True)
                (self.folder(job) / "error.txt").write_text(trace)
            except OSError as error:
                self._warn(f"the traceback of job {job.name!r} could not be written: {error}")
        self._tell(lambda tracker: tracker.end(job, state))

    def write_units(self, workers: Sequence[Worker]) -> None:
        """Write the units that ran since the last call."""
        lines = []
        for worker in workers:
            fresh = worker.log.records[self._num_written.get(worker.index, 0) :]
            excess = max(0, len(worker.log.records) - _MOST_RECORDS)
            del worker.log.records[:excess]
            self._num_written[worker.index] = self._num_written.get(worker.index, 0) + len(fresh) - excess
            lines += [json.dumps({key: getattr(record, key) for key in UnitRecord.__slots__}) for record in fresh]
        if lines:
            try:
                with (self._run_dir / "units.jsonl").open("a") as file:
                    file.write("".join(line + "\n" for line in lines))
            except OSError as error:
                self._warn(f"the record of units (units.jsonl) could not be written: {error}")

    def close(self) -> None:
        """Tell the trackers that the fleet has ended."""
        self._tell(lambda tracker: tracker.close())

    def _tell(self, call: Callable[[Tracker], None]) -> None:
        with self._lock:
            for tracker in list(self._trackers):
                try:
                    call(tracker)
                except Exception as error:
                    self._trackers.remove(tracker)
                    self._warn(
                        f"{type(tracker).__name__} raised {type(error).__name__}: {error}. This tracker receives no "
                        "further updates"
                    )

    def _warn(self, message: str) -> None:
        warnings.warn(f"{message}. Training goes on.", TrackerWarning, stacklevel=4)
