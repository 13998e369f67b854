"""Samples are of the graph, uniform, repeatable, and the same whoever draws."""

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unified_cases import graphs, random_graph

from penstock import unified


@given(
    graphs(), st.lists(st.integers(0, 29), max_size=6),
    st.lists(st.sampled_from([-1, 0, 1, 2, 5, 40]), min_size=1, max_size=3),
    st.booleans(),
)  # fmt: skip
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_sample_is_of_the_graph(either, case, seeds, fanouts, replace):
    edge_index, num_nodes = case
    seeds = torch.tensor([seed % num_nodes for seed in seeds], dtype=torch.int64)
    sampler = unified.NeighborSampler(unified.Graph(edge_index, num_nodes), fanouts, replace=replace)
    sample = sampler.sample(seeds, number=3)
    assert torch.equal(sample.nodes[sample.seeds], seeds)
    assert len(sample.nodes.unique()) == len(sample.nodes) == sum(sample.num_sampled_nodes)
    assert sample.num_sampled_nodes[0] == len(seeds.unique())
    assert torch.equal(sample.nodes[sample.rows], edge_index[0][sample.edges])
    assert torch.equal(sample.nodes[sample.cols], edge_index[1][sample.edges])
    assert torch.equal(sample.edge_index, torch.stack([sample.rows, sample.cols]))
    degrees = torch.bincount(edge_index[1], minlength=num_nodes)
    begin, edge = 0, 0
    for hop, fanout in enumerate(fanouts):
        frontier = torch.arange(begin, begin + sample.num_sampled_nodes[hop])
        begin += len(frontier)
        cols = sample.cols[edge : edge + sample.num_sampled_edges[hop]]
        edge += len(cols)
        have = degrees[sample.nodes[frontier]]
        most = have if fanout < 0 else torch.where(have > 0, fanout, 0) if replace else have.clamp(max=fanout)
        assert torch.equal(torch.bincount(cols, minlength=len(sample.nodes))[frontier], most)
        if not replace:
            drawn = sample.edges[edge - len(cols) : edge]
            assert len(drawn.unique()) == len(drawn)


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

    def random_edges(num_sources, num_targets, count):
        ends = [torch.randint(most, (count,), generator=generator) for most in (num_sources, num_targets)]
        return torch.stack(ends)

    edges = {
        ("a", "to", "b"): random_edges(100, 40, 700),
        ("b", "of", "a"): random_edges(40, 100, 500),
        ("a", "like", "a"): random_edges(100, 100, 300),
    }
    sizes = {"a": 100, "b": 40}
    return edges, {
        edge_type: unified.Graph(random_edges, sizes[edge_type[2]], sizes[edge_type[0]])
        for edge_type, random_edges in edges.items()
    }


def test_samples_of_several_types(either):
    edges, graphs = hetero()
    sampler = unified.HeteroNeighborSampler(graphs, [4, 3])
    sample = sampler.sample({"a": torch.tensor([5, 9, 5])}, number=2)
    assert torch.equal(sample.nodes["a"][sample.seeds["a"]], torch.tensor([5, 9, 5]))
    for edge_type, ends in edges.items():
        source, _, target = edge_type
        assert torch.equal(sample.nodes[source][sample.rows[edge_type]], ends[0][sample.edges[edge_type]])
        assert torch.equal(sample.nodes[target][sample.cols[edge_type]], ends[1][sample.edges[edge_type]])
        assert (
            sum(sample.num_sampled_edges[edge_type])
            == len(sample.edges[edge_type])
            == len(sample.edges[edge_type].unique())
        )
        counts = torch.bincount(sample.cols[edge_type], minlength=1)
        assert int(counts.max()) <= 4
    for name, counts in sample.num_sampled_nodes.items():
        assert sum(counts) == len(sample.nodes[name]) == len(sample.nodes[name].unique())
    assert sample.num_sampled_edges["a", "to", "b"][0] == 0  # no b was reached yet
    fanouts = {edge_type: [0, 0] if edge_type[1] == "like" else [2, 2] for edge_type in graphs}
    sample = unified.HeteroNeighborSampler(graphs, fanouts).sample({"b": torch.tensor([1])})
    assert sample.num_sampled_edges["a", "like", "a"] == (0, 0)


def test_types_that_do_not_go_together():
    _, graphs = hetero()
    with pytest.raises(ValueError, match="`fanouts` must name"):
        unified.HeteroNeighborSampler(graphs, {("a", "to", "b"): [2]})
    with pytest.raises(ValueError, match="the same number of fanouts"):
        unified.HeteroNeighborSampler(
            graphs, {edge_type: [2, 2] if edge_type[1] == "to" else [2] for edge_type in graphs}
        )
    graphs["b", "to", "b"] = unified.Graph(torch.tensor([[0], [1]]), 50)
    with pytest.raises(ValueError, match="same number of nodes of type 'b', got 40 and 50"):
        unified.HeteroNeighborSampler(graphs, [2])
