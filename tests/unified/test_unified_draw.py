"""Draws are uniform, repeatable, and the same whoever draws."""

import itertools

import pytest
import torch
from scipy.stats import chisquare
from unified_cases import random_graph

from penstock import unified
from penstock.unified import _draw


def test_all_ways_draw_the_same(monkeypatch):
    _, graph = random_graph()
    nodes = torch.randint(200, (500,))
    for fanout, replace, seed in itertools.product((1, 4, 12, 60, -1), (False, True), (0, 7, 2**62 + 5)):
        replaces = replace and fanout > 0
        compiled = _draw.draw(graph, nodes, fanout, seed, replace=replaces)
        plain = _draw.draw_by_torch(graph, nodes, fanout, seed, replace=replaces)
        assert all(torch.equal(drawn, expected) for drawn, expected in zip(compiled, plain, strict=True))
    sampler = unified.NeighborSampler(graph, [5, 4, 3])
    first = sampler.sample(nodes[:50], number=1)
    monkeypatch.setattr(_draw, "library", lambda *_: None)
    second = sampler.sample(nodes[:50], number=1)
    for name in ("nodes", "rows", "cols", "edges", "seeds"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


def test_draws_depend_on_their_number_alone():
    _, graph = random_graph()
    sampler = unified.NeighborSampler(graph, [5, 4])
    first, again, another = (sampler.sample(torch.arange(50), number=number) for number in (1, 1, 2))
    assert torch.equal(first.edges, again.edges)
    assert not torch.equal(first.edges, another.edges)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert torch.equal(sampler.sample(torch.arange(50), number=1).edges, first.edges)
    torch.set_num_threads(threads)
    torch.manual_seed(3)
    unnumbered = sampler.sample(torch.arange(50))
    torch.manual_seed(3)
    assert torch.equal(sampler.sample(torch.arange(50)).edges, unnumbered.edges)


@pytest.mark.parametrize("degree, fanout", [(5, 2), (4, 3), (6, 1), (4, 2)])
def test_every_subset_is_equally_likely(degree, fanout):
    """Over 20,000 hops, chi-squared; the seeds are fixed, so this passes always or never."""
    graph = unified.Graph(
        torch.stack([torch.arange(1, degree + 1), torch.zeros(degree, dtype=torch.int64)]), degree + 1
    )
    counts = dict.fromkeys(itertools.combinations(range(degree), fanout), 0)
    for seed in range(20_000):
        drawn = _draw.draw(graph, torch.tensor([0]), fanout, _draw.mixed(seed, 0), replace=False)
        counts[tuple(sorted(drawn.edges.tolist()))] += 1
    assert chisquare(list(counts.values())).pvalue > 1e-3


def test_draws_with_replacement_and_of_different_nodes_are_independent():
    """The pairs that two nodes draw, and that one node draws, are uniform."""
    degree, num_nodes = 4, 20_000
    targets = torch.arange(num_nodes).repeat_interleave(degree)
    graph = unified.Graph(torch.stack([torch.zeros_like(targets), targets]), num_nodes)
    drawn = _draw.draw(graph, torch.arange(num_nodes), 2, 5, replace=True).edges.view(num_nodes, 2) % degree
    pairs = torch.bincount(drawn[:, 0] * degree + drawn[:, 1], minlength=16)
    assert chisquare(pairs.tolist()).pvalue > 1e-3
    neighbours = torch.bincount(drawn[:-1:2, 0] * degree + drawn[1::2, 0], minlength=16)
    assert chisquare(neighbours.tolist()).pvalue > 1e-3
    hops = _draw.draw(graph, torch.arange(num_nodes), 2, 6, replace=True).edges.view(num_nodes, 2) % degree
    assert chisquare(torch.bincount(drawn[:, 0] * degree + hops[:, 0], minlength=16).tolist()).pvalue > 1e-3
