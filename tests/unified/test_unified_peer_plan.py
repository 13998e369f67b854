"""Plans of several machines: one answer for each row, and no division of their memory that takes less time."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import unified
from penstock.errors import InternalError


def problems(scores, num_machines, room, *, device=0, peer_row_s=1.0, disk_row_s=4.0, part_rows=None):
    """The problem as each of the machines sees it; rows have one byte."""
    return [
        unified.TierProblem(
            num_rows=len(scores), row_bytes=1, device_bytes=device, host_bytes=room,
            scores=torch.tensor(scores, dtype=torch.float64),
            peers=unified.Peers(
                num_machines=num_machines, machine=machine, peer_row_s=peer_row_s, disk_row_s=disk_row_s,
                part_rows=part_rows,
            ),
        )
        for machine in range(num_machines)
    ]  # fmt: skip


def seconds(problem, copies):
    """The time of an access if each row is in so many memories: 0, 1 or all; the mean over machines."""
    peers, scores = problem.peers, problem.scores / (float(problem.scores.sum()) or 1.0)
    copies = torch.tensor(copies)
    elsewhere = (peers.num_machines - 1) / peers.num_machines
    on_disk, once = float(scores[copies == 0].sum()), float(scores[copies == 1].sum())
    asked = elsewhere * (once + (on_disk if peers.part_rows else 0.0))
    return max(peers.peer_row_s * asked, peers.disk_row_s * on_disk)


def copies_in(plans, problem):
    """The number of machines that hold each row in memory, as all plans together say."""
    counts = torch.zeros(problem.num_rows, dtype=torch.int64)
    for plan in plans:
        counts[plan.host_rows.long()] += 1
    return counts


part_sizes = st.lists(st.integers(0, 9), min_size=2, max_size=5)
rates = st.sampled_from([0.0, 0.1, 1.0, 3.0, 50.0])


@given(part_sizes, st.booleans(), st.integers(0, 6), st.integers(0, 30), rates, rates, st.booleans(), st.randoms())
@settings(max_examples=300, deadline=None)
def test_machines_agree_on_who_answers_for_each_row(
    parts, has_parts, device, room, peer_row_s, disk_row_s, ties, random
):
    num_rows, num_machines = sum(parts), len(parts)
    scores = [random.randrange(3) if ties else random.random() for _ in range(num_rows)]
    seen = problems(
        scores, num_machines, room, device=device, peer_row_s=peer_row_s, disk_row_s=disk_row_s,
        part_rows=tuple(parts) if has_parts else None,
    )  # fmt: skip
    plans = [unified.plan_tiers(problem) for problem in seen]
    ends = list(itertools.accumulate(parts))
    owner_of_part = [next(number for number, end in enumerate(ends) if row < end) for row in range(num_rows)]
    held = [set(plan.host_rows.tolist()) for plan in plans]
    on_device = set(plans[0].device_rows.tolist())
    for problem, plan, machine in zip(seen, plans, range(num_machines), strict=True):
        unified.verify(problem, plan)
        assert set(plan.device_rows.tolist()) == on_device and len(held[machine]) <= room
        total = plan.device_share + plan.host_share + plan.peer_share + plan.disk_share + plan.peer_disk_share
        assert total == pytest.approx(1 if sum(scores) else 0, abs=1e-9) or not sum(scores)
        for row, asked in enumerate(plan.answering.tolist()):
            is_here = row in on_device or row in held[machine]
            in_memory = any(row in rows for rows in held)
            if is_here:
                assert asked == -1
            elif in_memory:
                assert row in held[asked]
            else:
                assert asked == (owner_of_part[row] if has_parts and owner_of_part[row] != machine else -1)
    in_all = set.intersection(*held)
    assert {plan.num_replicated_rows for plan in plans} == {len(in_all)} or num_rows <= room
    loads = [sum(plan.answering.tolist().count(machine) for plan in plans) for machine in range(num_machines)]
    if not has_parts:
        assert max(loads) - min(loads) <= num_machines - 1, "all answer for as many rows, but for one"


@given(
    st.integers(2, 3), st.integers(0, 4), st.lists(st.floats(0, 1), min_size=1, max_size=7), rates, rates, st.booleans()
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_no_other_division_takes_less_time(num_machines, room, scores, peer_row_s, disk_row_s, has_parts):
    """Compared with every choice of copies that fits, but for what rounding to whole rows costs."""
    num_rows = len(scores)
    part_rows = (num_rows, *[0] * (num_machines - 1)) if has_parts else None
    seen = problems(
        scores, num_machines, room, peer_row_s=peer_row_s, disk_row_s=disk_row_s, part_rows=part_rows
    )  # fmt: skip
    problem = seen[0]
    plans = [unified.plan_tiers(problem) for problem in seen]
    counts = copies_in(plans, problem)
    ours = seconds(problem, [2 if count == num_machines else int(count) for count in counts])
    best = min(
        seconds(problem, copies)
        for copies in itertools.product(range(3), repeat=num_rows)
        if copies.count(1) + copies.count(2) * num_machines <= num_machines * room
    )
    largest = max(scores) / (sum(scores) or 1.0)
    assert ours <= best + num_machines * largest * max(peer_row_s, disk_row_s) + 1e-9


def power_law(num_rows):
    return (1 / torch.arange(1, num_rows + 1).double()).tolist()


def test_a_slow_disk_is_spared_and_a_slow_network_too():
    scores = power_law(4000)
    fast_network = unified.plan_tiers(problems(scores, 4, 500, disk_row_s=1e4)[0])
    slow_network = unified.plan_tiers(problems(scores, 4, 500, peer_row_s=1e4)[0])
    assert fast_network.num_replicated_rows == 0 and fast_network.num_disk_rows == 2000
    assert slow_network.num_replicated_rows == 500 and slow_network.num_peer_rows == 0
    between = unified.plan_tiers(problems(scores, 4, 500, peer_row_s=1.0, disk_row_s=4.0)[0])
    assert 0 < between.num_replicated_rows < 500
    peer_s, disk_s = between.peer_share, 4 * between.disk_share
    assert peer_s == pytest.approx(disk_s, rel=0.02) and between.cold_row_s == pytest.approx(peer_s, rel=0.02)


def test_memory_that_is_enough_for_all_rows_together_leaves_no_disk():
    plan = unified.plan_tiers(problems(power_law(900), 4, 300, disk_row_s=1e4)[0])
    assert plan.num_disk_rows == 0 and plan.num_replicated_rows == 100
    assert plan.hit_rate == 1 and plan.num_peer_rows == 600


def test_the_plan_of_one_machine_is_as_without_peers():
    problem = problems(power_law(50), 1, 20)[0]
    plan, alone = unified.plan_tiers(problem), unified.plan_tiers(dataclasses.replace(problem, peers=None))
    assert torch.equal(plan.host_rows, alone.host_rows) and plan.peers is None and plan.answering is None


def test_wrong_plans_of_machines_are_found():
    problem = problems(power_law(40), 2, 10)[0]
    plan = unified.plan_tiers(problem)
    with pytest.raises(InternalError, match="in two tiers"):
        unified.verify(problem, dataclasses.replace(plan, num_peer_rows=plan.num_peer_rows, num_disk_rows=0))
    with pytest.raises(InternalError, match="other machines answer"):
        unified.verify(problem, dataclasses.replace(plan, num_peer_rows=0))


def test_rows_at_wrong_machines_are_found():
    problem = problems(power_law(40), 2, 10)[0]
    plan = unified.plan_tiers(problem)
    for machine in (0, 7):
        answering = torch.where(plan.answering >= 0, machine, plan.answering)
        with pytest.raises(InternalError, match="a machine that does not exist"):
            unified.verify(problem, dataclasses.replace(plan, answering=answering))
    with pytest.raises(InternalError, match="more rows are in every memory"):
        unified.verify(problem, dataclasses.replace(plan, num_replicated_rows=99))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("machine", 2), ("num_machines", 0), ("num_machines", 40_000), ("part_rows", (1, 2, 3)), ("part_rows", ()),
        ("part_rows", (-1, 4)), ("peer_row_s", -1.0),
    ],
)  # fmt: skip
def test_machines_that_cannot_be_are_refused(field, value):
    good = unified.Peers(num_machines=2, machine=1, peer_row_s=1e-6, disk_row_s=1e-5)
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(good, **{field: value})


def test_parts_must_add_up():
    with pytest.raises(ValueError, match="must add up to the table's 4 rows"):
        problems([1.0] * 4, 2, 2, part_rows=(1, 2))
