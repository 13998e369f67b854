"""The same numbers on every machine."""

import pytest
import torch

from penstock.fleet import _run


@pytest.fixture(autouse=True)
def _one_thread_and_fixed_lanes(monkeypatch):
    """Losses depend on the number of threads, and what is recomputed on how fast a disk is."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(_run._LaneRates, "__call__", lambda self: (1e9, 1e9))
    yield
    torch.set_num_threads(num_threads)
