"""A device's memory as a cache over the tiers."""

import pytest
from fleet_jobs import gpt_job, make_job, train, train_plainly

from penstock.errors import TierDegradedWarning
from penstock.testing import GPT


def test_tiers_that_are_full_fail_the_job_and_nothing_hangs():
    large = gpt_job("large", model=lambda: GPT(num_layers=6, width=64, num_heads=2, context=32))
    with pytest.warns(TierDegradedWarning):
        results = train([large], num_devices=1, budget="2MB", host="1MB")
    assert "the tiers below are full" in results["large"].error


def test_what_fits_is_never_moved():
    results = train([make_job()], num_devices=1, budget="100MB")
    (device,) = results.devices
    assert device.parked_bytes == device.fetched_bytes == 0


def test_host_memory_overflows_to_disk(tmp_path):
    job = make_job()
    results = train([job], num_devices=1, budget="1500KB", host="1MB", disk=tmp_path)
    (device,) = results.devices
    assert list(results["job"].losses) == train_plainly(job)[0]
    assert 0 < device.written_to_disk_bytes < device.parked_bytes
