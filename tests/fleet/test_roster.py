"""Jobs of a fleet by name, and requests about them."""

import threading

import pytest
import torch
from fleet_jobs import batches, gpt_job, layered_job, train, train_plainly

from penstock import fleet
from penstock.fleet import JobState
from penstock.fleet._engine import Engine
from penstock.fleet._schedulers import scheduler_of
from waiting import eventually


def test_two_jobs_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two jobs"):
        train([gpt_job(), gpt_job()])


def test_pause_resume_stop_and_clone_while_the_fleet_runs(tmp_path):
    """Through the database, as another process would."""
    release = threading.Event()

    def slow():
        while True:
            for batch in batches():
                release.wait(0.05)
                yield batch

    def make(lr=1e-2, steps=10_000):
        return gpt_job(
            "long", data=slow, steps=steps, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr)
        )

    state = fleet.FleetState(tmp_path)
    answers = []

    def user():
        def ask(*positional, **arguments):
            answers.append(state.answer_to(state.ask(*positional, arguments), 600))

        def until(condition):
            eventually(lambda: condition({row.name: row for row in state.jobs()}))

        try:
            until(lambda rows: "long" in rows and rows["long"].step > 2)
            ask("pause", "long")
            until(lambda rows: rows["long"].state == "paused")
            ask("resume", "long")
            until(lambda rows: rows["long"].state == "running")
            ask("clone", "long", name="short", changes={"steps": 3})
            ask("clone", "plain", name="x", changes={})
            ask("stop", "nobody")
            until(lambda rows: "short" in rows and rows["short"].state == "done")
            ask("clone", "short", name="warm", changes={"steps": 2}, warm=True)
            until(lambda rows: "warm" in rows and rows["warm"].state == "done")
            ask("stop", "long")
        finally:
            release.set()

    thread = threading.Thread(target=user)
    devices = [fleet.Device(name="cpu", threads=1)]
    options = {"host": "64MiB", "run_dir": tmp_path, "progress": None, "scheduler": "shortest-first"}
    with fleet.Fleet(devices, "2MB", **options) as running:
        running.add(make(), fleet.JobSource(make=make, path="tests:make", parameters={"lr": 1e-2}))
        running.add(gpt_job("plain", steps=2))
        thread.start()
        results = running.wait()
    thread.join()
    assert results["long"].state is JobState.STOPPED and results["long"].checkpoint is not None
    expected = train_plainly(gpt_job("short", steps=5))[0]
    assert list(results["short"].losses) == expected[:3]
    assert results["warm"].losses[0] != expected[0]
    assert [bool(answer) for answer in answers] == [False, False, False, True, True, False, False]
    assert "import path" in answers[3] and "there is no job named" in answers[4]


@pytest.mark.usefixtures("one_thread")
def test_a_job_between_turns_is_shown_as_waiting(monkeypatch):
    """One device, two jobs: while one trains its ten seconds, the other waits."""
    seen = []
    monkeypatch.setattr(Engine, "now_s", property(lambda engine: 0.4 * len(engine.workers[0].log.records)))

    def looking(progress):
        if progress.had_s is None:
            waited_s = running._engine.now_s - progress.since_s
            seen.append((running.rows()[progress.job].state, waited_s >= 1))
        return scheduler_of("fifo")(progress)

    device = fleet.Device(name="cpu", threads=1)
    with fleet.Fleet([device], "1MB", host="64MiB", progress=None, scheduler=looking) as running:
        running.add(layered_job("a", steps=6))
        running.add(layered_job("b", steps=6))
        running.wait()
    assert set(seen) == {("running", False), ("waiting", True)}
