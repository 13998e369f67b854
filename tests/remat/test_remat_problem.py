"""Problems as files, and on another device."""

import pytest
from problems import chain, random_problem

from penstock.remat import RematProblem


def test_saved_and_loaded(tmp_path):
    problem = random_problem(5)
    problem.save(tmp_path / "step.json")
    assert RematProblem.load(tmp_path / "step.json") == problem
    (tmp_path / "other.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="not a saved problem .* problem.save"):
        RematProblem.load(tmp_path / "other.json")


def test_planned_for_another_device():
    problem = chain(10, out_bandwidth_bytes_per_s=1.0, in_bandwidth_bytes_per_s=1.0)
    elsewhere = problem.scaled(durations=0.5, out=7.0)
    assert elsewhere.step_s == problem.step_s / 2
    assert (elsewhere.out_bandwidth_bytes_per_s, elsewhere.in_bandwidth_bytes_per_s) == (7.0, 1.0)
