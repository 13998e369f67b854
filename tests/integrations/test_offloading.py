"""What a loop's offloader says it did: every step counts, those in which nothing was moved too."""

import pytest
import torch

from penstock.errors import OffloadDeclinedWarning
from penstock.integrations._offloading import LoopOffloader
from penstock.offload import _learn


def summary_of(tmp_path, **options):
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64), torch.nn.GELU())
    loop = LoopOffloader(model, {"disk": tmp_path, "min_size": "4KiB", "min_saving": 0.0, **options})
    for _ in range(3):
        with loop:
            loss = model(torch.ones(64, 64)).sum()
            for waterfall in loop.offloader._waterfalls.values():
                waterfall.drain()  # else a tensor that is still on its way out need not leave
            loss.backward()
    loop.close()
    return loop.summary()


def test_steps_count_after_offloading_was_declined(tmp_path, monkeypatch):
    monkeypatch.setattr(
        _learn, "plan", lambda problem: _learn.replace(_learn.keep_all(problem, "kept"), declined="slow")
    )
    with pytest.warns(OffloadDeclinedWarning, match="slow"):
        summary = summary_of(tmp_path)
    assert summary.num_cycles == 3
    assert summary.parked_bytes == summary.written_to_disk_bytes > 0  # of the first step, which is recorded
    assert summary.busy_s > 0
    assert str(summary).startswith("Penstock parked ") and "in 3 micro-batches" in str(summary)
    assert str(summary).endswith("It then offloaded nothing: slow")


def test_a_run_that_never_moved_anything_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(
        _learn, "plan", lambda problem: _learn.replace(_learn.keep_all(problem, "kept"), declined="slow")
    )
    with pytest.warns(OffloadDeclinedWarning, match="slow"):
        summary = summary_of(tmp_path, policy=lambda _: False)
    assert str(summary) == "Penstock offloaded nothing in 3 micro-batches: slow"
