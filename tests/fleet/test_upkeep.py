"""Work around training: metrics, stoppers, checkpoints."""

import json

import pytest
from fleet_jobs import batches, gpt_job, train, train_plainly

from penstock.errors import TierDegradedWarning
from penstock.fleet import JobState, _checkpoint


def test_a_full_disk_is_said_once_and_training_goes_on(tmp_path, monkeypatch):
    """Of checkpoints: the last one must come out."""
    failures = []

    def refuse(*_):
        failures.append(1)
        raise OSError(28, "No space left on device")

    job = gpt_job()
    monkeypatch.setattr("penstock.fleet._checkpoint.save_file", refuse)
    with pytest.warns(TierDegradedWarning, match="No space left") as said:
        results = train([job], num_devices=1, run_dir=tmp_path, checkpoint_every=2)
    assert len(said) == 1 and len(failures) == 4
    assert results["job"].state is JobState.FAILED and "No space left" in results["job"].error
    assert list(results["job"].losses) == train_plainly(job)[0]
    monkeypatch.undo()
    assert not list((tmp_path / "jobs" / "job" / "checkpoints").iterdir())


def test_a_stopper_ends_a_job_early(tmp_path):
    seen = []

    def stopper(job, step, metrics):
        seen.append((job.name, step, set(metrics)))
        return job.name == "bad" and step >= 4

    jobs = [gpt_job(name, validation=lambda: batches(1, seed=8), evaluate_every=2) for name in ("bad", "good")]
    results = train(jobs, stopper=stopper)
    assert results["bad"].state is JobState.STOPPED and len(results["bad"].losses) == 4
    assert results["good"].state is JobState.DONE
    assert ("good", 8, {"loss"}) in seen


def test_metrics_of_a_step_are_there_before_its_checkpoint(tmp_path, monkeypatch):
    """A process that is killed between the two loses no line: those of later steps go when it resumes."""
    save, seen = _checkpoint.save, []

    def saved(run, memory, folder, *, keep):
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        seen.append((run.training.position.step, json.loads(lines[-1])["step"]))
        return save(run, memory, folder, keep=keep)

    monkeypatch.setattr(_checkpoint, "save", saved)
    train([gpt_job()], num_devices=1, run_dir=tmp_path, checkpoint_every=2)
    assert seen == [(2, 2), (4, 4), (6, 6), (8, 8)]
