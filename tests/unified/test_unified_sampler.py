"""Samples are of the graph, uniform, repeatable, and the same whoever draws."""

import dataclasses
import itertools
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from penstock import unified
from penstock.errors import InternalError
from penstock.unified import _draw, _graph


def random_graph(num_nodes=200, num_edges=3000, seed=0):
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=torch.Generator().manual_seed(seed))
    return edge_index, unified.Graph(edge_index, num_nodes)


@st.composite
def graphs(draw):
    num_nodes = draw(st.integers(1, 30))
    edges = draw(st.lists(st.tuples(st.integers(0, num_nodes - 1), st.integers(0, num_nodes - 1)), max_size=120))
    return torch.tensor(edges, dtype=torch.int64).view(-1, 2).t().contiguous(), num_nodes


@given(graphs())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_edges_by_target_keep_their_order(either, case):
    edge_index, num_nodes = case
    graph = unified.Graph(edge_index, num_nodes)
    order = edge_index[1].argsort(stable=True)
    assert graph.num_edges == edge_index.shape[1]
    assert torch.equal(graph.sources.long(), edge_index[0][order])
    positions = torch.arange(len(order)) if graph.positions is None else graph.positions
    assert torch.equal(positions, order)
    assert torch.equal(graph.degrees(), torch.bincount(edge_index[1], minlength=num_nodes))
    assert torch.equal(graph.out_degrees(), torch.bincount(edge_index[0], minlength=num_nodes))
    again = unified.Graph.from_csc(graph.starts, graph.sources, graph.positions)
    assert again.num_nodes == num_nodes and again.nbytes == graph.nbytes


