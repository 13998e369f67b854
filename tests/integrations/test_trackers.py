"""Trackers: every loss arrives, and what became of each job."""

import sys

import numpy as np
import pytest
import torch

from penstock import fleet
from penstock.integrations import MLflowTracker, TensorBoardTracker

OPTIONS = {"budget": "64MiB", "host": "64MiB", "progress": None}
X = torch.linspace(-1, 1, 16).reshape(8, 2)
Y = X @ torch.tensor([[2.0], [-1.0]])

pytestmark = pytest.mark.usefixtures("one_thread")


def job_of(name, **changes):
    return fleet.Job(
        name=name,
        model=lambda: torch.nn.Linear(2, 1),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        **{
            "data": lambda: [(X, Y)],
            "loss": lambda model, batch: ((model(batch[0]) - batch[1]) ** 2).mean(),
            "steps": 10,
            "validation": lambda: [(X, Y)],
            "evaluate_every": 5,
            "tags": {"lr": 0.1, "a|b": "c\nd"},
            **changes,
        },
    )


def data_that_breaks():
    yield X, Y
    yield X, Y
    raise OSError("the disk is gone")


def jobs():
    """One that ends, one that is stopped, one that fails in training, and one that fails before it."""
    return [
        job_of("done"),
        job_of("stopped"),
        job_of("failed", data=data_that_breaks),
        job_of("never begun", data=lambda: 1 / 0, tags={}),
    ]


def run(tracker):
    return fleet.run(
        jobs(), ["cpu", "cpu"], stopper=lambda job, *_: job.name == "stopped", trackers=[tracker], **OPTIONS
    )


def events_of(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return events


def text_of(events, tag):
    [event] = events.Tensors(f"{tag}/text_summary")
    return event.tensor_proto.string_val[0].decode()


def test_tensorboard_has_every_loss_and_what_became_of_each_job(tmp_path):
    pytest.importorskip("tensorboard")
    found = run(TensorBoardTracker(tmp_path / "runs"))
    assert sorted(one.name for one in (tmp_path / "runs").iterdir()) == sorted(found)
    for name, one in found.items():
        events = events_of(tmp_path / "runs" / name)
        assert text_of(events, "state") == one.state.value
        if not one.losses:
            continue
        steps = [(event.step, event.value) for event in events.Scalars("loss")]
        assert steps == [(step, np.float32(loss)) for step, loss in enumerate(one.losses, start=1)]
        assert "| lr | 0.1 |\n| a\\|b | c d |" in text_of(events, "tags")
    validations = [(one.step, one.value) for one in events_of(tmp_path / "runs" / "done").Scalars("validation/loss")]
    assert validations == [(one["step"], np.float32(one["loss"])) for one in found["done"].validations]
    assert len(found["stopped"].losses) == 5 and len(found["failed"].losses) == 2
    assert events_of(tmp_path / "runs" / "done").Scalars("lr")[0].value == np.float32(0.1)


def test_tensorboard_hides_what_came_after_the_checkpoint_of_a_resumed_job(tmp_path):
    pytest.importorskip("tensorboard")
    job = job_of("a")
    for steps in (range(1, 7), range(4, 9)):
        tracker = TensorBoardTracker(tmp_path)
        for step in steps:
            tracker.log(job, step, {"loss": float(step + 10 * steps.start)})
        tracker.close()
    values = {one.step: one.value for one in events_of(tmp_path / "a").Scalars("loss")}
    assert values == {1: 11, 2: 12, 3: 13, 4: 44, 5: 45, 6: 46, 7: 47, 8: 48}


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
    found = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return client, {one.info.run_name: one for one in found}


def history_of(client, run, key):
    return sorted((one.step, one.value) for one in client.get_metric_history(run.info.run_id, key))


STATUS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED", "never begun": "FAILED"}


def test_mlflow_has_every_loss_and_what_became_of_each_job(mlflow_uri):
    found = run(MLflowTracker("rates", tracking_uri=mlflow_uri))
    client, runs = runs_of(mlflow_uri, "rates")
    assert {name: one.info.status for name, one in runs.items()} == STATUS
    for name, one in found.items():
        run_of = runs[name]
        assert run_of.data.tags["penstock.state"] == one.state.value
        if one.losses:
            assert history_of(client, run_of, "loss") == list(enumerate(one.losses, start=1))
            assert run_of.data.params["lr"] == "0.1" and "a_b" in run_of.data.params
    validations = [(one["step"], one["loss"]) for one in found["done"].validations]
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
    assert {name: one.info.status for name, one in runs.items()} == {"a": "FINISHED", "b": "KILLED"}
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


@pytest.mark.parametrize(
    ("module", "make", "extra"),
    [
        ("torch.utils.tensorboard", lambda: TensorBoardTracker("runs"), "fleet"),
        ("mlflow", lambda: MLflowTracker("rates"), "mlflow"),
    ],
)
def test_without_the_library_the_extra_is_named(module, make, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"penstock\[{extra}\]"):
        make()
