"""Graphs keep the order of their edges, and accesses are counted and foreseen."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from unified_cases import EDGES, graphs

from penstock import unified


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


def test_ends_of_edges_name_the_number_of_nodes():
    with pytest.raises(ValueError, match="`num_nodes` is 4 and `num_sources` is 0"):
        unified.Graph(EDGES, 4, 0)


def test_counts_of_a_trial_epoch_are_scores():
    class Batch:
        n_id = torch.tensor([1, 1, 3])

    assert unified.count_accesses([torch.tensor([[0, 1]]), Batch()], 4).tolist() == [1, 3, 0, 1]


def test_accesses_of_rows_that_are_not_there():
    with pytest.raises(ValueError, match="`num_rows` must be above every row that is read, got 3; rows from 1 to 5"):
        unified.count_accesses([torch.tensor([1, 5])], 3)
    with pytest.raises(TypeError, match="`indexes` must be tensors of row numbers, or batches"):
        unified.count_accesses([None], 3)


def test_accesses_over_two_types_of_nodes_are_refused():
    graph = unified.Graph(torch.tensor([[0, 4], [1, 0]]), 2, 5)
    with pytest.raises(ValueError, match="5 sources and 2 targets"):
        unified.expected_accesses(graph, torch.tensor([0]), [2, 2], batch_size=1)
