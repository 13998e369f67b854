"""Work around training: metrics, stoppers, checkpoints."""

import json

import pytest
import torch
from fleet_jobs import batches, gpt_job, train, train_plainly

from penstock.errors import TierDegradedWarning
from penstock.fleet import JobState, _checkpoint


@pytest.mark.parametrize("by", ["steps", "epochs"])
def test_a_full_disk_is_said_once_and_training_goes_on(tmp_path, monkeypatch, by):
    """Of checkpoints: what is not there is not claimed, and nothing is lost."""
    failures = []

    def refuse(*_):
        failures.append(1)
        raise OSError(28, "No space left on device")

    job = gpt_job(steps=8) if by == "steps" else gpt_job(steps=None, epochs=1, data=lambda: batches(8))
    monkeypatch.setattr("penstock.fleet._checkpoint.save_file", refuse)
    with pytest.warns(TierDegradedWarning, match="No space left") as said:
        results = train([job], num_devices=1, run_dir=tmp_path, checkpoint_every=2)
    assert len(said) == 1 and len(failures) == 5  # at each second step, and when the job is over
    assert results["job"].state is JobState.FAILED and "No space left" in results["job"].error
    losses, model = train_plainly(job)
    assert list(results["job"].losses) == losses
    trained = results["job"].model().state_dict()
    assert all(torch.equal(trained[name], tensor) for name, tensor in model.state_dict().items())
    monkeypatch.undo()
    assert not list((tmp_path / "jobs" / "job" / "checkpoints").iterdir())


def test_a_checkpoint_that_could_not_be_written_is_tried_again(tmp_path, monkeypatch):
    """The disk has room again in the end: the job is done, with its last weights."""
    save_file, failures = _checkpoint.save_file, []

    def refuse_twice(tensors, path):
        if len(failures) < 2:
            failures.append(1)
            raise OSError(28, "No space left on device")
        save_file(tensors, path)

    job = gpt_job(steps=None, epochs=1, data=lambda: batches(4))
    monkeypatch.setattr("penstock.fleet._checkpoint.save_file", refuse_twice)
    with pytest.warns(TierDegradedWarning, match="later checkpoints are tried"):
        result = train([job], num_devices=1, run_dir=tmp_path, checkpoint_every=2)["job"]
    assert result.state is JobState.DONE and result.checkpoint.name == "step-00000004"
    trained = result.model().state_dict()
    assert all(torch.equal(trained[name], tensor) for name, tensor in train_plainly(job)[1].state_dict().items())


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
