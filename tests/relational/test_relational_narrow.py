"""Products of nodes' rows with narrow matrices of types, node by node, beside plain PyTorch and the order by types."""

import ctypes
from unittest import mock

import pytest
import torch
from relational_layers import check_like_plain, rand, summed

from penstock.relational import RelationalGraph, RGATConv, _narrow, _native, layer, tanh
from penstock.relational._domain import ENDS, Domain

WIDTH = 40
NUM_NODES, NUM_EDGES, NUM_TYPES = 300, 6000, 5


@pytest.fixture(scope="module")
def graph():
    """A graph of which some nodes have no edges, some types neither, and one node has a third of the pairs."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(10, NUM_NODES - 10, (NUM_EDGES,), generator=generator)
    target = torch.randint(10, 40, (NUM_EDGES,), generator=generator)
    kind = torch.randint(NUM_TYPES - 1, (NUM_EDGES,), generator=generator)
    return RelationalGraph(torch.stack([source, target]), kind, num_nodes=NUM_NODES, num_edge_types=NUM_TYPES)


@layer
def scored(g, x, matrix):
    for e in g.edges():
        message = tanh(x[e.dst] @ matrix[e.etype]) * x[e.src].sum(-1)
    for n in g.nodes():
        total = n.sum(message)
    return total


def plain_scored(source, target, kind, x, matrix):
    message = torch.tanh(torch.einsum("ei,eio->eo", x[target], matrix[kind])) * x[source].sum(-1, keepdim=True)
    return summed(message, target, NUM_NODES)


@layer
def widened(g, score, matrix):
    for e in g.edges():
        message = score[e.src] @ matrix[e.etype]
    for n in g.nodes():
        total = n.sum(message)
    return total


def plain_widened(source, target, kind, score, matrix):
    return summed(torch.einsum("ei,eio->eo", score[source], matrix[kind]), target, NUM_NODES)


LAYERS = {
    "scores": (scored, plain_scored, lambda numbers: (rand(NUM_NODES, WIDTH), rand(NUM_TYPES, WIDTH, numbers))),
    "rows of scores": (
        widened,
        plain_widened,
        lambda numbers: (rand(NUM_NODES, numbers), rand(NUM_TYPES, numbers, WIDTH)),
    ),
}


class Watch:
    """The functions of the C library that were called."""

    def __init__(self, library):
        self.names, self._library = [], library

    def __getattr__(self, name):
        self.names.append(name)
        return getattr(self._library, name)


def watched(call):
    """Call, and return how often each narrow function was called."""
    watch = Watch(_native.library())
    with mock.patch.object(_native, "library", return_value=watch):
        result = call()
    return result, {name: watch.names.count(f"penstock_narrow_{name}") for name in ("scores", "sums", "outers")}


@pytest.mark.parametrize("numbers", [1, 3, 8])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_results_and_gradients_are_those_of_plain_pytorch(graph, name, numbers, num_threads):
    """One of each: of scores forward, and rows for them in backward, or the other way round; and matrices."""
    compiled, plain, arguments = LAYERS[name]
    compiled = layer(compiled.function).with_options(emitter="c")  # compiled anew, so that the library is asked for
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        _, calls = watched(lambda: check_like_plain(compiled, graph, plain, *arguments(numbers)))
    finally:
        torch.set_num_threads(before)
    assert calls == {"scores": 1, "sums": 1, "outers": 1}


@pytest.mark.parametrize("heads", [1, 4])
def test_rgat_is_the_same_by_types(graph, heads):
    """Where all matrices together are too large, rows are multiplied type by type."""
    results = []
    for most_bytes in (_narrow.MOST_BYTES, 0):
        torch.manual_seed(0)
        conv, x = RGATConv(WIDTH, 8, NUM_TYPES, heads=heads).double(), rand(NUM_NODES, WIDTH)
        with mock.patch.object(_narrow, "MOST_BYTES", most_bytes):
            result = conv(x, graph)
            results.append([result, *torch.autograd.grad(result.square().sum(), (x, conv.weight, conv.q, conv.k))])
    for node_by_node, by_types in zip(*results, strict=True):
        torch.testing.assert_close(node_by_node, by_types, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bits_do_not_depend_on_threads(graph, dtype):
    pairs = Domain.TARGET_AND_TYPE
    row, pair, matrix = (
        rand(*shape).detach().to(dtype)
        for shape in ((NUM_NODES, WIDTH), (graph.indexes.count(pairs), 3), (NUM_TYPES, WIDTH, 3))
    )
    runs = []
    for num_threads in (1, 2, 4):
        sizes = _narrow.narrow(graph.indexes, pairs, (WIDTH, 3), dtype.itemsize, num_threads)
        results = torch.empty_like(pair), torch.empty_like(row), torch.empty_like(matrix)
        runs.append(results)
        scores, rows, matrices = (ctypes.c_void_p(result.data_ptr()) for result in results)
        x, s, w = (ctypes.c_void_p(value.data_ptr()) for value in (row, pair, matrix))
        no = ctypes.c_int64(0)
        library = _native.library()
        assert not library.penstock_narrow_scores(ctypes.byref(sizes), w, no, x, scores)
        assert not library.penstock_narrow_sums(ctypes.byref(sizes), w, no, s, rows, no)
        assert not library.penstock_narrow_outers(ctypes.byref(sizes), x, s, matrices, no)
    for run in runs[1:]:
        assert all(map(torch.equal, runs[0], run))


def test_parts_have_equal_numbers_of_pairs_and_all_nodes(graph):
    for over, end in list(ENDS.items())[:2]:
        starts = graph.indexes.order(over, end)[1]
        borders = _narrow._borders(starts, 4)
        assert (int(borders[0]), int(borders[-1])) == (0, NUM_NODES)
        pairs = starts[borders].diff()
        assert pairs.sum() == graph.indexes.count(over)
        assert pairs.max() - pairs.min() <= 2 * starts.diff().max()


@pytest.mark.parametrize("heads", [1, 4])
def test_a_graph_without_edges_has_zeros(heads):
    graph = RelationalGraph(torch.empty(2, 0, dtype=torch.int64), num_nodes=5, num_edge_types=3)
    conv, x = RGATConv(WIDTH, 8, 3, heads=heads, bias=False), torch.randn(5, WIDTH, requires_grad=True)
    result = conv(x, graph)
    gradients = torch.autograd.grad(result.sum(), (x, conv.weight, conv.q, conv.k))
    assert not any(tensor.any() for tensor in (result, *gradients))
