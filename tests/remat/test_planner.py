"""Graphs of one step that are planned together, and their first steps."""

import warnings

import pytest
import torch
from breaking import DOORS, assert_same, batch, make, through, train

from penstock import remat
from penstock.errors import BudgetError, BudgetNotKeptWarning


@DOORS
@pytest.mark.parametrize("kind", ["print", "lock", "exit", "top", "lstm", "disabled"])
def test_what_dynamo_breaks_up_shares_one_budget(kind, door):
    batches = [batch(128, length=8) if kind == "lstm" else batch()] * 4  # short sequences, which are captured unrolled
    options = {} if kind == "disabled" else {"num_blocks": 3}  # else the eager block is too large a part
    expected = train(model := make(kind, **options), model, batches)
    budget = int(0.7 * max(peak for *_, peak in expected))
    model = make(kind, **options)
    step = through(door, model, budget)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", BudgetNotKeptWarning)
        got = train(step, model, batches)
    assert_same(expected, got)
    assert all(peak <= 1.01 * budget for *_, peak in got), [peak / budget for *_, peak in got]
    if kind != "disabled":  # whose memory cannot be measured while all steps are
        assert not caught


def test_two_forwards_at_once_are_planned_together_from_then_on():
    model, x = make("plain"), batch()
    for _ in range(2):
        (model(x) + model(x + 1)).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model = make("plain")
    step = remat.compile(model, budget=0.6)
    for _ in range(2):
        (step(x) + step(x + 1)).backward()
    assert all(
        torch.equal(parameter.grad, gradient) for parameter, gradient in zip(model.parameters(), expected, strict=True)
    )
    assert len(step.plans[-1].problem.operators) > 1.9 * len(step.plans[0].problem.operators) or len(step.plans) == 1


def test_a_first_step_that_does_not_fit_is_told_from_later_ones_that_do():
    x = batch(256)
    plain = train(model := make("print"), model, [x])[0][2]
    planned = remat.compile(make("print"), budget=2 * plain)
    for _ in range(2):
        planned(x).backward()
    (planned_step,) = planned.plans
    lowest = remat.pareto(planned_step.problem, [2**10])  # nothing fits
    assert lowest == [None]
    with pytest.raises(BudgetError) as refused:
        remat.plan(planned_step.problem, 2**10)
    budget = int(str(refused.value).split("Give budget=")[1].split()[0])
    with pytest.warns(BudgetNotKeptWarning) as caught:
        seen = train(step := remat.compile(model := make("print"), budget=budget), model, [x] * 4)
    (warning,) = caught
    assert "the first step of its kind takes" in str(warning.message)
    assert seen[0][2] > budget
    assert max(peak for *_, peak in seen[1:]) <= 1.01 * budget
    assert "graphs" in step.explain()


def test_a_step_above_its_budget_takes_as_little_as_it_can():
    x = batch()
    plain = train(model := make("print", num_blocks=8), model, [x])[0][2]
    with pytest.warns(BudgetNotKeptWarning) as caught:
        seen = train(remat.compile(model := make("print", num_blocks=8), budget="4700KiB"), model, [x] * 3)
    lowest = int(str(caught[-1].message).split("Give budget=")[1].split()[0])
    assert lowest < 0.5 * plain
    assert max(peak for *_, peak in seen) <= 1.1 * lowest
    assert seen[-1][2] <= 1.01 * lowest


def test_the_first_step_of_a_smaller_batch_keeps_what_larger_ones_keep():
    sizes = [32, 24, 16, 32]  # the last in graphs with symbols for sizes, anew
    model = make("print", num_blocks=6)
    with pytest.warns(BudgetNotKeptWarning) as caught:
        train(remat.compile(model, budget=4_800_000), model, [batch(32)] * 2)
    budget = int(str(caught[-1].message).split("Give budget=")[1].split()[0])
    model = make("print", num_blocks=6)
    with pytest.warns(BudgetNotKeptWarning, match="first step"):
        seen = train(remat.compile(model, budget=budget), model, (batch(size) for size in sizes))
    peaks = [peak for *_, peak in seen]
    assert peaks[0] > 1.02 * budget, "the first step of all keeps it, so what follows shows nothing"
    assert max(peaks[1:]) <= budget


def test_a_later_shape_is_planned_from_the_profile_of_the_first(monkeypatch):
    model = make("plain", num_blocks=1)
    step = remat.compile(model, budget="64MiB")
    step(batch(32)).backward()
    step.explain()
    monkeypatch.setattr("penstock.remat._profile._median_s", lambda *_: pytest.fail("times were to be scaled"))
    step(batch(16)).backward()
    large, small = (plan.problem for plan in step.plans)
    assert small.step_s < large.step_s
    for first, second in zip(large.operators, small.operators, strict=True):
        assert first.target == second.target


def test_times_that_were_scaled_are_corrected_by_a_step():
    model = make("plain", num_blocks=1)
    step = remat.compile(model, budget="64MiB")
    for rows in (32, 16, 16):
        step(batch(rows)).backward()
    session = step._step.door.session
    (scaled,) = [variant for piece in session.pieces for variant in piece._variants.values() if variant.num_calls == 2]
    assert not scaled.is_scaled
    assert scaled.problem.operators[0].workspace_bytes == step.plans[-1].problem.operators[0].workspace_bytes
    assert step.plans[-1].problem.step_s == pytest.approx(scaled.problem.step_s)
