"""Parking and fetching main memory through a disk: the right bytes, whatever happens on the way."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parking import park_all, parked, plain, random_bytes
from random_cycles import run_cycles

from penstock.errors import TierDegradedWarning, TierReadError
from penstock.tiers import Budget, HandleState, waterfall_for

MIB = 2**20


@pytest.mark.parametrize("size_bytes", [1, 63, 4095, 4096, 4097, 8192, 12_345, 3 * MIB, 9 * MIB + 5])
def test_every_size_comes_back(make, size_bytes):
    waterfall, _ = make(verify=True)
    handle, expected = parked(waterfall, size_bytes)
    storage = handle.get()
    assert storage.nbytes() == size_bytes
    assert plain(storage) == expected


def test_an_empty_storage_comes_back(waterfall):
    handle = waterfall.park(torch.empty(0).untyped_storage())
    waterfall.drain()
    assert handle.get().nbytes() == 0


def test_a_full_disk_keeps_the_storage_and_warns_once(make):
    waterfall, _ = make(capacity="64KiB")
    handle, _ = parked(waterfall, 60_000)
    tensor = random_bytes(60_000, 1)
    with pytest.warns(TierDegradedWarning, match="no room for") as caught:
        kept = [waterfall.park(tensor.untyped_storage()) for _ in range(3)]
    assert len(caught) == 1
    assert [handle.state for handle in kept] == [HandleState.KEPT] * 3
    assert kept[0].prefetch()
    assert kept[0].get().data_ptr() == tensor.data_ptr()
    statistics = waterfall.statistics()
    assert (statistics.kept_bytes, statistics.num_failed_writes, statistics.parked_bytes) == (180_000, 0, 60_000)
    handle.release()
    again = waterfall.park(tensor.untyped_storage())
    waterfall.drain()
    assert again.state is HandleState.PARKED


def test_the_budget_of_the_disk_is_kept(tmp_path, collected):
    budget = Budget(disk={tmp_path: "256KiB"})
    waterfall = waterfall_for("cpu", budget)
    with pytest.warns(TierDegradedWarning):
        handles = park_all(waterfall, [random_bytes(60_000, seed) for seed in range(8)])
    statistics = waterfall.statistics()
    assert statistics.parked_bytes + statistics.kept_bytes == 480_000
    assert statistics.parked_bytes >= 180_000
    assert budget.peak_bytes(str(tmp_path)) <= 2**18
    assert [plain(handle.get()) for handle in handles] == [
        plain(random_bytes(60_000, seed).untyped_storage()) for seed in range(8)
    ]
    waterfall.close()
    assert budget.held_bytes(str(tmp_path)) == 0


def test_a_failed_write_keeps_the_storage_and_warns_once(make):
    waterfall, _ = make(write_error=1.0)
    tensors = [random_bytes(50_000, seed) for seed in range(3)]
    with pytest.warns(TierDegradedWarning, match="Input/output error") as caught:
        handles = park_all(waterfall, tensors)
    assert len(caught) == 1
    assert [handle.state for handle in handles] == [HandleState.KEPT] * 3
    assert [handle.get().data_ptr() for handle in handles] == [tensor.data_ptr() for tensor in tensors]
    statistics = waterfall.statistics()
    assert (statistics.kept_bytes, statistics.num_failed_writes, statistics.parked_bytes) == (150_000, 3, 0)
    assert statistics.held_bytes == {"disk": 0}, "its room is given back"


def test_a_write_that_fails_midway_keeps_the_storage(make, monkeypatch):
    """The storage is whole in memory, though part of it is on the disk."""
    waterfall, tier = make()
    real = tier._write_some

    def second_fails(piece, start, view):
        if piece.offset or start:
            raise OSError(5, "Input/output error")
        return real(piece, start, view[:4096])

    monkeypatch.setattr(tier, "_write_some", second_fails)
    tensor = random_bytes(9 * MIB)
    expected = plain(tensor.untyped_storage())
    box = [tensor]
    del tensor
    with pytest.warns(TierDegradedWarning):
        (handle,) = park_all(waterfall, box)
    box.clear()
    assert handle.state is HandleState.KEPT
    assert plain(handle.get()) == expected


@pytest.mark.parametrize(
    ("faults", "reason"), [({"read_error": 1.0}, "Input/output error"), ({"corrupt": 1.0}, "CRC-32")]
)
@pytest.mark.parametrize("is_prefetched", [True, False])
def test_a_failed_read_raises_and_hands_nothing_out(make, faults, reason, is_prefetched):
    waterfall, tier = make(verify=True, **faults)
    handle, expected = parked(waterfall)
    if is_prefetched:
        handle.prefetch()
    for _ in range(2):
        with pytest.raises(TierReadError, match=reason) as caught:
            handle.get()
        assert caught.value.tier == "disk"
        assert caught.value.size_bytes > 0
    assert handle.state is HandleState.PARKED
    tier._probability.update(dict.fromkeys(faults, 0.0))
    assert plain(handle.get()) == expected, "the device may have recovered"
    assert waterfall.statistics().fetched_bytes == 50_000


def test_after_close_no_bytes_are_made_up(make):
    waterfall, _ = make()
    handle, _ = parked(waterfall)
    waterfall.close()
    waterfall.close()
    torch.full((50_000,), 0xAB, dtype=torch.uint8)
    for _ in range(3):
        with pytest.raises(ValueError, match="closed"):
            handle.get()
    with pytest.raises(ValueError, match="closed"):
        waterfall.park(random_bytes(100).untyped_storage())
    handle.release()
    assert waterfall.statistics().num_live_handles == 0


@settings(deadline=None, max_examples=25, database=None)
@given(seed=st.integers(0, 2**32))
def test_random_cycles_under_random_faults(tmp_path_factory, seed):
    figures = run_cycles(seed, 40, tmp_path_factory.mktemp("spill"))
    assert {name: figures[name] for name in ("num_wrong", "num_live_handles", "used_bytes", "ledger_bytes")} == {
        "num_wrong": 0,
        "num_live_handles": 0,
        "used_bytes": 0,
        "ledger_bytes": 0,
    }
    assert figures["num_cycles"] == 40
