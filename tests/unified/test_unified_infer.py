"""Inference layer by layer: the outputs of the whole graph at once, whatever the memory, and nothing left behind."""

import pytest
import torch
from torch import nn
from unified_cases import random_graph

from penstock import unified
from penstock.errors import BudgetError
from penstock.unified import _infer

NUM_NODES, WIDTH = 400, 8


def mean(x, block):
    """The mean of a node's neighbors, and the node itself."""
    sources, targets = block.edge_index
    total = x.new_zeros(block.num_targets, x.shape[1]).index_add(0, targets, x[sources])
    count = torch.bincount(targets, minlength=block.num_targets).clamp(min=1).unsqueeze(1)
    return x[: block.num_targets] + total / count


def model():
    torch.manual_seed(0)
    first, second = nn.Linear(WIDTH, 16, dtype=torch.float64), nn.Linear(16, 4, dtype=torch.float64)
    return [lambda x, block: first(mean(x, block)).relu(), lambda x, block: second(mean(x, block))]


def whole(layers, edge_index, x):
    order = edge_index[1].argsort(stable=True)
    block = unified.Block(
        edge_index=edge_index[:, order], edges=order, num_sources=len(x), num_targets=len(x)
    )  # fmt: skip
    with torch.no_grad():
        for layer in layers:
            x = layer(x, block)
    return x


@pytest.fixture
def case():
    edge_index, graph = random_graph(NUM_NODES, 4000)
    return edge_index, graph, torch.randn(NUM_NODES, WIDTH, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["tensor", "file", "tiered", "npy"])
@pytest.mark.parametrize("host", ["12MiB", "1GiB"])
def test_outputs_are_those_of_the_whole_graph(tmp_path, case, kind, host):
    edge_index, graph, x = case
    features = x
    if kind == "npy":
        import numpy as np

        features = tmp_path / "x.npy"
        np.save(features, x.numpy())
    elif kind != "tensor":
        features = unified.write_features(tmp_path / "x", x)
    if kind == "tiered":
        features = unified.TieredFeatures(features, host="6MiB")
    path = unified.infer(model(), graph, features, tmp_path / "out", host=host, progress=False)
    with unified.TieredFeatures(path) as out:
        torch.testing.assert_close(out[:], whole(model(), edge_index, x), rtol=1e-13, atol=1e-13)
    assert {file.name for file in tmp_path.iterdir()} <= {"out", "x", "x.npy"}


@pytest.mark.parametrize("most_bytes", [300, 2000, 20_000, 70_000, 10**7])
def test_parts_cover_all_nodes_and_keep_their_size(case, most_bytes):
    _, graph, _ = case
    first, edges = 0, []
    for sample in _infer._parts(graph, most_bytes, 100):
        count = sample.num_sampled_nodes[0]
        assert sample.nodes[:count].tolist() == list(range(first, first + count))
        assert 100 * len(sample.nodes) + 64 * len(sample.rows) <= most_bytes or count == 1
        edges += sample.edges.tolist()
        first += count
    assert first == NUM_NODES and sorted(edges) == list(range(4000))


def test_few_parts_are_made_of_a_graph_that_fits(case):
    _, graph, _ = case
    assert len(list(_infer._parts(graph, 10**7, 100))) == 1
    assert len(list(_infer._parts(graph, 100_000, 100))) < 8
    dense = unified.Graph(torch.randint(50, (2, 100_000)), 50)  # nodes are few, and edges count too
    assert max(len(sample.rows) for sample in _infer._parts(dense, 2**20, 4)) * 64 <= 2**20


def test_parts_of_the_model_see_parts_of_the_graph(tmp_path, case):
    edge_index, graph, x = case
    sizes = []

    def layer(x, block):
        sizes.append(block.num_targets)
        assert not torch.is_grad_enabled() or x.requires_grad is False
        return mean(x, block)

    unified.infer([layer], graph, x, tmp_path / "out", host=4 * 200 * (8 * WIDTH + 64), progress=False)
    assert len(sizes) > 3 and sum(sizes) == NUM_NODES
    with unified.TieredFeatures(tmp_path / "out") as out:
        torch.testing.assert_close(out[:], whole([mean], edge_index, x))


