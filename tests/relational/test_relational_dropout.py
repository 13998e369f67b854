"""Dropout's zeros: the same in backward, in every emitter, and on weights."""

import torch
from relational_layers import rand, random_graph

from penstock.relational import dropout, layer


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


def test_dropout_of_weights(graph, emitter):
    @layer
    def dropped(g, x, w):
        for e in g.edges():
            message = x[e.src] @ dropout(w[e.etype], 0.5)
        for n in g.nodes():
            total = n.sum(dropout(message, 0.5))
        return total

    x, w = rand(6, 2), rand(3, 2, 3)
    actual = dropped.with_options(emitter=emitter)(graph, x, w)
    actual.sum().backward()
    torch.testing.assert_close((w.grad * w).sum(), actual.sum())  # linear in the weights


@layer
def dropped_weights(g, x, weight):
    for e in g.edges():
        message = x[e.src] @ dropout(weight[e.etype], 0.5)
    for n in g.nodes():
        total = n.sum(message)
    return total


def test_dropout_of_weights_has_the_same_zeros_everywhere(graph):
    x, weight = torch.ones(graph.num_sources, 3), torch.ones(graph.num_edge_types, 3, 5)
    for seed in range(5):
        results = []
        for emitter in ("c", "eager"):
            torch.manual_seed(seed)
            results.append(dropped_weights.with_options(emitter=emitter)(graph, x, weight))
        torch.testing.assert_close(*results)
