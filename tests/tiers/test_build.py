"""Waterfalls are built from a budget, or it says why not."""

import pytest

from penstock.tiers import Budget, waterfall_for


def test_a_processor_needs_a_disk():
    with pytest.raises(ValueError, match=r"Budget\(disk='/nvme'\)"):
        waterfall_for("cpu", Budget(host="1GiB"))


def test_other_devices_are_refused(tmp_path):
    with pytest.raises(ValueError, match="got 'meta'"):
        waterfall_for("meta", Budget(disk={tmp_path: "1MiB"}))


def test_below_main_memory_there_is_no_host_memory(waterfall):
    assert waterfall.reserve(4096) is None
    assert waterfall.statistics().num_live_handles == 0
