"""Budgets that cannot be kept are reported once for each way, or raised."""

import warnings

import breaking
import pytest
import torch
from breaking import DOORS, batch, make, through, train

from penstock import remat
from penstock.errors import BudgetError, BudgetNotKeptWarning


@pytest.mark.parametrize("kind", ["print", "disabled"])
def test_what_cannot_be_kept_is_said_once_or_raised(kind):
    x = batch()
    model = make(kind, num_blocks=8)  # whose inputs alone take 2 MiB between them

    def run(step):
        for _ in range(3):
            step(x).backward()

    with pytest.warns(BudgetNotKeptWarning) as caught:
        run(remat.compile(model, budget="4700KiB"))
    said = [str(warning.message) for warning in caught]
    assert len(said) == 2
    assert "the first step of its kind takes" in said[0]
    assert "Give budget=" in said[1]
    assert {warning.filename for warning in caught} == {__file__, breaking.__file__}  # the caller, and its model
    with pytest.raises(BudgetError, match="the first step of its kind takes"):
        run(remat.compile(model, budget="4700KiB", strict=True))


@DOORS
def test_a_step_of_which_nothing_is_compiled_is_warned_of(door):
    model = make("plain")
    model.forward = torch.compiler.disable(model.forward)
    peak = max(peak for *_, peak in train(model, model, [batch()] * 2))
    for budget, is_kept in ((int(0.7 * peak), False), (int(1.1 * peak), True)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", BudgetNotKeptWarning)
            step = through(door, model, budget)
            for _ in range(6):
                step(batch()).backward()
        said = [str(warning.message) for warning in caught if warning.category is BudgetNotKeptWarning]
        assert len(said) == (0 if is_kept else 1)
        assert is_kept or "cannot compile any part of this step" in said[0]


def test_what_nothing_compiles_of_is_warned_of_whenever_it_grows():
    model = make("plain")
    model.forward = torch.compiler.disable(model.forward)
    step = remat.compile(model, budget="16MiB")
    for _ in range(20):
        step(batch(2)).backward()
    with pytest.warns(BudgetNotKeptWarning, match="cannot compile any part"):
        step(batch(256)).backward()
