"""A job's life: faults stay with their job, and whatever ends a process, resuming gives the same losses."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from fleet_jobs import batches, train, train_plainly
from torch import nn

from penstock import fleet
from penstock.errors import CheckpointError, TierDegradedWarning
from penstock.fleet import JobState, _checkpoint
from penstock.testing import GPT
from penstock.tiers import Budget


def job(name="job", **changes):
    settings = {
        "model": lambda: GPT(num_layers=3, width=64, num_heads=2, context=32),
        "data": batches,
        "loss": lambda model, batch: model(*batch),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        "steps": 8,
    }
    return fleet.Job(name=name, **{**settings, **changes})


def failing_at(number, error):
    def data():
        yield from batches(number)
        raise error

    return data


def with_nan_at(number):
    def loss(model, batch):
        return model(*batch[:2]) * batch[2]

    def data():
        return [(*one, torch.tensor(float("nan") if at == number else 1.0)) for at, one in enumerate(batches(8))]

    return {"loss": loss, "data": data}


FAULTS = {
    "the data raises": ({"data": failing_at(3, OSError("the file is gone"))}, "the file is gone", 3),
    "the model raises": ({"model": lambda: 1 / 0}, "division by zero", 0),
    "no model": ({"model": lambda: 3}, "must return an nn.Module", 0),
    "no batches": ({"data": list}, "yields no batch", 0),
    "not a number": (with_nan_at(2), "the loss is nan at step 2", 2),
    "not a scalar": ({"loss": lambda model, batch: model.token(batch[0])}, "scalar", 0),
    "no optimizer": ({"optimizer": lambda parameters: None}, "torch.optim.AdamW", 0),
    "a stranger's parameters": (
        {"optimizer": lambda parameters: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)},
        "the model does not have",
        0,
    ),
    "L-BFGS": ({"optimizer": torch.optim.LBFGS}, "L-BFGS", 0),
    "a forward that cannot run": (
        {"loss": lambda model, batch: model(*batch, batch)},
        "its loss raises TypeError",
        0,
    ),
    "no loss": ({"loss": lambda model, batch: None}, "must return a tensor, got NoneType", 0),
    "a fleet inside": ({"data": lambda: fleet.run([job()], progress=None)}, "inside a job of another fleet", 0),
    "a stage that does not follow": ({"stages": lambda model: [model.token, model.token]}, "cannot follow", 0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_stays_with_its_job(fault):
    changes, said, num_steps = FAULTS[fault]
    others = [job(f"{at}", seed=at, steps=4) for at in range(2)]
    results = train([others[0], job("hit", **changes), others[1]])
    assert results["hit"].state is JobState.FAILED
    assert said in results["hit"].error
    assert len(results["hit"].losses) == num_steps
    for one in others:
        assert list(results[one.name].losses) == train_plainly(one)[0]
    assert "hit: failed" in repr(results)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "a/b"}, "job name"),
        ({"model": nn.Linear(1, 1)}, "`model` must be a function"),
        ({"epochs": 2}, "either epochs"),
        ({"steps": 0}, "at least 1"),
        ({"clip_norm": -1.0}, "clip_norm"),
        ({"precision": "float8"}, "precision"),
        ({"evaluate_every": 2}, "validation="),
    ],
)
def test_a_job_that_cannot_be_is_refused_at_once(changes, said):
    with pytest.raises((ValueError, TypeError), match=said):
        job(**changes)


def test_two_jobs_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two jobs"):
        train([job(), job()])


def test_a_full_disk_is_said_once_and_training_goes_on(tmp_path, monkeypatch):
    """Of checkpoints: the last one must come out."""
    failures = []

    def refuse(*_):
        failures.append(1)
        raise OSError(28, "No space left on device")

    one = job()
    monkeypatch.setattr("penstock.fleet._checkpoint.save_file", refuse)
    with pytest.warns(TierDegradedWarning, match="No space left") as said:
        results = train([one], num_devices=1, run_dir=tmp_path, checkpoint_every=2)
    assert len(said) == 1 and len(failures) == 4
    assert results["job"].state is JobState.FAILED and "No space left" in results["job"].error
    assert list(results["job"].losses) == train_plainly(one)[0]
    monkeypatch.undo()
    assert not list((tmp_path / "jobs" / "job" / "checkpoints").iterdir())


def test_tiers_that_are_full_fail_the_job_and_nothing_hangs():
    large = job("large", model=lambda: GPT(num_layers=6, width=64, num_heads=2, context=32))
    with pytest.warns(TierDegradedWarning):
        results = train([large], num_devices=1, budget="2MB", host_budget="1MB")
    assert "the tiers below are full" in results["large"].error


def test_resuming_gives_the_losses_of_an_undisturbed_run(tmp_path, monkeypatch):
    """Scheduler, clipping, dropout, order of the data, loss scale: all of it goes on."""
    jobs = [
        job("a", seed=1, clip_norm=0.5),
        job(
            "b",
            epochs=2,
            steps=None,
            data=lambda: torch.utils.data.DataLoader(batches(8), batch_size=None, shuffle=True),
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20),
        ),
        job("c", precision="float16", accumulate=2, steps=4),
    ]

    devices = [fleet.Device(name="cpu", threads=1)] * 2
    options = {"host_budget": "128MiB", "run_dir": tmp_path, "checkpoint_every": 2, "progress": None}
    with fleet.Fleet(devices, "2MB", **options) as made:
        log = made._upkeep.stepped

        def stepped(run):
            log(run)
            if run.training.position.step == 4 and run.job.name == "b":
                with made._engine.condition:
                    made._engine.is_stopping = True

        monkeypatch.setattr(made._upkeep, "stepped", stepped)
        for one in jobs:
            made.add(one)
        early = made.wait()
    assert any(one.state is JobState.RUNNING for one in early.values())
    with pytest.raises(ValueError, match="resume=True"):
        fleet.run(jobs, devices, "2MB", **options)
    for _ in range(2):  # the second time everything is done
        results = fleet.run(jobs, devices, "4MB", resume=True, **options)
        for one in jobs:
            assert results[one.name].error is None
            assert list(results[one.name].losses) == train_plainly(one)[0], one.name
    lines = [json.loads(line) for line in (tmp_path / "jobs" / "b" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == list(results["b"].losses)


CHILD = """
import sys
sys.path.insert(0, sys.argv[2])
import torch
from fleet_jobs import batches
from penstock import fleet
from penstock.testing import GPT
torch.set_num_threads(1)
def job(name, seed):
    return fleet.Job(
        name=name, model=lambda: GPT(num_layers=3, width=64, num_heads=2, context=32), data=batches,
        loss=lambda model, batch: model(*batch), optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        steps=12, seed=seed,
    )
