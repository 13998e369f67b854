"""What the language refuses, at the user's line; and what it records."""

import pytest
import torch
from relational_layers import random_graph

from penstock.relational import RelationalGraph, dot, dropout, layer, softmax


@pytest.fixture
def graph():
    return random_graph(6, 20, 3, torch.Generator().manual_seed(0))


def test_a_wrong_shape_is_reported_at_its_line(graph):
    @layer
    def wrong(g, x, weight):
        for e in g.edges():
            message = x[e.src] @ weight[e.etype]  # the marked line
        for n in g.nodes():
            total = n.sum(message)
        return total

    with pytest.raises(ValueError, match=r"test_relational_language.py:\d+: `message = x\[e.src\] @ weight\[e.etype\]"):
        wrong(graph, torch.ones(6, 4), torch.ones(3, 5, 2))
    with pytest.raises(ValueError, match="a row of size 4 cannot be multiplied by a matrix of 5 x 2"):
        wrong(graph, torch.ones(6, 4), torch.ones(3, 5, 2))


def test_a_node_is_not_mixed_with_an_edge(graph):
    @layer
    def wrong(g, x):
        for n in g.nodes():
            z = x[n] * 2
        for e in g.edges():
            message = z + x[e.src]
        for n in g.nodes():
            total = n.sum(message)
        return total

    with pytest.raises(ValueError, match=r"choose an end of the edge, as in z\[e.src\]"):
        wrong(graph, torch.ones(6, 4))


def test_a_tensor_has_one_kind_of_rows(graph):
    @layer
    def wrong(g, x):
        for e in g.edges():
            message = x[e.src] * x[e.etype]
        for n in g.nodes():
            total = n.sum(message)
        return total

    with pytest.raises(ValueError, match="x is looked up by an edge type here, but by a node at"):
        wrong(graph, torch.ones(6, 4))


def test_softmax_is_of_edges(graph):
    @layer
    def wrong(g, x):
        for n in g.nodes():
            share = softmax(x[n])
        return share

    with pytest.raises(ValueError, match="softmax is computed over the edges that enter a node"):
        wrong(graph, torch.ones(6, 4))


def test_rows_are_counted_when_the_layer_is_called(graph):
    @layer
    def fine(g, x, scale):
        for e in g.edges():
            message = x[e.src] * scale[e.etype]
        for n in g.nodes():
            total = n.sum(message)
        return total

    assert fine(graph, torch.ones(6, 4), torch.ones(3, 1)).shape == (6, 4)
    with pytest.raises(ValueError, match="scale has 2 rows, but it is looked up by edge type"):
        fine(graph, torch.ones(6, 4), torch.ones(2, 1))
    with pytest.raises(TypeError, match="fine expects a graph and x, scale"):
        fine(graph, torch.ones(6, 4))
    with pytest.raises(ValueError, match="must have one dtype"):
        fine(graph, torch.ones(6, 4, dtype=torch.float64), torch.ones(3, 1))


def test_dropout_is_replayed_in_backward(graph):
    @layer
    def dropped(g, x, probability):
        for e in g.edges():
            message = dropout(x[e.src], probability)
        for n in g.nodes():
            total = n.sum(message)
        return total

    big = random_graph(50, 4000, 3, torch.Generator().manual_seed(1))
    for emitter in ("eager", "c"):
        x = torch.ones(50, 8, requires_grad=True)
        compiled = dropped.with_options(emitter=emitter)
        torch.manual_seed(5)
        actual = compiled(big, x, 0.25)
        actual.sum().backward()
        torch.testing.assert_close(x.grad.sum(), actual.sum())  # linear with the same zeros
        kept = actual.sum() * 0.75 / (4000 * 8)
        assert 0.74 < kept < 0.76
        torch.manual_seed(5)
        assert torch.equal(compiled(big, x, 0.25), actual)
        assert not torch.equal(compiled(big, x, 0.25), actual)
    torch.manual_seed(5)
    seeds = [dropped.with_options(emitter=emitter) for emitter in ("eager", "c")]
    results = []
    for compiled in seeds:
        torch.manual_seed(5)
        results.append(compiled(big, torch.ones(50, 8), 0.25))
    torch.testing.assert_close(*results)


def test_explain_shows_every_pass_and_step(graph):
    @layer
    def attention(g, x, weight, a):
        for e in g.edges():
            message = softmax(dot(x[e.dst] @ weight[e.etype], a[e.etype])) * x[e.src]
        for n in g.nodes():
            total = n.sum(message)
        return total

    x, weight = torch.ones(6, 4, requires_grad=True), torch.ones(3, 4, 4, requires_grad=True)
    text = attention.explain(graph, x, weight, torch.ones(3, 4))
    for heading in ("traced", "compact", "sum first", "reorder", "unify", "forward, step by step", "backward"):
        assert f"\n{heading}\n" in f"\n{text}"
    traced, reordered = text.split("\n\n")[0], text.split("\n\n")[3]
    assert "edge                   [4]          %0 @ %1" in traced
    assert "@ %" in reordered
    assert "(target, edge type)" in reordered


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


def test_values_are_not_compared_and_graphs_not_gone_round():
    graph = RelationalGraph(torch.tensor([[0, 1], [1, 0]]))

    def branching(g, x):
        for e in g.edges():
            result = x[e.src] if x[e.src] > 0 else x[e.dst]
        return result

    def asking(g, x):
        for e in g.edges():
            result = x[e.src] or x[e.dst]
        return result

    for function in (branching, asking):
        with pytest.raises(ValueError, match="values cannot be compared or branched on; use maximum"):
            layer(function)(graph, torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"a layer must loop over `g.edges\(\)` or `g.nodes\(\)`"):
        layer(lambda g, x: list(g))(graph, torch.ones(2, 3))
    with pytest.raises(TypeError, match="`graph` must be a penstock.relational.RelationalGraph"):
        layer(branching)(torch.ones(2, 3), torch.ones(2, 3))
