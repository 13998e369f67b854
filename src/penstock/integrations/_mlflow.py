"""A tracker that logs a fleet's metrics as runs of an MLflow experiment."""

import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.arguments import checked
from penstock.fleet import Job, JobState

if TYPE_CHECKING:
    from mlflow.entities import Metric as _Metric

_MOST_WAITING = 200
"""Number of metrics per request. A request is a round trip to a server, and other devices may have to log meanwhile."""
_STATUS = {JobState.DONE: "FINISHED", JobState.FAILED: "FAILED", JobState.STOPPED: "KILLED"}


class MLflowTracker:
    """A `fleet.Tracker` with one MLflow run per job in ``experiment``, which is created if there is none.

    Tags become parameters, and metrics have their step. A run ends as ``FINISHED``, ``FAILED`` or ``KILLED``. The last
    means stopped, or not over when the fleet ended; the tag ``penstock.state`` says which. Metrics are sent with each
    validation, at a job's end, and otherwise some hundred at once. A fleet that is resumed makes new runs. MLflow's
    active run is not touched.

    ``tracking_uri`` is a server, or ``"sqlite:///mlflow.db"``, which needs SQLAlchemy and Alembic (Optuna brings both),
    or ``None`` for MLflow's default. Raises ``ImportError`` without MLflow, and what MLflow raises for its URI.

    ``fleet.run(jobs, trackers=[MLflowTracker("learning rates")])``
    """

    @checked("MLflowTracker('learning rates')")
    def __init__(self, experiment: str, tracking_uri: str | None = None):
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
        except ImportError as error:
            raise ImportError("MLflowTracker needs mlflow-skinny: pip install 'penstock[mlflow]'") from error
        self._metric, self._param = Metric, Param
        self._client = MlflowClient(tracking_uri=tracking_uri)
        existing = self._client.get_experiment_by_name(experiment)
        self._experiment_id = self._client.create_experiment(experiment) if existing is None else existing.experiment_id
        self._runs: dict[str, str] = {}
        self._waiting: dict[str, list[_Metric]] = {}

    @checked("tracker.log(job, 10, {'loss': 0.5})")
    def log(self, job: Job, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics at ``step``, and send them from time to time."""
        run = self._run_of(job)
        waiting, now_ms = self._waiting[run], int(time.time() * 1000)
        waiting += [self._metric(_key(key), value, now_ms, step) for key, value in metrics.items()]
        if len(waiting) >= _MOST_WAITING or any(key.startswith("validation/") for key in metrics):
            self._send(run)

    @checked("tracker.end(job, JobState.DONE)")
    def end(self, job: Job, state: JobState) -> None:
        """End the job's run."""
        run = self._run_of(job)
        del self._runs[job.name]
        self._end(run, state.value, _STATUS[state])

    def close(self) -> None:
        """End the runs of jobs that are not over."""
        for run in self._runs.values():
            self._end(run, "interrupted", "KILLED")
        self._runs.clear()

    def _run_of(self, job: Job) -> str:
        run = self._runs.get(job.name)
        if run is None:
            run = self._client.create_run(self._experiment_id, run_name=job.name).info.run_id
            self._runs[job.name], self._waiting[run] = run, []
            for key, value in job.tags.items():
                self._client.log_param(run, _key(key), value)
        return run

    def _send(self, run: str) -> None:
        waiting, self._waiting[run] = self._waiting[run], []
        if waiting:
            self._client.log_batch(run, metrics=waiting)

    def _end(self, run: str, state: str, status: str) -> None:
        self._send(run)
        del self._waiting[run]
        self._client.set_tag(run, "penstock.state", state)
        self._client.set_terminated(run, status)


def _key(name: str) -> str:
    """Return a name with only the characters that MLflow takes: letters, digits, blanks and ``_-./:``."""
    return re.sub(r"[^\w\-./: ]", "_", name)
