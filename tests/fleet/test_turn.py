"""Turns of a job."""

import sys

import pytest
import torch
from fleet_jobs import batches, gpt_job, train, train_plainly

from penstock import fleet
from penstock.fleet import JobState


def test_a_job_that_accumulates_stops_between_two_steps(tmp_path):
    running = fleet.Fleet([fleet.Device(name="cpu", threads=1)], "2MB", host="64MiB", run_dir=tmp_path, progress=None)
    seen = []

    def loss(model, batch):
        return model(*batch)

    def data():
        for batch in batches() * 100:
            seen.append(1)
            if len(seen) == 6:  # the second of four batches of a step
                running.stop("job")
            yield batch

    with running:
        running.add(gpt_job(accumulate=4, data=data, loss=loss, steps=50))
        results = running.wait()
    assert results["job"].state is JobState.STOPPED
    assert len(results["job"].losses) == 2 and results["job"].checkpoint.name == "step-00000002"


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
    job = gpt_job()
    results = train([job], num_devices=1, budget="2MB", checkpoint_every=2)
    assert results["job"].error is None
    assert hits[-1] > hits[0]
    assert list(results["job"].losses) == train_plainly(job)[0]


@pytest.mark.parametrize("where", ["data", "loss", "model"])
def test_a_job_that_exits_ends_alone(where):
    def leave(*_):
        sys.exit(3)

    results = train([gpt_job("leaves", **{where: leave}), gpt_job("stays", steps=2)], num_devices=1)
    assert results["leaves"].state is JobState.FAILED
    assert "SystemExit: 3" in results["leaves"].error
    assert results["stays"].state is JobState.DONE
