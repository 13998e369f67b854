"""The one account of bytes."""

import threading
from pathlib import Path

import pytest

from penstock.errors import BudgetError, InternalError, PenstockError
from penstock.tiers import Budget, Charges, Footprint


def test_sizes_are_text_or_bytes():
    budget = Budget(device="40GiB", host=2**30, disk={"/nvme0": "1TiB", Path("/nvme1"): None})
    assert (budget.device_bytes, budget.host_bytes) == (40 * 2**30, 2**30)
    assert budget.disk_bytes == {Path("/nvme0"): 2**40, Path("/nvme1"): None}


@pytest.mark.parametrize(
    ("disk", "paths"),
    [
        (None, []),
        ("/a", ["/a"]),
        (Path("/a"), ["/a"]),
        (["/a", "/b"], ["/a", "/b"]),
        (("/b", Path("/a")), ["/b", "/a"]),
    ],
)
def test_directories_come_in_several_spellings(disk, paths):
    assert list(Budget(disk=disk).disk_bytes.items()) == [(Path(path), None) for path in paths]


@pytest.mark.parametrize("disk", [7, [7], {"/a"}, b"/a"])
def test_other_directories_are_refused(disk):
    with pytest.raises(
        TypeError, match="`disk` must be text, a path, a list, a tuple, a dict or None|`disk` must be a directory"
    ):
        Budget(disk=disk)


@pytest.mark.parametrize("place", ["device", "host"])
def test_a_size_that_cannot_be_read_is_refused(place):
    with pytest.raises(ValueError, match="lots"):
        Budget(**{place: "lots"})
    with pytest.raises(ValueError, match="negative"):
        Budget(**{place: -1})


def test_it_shows_its_limits():
    shown = repr(Budget(device="40GiB", disk={"/nvme0": "1TiB", "/nvme1": None}))
    assert shown == "Budget(device='40.0 GiB', host=None, disk={'/nvme0': '1.0 TiB', '/nvme1': None})"


@pytest.mark.parametrize("place", ["device", "host", "/nvme"])
def test_a_charge_above_the_limit_is_refused_and_takes_nothing(place):
    budget = Budget(device=100, host=100, disk={"/nvme": 100})
    budget.charge(place, 60)
    budget.charge(place, 40)
    with pytest.raises(BudgetError, match="at least 101 bytes") as caught:
        budget.charge(place, 1)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, PenstockError)
    assert budget.held_bytes(place) == 100
    budget.credit(place, 40)
    budget.charge(place, 30)
    assert (budget.held_bytes(place), budget.peak_bytes(place)) == (90, 100)


@pytest.mark.parametrize("place", ["device", "host", "/nvme", "/elsewhere"])
def test_without_a_limit_everything_fits(place):
    budget = Budget(disk="/nvme")
    budget.charge(place, 2**50)
    assert budget.held_bytes(place) == budget.peak_bytes(place) == 2**50


def test_bytes_that_exist_already_are_charged_by_force():
    budget = Budget(device=10)
    budget.charge("device", 25, force=True)
    assert budget.held_bytes("device") == 25
    with pytest.raises(BudgetError):
        budget.charge("device", 1)


def test_giving_back_more_than_was_taken_is_our_bug():
    budget = Budget()
    budget.charge("host", 5)
    with pytest.raises(InternalError, match="6 bytes were given back to host"):
        budget.credit("host", 6)
    assert budget.held_bytes("host") == 5


def test_places_are_accounted_apart():
    budget = Budget(device=10, host=10, disk={"/a": 10, "/b": 10})
    for place in ("device", "host", "/a", "/b"):
        budget.charge(place, 10)
    budget.credit("/a", 10)
    assert [budget.held_bytes(place) for place in ("device", "host", "/a", "/b")] == [10, 10, 0, 10]


def test_threads_together_stay_below_the_limit():
    budget = Budget(host=1000)
    granted = []

    def work():
        for _ in range(300):
            try:
                budget.charge("host", 1)
            except BudgetError:
                continue
            granted.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(granted) == budget.held_bytes("host") == budget.peak_bytes("host") == 1000


