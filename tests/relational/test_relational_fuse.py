"""Rows of pairs that are computed, multiplied and summed a block at a time: no table of them, the same results."""

import pytest
import torch
from relational_layers import attention, attention_of, check_like_plain, plain_attention, summed

from penstock.probe import peak_bytes
from penstock.relational import RelationalGraph, RGCNConv, layer
from penstock.relational._fuse import LEAST_COLUMNS, MOST_EDGES_A_PRODUCT, column_parts, has_room_for_outers

SIZES = 1500, 20_000, 4
"""Nodes, edges and types: several blocks of pairs for each type, and more than one thread gets."""


@pytest.fixture(params=[1, 2, 4], ids=["one thread", "two threads", "four threads"])
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def graph_of(few):
    """A graph with fewer pairs of a target and a type, or fewer of a source and a type; one type has no edges."""
    num_nodes, num_edges, num_types = SIZES
    generator = torch.Generator().manual_seed(0)
    source, target = torch.randint(num_nodes, (2, num_edges), generator=generator)
    ends = (source, target % 1000) if few == "targets" else (source % 1000, target)
    kind = torch.randint(num_types - 1, (num_edges,), generator=generator)
    return RelationalGraph(torch.stack(ends), kind, num_nodes=num_nodes, num_edge_types=num_types)


@layer
def mean_per_type(g, x, weight):
    for e in g.edges():
        message = (1 / e.siblings()) * (x[e.src] @ weight[e.etype])
    for n in g.nodes():
        total = n.sum(message)
    return total


def plain_mean(source, target, kind, x, weight):
    message = x.new_zeros(len(kind), *weight.shape[1:-2], weight.shape[-1])
    for number, matrix in enumerate(weight):
        rows = x[source[kind == number]]
        message[kind == number] = torch.einsum("e...i,...io->e...o", rows, matrix)
    pairs = target * len(weight) + kind
    siblings = torch.bincount(pairs, minlength=len(x) * len(weight))[pairs]
    return summed(message / siblings.view(-1, *[1] * (message.dim() - 1)), target, len(x))


def rand(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


@pytest.mark.parametrize("few", ["sources", "targets"])
@pytest.mark.parametrize(("num_heads", "width"), [((), 64), ((), 20), ((2,), 64)], ids=["wide", "odd", "heads"])
def test_sums_of_products_are_those_of_plain_pytorch(few, num_heads, width, num_threads):
    graph, compiled = graph_of(few), mean_per_type.with_options(emitter="c")
    x, weight = rand(SIZES[0], *num_heads, 12, seed=1), rand(SIZES[2], *num_heads, 12, width, seed=2)
    forward, backward = compiled.explain(graph, x, weight).split("\nbackward, step by step\n")
    rows, columns = "from 20,000 edge rows; products summed to", f"columns in {num_threads} parts"
    # Products are added up by edges in one direction, and their sums are multiplied in the other.
    summed_by_edges, multiplied = (forward, backward) if few == "sources" else (backward, forward)
    inner = width if few == "sources" else 12
    assert rows in multiplied
    assert (columns in summed_by_edges) == (inner % num_threads == 0 and inner // num_threads >= LEAST_COLUMNS)
    check_like_plain(compiled, graph, plain_mean, x, weight)


@pytest.mark.parametrize("num_heads", [1, 2])
def test_attention_is_that_of_plain_pytorch(num_heads, num_threads):
    graph, compiled = graph_of("sources"), attention.with_options(emitter="c")
    arguments = attention_of(SIZES[0], SIZES[2], num_heads, 8)
    backward = compiled.explain(graph, *arguments).split("\nbackward, step by step\n")[1]
    (step,) = [line for line in backward.splitlines() if line.startswith("blocks of")]
    assert (step.count("products summed"), step.count("outer products summed")) == (4, 2)
    check_like_plain(compiled, graph, plain_attention, *arguments)


@pytest.mark.parametrize("few", ["sources", "targets"])
def test_results_are_the_same_from_run_to_run(few, num_threads):
    graph, layer = graph_of(few), RGCNConv(32, 32, SIZES[2])
    x = rand(SIZES[0], 32, seed=1).detach().float().requires_grad_()
    runs = []
    for _ in range(3):
        result = layer(x, graph)
        runs.append([result, *torch.autograd.grad(result.square().sum(), (x, layer.weight))])
    for run in runs[1:]:
        assert all(map(torch.equal, runs[0], run))


def test_no_table_of_pairs_exists():
    """Neither the products of forward nor the sums of backward."""
    graph, x, weight = graph_of("sources"), rand(SIZES[0], 64, seed=1), rand(SIZES[2], 64, 64, seed=2)
    table = len(graph.pairs()[0]) * 64 * 8
    fused, stored = (mean_per_type.with_options(fuse=fuse) for fuse in (True, False))

    def peak(compiled, *, is_trained):
        def call():
            with torch.set_grad_enabled(is_trained):
                result = compiled(graph, x, weight)
            if is_trained:
                result.sum().backward()

        call()
        return peak_bytes(call, device="cpu").peak_bytes

    assert table > x.nbytes
    assert peak(fused, is_trained=False) <= peak(stored, is_trained=False) - table
    assert peak(fused, is_trained=True) < peak(stored, is_trained=True) - table // 3


def test_a_change_of_threads_is_seen():
    graph, x, weight = graph_of("sources"), rand(SIZES[0], 64, seed=1), rand(SIZES[2], 64, 64, seed=2)
    before = torch.get_num_threads()
    try:
        for count, text in ((1, "in 1 parts"), (4, "in 4 parts"), (3, "product of")):
            torch.set_num_threads(count)
            assert text in mean_per_type.explain(graph, x, weight)
            check_like_plain(mean_per_type, graph, plain_mean, x, weight)
    finally:
        torch.set_num_threads(before)


def test_columns_are_divided_where_that_pays():
    assert [column_parts(100, 50, threads) for threads in (1, 2, 3, 4, 8)] == [1, 2, 0, 4, 0]
    assert column_parts(MOST_EDGES_A_PRODUCT * 50, 50, 2) == 2
    assert column_parts(MOST_EDGES_A_PRODUCT * 50 + 1, 50, 2) == 0


def test_matrices_of_threads_take_no_more_than_the_rows():
    """FB15k-237 with 2 threads and with 64; a graph with few rows for each type."""
    assert [has_room_for_outers(29_683, 237, threads) for threads in (1, 2, 64)] == [True, True, False]
    generator = torch.Generator().manual_seed(0)
    index, kind = torch.randint(300, (2, 4000), generator=generator), torch.randint(200, (4000,), generator=generator)
    graph = RelationalGraph(index, kind, num_edge_types=200)
    x, weight = rand(300, 8, seed=1), rand(200, 8, 8, seed=2)
    before = torch.get_num_threads()
    try:
        for count, is_fused in ((1, True), (2, False)):
            torch.set_num_threads(count)
            assert ("outer products summed" in mean_per_type.explain(graph, x, weight)) == is_fused
            check_like_plain(mean_per_type, graph, plain_mean, x, weight)
    finally:
        torch.set_num_threads(before)


def test_a_graph_without_edges_has_zeros(num_threads):
    graph = RelationalGraph(torch.empty(2, 0, dtype=torch.int64), num_nodes=5, num_edge_types=3)
    x, weight = rand(5, 16 * num_threads, seed=1), rand(3, 16 * num_threads, 16 * num_threads, seed=2)
    result = mean_per_type(graph, x, weight)
    gradients = torch.autograd.grad(result.sum(), (x, weight))
    assert not any(tensor.any() for tensor in (result, *gradients))
