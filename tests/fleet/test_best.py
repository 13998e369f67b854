"""The best validation of a job: its checkpoint, and a job that is stopped once nothing better comes."""

import pytest
import torch
from fleet_jobs import train
from torch import nn

from penstock import fleet
from penstock.fleet import JobState
from penstock.fleet._life import num_since_best


class Line(nn.Module):
    """A weight that each step makes larger by 1."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x):
        return self.layer(x)


def line_job(name="line", far=5.0, **changes):
    """A job whose metric is least when the weight is ``far``."""
    settings = {
        "model": Line,
        "data": lambda: [torch.ones(1, 1)] * 4,
        "loss": lambda model, batch: -model(batch).sum(),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        "validation": lambda: [torch.ones(1, 1)],
        "metric": lambda model, batch: {
            "error": (model(batch) - far).square().sum(),
            "score": -(model(batch) - far).abs().sum(),
        },
        "evaluate_every": 1,
        "best": ("error", "min"),
        "steps": 12,
    }
    return fleet.Job(name=name, **{**settings, **changes})


def weight_of(model):
    return model.layer.weight.item()


@pytest.mark.parametrize("best", [("error", "min"), ("score", "max")])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_best_validation_is_kept_beside_the_last(tmp_path, best, accumulate):
    result = train([line_job(best=best, accumulate=accumulate)], run_dir=tmp_path)["line"]
    assert result.state is JobState.DONE
    assert weight_of(result.model()) == pytest.approx(12)
    assert weight_of(result.model(best=True)) == pytest.approx(5)
    assert len(list((tmp_path / "jobs" / "line" / "best").iterdir())) == 1


def test_at_ends_of_epochs_in_the_middle_of_a_step(tmp_path):
    job = line_job(evaluate_every=None, accumulate=3, steps=None, epochs=9)
    result = train([job], run_dir=tmp_path)["line"]
    assert weight_of(result.model(best=True)) == pytest.approx(5)


def test_a_job_stops_when_nothing_better_has_come_for_long_enough(tmp_path):
    result = train([line_job(patience=3)], run_dir=tmp_path)["line"]
    assert result.state is JobState.STOPPED
    assert len(result.losses) == 8
    assert weight_of(result.model(best=True)) == pytest.approx(5)
    unhurried = train([line_job(patience=8)], run_dir=tmp_path / "other")["line"]
    assert unhurried.state is JobState.DONE


@pytest.mark.parametrize("steps", [3, 6])
def test_a_job_that_resumes_knows_its_best(tmp_path, steps):
    train([line_job(steps=steps, patience=3)], run_dir=tmp_path)
    result = train([line_job(patience=3)], run_dir=tmp_path, resume=True)["line"]
    assert result.state is JobState.STOPPED
    assert len(result.losses) == 8
    assert weight_of(result.model(best=True)) == pytest.approx(5)
    again = train([line_job(patience=3)], run_dir=tmp_path, resume=True)["line"]
    assert weight_of(again.model(best=True)) == pytest.approx(5)


def test_patience_alone_looks_at_the_loss(tmp_path):
    job = line_job(metric=None, best=None, patience=2, loss=lambda model, batch: model(batch).sum())
    falling = train([job], run_dir=tmp_path / "falling")["line"]
    assert falling.state is JobState.DONE
    with pytest.raises(ValueError, match=r"no checkpoint of its best validation.*Job\(best="):
        falling.model(best=True)


def test_a_metric_that_is_not_there_is_named():
    result = train([line_job(best=("accuracy", "max"))])["line"]
    assert result.state is JobState.FAILED
    assert "its validations have no 'accuracy', but 'error', 'score'; name the metric" in result.error


@pytest.mark.parametrize(
    "changes",
    [{"validation": None}, {"best": "error"}, {"best": ("error", "less")}, {"patience": 0}, {"patience": 1.5}],
)
def test_what_cannot_be_meant_is_refused(changes):
    if "validation" in changes:
        changes = {**changes, "metric": None, "evaluate_every": None}
    with pytest.raises((TypeError, ValueError), match="best|patience"):
        line_job(**changes)


def test_validations_without_a_number_count_as_no_better():
    job = line_job()
    nan = float("nan")
    assert num_since_best(job, []) is None
    assert num_since_best(job, [{"error": nan}]) is None
    assert num_since_best(job, [{"error": 2.0}, {"error": nan}]) == 1
    assert num_since_best(job, [{"error": 2.0}, {"error": 2.0}]) == 1
    assert num_since_best(job, [{"error": 2.0}, {"error": 1.0}]) == 0
