"""Units on a device that are measured as they run."""

import pytest
from fleet_jobs import batches, make_job, train, train_plainly

from penstock.errors import BudgetNotKeptWarning
from penstock.fleet import _turn


def test_a_unit_that_exceeds_the_budget_is_said_where_units_are_measured(monkeypatch):
    """As where a kernel takes more in a later step than in the pilot run."""
    monkeypatch.setattr(_turn._Measured, "transient_bytes", lambda *_: 0)
    job = make_job(data=lambda: batches(3))
    with pytest.warns(BudgetNotKeptWarning, match=r"job 'job': \w+ of the shard .* took \d+ bytes") as said:
        results = train([job], num_devices=1, budget="600KB", verify=True)
    (device,) = results.devices
    assert len(said) == 1
    assert list(results["job"].losses) == train_plainly(job)[0]
    assert device.measured_peak_bytes > device.budget_bytes
