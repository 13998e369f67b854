"""Gradients of values that have a row for each edge, and of maxima."""

import pytest
import torch
from relational_layers import check_like_plain, rand, summed

from penstock.relational import layer


@pytest.mark.parametrize("kind", ["sum", "mean"])
def test_edges_have_gradients_of_their_own(graph, emitter, kind):
    @layer
    def gathered(g, edge):
        for n in g.nodes():
            for e in g.edges():
                total = getattr(n, kind)(edge[e])
        return total

    def plain(source, target, types, edge):
        total = summed(edge, target, 6)
        return total / torch.bincount(target, minlength=6).clamp(min=1)[:, None] if kind == "mean" else total

    check_like_plain(gathered.with_options(emitter=emitter), graph, plain, rand(25, 2))


def test_values_of_edges_have_a_row_for_each(graph, emitter):
    @layer
    def of_edges(g, x, w):
        for e in g.edges():
            first, second = x[e.src], x[e.src] @ w[e.etype]
        return first, second

    def plain(source, target, kind, x, w):
        return x[source], torch.einsum("ei,eio->eo", x[source], w[kind])

    check_like_plain(of_edges.with_options(emitter=emitter), graph, plain, rand(6, 2), rand(3, 2, 3))


def test_results_do_not_share_memory(graph, emitter):
    @layer
    def twice(g, x):
        for n in g.nodes():
            for e in g.edges():
                largest = n.max(x[e.src])
            rows = x[n].reshape(2, -1)
        return largest, largest, rows

    def plain(source, target, kind, x):
        places = target[:, None].expand(-1, 4)
        largest = x.new_zeros(6, 4).scatter_reduce(0, places, x[source], "amax", include_self=False)
        return largest, largest, x.view(6, 2, 2)

    check_like_plain(twice.with_options(emitter=emitter), graph, plain, rand(6, 4))
