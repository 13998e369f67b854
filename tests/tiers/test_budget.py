"""The one account of bytes."""

import threading
from pathlib import Path

import pytest

from penstock.errors import BudgetError, InternalError, PenstockError
from penstock.tiers import Budget


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
    with pytest.raises(TypeError, match="disk is a directory"):
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
    with pytest.raises(BudgetError, match="at least 101 B") as caught:
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
    with pytest.raises(InternalError, match="6 bytes given back to host"):
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
