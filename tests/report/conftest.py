"""Runs that several files of tests report on."""

import pytest
import torch
from runs_to_report import JOBS, UNITS, write_run

from penstock import offload


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "spill"
    folder.mkdir()
    return folder


@pytest.fixture
def offloader(disk):
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
    with_less = offload.activations(model, disk=disk, min_size=0, min_saving=0, max_stall=1)
    for _ in range(3):
        with with_less:
            model(torch.ones(512, 256)).sum().backward()
    yield with_less
    with_less.close()


@pytest.fixture
def run_dir(tmp_path):
    return write_run(tmp_path / "runs", UNITS, JOBS, {"a": [3.0, 2.0, 1.0], "gone wrong": [1.0, float("nan")]})
