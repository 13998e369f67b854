"""RGAT against PyG's, weights and all."""

import copy

import pytest
import torch
from relational_layers import NODES, RELATIONS, WIDTH, check_like_pyg, summed

from penstock.relational import RGATConv

GRAPH = NODES, 200, RELATIONS


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"heads": 2},
        {"heads": 2, "concat": False},
        {"num_bases": 3},
        {"num_blocks": 4},
        {"attention_mechanism": "within-relation"},
        {"attention_mode": "multiplicative-self-attention", "dim": 3, "heads": 2},
        {"attention_mode": "multiplicative-self-attention", "heads": 2, "concat": False},
        {"mod": "additive"},
        {"mod": "scaled", "heads": 2},
        {"mod": "f-additive"},
        {"mod": "f-scaled"},
        {"edge_dim": 3},
        {"edge_dim": 3, "heads": 2, "attention_mode": "multiplicative-self-attention"},
    ],
    ids=str,
)
def test_rgat_is_pygs(pyg, graph, x, options):
    attributes = (torch.randn(graph.num_edges, 3, dtype=torch.float64),) if "edge_dim" in options else ()
    check_like_pyg(
        RGATConv(WIDTH, 12, RELATIONS, **options),
        pyg.RGATConv(WIDTH, 12, RELATIONS, **options),
        lambda layer, x: layer(x, graph, None, *attributes),
        lambda layer, x: layer(x, graph.edge_index, graph.edge_type, *attributes),
        x,
    )


def test_rgat_returns_shares_and_has_attention_per_relation(graph, x):
    shared = RGATConv(WIDTH, 6, RELATIONS).double()
    apart = RGATConv(WIDTH, 6, RELATIONS, attention_per_relation=True).double()
    state = copy.deepcopy(shared.state_dict())
    for name in ("q", "k"):
        state[name] = state[name].expand(RELATIONS, -1, -1)
    apart.load_state_dict(state)
    actual, (edge_index, shares) = apart(x, graph, return_attention_weights=True)
    torch.testing.assert_close(actual, shared(x, graph))
    assert torch.equal(edge_index, graph.edge_index)
    entered = torch.unique(edge_index[1])
    torch.testing.assert_close(summed(shares, edge_index[1], NODES)[entered], torch.ones(len(entered), 1).double())
