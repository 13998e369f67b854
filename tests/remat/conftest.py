"""What every test of this room starts from."""

import pytest
import torch

from penstock.probe import ledger


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch, capturing_is_imported):
    """Nothing compiled, and lanes fast by decree: what is swapped must not depend on the disk that runs the tests."""
    torch._dynamo.reset()
    # times guards once they are made, for which it empties the processor's caches: 23 ms for every graph
    monkeypatch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0)
    rates = lambda _, account, __: (1e12, 1e12) if account.disk_bytes else (0.0, 0.0)  # noqa: E731
    monkeypatch.setattr("penstock.remat._describe.lane_rates", rates)
    # what other tests of the process left behind is not there: budgets are of this test's own bytes
    left_bytes = ledger.held_bytes
    ledger.charge(-left_bytes)
    yield
    ledger.charge(left_bytes)
