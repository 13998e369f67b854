"""Results of a fleet."""

import gc
import shutil

import pytest
import torch
from fleet_jobs import gpt_job, train_plainly

from penstock import fleet
from penstock.errors import CheckpointError


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
