"""Made graphs: the same edges in parts of any size, with the skew, the labels and the types that were asked for."""

import pytest
import torch

from penstock.testing import graphs
from penstock.testing.graphs import MadeGraph


def whole(graph, **options):
    return torch.cat(list(graph.edges(**options)), dim=1)


def test_parts_of_any_size_are_the_same_edges(monkeypatch):
    monkeypatch.setattr(graphs, "_PART_EDGES", 1000)
    graph = MadeGraph(num_nodes=500, num_edges=3500, num_relations=3)
    edges = whole(graph)
    assert edges.shape == (2, 3500) and edges.dtype is torch.int64 and edges.min() >= 0 and edges.max() < 500
    for most_edges in (1, 7, 999, 10_000):
        parts = list(graph.edges(most_edges=most_edges))
        assert max(part.shape[1] for part in parts) <= most_edges and torch.equal(torch.cat(parts, dim=1), edges)
    typed = list(graph.typed_edges(most_edges=300))
    assert torch.equal(torch.cat([part for part, _ in typed], dim=1), edges)
    assert set(torch.cat([types for _, types in typed]).tolist()) == {0, 1, 2}
    assert not torch.equal(whole(MadeGraph(num_nodes=500, num_edges=3500, seed=1)), edges)


def test_sources_follow_the_power_law():
    for skew in (1.0, 2.0, 4.0):
        sources = whole(MadeGraph(num_nodes=1000, num_edges=200_000, skew=skew, homophily=0.0))[0]
        counts = torch.bincount(sources, minlength=1000).sort(descending=True).values
        assert float(counts[:100].sum() / counts.sum()) == pytest.approx(0.1 ** (1 / skew), abs=0.02)


def test_edges_join_nodes_of_one_label_as_often_as_asked():
    for homophily in (0.0, 0.5, 1.0):
        graph = MadeGraph(num_nodes=1000, num_edges=100_000, num_classes=10, homophily=homophily)
        labels, (sources, targets) = graph.labels(), whole(graph)
        share = float((labels[sources] == labels[targets]).double().mean())
        assert share == pytest.approx(homophily + (1 - homophily) / 10, abs=0.01)


def test_frequent_types_come_first():
    graph = MadeGraph(num_nodes=100, num_edges=100_000, num_relations=15)
    types = torch.cat([types for _, types in graph.typed_edges()])
    counts = torch.bincount(types, minlength=15)
    assert counts[0] == counts.max() and counts.min() > 0
    assert float(counts[0] / counts[1]) == pytest.approx(1 / 0.585, abs=0.1)


def test_rows_are_centres_of_labels_and_noise(monkeypatch):
    monkeypatch.setattr(graphs, "_PART_ROWS", 100)
    graph = MadeGraph(num_nodes=1050, num_edges=0, num_classes=3)
    exact = torch.cat(list(graph.features(8, noise=0.0)))
    assert exact.shape == (1050, 8) and len(exact.unique(dim=0)) == 3
    assert torch.equal(exact[:-3], exact[3:])
    noisy = torch.cat(list(graph.features(8, noise=0.5, dtype=torch.float16)))
    assert noisy.dtype is torch.float16 and float((noisy - exact).float().std()) == pytest.approx(0.5, abs=0.02)


def test_a_graph_without_edges_has_no_parts():
    assert list(MadeGraph(num_nodes=100, num_edges=0).edges()) == []


def test_bad_numbers_are_told():
    with pytest.raises(ValueError, match="`num_classes` at most that number.*got 3, 16"):
        MadeGraph(num_nodes=3, num_edges=1)
    with pytest.raises(ValueError, match="`skew`"):
        MadeGraph(num_nodes=30, num_edges=1, skew=0.5)
