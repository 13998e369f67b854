"""What the language refuses, at the user's line; and what it records."""

import pytest
import torch

from penstock.relational import RelationalGraph, dot, layer, softmax

GRAPH = 6, 20, 3


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
