"""Checkpoints of jobs: whatever ends a process, resuming gives the same losses."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fleet_jobs import batches, gpt_job, train, train_plainly

from penstock import fleet
from penstock.fleet import JobState, _checkpoint
from penstock.testing import GPT
from waiting import eventually


def test_resuming_gives_the_losses_of_an_undisturbed_run(tmp_path, monkeypatch):
    """Scheduler, clipping, dropout, order of the data, loss scale: all of it goes on."""
    jobs = [
        gpt_job("a", seed=1, clip_norm=0.5),
        gpt_job(
            "b",
            epochs=2,
            steps=None,
            data=lambda: torch.utils.data.DataLoader(batches(8), batch_size=None, shuffle=True),
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20),
        ),
        gpt_job("c", precision="float16", accumulate=2, steps=4),
    ]

    devices = [fleet.Device(name="cpu", threads=1)] * 2
    options = {"host": "128MiB", "run_dir": tmp_path, "checkpoint_every": 2, "progress": None}
    with fleet.Fleet(devices, "2MB", **options) as running:
        log = running._engine.upkeep.stepped

        def stepped(run):
            log(run)
            if run.training.position.step == 4 and run.job.name == "b":
                with running._engine.condition:
                    running._engine.is_stopping = True

        monkeypatch.setattr(running._engine.upkeep, "stepped", stepped)
        for job in jobs:
            running.add(job)
        early = running.wait()
    assert any(result.state is JobState.RUNNING for result in early.values())
    with pytest.raises(ValueError, match="resume=True"):
        fleet.run(jobs, devices, "2MB", **options)
    for _ in range(2):  # the second time everything is done
        results = fleet.run(jobs, devices, "4MB", resume=True, **options)
        for job in jobs:
            assert results[job.name].error is None
            assert list(results[job.name].losses) == train_plainly(job)[0], job.name
    lines = [json.loads(line) for line in (tmp_path / "jobs" / "b" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == list(results["b"].losses)


CHILD = """
import itertools, sys, threading
sys.path.insert(0, sys.argv[2])
import torch
from fleet_jobs import batches
from penstock import fleet
from penstock.testing import GPT
torch.set_num_threads(1)
def job(name, seed):
    number = itertools.count()
    def until_it_is_killed():
        for batch in batches():
            if name == "a" and next(number) == 8:
                threading.Event().wait()
            yield batch
    return fleet.Job(
        name=name, model=lambda: GPT(num_layers=3, width=64, num_heads=2, context=32), data=until_it_is_killed,
        loss=lambda model, batch: model(*batch), optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        steps=12, seed=seed,
    )
fleet.run(
    [job("a", 1), job("b", 2)], [fleet.Device(name="cpu", threads=1)] * 2, "2MB", host="64MiB",
    run_dir=sys.argv[1], resume=True, checkpoint_every=1, progress=None,
)
"""


def test_a_killed_process_resumes_with_the_same_losses(tmp_path):
    run_dir = tmp_path / "run"
    command = [sys.executable, "-c", CHILD, str(run_dir), str(Path(__file__).parent)]
    child = subprocess.Popen(command)
    eventually(lambda: list(run_dir.glob("jobs/a/checkpoints/step-0000000[2-9]")) or child.poll() is not None)
    assert child.poll() is None
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    jobs = [gpt_job("a", seed=1, steps=12), gpt_job("b", seed=2, steps=12)]
    assert not fleet.FleetState(run_dir).is_alive
    results = train(jobs, budget="2MB", run_dir=run_dir, resume=True)
    for job in jobs:
        assert list(results[job.name].losses) == train_plainly(job)[0]


@pytest.mark.parametrize("damage", ["truncated", "state", "another job's", "not JSON"])
def test_a_damaged_checkpoint_is_refused_and_others_train(tmp_path, damage):
    train([gpt_job(steps=4)], num_devices=1, run_dir=tmp_path)
    (path,) = (tmp_path / "jobs" / "job" / "checkpoints").iterdir()
    tensors = min(path.glob("tensors-*"))
    if damage == "truncated":
        tensors.write_bytes(tensors.read_bytes()[:100])
    elif damage == "state":
        (path / "state.json").write_text(json.dumps({"format": 99}))
    elif damage == "not JSON":
        (path / "state.json").write_text("{")
    job = gpt_job()
    if damage == "another job's":
        job = gpt_job(model=lambda: GPT(num_layers=3, width=32, num_heads=2, context=32))
    state = fleet.FleetState(tmp_path)
    (row,) = state.jobs()
    state.write([fleet.JobRow(**{name: getattr(row, name) for name in row.__slots__} | {"state": "running"})])
    results = train([job, gpt_job("other", steps=3)], run_dir=tmp_path, resume=True)
    assert results["job"].state is JobState.FAILED and "cannot be used" in results["job"].error
    assert results["other"].state is JobState.DONE


def test_checkpoints_of_another_fleet_are_not_mistaken_for_ones_own(tmp_path):
    train([gpt_job(steps=2)], num_devices=1, run_dir=tmp_path)
    for file in tmp_path.glob("fleet.db*"):
        file.unlink()
    with pytest.raises(ValueError, match="holds checkpoints"):
        train([gpt_job(steps=2)], num_devices=1, run_dir=tmp_path)


def test_a_checkpoint_that_goes_while_it_is_cloned_is_copied_from_the_next(tmp_path, monkeypatch):
    newest = iter([tmp_path / "step-1", tmp_path / "step-2"])
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / "tensors.safetensors").write_bytes(b"whole")
    monkeypatch.setattr("penstock.fleet._checkpoint.latest", lambda _: next(newest))
    _checkpoint.copy_newest(tmp_path, tmp_path / "job" / "origin", "job")
    assert [path.name for path in (tmp_path / "job").iterdir()] == ["origin"]
    assert (tmp_path / "job" / "origin" / "step-2" / "tensors.safetensors").read_bytes() == b"whole"
