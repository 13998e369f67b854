"""Graphs: checked when they are made, copied, pickled, and made once from PyG's tensors."""

import copy
import pickle

import pytest
import torch
from relational_layers import rand, random_graph

from penstock.relational import RelationalGraph, layer
from penstock.relational._graph import graph_of


def test_a_graph_is_checked_once():
    edges = torch.tensor([[0, 1], [1, 5]])
    with pytest.raises(
        ValueError,
        match="the target of an edge .below `num_nodes`. must be from 0 to 2 .there are 3., got numbers from 1 to 5",
    ):
        RelationalGraph(edges, torch.tensor([0, 1]), num_nodes=3)
    with pytest.raises(ValueError, match=r"got torch.int32 of shape \[2, 2\]"):
        RelationalGraph(edges.int(), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="edge_type must be from 0 .* got numbers from -1"):
        RelationalGraph(edges, torch.tensor([0, -1]))
    with pytest.raises(ValueError, match="must be in ascending order"):
        RelationalGraph(edges, torch.tensor([0, 1]), node_type=torch.tensor([0, 1, 0, 0, 1, 1]))
    with pytest.raises(ValueError, match="more pairs than an int64"):
        RelationalGraph(edges, torch.tensor([0, 1]), num_nodes=2**40, num_edge_types=2**30)
    empty = RelationalGraph(torch.empty(2, 0, dtype=torch.int64), num_nodes=3)
    assert (empty.num_edges, empty.num_edge_types) == (0, 1)


def test_graphs_are_copied_and_pickled(graph, emitter):
    @layer
    def gathered(g, x):
        for n in g.nodes():
            for e in g.edges():
                total = n.sum(x[e.src])
        return total

    compiled, x = gathered.with_options(emitter=emitter), rand(6, 2)
    expected = compiled(graph, x)
    for twin in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        assert twin.number != graph.number
        torch.testing.assert_close(compiled(twin, x), expected)


def test_indexes_are_built_once_and_go_with_their_tensors():
    edges, kinds = torch.randint(10, (2, 30)), torch.randint(3, (30,))
    first = graph_of(edges, kinds, 10, 3)
    assert graph_of(edges, kinds, 10, 3) is first
    kinds[0] = (kinds[0] + 1) % 3
    second = graph_of(edges, kinds, 10, 3)
    assert second is not first
    assert second.edge_type[0] == kinds[0]


def test_a_graph_stays_where_it_is():
    graph = random_graph(20, 90, 4, torch.Generator().manual_seed(1))
    assert graph.to("cpu") is graph