fleet.run(
    [job("a", 1), job("b", 2)], [fleet.Device(name="cpu", threads=1)] * 2, "2MB", host_budget="64MiB",
    run_dir=sys.argv[1], resume=True, checkpoint_every=1, progress=None,
)
"""


def test_a_killed_process_resumes_with_the_same_losses(tmp_path):
    run_dir = tmp_path / "run"
    command = [sys.executable, "-c", CHILD, str(run_dir), str(Path(__file__).parent)]
    child = subprocess.Popen(command)
    deadline = time.monotonic() + 600
    while not list(run_dir.glob("jobs/a/checkpoints/step-0000000[2-9]")):
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    jobs = [job("a", seed=1, steps=12), job("b", seed=2, steps=12)]
    assert not fleet.FleetState(run_dir).is_alive
    results = train(jobs, budget="2MB", run_dir=run_dir, resume=True)
    for one in jobs:
        assert list(results[one.name].losses) == train_plainly(one)[0]


@pytest.mark.parametrize("damage", ["truncated", "state", "another job's", "not JSON"])
def test_a_damaged_checkpoint_is_refused_and_others_train(tmp_path, damage):
    train([job(steps=4)], num_devices=1, run_dir=tmp_path)
    (path,) = (tmp_path / "jobs" / "job" / "checkpoints").iterdir()
    tensors = min(path.glob("tensors-*"))
    if damage == "truncated":
        tensors.write_bytes(tensors.read_bytes()[:100])
    elif damage == "state":
        (path / "state.json").write_text(json.dumps({"format": 99}))
    elif damage == "not JSON":
        (path / "state.json").write_text("{")
    one = job()
    if damage == "another job's":
        one = job(model=lambda: GPT(num_layers=3, width=32, num_heads=2, context=32))
    state = fleet.FleetState(tmp_path)
    (row,) = state.jobs()
    state.write([fleet.JobRow(**{name: getattr(row, name) for name in row.__slots__} | {"state": "running"})])
    results = train([one, job("other", steps=3)], run_dir=tmp_path, resume=True)
    assert results["job"].state is JobState.FAILED and "cannot be used" in results["job"].error
    assert results["other"].state is JobState.DONE


def test_pause_resume_stop_and_clone_while_the_fleet_runs(tmp_path):
    """Through the database, as another process would."""
    release = threading.Event()

    def slow():
        while True:
            for batch in batches():
                release.wait(0.05)
                yield batch

    def make(lr=1e-2, steps=10_000):
        return job("long", data=slow, steps=steps, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr))

    state = fleet.FleetState(tmp_path)
    answers = []

    def user():
        def ask(*given, **arguments):
            answers.append(state.answer_to(state.ask(*given, arguments), 600))

        def until(condition):
            deadline = time.monotonic() + 600
            while not condition({row.name: row for row in state.jobs()}):
                assert time.monotonic() < deadline
                time.sleep(0.02)

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
    options = {"host_budget": "64MiB", "run_dir": tmp_path, "progress": None, "scheduler": "shortest-first"}
    with fleet.Fleet(devices, "2MB", **options) as made:
        made.add(make(), fleet.JobSource(make=make, path="tests:make", parameters={"lr": 1e-2}))
        made.add(job("plain", steps=2))
        thread.start()
        results = made.wait()
    thread.join()
    assert results["long"].state is JobState.STOPPED and results["long"].checkpoint is not None
    expected = train_plainly(job("short", steps=5))[0]
    assert list(results["short"].losses) == expected[:3]
    assert results["warm"].losses[0] != expected[0]
    assert [bool(answer) for answer in answers] == [False, False, False, True, True, False, False]
    assert "import path" in answers[3] and "there is no job named" in answers[4]


def test_a_job_that_accumulates_stops_between_two_steps(tmp_path):
    made = fleet.Fleet(
        [fleet.Device(name="cpu", threads=1)], "2MB", host_budget="64MiB", run_dir=tmp_path, progress=None
    )
    seen = []

    def loss(model, batch):
        return model(*batch)

    def data():
        for batch in batches() * 100:
            seen.append(1)
            if len(seen) == 6:  # the second of four batches of a step
                made.stop("job")
            yield batch

    with made:
        made.add(job(accumulate=4, data=data, loss=loss, steps=50))
        results = made.wait()
    assert results["job"].state is JobState.STOPPED
    assert len(results["job"].losses) == 2 and results["job"].checkpoint.name == "step-00000002"


def test_checkpoints_of_another_fleet_are_not_mistaken_for_ones_own(tmp_path):
    train([job(steps=2)], num_devices=1, run_dir=tmp_path)
    for file in tmp_path.glob("fleet.db*"):
        file.unlink()
    with pytest.raises(ValueError, match="holds checkpoints"):
        train([job(steps=2)], num_devices=1, run_dir=tmp_path)


def test_a_stopper_ends_a_job_early(tmp_path):
    seen = []

    def stopper(one, step, metrics):
        seen.append((one.name, step, set(metrics)))
        return one.name == "bad" and step >= 4

    jobs = [job(name, validation=lambda: batches(1, seed=8), evaluate_every=2) for name in ("bad", "good")]
    results = train(jobs, stopper=stopper)
    assert results["bad"].state is JobState.STOPPED and len(results["bad"].losses) == 4
    assert results["good"].state is JobState.DONE
    assert ("good", 8, {"loss"}) in seen


def test_out_of_memory_is_answered_by_smaller_shards(monkeypatch):
    """Once, from the last checkpoint."""
    from penstock.fleet import _worker

    compute, hits = _worker.UnitVerifier.compute, []

    def hit(self, mini, index):
        if mini.work.training.position.step == 4 and not hits:
            hits.append(len(mini.work.program.shards))
            raise torch.OutOfMemoryError("CUDA out of memory")
        if hits:
            hits.append(len(mini.work.program.shards))
        compute(self, mini, index)

    monkeypatch.setattr(_worker.UnitVerifier, "compute", hit)
    one = job()
    results = train([one], num_devices=1, budget="2MB", checkpoint_every=2)
    assert results["job"].error is None
    assert hits[-1] > hits[0]
    assert list(results["job"].losses) == train_plainly(one)[0]


def test_a_fleet_that_cannot_begin_takes_nothing(tmp_path, monkeypatch):
    account, interval_s = Budget(device="64MiB", host="64MiB"), sys.getswitchinterval()
    monkeypatch.setattr(fleet.FleetState, "create", mock.Mock(side_effect=KeyboardInterrupt))
    made = fleet.Fleet([fleet.Device(name="cpu", threads=1)], account, progress=None)
    with pytest.raises(KeyboardInterrupt), made:
        pass
    assert not any(one.held_bytes for one in account.uses())
    assert sys.getswitchinterval() == interval_s


def test_a_checkpoint_that_goes_while_it_is_cloned_is_copied_from_the_next(tmp_path, monkeypatch):
    newest = iter([tmp_path / "step-1", tmp_path / "step-2"])
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / "tensors.safetensors").write_bytes(b"whole")
    monkeypatch.setattr("penstock.fleet._checkpoint.latest", lambda _: next(newest))
    _checkpoint.copy_newest(tmp_path, tmp_path / "job" / "origin", "job")
    assert [one.name for one in (tmp_path / "job").iterdir()] == ["origin"]
    assert (tmp_path / "job" / "origin" / "step-2" / "tensors.safetensors").read_bytes() == b"whole"


def test_metrics_of_a_step_are_there_before_its_checkpoint(tmp_path, monkeypatch):
    """A process that is killed between the two loses no line: those of later steps go when it resumes."""
    save, seen = _checkpoint.save, []

    def saved(run, memory, folder, *, keep):
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        seen.append((run.training.position.step, json.loads(lines[-1])["step"]))
        return save(run, memory, folder, keep=keep)

    monkeypatch.setattr(_checkpoint, "save", saved)
    train([job()], num_devices=1, run_dir=tmp_path, checkpoint_every=2)
    assert seen == [(2, 2), (4, 4), (6, 6), (8, 8)]


def test_a_fleet_is_used_while_it_is_entered_and_once():
    running = fleet.Fleet(["cpu"], "8MiB", host_budget="64MiB", progress=None)
    for misuse in (lambda: running.add(job("early")), running.wait):
        with pytest.raises(ValueError, match="must be entered before"):
            misuse()
    with running:
        running.add(job("one", steps=1))
        assert running.wait()["one"].error is None
        with pytest.raises(ValueError, match=r"wait\(\) was already called"):
            running.wait()
    with pytest.raises(ValueError, match="must be entered before"):
        running.add(job("late"))
    with pytest.raises(ValueError, match="entered only once"), running:
        pass


def test_a_result_keeps_a_temporary_folder_and_a_folder_that_is_gone_is_told(tmp_path):
    one = job(steps=2)
    result = fleet.run([one], budget="2MB", host_budget="64MiB", progress=None)["job"]
    gc.collect()  # the fleet and all other results are gone
    expected = train_plainly(one)[1].state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in result.model().state_dict().items())
    left = fleet.run([one], budget="2MB", host_budget="64MiB", progress=None, run_dir=tmp_path)["job"]
    shutil.rmtree(tmp_path / "jobs")
    with pytest.raises(CheckpointError, match="the folder no longer exists"):
        left.model()
