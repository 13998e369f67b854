"""The lower bound of a step's extra time: below every plan and every optimum, and what paper and pencil give."""

import math

import pytest
from benchmarks.optimal import fastest
from benchmarks.planner import network
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import chain, keep_all_bytes, problems

from penstock.errors import BudgetError
from penstock.remat import Planned, _space, least_extra_s, pareto, plan, smallest_budget_bytes

METHODS = ["hybrid", "recompute", "swap"]


@pytest.fixture(autouse=True)
def _small_storages_may_swap(monkeypatch):
    monkeypatch.setattr(_space, "MIN_SWAP_BYTES", 0)


@given(problems, st.sampled_from(METHODS), st.floats(0.2, 1.0))
@settings(deadline=None, max_examples=300, database=None)
def test_no_plan_is_faster(problem, method, share):
    budget = problem.static_bytes + int(share * (keep_all_bytes(problem) - problem.static_bytes))
    bound_s = least_extra_s(problem, budget, method=method)
    (result,) = pareto(problem, [budget], method=method)
    if result is not None:
        assert bound_s <= result.extra_s + 1e-9
    if bound_s == math.inf:
        with pytest.raises(BudgetError):
            plan(problem, budget, method=method)


def test_recomputing_costs_the_fewest_seconds_per_byte():
    """While the first or second operator of backward runs, 9 storages of 100 bytes exist; 4 of them are too many."""
    assert least_extra_s(chain(8), 500) == pytest.approx(4)
    assert least_extra_s(chain(8, static_bytes=1000), 1500) == pytest.approx(4)
    assert least_extra_s(chain(8), 900) == 0
    assert least_extra_s(chain(8), 850) == pytest.approx(0.5)  # a share of a storage


@pytest.mark.parametrize(("method", "seconds"), [("recompute", 4), ("hybrid", 3), ("swap", 33)])
def test_lanes_carry_what_time_allows(method, seconds):
    """At the second operator of backward 400 bytes are too many, and 7 seconds are left for the lane back.

    Recomputing for s seconds spares 100 s bytes and lets the lane carry 10 (7 + s): 400 = 100 s + 70 + 10 s.
    """
    problem = chain(8, out_bandwidth_bytes_per_s=10.0, in_bandwidth_bytes_per_s=10.0)
    assert least_extra_s(problem, 500, method=method) == pytest.approx(seconds)


def test_fast_lanes_cost_nothing():
    assert least_extra_s(chain(8, out_bandwidth_bytes_per_s=1e3, in_bandwidth_bytes_per_s=1e3), 500) == 0


def test_no_plan_is_smaller_than_an_operator_needs():
    assert least_extra_s(chain(8), 250) == math.inf
    assert least_extra_s(chain(8), 500, method="swap") == math.inf  # without lanes
    with pytest.raises(ValueError, match="budget_bytes"):
        least_extra_s(chain(8), -1)


@pytest.mark.parametrize("method", ["recompute", "hybrid"])
@pytest.mark.parametrize("seed", range(3))
def test_a_solver_finds_nothing_below_it_nor_above_our_plan(method, seed):
    problem = network(seed, 8).scaled(out=2e9, back=2e9)
    low = smallest_budget_bytes(problem, method=method)
    high = keep_all_bytes(problem)
    for share in (0.0, 0.3, 0.7):
        budget = int(low + share * (high - low))
        best = fastest(problem, budget, method=method)
        assert least_extra_s(problem, budget, method=method) <= best.bound_s + 1e-6
        assert best.bound_s <= plan(problem, budget, method=method).extra_s + 1e-6


def test_swaps_help_the_solver_too():
    problem = network(0, 12).scaled(out=2e9, back=2e9)
    budget = smallest_budget_bytes(problem, method="recompute")
    assert fastest(problem, budget, method="hybrid").extra_s < fastest(problem, budget).extra_s


def test_explain_names_the_bound():
    def explained(problem, budget_bytes):
        result = plan(problem, budget_bytes)
        return Planned(problem=problem, plan=result, budget_bytes=budget_bytes).explain()

    assert "; no plan for this budget adds less than 4.0 s (25.0%)" in explained(chain(8), 500)
    assert "no plan for" not in explained(chain(8), 900)
    assert "no plan for" not in explained(chain(8), 2**62)
