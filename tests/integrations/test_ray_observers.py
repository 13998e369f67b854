"""The user's trackers and stopper in the driver of a fleet on Ray, without Ray."""

import json

import pytest

from penstock import errors, fleet
from penstock.integrations._ray_observers import Observers


class Noting:
    def __init__(self):
        self.calls = []

    def log(self, job, step, metrics):
        self.calls.append((job.name, step, dict(metrics)))

    def end(self, job, state):
        self.calls.append((job.name, state))

    def close(self):
        self.calls.append("closed")


@pytest.fixture
def job():
    return fleet.Job(name="a", model=int, data=list, loss=lambda *_: None, optimizer=lambda _: None, steps=9)


def test_steps_that_are_repeated_after_a_loss_are_logged_once(job):
    tracker = Noting()
    observers = Observers(None, [tracker])
    for step in (1, 2, 3, 2, 3, 4):
        observers.log(job, step, {"loss": float(step)})
    observers.log(job, 3, {"validation/loss": 0.5})  # which has steps of its own
    observers.log(job, 3, {"validation/loss": 0.5})
    assert [step for _, step, _ in tracker.calls] == [1, 2, 3, 4, 3]


def test_metrics_that_a_lost_node_did_not_report_are_read_from_its_file(job, tmp_path):
    file = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "time_s": 1.0, "loss": float(step)}) for step in (1, 2, 3)]
    file.write_text("\n".join([*lines, '{"step": 4, "ti']))
    tracker = Noting()
    observers = Observers(None, [tracker])
    observers.log(job, 1, {"loss": 1.0})
    observers.catch_up(job, file)
    observers.catch_up(job, tmp_path / "missing.jsonl")
    assert tracker.calls == [("a", step, {"loss": float(step)}) for step in (1, 2, 3)]


def test_a_stopper_is_asked_once_per_validation_and_its_error_is_a_text(job):
    asked = []

    def stopper(_, step, metrics):
        asked.append(step)
        return step >= 4 or metrics["loss"] > 1

    observers = Observers(stopper, [])
    assert [observers.verdict(job, step, {"loss": 0.5}) for step in (2, 4, 2, 4)] == [False, True, False, True]
    assert asked == [2, 4]
    assert observers.verdict(job, 3, {}) == "KeyError: 'loss'"


def test_a_tracker_that_raises_is_not_called_again(job):
    class Broken(Noting):
        def log(self, job, step, metrics):
            raise OSError("no space")

    broken, whole = Broken(), Noting()
    observers = Observers(None, [broken, whole])
    with pytest.warns(errors.TrackerWarning, match="Broken raised OSError: no space, and receives no further updates"):
        observers.log(job, 1, {"loss": 1.0})
    observers.end(job, fleet.JobState.DONE)
    observers.close()
    assert broken.calls == []
    assert whole.calls == [("a", 1, {"loss": 1.0}), ("a", fleet.JobState.DONE), "closed"]
