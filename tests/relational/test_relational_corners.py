"""Small layers at the edges of what the language allows, each of which was wrong once; both emitters."""

import copy
import math
import pickle

import pytest
import torch
from relational_layers import random_graph, summed

from penstock.relational import (
    CompGCNConv,
    Layer,
    Options,
    RelationalGraph,
    RGATConv,
    RGCNConv,
    RGraphSAGEConv,
    SimpleHGNConv,
    concat,
    dot,
    dropout,
    layer,
    leaky_relu,
    tanh,
)


@pytest.fixture(params=["eager", "c"])
def emitter(request):
    return request.param


@pytest.fixture
def graph():
    return random_graph(6, 25, 3, torch.Generator().manual_seed(0))


def rand(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def check(compiled, graph, plain, *arguments):
    """Equal to ``plain(source, target, kind, *arguments)``, gradients too."""
    actual = compiled(graph, *arguments)
    expected = plain(*graph.edge_index, graph.edge_type, *arguments)
    actual, expected = (result if isinstance(result, tuple) else (result,) for result in (actual, expected))
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    weights = [torch.randn_like(result) for result in expected]
    gradients = [
        torch.autograd.grad(
            sum((a * b).sum() for a, b in zip(results, weights, strict=True)), arguments, allow_unused=True
        )
        for results in (actual, expected)
    ]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(
            torch.zeros(()) if mine is None else mine, torch.zeros(()) if theirs is None else theirs
        )


def test_types_reshaped_do_not_share_memory(graph, emitter):
    @layer
    def two(g, x, y, a, b):
        for e in g.edges():
            message = x[e.src] @ tanh(a[e.etype]) + y[e.src] @ b[e.etype].reshape(4, 3)
        for n in g.nodes():
            total = n.sum(message)
        return total

    def plain(source, target, kind, x, y, a, b):
        message = torch.einsum("ei,eio->eo", x[source], torch.tanh(a)[kind])
        message = message + torch.einsum("ei,eio->eo", y[source], b.view(-1, 4, 3)[kind])
        return summed(message, target, 6)

    check(two.with_options(emitter=emitter), graph, plain, rand(6, 4), rand(6, 4), rand(3, 4, 3), rand(3, 12))


def test_edges_times_a_shared_matrix(graph, emitter):
    @layer
    def shared(g, edge, x, w):
        for e in g.edges():
            message = concat(x[e.src], edge[e]) @ w
        for n in g.nodes():
            total = n.sum(message)
        return total

    def plain(source, target, kind, edge, x, w):
        return summed(torch.cat([x[source], edge], dim=1) @ w, target, 6)

    check(shared.with_options(emitter=emitter), graph, plain, rand(25, 2), rand(6, 2), rand(4, 3))


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

    check(gathered.with_options(emitter=emitter), graph, plain, rand(25, 2))


def test_values_of_edges_have_a_row_for_each(graph, emitter):
    @layer
    def of_edges(g, x, w):
        for e in g.edges():
            first, second = x[e.src], x[e.src] @ w[e.etype]
        return first, second

    def plain(source, target, kind, x, w):
        return x[source], torch.einsum("ei,eio->eo", x[source], w[kind])

    check(of_edges.with_options(emitter=emitter), graph, plain, rand(6, 2), rand(3, 2, 3))


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

    check(twice.with_options(emitter=emitter), graph, plain, rand(6, 4))


def test_heads_of_matrices_alone(graph, emitter):
    @layer
    def headed(g, x, w, a):
        for e in g.edges():
            z = x[e.src] @ w[e.etype]
            score = dot(x[e.dst] @ w[e.etype], a[e.etype])
        for n in g.nodes():
            total = n.sum(score.unsqueeze(-1) * z)
        return total

    def plain(source, target, kind, x, w, a):
        z, y = (torch.einsum("ei,ehio->eho", x[end], w[kind]) for end in (source, target))
        return summed((y * a[kind][:, None]).sum(-1, keepdim=True) * z, target, 6)

    check(headed.with_options(emitter=emitter), graph, plain, rand(6, 3), rand(3, 2, 3, 4), rand(3, 4))


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


def test_the_same_name_is_used_in_two_ways(graph, emitter):
    @layer
    def either(g, x, w, by_type):
        for e in g.edges():
            message = x[e.src] * (w[e.etype] if by_type else w)
        for n in g.nodes():
            total = n.sum(message)
        return total

    compiled = either.with_options(emitter=emitter)
    x = rand(6, 1)
    assert compiled(graph, x, rand(3, 1), True).shape == (6, 1)
    assert compiled(graph, x, rand(1), False).shape == (6, 1)
    assert compiled(graph, x, rand(3), False).shape == (6, 3)


def test_ends_with_features_of_their_own(graph, emitter):
    @layer
    def both(g, x):
        for e in g.edges():
            message = x[e.src] * x[e.dst]
        for n in g.nodes():
            total = n.sum(message)
        return total

    a, b = rand(6, 2), rand(6, 2)
    source, target = graph.edge_index
    actual = both.with_options(emitter=emitter)(graph, (a, b))
    torch.testing.assert_close(actual, summed(a[source] * b[target], target, 6))
    with pytest.raises(ValueError, match="do not broadcast"):
        both(graph, (a, rand(6, 3)))


def test_a_block_does_not_read_targets_at_sources(emitter):
    @layer
    def two_steps(g, x):
        for n in g.nodes():
            for e in g.edges():
                z = n.sum(x[e.src])
        for n in g.nodes():
            for e in g.edges():
                total = n.sum(z[e.src])
        return total

    block = RelationalGraph(torch.tensor([[0, 11], [1, 4]]), num_nodes=(12, 5))
    with pytest.raises(ValueError, match="in a block sources and targets are different nodes"):
        two_steps.with_options(emitter=emitter)(block, rand(12, 2))


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


@layer
def by_own_type(g, x, weight):
    for e in g.edges():
        message = x[e.src]
    for n in g.nodes():
        total = n.sum(message) * weight[n.ntype]
    return total


@pytest.mark.parametrize("emitter", ["c", "eager"])
def test_a_table_of_as_many_types_as_sources_is_not_cut(emitter):
    block = RelationalGraph(
        torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]]), num_nodes=(4, 2),
        node_type=(torch.arange(4), torch.tensor([1, 3])), num_node_types=4,
    )  # fmt: skip
    x, weight = torch.rand(4, 3), torch.arange(4.0).requires_grad_()
    actual = by_own_type.with_options(emitter=emitter)(block, x, weight)
    expected = torch.stack([x[0] + x[2], 3 * (x[1] + x[3])])
    torch.testing.assert_close(actual, expected)
    (gradient,) = torch.autograd.grad(actual.sum(), weight)
    torch.testing.assert_close(gradient, torch.tensor([0, (x[0] + x[2]).sum(), 0, (x[1] + x[3]).sum()]))


