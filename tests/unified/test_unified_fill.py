"""Tiers are filled within the account; failures and files leave nothing behind."""

import errno
import os
import pickle
import warnings

import numpy as np
import pytest
import torch
from unified_cases import large_table, room, tiered

from penstock import tiers, unified
from penstock.errors import BudgetError, FeatureFileError, TierDegradedWarning
from penstock.unified import _fill
from penstock.unified._files import find_table

pytestmark = pytest.mark.usefixtures("no_buffers")


def test_a_disk_in_main_memory_is_warned_of_where_features_are_made(monkeypatch, tmp_path):
    monkeypatch.setattr("penstock.directio.memory_file_system", lambda path: "tmpfs")
    with pytest.warns(TierDegradedWarning, match="`disk` names main memory") as caught:
        unified.TieredFeatures(large_table(), host=room(3000, large_table(), 5), in_flight=0, disk=tmp_path).close()
    assert caught[0].filename == __file__


def test_a_failure_gives_back_what_was_charged(tmp_path, monkeypatch):
    budget = tiers.Budget(host="1MiB", disk={tmp_path: "1MiB"})
    monkeypatch.setattr(_fill, "exact", lambda size_bytes: (_ for _ in ()).throw(MemoryError("none")))
    with pytest.raises(MemoryError):
        tiered(tmp_path, large_table(), 500, budget=budget)
    assert budget.held_bytes("host") == budget.held_bytes(str(tmp_path)) == 0
    assert budget.peak_bytes(str(tmp_path)) == 3000 * 64  # 36 bytes a row, 64 apart
    monkeypatch.undo()
    with pytest.raises(BudgetError, match=r"of rows do not fit into .* which may hold 100 B: disk=\{"):
        unified.TieredFeatures(torch.zeros(100_000, 40), host="4MiB", disk={tmp_path: 100})


def test_damage_is_found_where_it_is_asked(tmp_path):
    path = unified.write_features(tmp_path / "x.rows", large_table())
    raw = bytearray(path.read_bytes())
    raw[4096 + 64 * 1000] ^= 1
    path.write_bytes(raw)
    with pytest.raises(FeatureFileError, match="rows 0 to 2999 differ from what was written"):
        unified.TieredFeatures(path, verify=True)
    with pytest.raises(FeatureFileError, match="differ from what was written"):
        unified.write_features(tmp_path / "copy.rows", path)
    assert not (tmp_path / "copy.rows").exists()


def test_all_rows_in_memory_are_where_they_were():
    plain = large_table()
    with unified.TieredFeatures(plain) as features:
        plain[7] = 5
        assert torch.equal(features[7], plain[7])
        assert features.plan.hit_rate == 1


def test_nothing_is_left_on_the_disk(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    features = tiered(tmp_path, large_table(), 5)
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) > before
    features.close()
    features.close()
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(unified.TieredFeatures(large_table()))


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path, monkeypatch):
    from penstock.unified import _write

    def full(file, view, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_write, "write_at", full)
    with pytest.raises(OSError, match="No space left"):
        tiered(tmp_path, large_table(), 5)
    assert list(tmp_path.iterdir()) == []


def test_tables_that_are_found_stay_as_they_were(tmp_path):
    """Reading in place writes nothing."""
    np.save(tmp_path / "x.npy", large_table().numpy())
    before = (tmp_path / "x.npy").read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TierDegradedWarning)
        with unified.TieredFeatures(tmp_path / "x.npy", host=room(3000, large_table(), 10), in_flight=0) as features:
            features[torch.arange(100)]
    assert (tmp_path / "x.npy").read_bytes() == before
    assert find_table(tmp_path / "x.npy").shape == (3000, 9)