def test_a_graph_in_a_file_and_modules_of_pyg(tmp_path, case):
    nn_pyg = pytest.importorskip("torch_geometric.nn")
    edge_index, _, x = case
    torch.manual_seed(1)
    convs = [nn_pyg.SAGEConv(WIDTH, 16).double(), nn_pyg.SAGEConv(16, 3).double()]
    layers = [
        lambda x, block: convs[0]((x, x[: block.num_targets]), block.edge_index).relu(),
        lambda x, block: convs[1]((x, x[: block.num_targets]), block.edge_index),
    ]
    graph = unified.open_graph(unified.write_graph(tmp_path / "g", edge_index, num_nodes=NUM_NODES))
    unified.infer(layers, graph, x, tmp_path / "out", host="8MiB", progress=False)
    with torch.no_grad():
        expected = convs[1](convs[0](x, edge_index).relu(), edge_index)
    with unified.TieredFeatures(tmp_path / "out") as out:
        torch.testing.assert_close(out[:], expected, rtol=1e-12, atol=1e-12)


def test_layers_with_relations_find_their_types_by_the_edges(tmp_path, case):
    from penstock import relational

    edge_index, graph, x = case
    types = torch.randint(3, (4000,), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(2)
    conv = relational.RGCNConv(WIDTH, 5, num_relations=3).double()

    def layer(x, block):
        part = relational.RelationalGraph(
            block.edge_index, types[block.edges], num_nodes=block.num_sources, num_edge_types=3
        )
        return conv(x, part)[: block.num_targets]

    unified.infer([layer], graph, x, tmp_path / "out", host=4 * 300 * (8 * WIDTH + 64), progress=False)
    with torch.no_grad():
        expected = conv(x, relational.RelationalGraph(edge_index, types, num_nodes=NUM_NODES, num_edge_types=3))
    with unified.TieredFeatures(tmp_path / "out") as out:
        torch.testing.assert_close(out[:], expected, rtol=1e-12, atol=1e-12)


def test_an_error_leaves_nothing_behind(tmp_path, case):
    _, graph, x = case

    def fails(x, block):
        raise ZeroDivisionError("a layer's own error")

    with pytest.raises(ZeroDivisionError):
        unified.infer([mean, fails], graph, x, tmp_path / "out", progress=False)
    assert not list(tmp_path.iterdir())


def test_bad_calls_are_told(tmp_path, case):
    _, graph, x = case
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="layer 0 must return one row for each of the block's"):
        unified.infer([lambda x, _: x[:1]], graph, x, out)
    with pytest.raises(ValueError, match="layer 1 must return .* got NoneType"):
        unified.infer([mean, lambda *_: None], graph, x, out)
    with pytest.raises(ValueError, match="one row for each of 400 nodes, got 399"):
        unified.infer([mean], graph, x[1:], out)
    with pytest.raises(ValueError, match="one row for each of 400 nodes, got 399"):
        unified.infer([mean], graph, unified.write_features(tmp_path / "x", x[1:]), out)
    with pytest.raises(TypeError, match="`layers`"):
        unified.infer([], graph, x, out)
    with pytest.raises(BudgetError, match="`host` must be at least"):
        unified.infer([mean], graph, x, out, host=100)
    wide = unified.write_features(tmp_path / "x", x.repeat(1, 128))
    with pytest.raises(BudgetError, match="half of `host`"):
        unified.infer([mean], graph, wide, out, host="2MiB")
    with pytest.raises(ValueError, match="the same nodes"):
        unified.infer([mean], unified.Graph(torch.tensor([[9], [1]]), num_sources=10), x, out)
