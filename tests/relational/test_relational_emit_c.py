"""Numbers that C writes in another way: infinite constants, and maxima of NaN."""

import math

import pytest
import torch

from penstock.relational import Layer, Options, RelationalGraph, layer, leaky_relu


def test_what_is_no_number_stays_so(graph, emitter):
    @layer
    def largest(g, x):
        for n in g.nodes():
            for e in g.edges():
                result = n.max(x[e.src])
        return result

    x = torch.full((6, 2), torch.nan)
    entered = torch.unique(graph.edge_index[1])
    assert largest.with_options(emitter=emitter)(graph, x)[entered].isnan().all()


@pytest.mark.parametrize("emitter", ["eager", "c"])
def test_an_infinite_constant_is_a_number_in_every_emitter(emitter):
    def steep(g, x):
        for e in g.edges():
            message = leaky_relu(x[e.src], math.inf)
        for n in g.nodes():
            result = n.sum(message)
        return result

    graph = RelationalGraph(torch.tensor([[0, 1], [1, 0]]))
    actual = Layer(steep, Options(emitter=emitter))(graph, torch.tensor([[1.0, -2.0], [3.0, 4.0]]))
    assert torch.equal(actual, torch.tensor([[3.0, 4.0], [1.0, -math.inf]]))
