"""Fixtures of the tests of `penstock.relational`."""

import pytest


@pytest.fixture(params=["eager", "c"])
def emitter(request):
    return request.param


@pytest.fixture
def pyg():
    return pytest.importorskip("torch_geometric.nn")
