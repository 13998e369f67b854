"""Plans for random steps: verified from the order of operators, beside brute force, and monotone in the budget."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from problems import chain, keep_all_bytes, problems, random_problem

from penstock.errors import BudgetError, InternalError
from penstock.remat import Decision, RematProblem, _refine, _space, pareto, plan, smallest_budget_bytes, verify
from penstock.remat._simulate import FlatProblem, simulate
from penstock.remat._verify import live_bytes

many = settings(deadline=None, max_examples=100, database=None)


@pytest.fixture(autouse=True)
def _small_storages_may_swap(monkeypatch):
    monkeypatch.setattr(_space, "MIN_SWAP_BYTES", 0)


@given(problems, st.sampled_from(["hybrid", "recompute", "swap"]), st.floats(0.3, 1.0))
@example(random_problem(37), "recompute", 0.875)  # makes a storage again beside another while it is still there
@many
def test_every_plan_is_verified_and_within_its_budget(problem, method, share):
    budget = problem.static_bytes + int(share * (keep_all_bytes(problem) - problem.static_bytes))
    (result,) = pareto(problem, [budget], method=method)
    if result is None:
        with pytest.raises(BudgetError, match="needs at least"):
            plan(problem, budget, method=method)
        return
    verify(problem, result)
    assert result.peak_bytes <= budget
    assert max(live_bytes(problem, result), default=0) + problem.static_bytes == result.peak_bytes
    assert result.extra_s >= result.stall_s >= 0
    if method == "recompute":
        assert not result.gone_slots
    if method == "swap":
        assert len(result.slots) == len(problem.operators)


@given(problems)
@many
def test_more_bytes_never_cost_more_time(problem):
    budgets = [problem.static_bytes + part * keep_all_bytes(problem) // 8 for part in range(2, 10)]
    plans = pareto(problem, budgets)
    times = [result.extra_s for result in plans if result is not None]
    assert times == sorted(times, reverse=True)
    assert [result is None for result in plans] == sorted((result is None for result in plans), reverse=True)
    assert plans[-1] is not None
    assert plans[-1].extra_s == 0


@given(problems, st.integers(0, 2**32))
@many
def test_to_hold_longer_what_runs_once_saves_nothing(problem, seed):
    """Which is why such decisions are not tried."""
    choose, space = np.random.default_rng(seed), _space.Space.of(problem, "hybrid")
    decisions = np.zeros(len(problem.storages), dtype=np.uint8)
    for group, choices in space.groups():
        decisions[group] = choose.choice(choices)
    before = simulate(space.graph, decisions)
    assume(before is not None)
    extra_s, again = before.extra_s, np.bincount(before.slots[problem.num_forward :], minlength=len(problem.operators))
    for group, choices in space.groups():
        now = decisions[group[0]]
        if not set(_space.RECOMPUTE) <= set(choices) or now not in _space.RECOMPUTE:
            continue
        if again[space.graph.producers[group[0]]] <= 1:
            for longer in _space.RECOMPUTE[: _space.RECOMPUTE.index(Decision(now))]:
                changed = decisions.copy()
                changed[group] = longer
                assert simulate(space.graph, changed).extra_s == extra_s


@pytest.mark.parametrize("method", ["recompute", "hybrid"])
def test_threads_find_the_same_plans(monkeypatch, method):
    monkeypatch.setattr(_refine, "_LARGE_GRAPH", 0)
    num_threads = torch.get_num_threads()
    for seed in range(20):
        problem = random_problem(seed, num_forward=12)
        budgets = [problem.static_bytes + part * keep_all_bytes(problem) // 8 for part in range(2, 8)]
        found = []
        for number in (1, 4):
            torch.set_num_threads(number)
            found.append(pareto(problem, budgets, method=method))
        torch.set_num_threads(num_threads)
        assert found[0] == found[1]


@given(problems)
@many
def test_swaps_never_raise_the_smallest_budget(problem):
    assert smallest_budget_bytes(problem) <= smallest_budget_bytes(problem, method="recompute")


@given(problems, st.sampled_from(["hybrid", "recompute", "swap"]))
@many
def test_the_smallest_budget_works(problem, method):
    smallest = smallest_budget_bytes(problem, method=method)
    assert plan(problem, smallest, method=method).peak_bytes <= smallest


@given(problems, st.integers(0, 2**32))
@many
def test_the_smallest_budget_of_recomputation_depends_on_sizes_alone(problem, seed):
    """However fast operators were measured: a seed or a repair that looks at times breaks this."""
    factors = np.random.default_rng(seed).uniform(0.1, 10, len(problem.operators))
    operators = tuple(
        replace(operator, duration_s=operator.duration_s * factor)
        for operator, factor in zip(problem.operators, factors, strict=True)
    )
    other = replace(problem, operators=operators)
    budgets = [smallest_budget_bytes(one, method="recompute") for one in (problem, other)]
    assert budgets[0] == budgets[1]


@pytest.mark.parametrize("seed", range(40))
def test_recomputation_is_near_the_best_of_all_decisions(seed):
    """Brute force over keep, recompute and recompute-each-time on steps of up to seven storages."""
    problem = random_problem(seed, num_forward=4)
    forward = [
        index for index, storage in enumerate(problem.storages) if storage.producer < 4 and not storage.is_output
    ]
    if len(forward) > 7:
        pytest.skip("too many to try")
    graph = FlatProblem(problem)
    free = [storage for storage in forward if not problem.operators[problem.storages[storage].producer].must_run_once]
    outcomes = []
    for choice in itertools.product([0, 1, 2], repeat=len(free)):
        decisions = np.zeros(len(problem.storages), dtype=np.uint8)
        decisions[free] = choice
        played = simulate(graph, decisions)
        outcomes.append((played.peak_bytes, played.extra_s))
    for budget in sorted({peak for peak, _ in outcomes}):
        best_s = min(extra_s for peak, extra_s in outcomes if peak <= budget)
        result = pareto(problem, [budget + problem.static_bytes], method="recompute")[0]
        if result is not None:
            assert result.extra_s <= best_s + 0.35 * graph.step_s
    smallest = smallest_budget_bytes(problem, method="recompute") - problem.static_bytes
    assert smallest <= 1.3 * min(peak for peak, _ in outcomes) + 1


def test_a_chain_takes_about_the_root_of_its_layers():
    problem = chain(36)
    result = plan(problem, 1500, method="recompute")
    verify(problem, result)
    assert keep_all_bytes(problem) == 3700
    assert result.extra_s <= 36
    assert smallest_budget_bytes(problem, method="recompute") <= 1500


def test_swapping_hides_where_the_lane_is_fast_enough():
    problem = chain(20, out_bandwidth_bytes_per_s=1000.0, in_bandwidth_bytes_per_s=1000.0)
    result = plan(problem, 800)
    assert result.extra_s == 0
    assert result.gone_slots
    verify(problem, result)
    with pytest.raises(BudgetError):
        plan(problem, 300, method="swap")


def test_what_the_budget_does_not_ask_for_is_not_swapped():
    problem = chain(20, out_bandwidth_bytes_per_s=1e6, in_bandwidth_bytes_per_s=1e6)
    swapped = [len(plan(problem, budget).gone_slots) for budget in (800, 1400, 2000, 2100)]
    assert swapped == sorted(swapped, reverse=True)
    assert swapped[-1] == 0


def test_refinement_and_methods_can_be_left_out():
    problem = chain(30, out_bandwidth_bytes_per_s=30.0, in_bandwidth_bytes_per_s=30.0)
    times = {method: plan(problem, 1600, method=method).extra_s for method in ("hybrid", "recompute")}
    assert times["hybrid"] <= times["recompute"]
    assert plan(problem, 1600, refine=False).extra_s >= times["hybrid"]


def test_a_refusal_names_the_smallest_budget_and_the_largest_storages():
    problem = replace(chain(10), static_bytes=50)
    with pytest.raises(BudgetError, match=r"needs at least \d+ bytes .* the largest storages are x0 ") as caught:
        plan(problem, 200)
    smallest = int(str(caught.value).partition("at least ")[2].partition(" ")[0])
    assert plan(problem, smallest).peak_bytes <= smallest


def test_nothing_to_plan():
    empty = RematProblem(operators=(), num_forward=0, storages=())
    result = plan(empty, 0)
    assert result.peak_bytes == 0
    assert result.slots == ()
    verify(empty, result)


class TestVerify:
    """A wrong plan is caught, whatever is wrong with it."""

    problem = chain(8)

    def made(self):
        return plan(self.problem, 600, method="recompute")

    def test_a_peak_that_is_too_low(self):
        with pytest.raises(InternalError, match="implies"):
            verify(self.problem, replace(self.made(), peak_bytes=self.made().peak_bytes - 1))

    def test_a_storage_that_is_gone(self):
        decisions = (Decision.RECOMPUTE,) * len(self.problem.storages)
        with pytest.raises(InternalError, match="which is no longer there"):
            verify(self.problem, replace(self.made(), decisions=decisions, slots=tuple(range(16))))

    def test_an_operator_that_is_left_out(self):
        with pytest.raises(InternalError, match="once and in order"):
            verify(self.problem, replace(self.made(), slots=self.made().slots[:-1]))

    def test_forward_in_another_order(self):
        with pytest.raises(InternalError, match="as captured"):
            verify(self.problem, replace(self.made(), slots=(1, 0, *self.made().slots[2:])))

    def test_what_must_run_once(self):
        operators = tuple(replace(operator, must_run_once="a collective") for operator in self.problem.operators)
        with pytest.raises(InternalError, match="a collective"):
            verify(replace(self.problem, operators=operators), self.made())

    def test_a_return_before_the_departure(self):
        result = self.made()
        kept = next(storage for storage, what in enumerate(result.decisions) if what == Decision.KEEP)
        with pytest.raises(InternalError, match="outside of its lifetime"):
            verify(self.problem, replace(result, gone_slots={kept: 9}, fetch_slots={kept: 8}))
