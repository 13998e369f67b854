"""Ranks that train on one file of edges, each with its own stream."""

import copy

import pytest
import torch
from torch import nn

from penstock import unified
from penstock.relational import RelationalGraph, RGATConv, RGCNConv
from ranks import run_in_ranks

N, E, TYPES, W = 60, 900, 4, 8


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList([kind(W, W, TYPES), kind(W, W, TYPES)])

    def forward(self, x, graph):
        for layer in self.layers:
            x = layer(x, graph).tanh()
        return x


def edges():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, N, (2, E), generator=generator), torch.randint(0, TYPES, (E,), generator=generator)


def _trains(rank, path, kind):
    """Gradients are the mean of both ranks' on the graph in memory, step after step."""
    torch.manual_seed(0)
    plain = Model(kind).double()
    wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(plain), find_unused_parameters=True)  # RGAT has some
    whole = RelationalGraph(*edges(), num_nodes=N, num_edge_types=TYPES)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, wrapped)]
    stream = RelationalGraph.stream(path, budget="250KiB")
    for step in range(3):
        inputs = torch.randn(2, N, W, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for optimizer in optimizers:
            optimizer.zero_grad()
        wrapped(inputs[rank], stream).square().sum().backward()
        (sum(plain(x, whole).square().sum() for x in inputs) / 2).backward()
        for mine, expected in zip(wrapped.parameters(), plain.parameters(), strict=True):
            if expected.grad is not None:
                torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-11, atol=1e-11)
        for optimizer in optimizers:
            optimizer.step()
    assert stream.statistics().num_blocks > 6


@pytest.mark.parametrize("kind", [RGCNConv, RGATConv])
def test_ranks_train_on_streams_of_one_file(tmp_path, kind):
    path = unified.write_graph(tmp_path / "edges.graph", edges(), num_nodes=N, num_types=TYPES, progress=False)
    run_in_ranks(_trains, path, kind, directory=tmp_path)
