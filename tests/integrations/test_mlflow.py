"""Runs of an MLflow experiment: every loss, and the end of each job."""

import sys

import pytest
from tracked import job_of, run

from penstock import fleet
from penstock.integrations import MLflowTracker

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def mlflow_uri(tmp_path, monkeypatch):
    """Files, which this version takes only when asked to; a database would be made anew for each test, in seconds."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    pytest.importorskip("mlflow")
    return f"file:{tmp_path / 'mlruns'}"


def runs_of(uri, experiment):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    runs = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return client, {job_run.info.run_name: job_run for job_run in runs}


def history_of(client, run, key):
    return sorted((metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, key))


STATUS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED", "never begun": "FAILED"}


def test_mlflow_has_every_loss_and_what_became_of_each_job(mlflow_uri):
    results = run(MLflowTracker("rates", tracking_uri=mlflow_uri))
    client, runs = runs_of(mlflow_uri, "rates")
    assert {name: job_run.info.status for name, job_run in runs.items()} == STATUS
    for name, result in results.items():
        run_of = runs[name]
        assert run_of.data.tags["penstock.state"] == result.state.value
        if result.losses:
            assert history_of(client, run_of, "loss") == list(enumerate(result.losses, start=1))
            assert run_of.data.params["lr"] == "0.1" and "a_b" in run_of.data.params
    validations = [(validation["step"], validation["loss"]) for validation in results["done"].validations]
    assert history_of(client, runs["done"], "validation/loss") == validations
    assert len(validations) == 2


def test_mlflow_takes_a_database_and_an_experiment_that_exists(tmp_path, mlflow_uri):
    pytest.importorskip("sqlalchemy")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    for name in ("a", "b"):
        tracker = MLflowTracker("rates", tracking_uri=uri)
        tracker.log(job_of(name), 1, {"loss": 0.5})
        if name == "a":
            tracker.end(job_of(name), fleet.JobState.DONE)
        tracker.close()
    client, runs = runs_of(uri, "rates")
    assert {name: job_run.info.status for name, job_run in runs.items()} == {"a": "FINISHED", "b": "KILLED"}
    assert runs["b"].data.tags["penstock.state"] == "interrupted"
    assert history_of(client, runs["b"], "loss") == [(1, 0.5)]


def test_mlflow_sends_many_metrics_at_once(mlflow_uri, monkeypatch):
    from mlflow import MlflowClient

    sent = []
    log_batch = MlflowClient.log_batch

    def counted(self, run_id, metrics=(), **others):
        sent.append(len(metrics))
        return log_batch(self, run_id, metrics=metrics, **others)

    monkeypatch.setattr(MlflowClient, "log_batch", counted)
    tracker = MLflowTracker("rates", tracking_uri=mlflow_uri)
    for step in range(1, 151):
        tracker.log(job_of("a"), step, {"loss": 1.0, "lr": 0.1})
    assert sent == [200]
    tracker.log(job_of("a"), 150, {"validation/loss": 1.0})
    assert sent == [200, 101]
    tracker.end(job_of("a"), fleet.JobState.DONE)
    assert sent == [200, 101]


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ImportError, match=r"penstock\[mlflow\]"):
        MLflowTracker("rates")
