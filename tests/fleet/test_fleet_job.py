"""Jobs, as a user gives them."""

import pytest
from fleet_jobs import gpt_job
from torch import nn


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
        gpt_job(**changes)
