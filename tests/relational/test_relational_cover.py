"""Edges that choose the end at which they are multiplied: few products, the same sums."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from relational_layers import attention, attention_of, check_like_plain, plain_attention, rgat, summed, tensors
from relational_layers import plain as plain_layer
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching

from penstock.relational import RelationalGraph, RGCNConv, layer
from penstock.relational._cover import PAYS
from penstock.relational._domain import EDGES, ENDS, OF_COVERS, Domain


def with_hubs(num_nodes, num_edges, num_types, seed=0):
    """A graph where a third of the edges leave one node, a third enter one, and one type has no edges."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(num_nodes, (2, num_edges), generator=generator)
    index[0, : num_edges // 3] = 0
    index[1, num_edges // 3 : 2 * num_edges // 3] = 1 % num_nodes
    kind = torch.randint(max(1, num_types - 1), (num_edges,), generator=generator)
    return RelationalGraph(index, kind, num_nodes=num_nodes, num_edge_types=num_types)


def fewest(indexes):
    """The size of a maximum matching of pairs, which is that of a minimum vertex cover (König)."""
    pairs = [indexes.pairs(domain).of_edges.numpy() for domain in (Domain.SOURCE_AND_TYPE, Domain.TARGET_AND_TYPE)]
    joined = coo_matrix((torch.ones(len(pairs[0])).numpy(), pairs)).tocsr()
    return int((maximum_bipartite_matching(joined, perm_type="column") >= 0).sum())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    num_nodes=st.integers(1, 40),
    num_edges=st.integers(0, 300),
    num_types=st.integers(1, 5),
)
def test_each_edge_has_a_product(seed, num_nodes, num_edges, num_types):
    graph = with_hubs(num_nodes, num_edges, num_types, seed)
    indexes, cover = graph.indexes, graph.indexes.cover()
    at = {Domain.COVER_SOURCE: ~cover.at_target, Domain.COVER_TARGET: cover.at_target}
    for domain in sorted(OF_COVERS, key=str):
        nodes, types, of_edges = indexes.pairs(domain)
        chosen = at[domain]
        assert torch.equal(indexes.index(EDGES[domain], Domain.EDGE), chosen.nonzero()[:, 0])
        assert torch.equal(types[of_edges], graph.edge_type[chosen])
        assert torch.equal(nodes[of_edges], graph.edge_index[int(ENDS[domain] is Domain.TARGET), chosen])
        assert indexes.count(domain) == len((types * num_nodes + nodes).unique())
    assert cover.num_rows == sum(map(indexes.count, OF_COVERS))
    ends = [indexes.count(domain) for domain in (Domain.SOURCE_AND_TYPE, Domain.TARGET_AND_TYPE)]
    assert (fewest(indexes) if num_edges else 0) <= cover.num_rows <= min(ends)


@pytest.mark.parametrize(("num_nodes", "num_edges"), [(50, 400), (1000, 5000), (2000, 2000)])
def test_products_are_nearly_as_few_as_possible(num_nodes, num_edges):
    indexes = with_hubs(num_nodes, num_edges, 4).indexes
    assert indexes.cover().num_rows <= 1.15 * fewest(indexes)


@layer
def plain_sum(g, x, weight):
    for e in g.edges():
        message = x[e.src] @ weight[e.etype]
    for n in g.nodes():
        total = n.sum(message)
    return total


@layer
def gated(g, x, weight, gate):
    for e in g.edges():
        message = (x[e.src] @ weight[e.etype]) * (gate[e.src] * gate[e.dst] / e.siblings()).unsqueeze(-1)
    for n in g.nodes():
        total = n.sum(message)
    return total


def plain(source, target, kind, x, weight, *more):
    message = torch.einsum("e...i,e...io->e...o", x[source], weight[kind])
    if more:
        pairs = target * len(weight) + kind
        factor = more[0][source] * more[0][target] / torch.bincount(pairs)[pairs]
        message = message * factor.view(-1, *[1] * (message.dim() - 1))
    return summed(message, target, len(x))


def rand(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("width", [5, 64])
@pytest.mark.parametrize("name", ["sum", "heads", "gated"])
def test_sums_are_those_of_plain_pytorch(name, width, num_threads):
    graph, heads = with_hubs(4000, 9000, 4), (2,) if name == "heads" else ()
    compiled = gated if name == "gated" else plain_sum
    arguments = [rand(4000, *heads, 6, seed=1), rand(4, *heads, 6, width, seed=2)]
    arguments += [rand(4000, seed=3)] if name == "gated" else []
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert "of the cover" in compiled.explain(graph, *arguments)
        check_like_plain(compiled, graph, plain, *arguments)
        check_like_plain(compiled.with_options(emitter="eager"), graph, plain, *arguments)
        with torch.no_grad():
            torch.testing.assert_close(
                compiled(graph, *arguments), plain(*graph.edge_index, graph.edge_type, *arguments)
            )
    finally:
        torch.set_num_threads(before)


def test_only_chosen_pairs_are_multiplied():
    """Of forward and backward, however gradients are spread."""
    graph, x, weight = with_hubs(4000, 9000, 4), rand(4000, 6, seed=1), rand(4, 6, 5, seed=2)
    steps = plain_sum.explain(graph, x, weight).split("step by step\n", 1)[1]
    assert "(source, edge type) rows" not in steps
    assert "(target, edge type) rows" not in steps
    assert "of the cover" not in plain_sum.with_options(cover=False).explain(graph, x, weight)


def test_a_cover_must_pay():
    """With one edge for each pair, there are as many products anyhow."""
    nodes = torch.arange(40)
    graph = RelationalGraph(torch.stack([nodes, nodes]), nodes % 3, num_edge_types=3)
    assert graph.indexes.cover().num_rows > PAYS * 40
    assert "of the cover" not in plain_sum.explain(graph, rand(40, 6, seed=1), rand(3, 6, 5, seed=2))


@layer
def read_twice(g, x, weight):
    for e in g.edges():
        message = x[e.src] @ weight[e.etype]
    for n in g.nodes():
        total = n.sum(message) + n.max(message)
    return total


def test_products_that_something_else_reads_are_those_of_one_end():
    arguments = rand(4000, 6, seed=1), rand(4, 6, 5, seed=2)
    assert "of the cover" not in read_twice.explain(with_hubs(4000, 9000, 4), *arguments)


def test_attention_is_that_of_plain_pytorch():
    """Whose scores read the products of RGAT as dots, and not at all those of HGT's values."""
    graph, arguments = with_hubs(4000, 9000, 4), attention_of(4000, 4, 2, 4)
    assert "of the cover" in attention.explain(graph, *arguments)
    check_like_plain(attention, graph, plain_attention, *arguments)
    named = tensors("rgat", graph, 6, torch.float64, torch.Generator().manual_seed(1))
    assert "of the cover" in rgat.explain(graph, **named)
    names = list(named)
    check_like_plain(
        rgat,
        graph,
        lambda *args: plain_layer("rgat", graph, dict(zip(names, args[3:], strict=True)))[0],
        *named.values(),
    )


def test_blocks_and_graphs_from_files(tmp_path):
    """A block's targets are other nodes; indexes of covers are not saved, but built again."""
    whole = with_hubs(4000, 9000, 4)
    block = RelationalGraph(whole.edge_index, whole.edge_type, num_nodes=(4000, 4001), num_edge_types=4)
    conv = RGCNConv(16, 16, 4)
    x = torch.randn(4001, 16, requires_grad=True)
    expected = conv(x[:4000], whole)
    (gradient,) = torch.autograd.grad(expected.square().sum(), x)
    for number, graph in enumerate((whole, block)):
        graph.save(tmp_path / f"{number}.graph")
        loaded = RelationalGraph.load(tmp_path / f"{number}.graph")
        features = x[:4000] if graph is whole else (x[:4000], x)
        actual = conv(features, loaded)
        torch.testing.assert_close(actual[:4000], expected)
        (mine,) = torch.autograd.grad(actual[:4000].square().sum(), x)
        torch.testing.assert_close(mine, gradient, rtol=1e-4, atol=1e-4)
