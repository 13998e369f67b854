"""RGCN against PyG's, weights and all; and what layers refuse."""

import pytest
import torch
from relational_layers import NODES, RELATIONS, WIDTH, check_like_pyg

from penstock.relational import CompGCNConv, RelationalGraph, RGATConv, RGCNConv, RGraphSAGEConv, SimpleHGNConv

GRAPH = NODES, 200, RELATIONS


@pytest.mark.parametrize(
    "options",
    [{}, {"num_bases": 3}, {"num_blocks": 4}, {"aggr": "add"}, {"root_weight": False, "bias": False}],
    ids=str,
)
@pytest.mark.parametrize("takes_graph", [True, False])
def test_rgcn_is_pygs(pyg, graph, x, options, takes_graph):
    edges = (graph,) if takes_graph else (graph.edge_index, graph.edge_type)
    check_like_pyg(
        RGCNConv(WIDTH, 12, RELATIONS, **options),
        pyg.RGCNConv(WIDTH, 12, RELATIONS, **options),
        lambda layer, x: layer(x, *edges),
        lambda layer, x: layer(x, graph.edge_index, graph.edge_type),
        x,
    )


@pytest.mark.parametrize("options", [{}, {"num_bases": 2}], ids=str)
def test_rgcn_without_features_is_pygs(pyg, graph, x, options):
    check_like_pyg(
        RGCNConv(NODES, 12, RELATIONS, **options),
        pyg.RGCNConv(NODES, 12, RELATIONS, **options),
        lambda layer, _: layer(None, graph),
        lambda layer, _: layer(None, graph.edge_index, graph.edge_type),
        x,
    )


def test_misuse_names_the_call_that_works(graph, x):
    with pytest.raises(ValueError, match="num_edge_types=7"):
        RGCNConv(WIDTH, 4, 7)(x.float(), graph)
    with pytest.raises(ValueError, match="without edge_type"):
        RGCNConv(WIDTH, 4, RELATIONS)(x.float(), graph.edge_index)
    with pytest.raises(ValueError, match="edge_dim=3"):
        RGATConv(WIDTH, 4, RELATIONS)(x.float(), graph, None, torch.ones(graph.num_edges, 3))
    with pytest.raises(ValueError, match="`aggr` must be .* got 'max'"):
        RGCNConv(WIDTH, 4, RELATIONS, aggr="max")
    with pytest.raises(ValueError, match="`attention_mechanism` must be one of .* got 'other'"):
        RGATConv(WIDTH, 4, RELATIONS, attention_mechanism="other")


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
