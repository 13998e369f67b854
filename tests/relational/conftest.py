"""Fixtures of the tests of `penstock.relational`."""

import pytest
import torch
from relational_layers import NODES, WIDTH, random_graph


@pytest.fixture(params=["eager", "c"])
def emitter(request):
    return request.param


@pytest.fixture
def pyg():
    return pytest.importorskip("torch_geometric.nn")


@pytest.fixture
def graph(request):
    """A graph with the module's ``GRAPH``: numbers of nodes, edges and edge types."""
    return random_graph(*getattr(request.module, "GRAPH", (6, 25, 3)), torch.Generator().manual_seed(0))


@pytest.fixture
def x():
    return torch.randn(NODES, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
