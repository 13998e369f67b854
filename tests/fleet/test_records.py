"""What trackers do is none of the training's business, and nothing that they call hangs it."""

import threading

import pytest
import torch
from fleet_jobs import batches, train, train_plainly

from penstock import fleet
from penstock.errors import TrackerWarning
from penstock.fleet import JobState


def tiny(name="job", **changes):
    settings = {
        "model": lambda: torch.nn.Embedding(256, 256),
        "data": batches,
        "loss": lambda model, batch: torch.nn.functional.cross_entropy(
            model(batch[0]).flatten(0, 1), batch[1].flatten()
        ),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        "steps": 6,
    }
    return fleet.Job(name=name, **{**settings, **changes})


class Tracker:
    def __init__(self, fails_in=""):
        self.fails_in, self.seen = fails_in, []

    def _note(self, what, *arguments):
        self.seen.append((what, *arguments))
        if what == self.fails_in:
            raise OSError("the server is gone")

    def log(self, job, step, metrics):
        self._note("log", job.name, step, metrics["loss"])

    def end(self, job, state):
        self._note("end", job.name, state)

    def close(self):
        self._note("close")


def test_a_tracker_sees_every_loss_and_every_end():
    tracker = Tracker()
    jobs = [tiny("a"), tiny("b", data=list)]
    results = train(jobs, trackers=[tracker])
    assert [entry[3] for entry in tracker.seen if entry[:2] == ("log", "a")] == list(results["a"].losses)
    assert ("end", "a", JobState.DONE) in tracker.seen and ("end", "b", JobState.FAILED) in tracker.seen
    assert tracker.seen[-1] == ("close",)


@pytest.mark.parametrize("fails_in", ["log", "end", "close"])
def test_a_tracker_that_raises_is_told_no_more(fails_in):
    broken, whole = Tracker(fails_in), Tracker()
    with pytest.warns(TrackerWarning, match="the server is gone") as said:
        results = train([tiny("a"), tiny("b", seed=1)], trackers=[broken, whole])
    assert len(said) == 1
    assert [entry[0] for entry in broken.seen].count(fails_in) == 1
    assert [entry[0] for entry in whole.seen].count("end") == 2
    for name, seed in (("a", 0), ("b", 1)):
        assert results[name].state is JobState.DONE
        assert list(results[name].losses) == train_plainly(tiny(seed=seed))[0]


def test_a_tracker_may_ask_and_steer_its_fleet_while_a_user_does():
    running = fleet.Fleet([fleet.Device(name="cpu", threads=1)] * 2, "2MB", host="32MiB", progress=None)
    has_begun = threading.Event()

    class Steering(Tracker):
        def log(self, job, step, metrics):
            has_begun.set()
            running.rows()
            if job.name == "a" and step == 3:
                running.stop("b")

        def end(self, job, state):
            running.rows()
            if job.name == "b":
                running.add(tiny("c", steps=2))

    running._records._trackers.append(Steering())

    def user():
        has_begun.wait(600)
        running.pause("a")
        running.resume("a")
        running.stop("d")

    thread = threading.Thread(target=user)
    with running:
        for name in ("a", "b", "d"):
            running.add(tiny(name, steps=10_000 if name in "bd" else 6))
        thread.start()
        results = running.wait()
    thread.join()
    assert {name: result.state for name, result in results.items()} == {
        "a": JobState.DONE, "b": JobState.STOPPED, "c": JobState.DONE, "d": JobState.STOPPED,
    }  # fmt: skip
