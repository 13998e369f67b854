"""Kinds of step that come in turns, joined into one order."""

import pytest

from penstock.state import Rates, best_plan, verify
from penstock.state._order import Details, StepOrder, UpdateOnHost
from penstock.state._order_problem import problem_of
from penstock.state._turns import joined

MIB = 2**20
RATES = Rates(in_bytes_per_s=1e9, out_bytes_per_s=1e9, both_in_bytes_per_s=1e9, both_out_bytes_per_s=1e9)
WEIGHT, OTHER, GRADIENT, RESULT = 10, 11, 12, 13


def order_of(needs, *, begun=(), died=(), writes=None, **details):
    """An order of pages of 1 MiB. ``begun`` and ``died`` are pairs of key and position."""
    order = StepOrder(others_bytes=[MIB] * len(needs), num_measured=2)
    order.details = Details(
        writes=writes or [(False,) * len(needed) for needed in needs],
        seconds=[1e-3] * len(needs),
        born_bytes={key: MIB for key, _ in begun},
        died=dict(died),
        **details,
    )
    for needed in needs:
        order.add(needed, (MIB,) * len(needed))
    order.begun = dict(begun)
    return order


def test_a_turn_of_one_kind_is_that_kind():
    order = order_of([(WEIGHT,), (WEIGHT, RESULT), (OTHER, RESULT), (OTHER,)], begun=[(RESULT, 1)], died=[(RESULT, 2)])
    turn = joined([order])
    names = dict(enumerate(turn.keys))
    assert [tuple(names[key] for key in needed) for needed in turn.order.needs] == order.needs
    assert {names[key]: place for key, place in turn.order.begun.items()} == order.begun
    assert {names[key]: place for key, place in turn.order.details.died.items()} == order.details.died
    assert turn.order.sizes == order.sizes
    assert turn.starts == [0, 4]


def test_what_begins_in_two_steps_is_two_pages():
    kinds = [
        order_of([(WEIGHT,), (RESULT,)], begun=[(RESULT, 1)], died=[(RESULT, 1)]),
        order_of([(WEIGHT,), (RESULT, OTHER)], begun=[(RESULT, 1)], died=[(RESULT, 1)]),
    ]
    turn = joined(kinds)
    (first,), (result,), (again,), (other_result, _) = turn.order.needs
    assert first == again
    assert result != other_result
    assert turn.keys[result] == turn.keys[other_result] == RESULT
    assert turn.order.begun == {result: 1, other_result: 3}
    assert turn.order.details.died == {result: 1, other_result: 3}


def test_a_gradient_lives_from_the_first_micro_batch_to_the_update():
    first = order_of([(WEIGHT,), (GRADIENT,)], begun=[(GRADIENT, 1)])
    later = order_of([(WEIGHT,), (GRADIENT,)])
    last = order_of([(WEIGHT,), (GRADIENT,), (WEIGHT, GRADIENT)], died=[(GRADIENT, 2)])
    turn = joined([first, later, later, last])
    keys = {needed[-1] for needed in turn.order.needs if turn.keys[needed[-1]] == GRADIENT}
    assert len(keys) == 1
    (gradient,) = keys
    assert turn.order.begun == {gradient: 1}
    assert turn.order.details.died == {gradient: 8}


@pytest.mark.parametrize("place", [-1, 0])
def test_one_that_lives_on_dies_in_the_next_turn(place):
    """Its end is seen before its successor begins, in the step in which both have the same key."""
    kind = order_of([(WEIGHT,), (RESULT,), (RESULT,)], begun=[(RESULT, 2)], died=[(RESULT, place)])
    other = order_of([(WEIGHT,)])
    turn = joined([kind, other])
    (result,) = turn.order.begun
    assert turn.order.needs[1:3] == [(result,), (result,)]
    assert turn.order.details.died == {result: place}


def test_what_nobody_is_seen_to_free_dies_with_the_last_step_that_uses_it():
    kept = order_of([(WEIGHT,), (RESULT,)], begun=[(RESULT, 1)])
    user = order_of([(RESULT,), (WEIGHT,)])
    other = order_of([(WEIGHT,), (OTHER,)])
    turn = joined([kept, user, other])
    assert list(turn.order.details.died.values()) == [3]
    turn = joined([kept, other, other])
    assert list(turn.order.details.died.values()) == [1]


def test_updates_on_the_host_have_the_keys_of_their_steps():
    micro_batch = order_of([(WEIGHT,), (GRADIENT,)], begun=[(GRADIENT, 1)])
    last = order_of(
        [(WEIGHT,), (GRADIENT,)],
        updates=[UpdateOnHost(reads=(GRADIENT,), writes=(WEIGHT,), size_bytes=100, after=1)],
        died=[(GRADIENT, 1)],
    )
    turn = joined([micro_batch, last])
    (update,) = turn.order.details.updates
    assert [turn.keys[key] for key in (*update.reads, *update.writes)] == [GRADIENT, WEIGHT]
    assert update.reads[0] in turn.order.begun
    assert update.after == 3


def test_nothing_is_joined_of_which_too_little_is_known():
    known, unknown = order_of([(WEIGHT,)]), order_of([(WEIGHT,)])
    unknown.details = None
    assert joined([known, unknown]) is None
    unknown.details, unknown.others_bytes = known.details, []
    assert joined([known, unknown]) is None


def test_a_plan_of_a_turn_moves_no_more_than_plans_of_each_kind():
    """Where two kinds use other weights, plans of each alone would begin with the other's on the device."""
    keys = range(20, 32)
    kinds = [
        order_of([(key,) for key in [*keys, *reversed(keys)]], writes=[(True,)] * 24),
        order_of([(key,) for key in [*reversed(keys), *keys][6:]], writes=[(True,)] * 18),
    ]
    turn = joined(kinds)
    ordered = problem_of(turn.order, 7 * MIB, RATES, is_one_memory=False)
    planned = best_plan([ordered.problem])
    verify(ordered.problem, planned.plan)
    alone = 0
    for kind in kinds:
        problem = problem_of(kind, 7 * MIB, RATES, is_one_memory=False).problem
        alone += best_plan([problem]).plan.in_bytes(problem)
    assert 0 < planned.plan.in_bytes(ordered.problem) <= alone