@layer
def target_before_source(g, x, left, right):
    for e in g.edges():
        message = tanh(x[e.dst] @ left[e.etype] + x[e.src] @ right[e.etype])
    for n in g.nodes():
        total = n.sum(message)
    return total


@layer
def ends_of_sums(g, x, first, second):
    for e in g.edges():
        left, right = x[e.src] @ first[e.etype], x[e.src] @ second[e.etype]
    for n in g.nodes():
        p, q = n.sum(left), n.sum(right)
    for e in g.edges():
        both = p[e.src] + q[e.dst]
    return both


@pytest.mark.parametrize("emitter", ["c", "eager"])
@pytest.mark.parametrize("name", ["target_before_source", "ends_of_sums"])
def test_sums_into_the_same_rows_come_from_their_own_ends(emitter, name):
    generator = torch.Generator().manual_seed(0)
    index, kind = torch.randint(8, (2, 40), generator=generator), torch.randint(3, (40,), generator=generator)
    graph = RelationalGraph(index, kind, num_nodes=8, num_edge_types=3)
    x = torch.randn(8, 4, dtype=torch.float64, generator=generator).requires_grad_()
    first, second = (torch.randn(3, 4, 5, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(2))
    (source, target), empty = index, torch.zeros(8, 5, dtype=torch.float64)

    def product(end, weight):
        return torch.einsum("ei,eio->eo", x[end], weight[kind])

    if name == "target_before_source":
        expected = empty.index_add(0, target, torch.tanh(product(target, first) + product(source, second)))
        actual = target_before_source.with_options(emitter=emitter)(graph, x, first, second)
    else:
        p, q = (empty.index_add(0, target, product(source, weight)) for weight in (first, second))
        expected = p[source] + q[target]
        actual = ends_of_sums.with_options(emitter=emitter)(graph, x, first, second)
    torch.testing.assert_close(actual, expected)
    weight = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    for mine, theirs in zip(
        *(torch.autograd.grad((y * weight).sum(), (x, first, second)) for y in (actual, expected)), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


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


@pytest.mark.parametrize(
    ("conv", "more"),
    [
        (RGCNConv(8, 4, 1), ()), (RGATConv(8, 4, 1), ()), (SimpleHGNConv(8, 4, 1), ()), (RGraphSAGEConv(8, 4, 1), ()),
        (CompGCNConv(8, 4, 1), (torch.ones(2, 8),)),
    ],
)  # fmt: skip
def test_layers_name_inputs_that_they_cannot_take(conv, more):
    graph = RelationalGraph(torch.tensor([[0, 1], [1, 0]]))
    with pytest.raises(TypeError, match=r"`x` must be a torch.Tensor with a row for each node, got 'features' \(str\)"):
        conv("features", *more, graph)
    with pytest.raises(
        ValueError, match=r"`x` must have a row of in_channels=8 for each node, got torch.float32 \(2, 5\)"
    ):
        conv(torch.ones(2, 5), *more, graph)
    with pytest.raises((TypeError, ValueError), match=r"`graph` must be a penstock.relational.Rel|conv\(x, graph\)"):
        conv(torch.ones(2, 8), *more, "graph")


@pytest.mark.parametrize("conv", [RGCNConv(8, 4, 1), RGATConv(8, 4, 1)])
def test_edge_types_beside_a_graph_are_not_ignored(conv):
    graph = RelationalGraph(torch.tensor([[0, 1], [1, 0]]))
    with pytest.raises(ValueError, match="`edge_type` must be given only with an edge_index"):
        conv(torch.ones(2, 8), graph, torch.zeros(2, dtype=torch.int64))