def test_edges_that_lead_nowhere():
    edges = torch.tensor([[0, 5], [1, 2]])
    with pytest.raises(ValueError, match=r"num_nodes=6"):
        unified.Graph(edges, 5)
    with pytest.raises(ValueError, match="the lowest node is -1"):
        unified.Graph(-edges.clamp(max=1), 5)
    with pytest.raises(ValueError, match="stack"):
        unified.Graph(edges.float())
    with pytest.raises(ValueError, match="from 0 to the number of edges"):
        unified.Graph.from_csc(torch.tensor([0, 1]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="must not decrease"):
        unified.Graph.from_csc(torch.tensor([0, 2, 1, 2]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="must hold nodes below 2"):
        unified.Graph.from_csc(torch.tensor([0, 1, 2]), torch.tensor([0, 2]))
    assert unified.Graph(torch.empty(2, 0, dtype=torch.int64), 4).num_edges == 0


@given(
    graphs(), st.lists(st.integers(0, 29), max_size=6),
    st.lists(st.sampled_from([-1, 0, 1, 2, 5, 40]), min_size=1, max_size=3),
    st.booleans(),
)  # fmt: skip
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_sample_is_of_the_graph(either, case, seeds, fanouts, replace):
    edge_index, num_nodes = case
    seeds = torch.tensor([one % num_nodes for one in seeds], dtype=torch.int64)
    sampler = unified.NeighborSampler(unified.Graph(edge_index, num_nodes), fanouts, replace=replace)
    found = sampler.sample(seeds, number=3)
    assert torch.equal(found.nodes[found.seeds], seeds)
    assert len(found.nodes.unique()) == len(found.nodes) == sum(found.num_sampled_nodes)
    assert found.num_sampled_nodes[0] == len(seeds.unique())
    assert torch.equal(found.nodes[found.rows], edge_index[0][found.edges])
    assert torch.equal(found.nodes[found.cols], edge_index[1][found.edges])
    assert torch.equal(found.edge_index, torch.stack([found.rows, found.cols]))
    degrees = torch.bincount(edge_index[1], minlength=num_nodes)
    begin, edge = 0, 0
    for hop, fanout in enumerate(fanouts):
        frontier = torch.arange(begin, begin + found.num_sampled_nodes[hop])
        begin += len(frontier)
        cols = found.cols[edge : edge + found.num_sampled_edges[hop]]
        edge += len(cols)
        have = degrees[found.nodes[frontier]]
        most = have if fanout < 0 else torch.where(have > 0, fanout, 0) if replace else have.clamp(max=fanout)
        assert torch.equal(torch.bincount(cols, minlength=len(found.nodes))[frontier], most)
        if not replace:
            drawn = found.edges[edge - len(cols) : edge]
            assert len(drawn.unique()) == len(drawn)


def test_all_ways_draw_the_same(monkeypatch):
    _, graph = random_graph()
    nodes = torch.randint(200, (500,))
    for fanout, replace, seed in itertools.product((1, 4, 12, 60, -1), (False, True), (0, 7, 2**62 + 5)):
        replaces = replace and fanout > 0
        compiled = _draw.draw(graph, nodes, fanout, seed, replace=replaces)
        plain = _draw.draw_by_torch(graph, nodes, fanout, seed, replace=replaces)
        assert all(torch.equal(one, other) for one, other in zip(compiled, plain, strict=True))
    sampler = unified.NeighborSampler(graph, [5, 4, 3])
    first = sampler.sample(nodes[:50], number=1)
    monkeypatch.setattr(_draw, "library", lambda: None)
    second = sampler.sample(nodes[:50], number=1)
    for name in ("nodes", "rows", "cols", "edges", "seeds"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


def test_draws_depend_on_their_number_alone():
    _, graph = random_graph()
    sampler = unified.NeighborSampler(graph, [5, 4])
    first, again, other = (sampler.sample(torch.arange(50), number=number) for number in (1, 1, 2))
    assert torch.equal(first.edges, again.edges)
    assert not torch.equal(first.edges, other.edges)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert torch.equal(sampler.sample(torch.arange(50), number=1).edges, first.edges)
    torch.set_num_threads(threads)
    torch.manual_seed(3)
    one = sampler.sample(torch.arange(50))
    torch.manual_seed(3)
    assert torch.equal(sampler.sample(torch.arange(50)).edges, one.edges)


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


def test_blocks_are_what_layers_need():
    edge_index, graph = random_graph()
    sample = unified.NeighborSampler(graph, [4, 3, 2]).sample(torch.arange(20))
    assert sample.block(0).num_sources == len(sample.nodes)
    assert sample.block(2).num_targets == 20
    for layer in range(3):
        block = sample.block(layer)
        assert block.edge_index.shape[1] == len(block.edges) > 0
        assert int(block.edge_index[0].max()) < block.num_sources and int(block.edge_index[1].max()) < block.num_targets
        assert torch.equal(sample.nodes[block.edge_index[0]], edge_index[0][block.edges])
        if layer:
            assert block.num_sources == sample.block(layer - 1).num_targets
    with pytest.raises(IndexError, match="3 hops"):
        sample.block(3)


def test_what_cannot_be_sampled():
    _, graph = random_graph()
    for fanouts in ([], [-2], [2.0], [True]):
        with pytest.raises((TypeError, ValueError), match=r"fanouts.*\[10, 5\]"):
            unified.NeighborSampler(graph, fanouts)
    with pytest.raises(IndexError, match="got numbers from 0 to 200"):
        unified.NeighborSampler(graph, [2]).sample(torch.tensor([0, 200]))
    with pytest.raises(ValueError, match="HeteroNeighborSampler"):
        unified.NeighborSampler(unified.Graph(torch.tensor([[5], [1]]), 2, 6), [2])
    assert len(unified.NeighborSampler(graph, [2]).sample(torch.empty(0, dtype=torch.int64)).nodes) == 0
    mask = torch.zeros(200, dtype=torch.bool)
    mask[7] = True
    assert unified.NeighborSampler(graph, [2]).sample(mask).nodes[0] == 7


def test_in_a_forked_child():
    _, graph = random_graph()
    sampler = unified.NeighborSampler(graph, [40, 40])
    expected = sampler.sample(torch.arange(200), number=1).edges
    child = os.fork()
    if not child:
        torch.set_num_threads(1)  # as PyTorch's workers do: its own threads do not survive either
        os._exit(0 if torch.equal(sampler.sample(torch.arange(200), number=1).edges, expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def hetero():
    generator = torch.Generator().manual_seed(0)

    def some(num_sources, num_targets, count):
        ends = [torch.randint(most, (count,), generator=generator) for most in (num_sources, num_targets)]
        return torch.stack(ends)

    edges = {
        ("a", "to", "b"): some(100, 40, 700),
        ("b", "of", "a"): some(40, 100, 500),
        ("a", "like", "a"): some(100, 100, 300),
    }
    sizes = {"a": 100, "b": 40}
    return edges, {one: unified.Graph(some, sizes[one[2]], sizes[one[0]]) for one, some in edges.items()}


def test_samples_of_several_types(either):
    edges, graphs = hetero()
    sampler = unified.HeteroNeighborSampler(graphs, [4, 3])
    found = sampler.sample({"a": torch.tensor([5, 9, 5])}, number=2)
    assert torch.equal(found.nodes["a"][found.seeds["a"]], torch.tensor([5, 9, 5]))
    for one, some in edges.items():
        source, _, target = one
        assert torch.equal(found.nodes[source][found.rows[one]], some[0][found.edges[one]])
        assert torch.equal(found.nodes[target][found.cols[one]], some[1][found.edges[one]])
        assert sum(found.num_sampled_edges[one]) == len(found.edges[one]) == len(found.edges[one].unique())
        counts = torch.bincount(found.cols[one], minlength=1)
        assert int(counts.max()) <= 4
    for name, counts in found.num_sampled_nodes.items():
        assert sum(counts) == len(found.nodes[name]) == len(found.nodes[name].unique())
    assert found.num_sampled_edges["a", "to", "b"][0] == 0  # no b was reached yet
    fanouts = {one: [0, 0] if one[1] == "like" else [2, 2] for one in graphs}
    found = unified.HeteroNeighborSampler(graphs, fanouts).sample({"b": torch.tensor([1])})
    assert found.num_sampled_edges["a", "like", "a"] == (0, 0)


def test_types_that_do_not_go_together():
    _, graphs = hetero()
    with pytest.raises(ValueError, match="`fanouts` must name"):
        unified.HeteroNeighborSampler(graphs, {("a", "to", "b"): [2]})
    with pytest.raises(ValueError, match="the same number of fanouts"):
        unified.HeteroNeighborSampler(graphs, {one: [2, 2] if one[1] == "to" else [2] for one in graphs})
    graphs["b", "to", "b"] = unified.Graph(torch.tensor([[0], [1]]), 50)
    with pytest.raises(ValueError, match="same number of nodes of type 'b', got 40 and 50"):
        unified.HeteroNeighborSampler(graphs, [2])


def power_law(num_nodes=4000, num_edges=60_000):
    generator = torch.Generator().manual_seed(0)
    rank = (torch.rand(num_edges, generator=generator) ** 4 * num_nodes).long()
    sources = torch.randperm(num_nodes, generator=generator)[rank]
    return unified.Graph(torch.stack([sources, torch.randint(num_nodes, (num_edges,), generator=generator)]), num_nodes)


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("batch_size", [32, 400])
def test_the_planned_hit_rate_is_the_measured_one(replace, batch_size, monkeypatch):
    """Within 2 points, and at least 95% of the hit rate of an oracle that knows the counts."""
    monkeypatch.setattr(_graph, "_MOST_EDGES", 5000)  # in several pieces
    graph, fanouts = power_law(), [10, 5]
    seeds = torch.randperm(4000, generator=torch.Generator().manual_seed(1))[:1200]
    scores = unified.expected_accesses(graph, seeds, fanouts, batch_size=batch_size, replace=replace)
    sampler = unified.NeighborSampler(graph, fanouts, replace=replace)
    loader = unified.Loader(sampler, torch.zeros(4000, 1), seeds, batch_size=batch_size)
    counts = unified.count_accesses((batch for _ in range(4) for batch in loader), 4000)
    assert abs(float(scores.sum()) * len(loader) * 4 / float(counts.sum()) - 1) < 0.03  # rows, not shares alone
    degrees = graph.out_degrees().double()
    for hot in (200, 800, 2000):
        plan = unified.plan_tiers(
            unified.TierProblem(num_rows=4000, row_bytes=4, device_bytes=0, host_bytes=4 * hot, scores=scores)
        )
        measured = float(counts[plan.host_rows].sum() / counts.sum())
        assert abs(plan.hit_rate - measured) < 0.02
        oracle = float(counts.sort(descending=True).values[:hot].sum() / counts.sum())
        if batch_size == 400:  # a few batches leave counts that are mostly chance
            assert measured >= 0.95 * oracle
        by_degree = float(counts[degrees.argsort(descending=True)[:hot]].sum() / counts.sum())
        assert measured >= by_degree - 0.01


def test_counts_of_a_trial_epoch_are_scores():
    class Batch:
        n_id = torch.tensor([1, 1, 3])

    assert unified.count_accesses([torch.tensor([[0, 1]]), Batch()], 4).tolist() == [1, 3, 0, 1]


@given(
    st.integers(0, 40), st.integers(0, 9), st.integers(0, 200), st.none() | st.integers(0, 200), st.booleans(),
    st.randoms(),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_plans_are_verified(num_rows, row_bytes, device_bytes, host_bytes, ties, random):
    scores = torch.tensor([random.randrange(3) if ties else random.random() for _ in range(num_rows)])
    problem = unified.TierProblem(
        num_rows=num_rows, row_bytes=row_bytes, device_bytes=device_bytes, host_bytes=host_bytes, scores=scores
    )
    plan = unified.plan_tiers(problem)
    unified.verify(problem, plan)
    assert 0 <= plan.disk_share <= 1 + 1e-9
    assert (host_bytes is not None) or plan.num_disk_rows == 0
    if num_rows > 2 and plan.num_disk_rows and len(plan.host_rows):
        worse = dataclasses.replace(plan, host_rows=plan.host_rows[:-1])
        with pytest.raises(InternalError):
            unified.verify(problem, worse)
