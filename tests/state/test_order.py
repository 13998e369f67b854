"""Orders of steps, which tell when a page is used next, and the ranks that follow from them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BudgetError
from penstock.state._order import MAX_ORDERS, Follower, StepOrder

NUM_KEYS = 4
STEPS = st.lists(st.lists(st.integers(0, NUM_KEYS - 1), max_size=3, unique=True), min_size=1, max_size=12)


def order_of(step, births=None):
    order = StepOrder()
    for index, keys in enumerate(step):
        for key, birth in (births or {}).items():
            if birth == index:
                order.begin(key, 1)
        order.add(tuple(keys), (1,) * len(keys))
    return order


def use_by_scanning(step, births, key, position, births_from):
    """The next use of a key's page: a page that begins with the key ends the one before."""
    for index in range(position, len(step)):
        if births.get(key) == index and index >= births_from:
            return math.inf
        if key in step[index]:
            return index
    return math.inf if births.get(key, -1) >= max(births_from, len(step)) else None


@given(st.data())
def test_the_next_use_is_the_one_that_a_scan_finds(data):
    step = data.draw(STEPS)
    births = data.draw(st.dictionaries(st.integers(0, NUM_KEYS - 1), st.integers(0, len(step) - 1)))
    order = order_of(step, births)
    for key in range(NUM_KEYS):
        for position in range(len(step)):
            expected = use_by_scanning(step, births, key, position, position)
            if expected is None:
                again = use_by_scanning(step, births, key, 0, 0)
                expected = math.inf if again is None else len(step) + again
            assert order.next_use(key, position) == expected


def test_a_page_that_begins_now_is_not_its_own_successor():
    order = order_of([[0], [0]], births={0: 1})
    assert order.next_use(0, 1) == math.inf
    assert order.next_use(0, 1, is_new=True) == 1


@given(STEPS)
def test_a_step_is_recognised_and_one_that_deviates_is_not(step):
    follower = Follower()
    for _ in range(2):
        follower.begin()
        for keys in step:
            follower.follow(tuple(keys), (1,) * len(keys))
        assert follower.end([]) is not None
    assert len(follower.orders) == 1
    follower.begin()
    assert follower.known is follower.orders[0]
    follower.follow((NUM_KEYS,), (1,))
    assert follower.known is None


def test_the_kind_of_step_that_came_after_is_expected():
    follower = Follower()
    for _ in range(2):
        for key in (0, 1):
            follower.begin()
            follower.follow((key,), (1,))
            follower.end([])
    assert follower.expected is not None
    assert follower.expected.needs == [(0,)]


def test_only_the_latest_kinds_are_remembered():
    follower = Follower()
    for key in range(MAX_ORDERS + 3):
        follower.begin()
        follower.follow((key,), (1,))
        follower.end([])
    assert [order.needs for order in follower.orders] == [[(key,)] for key in range(3, MAX_ORDERS + 3)]


def test_the_operator_that_needs_most_is_named():
    order = order_of([[0], [0, 1], [1]])
    order.measured([10, 10, 10], order)
    order.refuse_small(12, str)
    with pytest.raises(BudgetError, match=r"must be at least 12 .*an operator on 0, 1"):
        order.refuse_small(11, str)


def test_the_first_three_of_many_are_named():
    order = order_of([[0, 1, 2, 3]])
    order.measured([0], order)
    with pytest.raises(BudgetError, match=r"must be at least 4 .*an operator on 0, 1, 2 and 1 others"):
        order.refuse_small(3, str)


def test_pages_that_begin_between_two_operators_are_counted_by_position():
    order = StepOrder()
    for size_bytes in (5, 7, 0):
        order.add((0,), (1,))
        order.begin(1, size_bytes)
    order.measured([0, 0, 0], order)
    assert [order.begun_between(0, end) for end in range(4)] == [0, 5, 12, 12]
    assert order.begun_between(1, 3) == 7


def test_a_measured_step_adds_to_what_is_known_of_its_kind():
    follower = Follower()
    for others_bytes in ([3, 1], [2, 5]):
        follower.begin()
        for key in (0, 1):
            follower.follow((key,), (1,))
        order = follower.end(others_bytes)
    assert order is not None
    assert (order.others_bytes, order.num_measured) == ([3, 5], 2)


def test_the_larger_of_two_measurements_counts():
    order = order_of([[0], [1]])
    order.measured([3, 1], order)
    order.measured([2, 5], order)
    assert (order.others_bytes, order.num_measured) == ([3, 5], 2)


def test_the_next_uses_of_an_operators_pages_follow_what_is_known():
    order, other = order_of([(1, 2), (2,), (1,)]), order_of([(3,), (2,)])
    order.measured([0] * 3, order)
    order.precede(order)
    assert order.next_uses(0) == (2, 1)
    assert order.next_uses(2) == (3,)
    order.precede(other)
    assert order.next_uses(1) == (4,)
    assert order.next_uses(2) == (math.inf,)  # which the other one does not use
    seen = order_of([(1, 2), (2,), (1,)], {1: 2})  # now another page has the first key from the third operator on
    order.measured([0] * 3, seen)
    assert order.next_uses(0) == (math.inf, 1)


@pytest.mark.parametrize("turn", ["ab", "aaab", "abac", "aabbbc", "abaacd"])
def test_kinds_that_come_in_turns_are_expected(turn):
    follower, needs = Follower(), {"a": [(1,), (2,)], "b": [(1,), (3,)], "c": [(1,)], "d": [(2,)]}
    missed = []
    for number in range(6 * len(turn)):
        kind = turn[number % len(turn)]
        follower.begin()
        expected = follower.known
        for keys in needs[kind]:
            follower.follow(keys, (100,) * len(keys))
        order = follower.end([0] * len(needs[kind]))
        missed += [number] * (expected is not order)
    assert all(number < 2 * len(turn) for number in missed)
    assert follower.expected.needs == needs[turn[0]]
    assert follower.expected.then.needs == needs[turn[1]]