def test_views_share_the_account_and_say_who_holds_what():
    budget = Budget(device=100, host=50, disk={"/nvme": 10})
    offload, unified = budget.named("offload"), budget.named("unified")
    offload.charge("host", 30)
    unified.charge("host", 15)
    unified.charge("host", 5)
    unified.credit("host", 10)
    with pytest.raises(BudgetError, match="held: offload 30 B, unified 10 B"):
        budget.charge("host", 11)
    host = next(use for use in budget.uses() if use.place == "host")
    assert (host.limit_bytes, host.held_bytes, host.peak_bytes) == (50, 40, 50)
    assert [(holder.name, holder.held_bytes, holder.peak_bytes) for holder in host.holders] == [
        ("offload", 30, 30),
        ("unified", 10, 20),
    ]
    assert [use.place for use in budget.uses()] == ["device", "host", "/nvme"]
    assert budget.room_bytes("host") == 10
    assert Budget().room_bytes("host") is None


def test_tensors_that_several_name_count_once_and_steps_take_turns():
    budget = Budget(device=100)
    first = Footprint(tensors={1: 10, 2: 10}, held_bytes=5, step_bytes=40)
    second = Footprint(tensors={2: 10, 3: 10}, step_bytes=30)
    budget.named("remat").enter(first)
    assert budget.held_bytes("device") == 65
    assert budget.step_room_bytes(second) == 100 - 10 - 5  # without the tensor that both name
    budget.named("offload").enter(second)
    assert budget.held_bytes("device") == 10 + 10 + 10 + 5 + 40
    with pytest.raises(BudgetError, match="remat"):
        budget.named("fleet").enter(Footprint(step_bytes=30, runs_beside=True))
    budget.named("fleet").enter(Footprint(step_bytes=25, runs_beside=True))
    assert budget.held_bytes("device") == 100
    assert budget.beside_bytes() == 25
    assert budget.step_room_bytes(first) == 100 - 10 - 25
    budget.leave(first)
    budget.leave(first)
    assert budget.held_bytes("device") == 20 + 25 + 30


def test_what_is_refused_leaves_no_trace():
    budget = Budget(device=100)
    charges = Charges(budget, "remat")
    charges.enter(Footprint(held_bytes=60, step_bytes=30))
    with pytest.raises(BudgetError, match="at least 110 bytes"):
        budget.enter(Footprint(held_bytes=20))
    assert budget.held_bytes("device") == 90
    with pytest.raises(BudgetError):
        charges.enter(Footprint(held_bytes=101))
    assert budget.held_bytes("device") == 90  # what was entered before stays
    charges.enter(Footprint(held_bytes=10, step_bytes=30))  # instead of what was entered before
    assert budget.held_bytes("device") == 40
    charges.charge("device", 20)
    charges.give_back()
    assert budget.held_bytes("device") == 0
    assert budget.peak_bytes("device") == 90


def test_charges_to_no_account_cost_nothing():
    charges = Charges(None, "unified")
    charges.charge("host", 2**60)
    charges.enter(Footprint(held_bytes=2**60))
    charges.give_back()


def test_a_view_may_have_a_tighter_limit():
    budget = Budget()
    view = budget.named("fleet")
    view.host_bytes = 10
    budget.charge("host", 5)
    with pytest.raises(BudgetError):
        view.charge("host", 6)
    budget.charge("host", 6)


def test_a_finaliser_may_give_back_in_the_middle_of_a_change(monkeypatch):
    budget = Budget(device=100)
    charges, footprint = Charges(budget, "offload"), Footprint(held_bytes=20)
    charges.charge("device", 30)
    charges.enter(footprint)
    held_bytes = budget.account.held_bytes

    def collects(place):
        charges.give_back()
        return held_bytes(place)

    monkeypatch.setattr(budget.account, "held_bytes", collects)
    budget.charge("device", 40)
    monkeypatch.undo()
    assert budget.held_bytes("device") == 40


def test_two_fleets_stand_side_by_side():
    budget = Budget(device=100)
    for size in (10, 20):
        budget.named("fleet").enter(Footprint(step_bytes=size, runs_beside=True))
    (use,) = budget.uses()
    assert use.held_bytes == 30
    assert [(holder.name, holder.held_bytes) for holder in use.holders] == [("fleet", 30)]
