"""The compiled simulation and the one in Python: equal in every number, and so are plans."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import chain, keep_all_bytes, random_problem

from penstock.remat import _simulate, _space, plan
from penstock.remat._simulate import FlatProblem, simulate, simulate_slowly

many = settings(deadline=None, max_examples=100, database=None)


@pytest.fixture(autouse=True)
def _small_storages_may_swap(monkeypatch):
    monkeypatch.setattr(_space, "MIN_SWAP_BYTES", 0)


@given(st.integers(0, 2**32), st.integers(0, 70))
@settings(many, max_examples=300)
def test_the_compiled_simulation_equals_the_one_in_python(seed, gap):
    problem = random_problem(seed)
    if not problem.can_swap:
        problem = replace(problem, out_bandwidth_bytes_per_s=50.0)
    graph = FlatProblem(problem, gap)
    decisions = np.random.default_rng(seed).integers(0, 5, len(problem.storages)).astype(np.uint8)
    slow, fast = simulate_slowly(graph, decisions), simulate(graph, decisions)
    assert (slow is None) == (fast is None)
    if slow is not None and fast is not None:
        assert (slow.peak_bytes, slow.extra_s, slow.stall_s) == (fast.peak_bytes, fast.extra_s, fast.stall_s)
        for name in ("slots", "live_bytes", "gone", "fetch"):
            assert np.array_equal(getattr(slow, name), getattr(fast, name)), name


@pytest.mark.parametrize("share", [0.6, 0.8])
def test_plans_without_a_compiler_are_the_same(share, monkeypatch):
    problem = replace(chain(6), out_bandwidth_bytes_per_s=200.0, in_bandwidth_bytes_per_s=200.0)
    budget = int(share * keep_all_bytes(problem))
    compiled = plan(problem, budget)
    monkeypatch.setattr(_simulate, "load", lambda *_, **__: None)
    monkeypatch.setattr(_simulate, "_simulate_compiled", lambda *_: pytest.fail("there is no compiler"))
    assert plan(problem, budget) == compiled
