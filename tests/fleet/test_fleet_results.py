"""Results of a fleet."""

import gc
import shutil

import pytest
import torch
from fleet_jobs import gpt_job, train_plainly

from penstock import fleet
from penstock.errors import CheckpointError
from penstock.fleet import JobResult, JobState, Results


def test_a_result_keeps_a_temporary_folder_and_a_folder_that_is_gone_is_told(tmp_path):
    job = gpt_job(steps=2)
    result = fleet.run([job], budget="2MB", host="64MiB", progress=None)["job"]
    gc.collect()  # the fleet and all other results are gone
    expected = train_plainly(job)[1].state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in result.model().state_dict().items())
    left = fleet.run([job], budget="2MB", host="64MiB", progress=None, run_dir=tmp_path)["job"]
    shutil.rmtree(tmp_path / "jobs")
    with pytest.raises(CheckpointError, match="the folder no longer exists"):
        left.model()


def result_of(name, state, loss):
    return JobResult(
        job=gpt_job(name), state=state, losses=(1.0, loss), validations=(), error=None, seconds_per_step=0.0,
        checkpoint=None,
    )  # fmt: skip


@pytest.mark.parametrize(("mode", "best"), [("min", "good"), ("max", "late")])
def test_the_best_job_is_one_that_did_not_fail_and_has_a_number(tmp_path, mode, best):
    known = [
        result_of("no number", JobState.DONE, float("nan")),
        result_of("broken", JobState.FAILED, 0.0 if mode == "min" else 9.0),
        result_of("good", JobState.DONE, 0.5),
        result_of("late", JobState.STOPPED, 0.7),
    ]
    assert Results(known, [], tmp_path, None).best(mode=mode).name == best
    with pytest.raises(ValueError, match="no job that did not fail"):
        Results(known[:2], [], tmp_path, None).best()
