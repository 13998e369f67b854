"""The layers that PyG has not, against plain PyTorch."""

import pytest
import torch
from relational_layers import NODES, RELATIONS, WIDTH, summed

from penstock.relational import CompGCNConv, RelationalGraph, RGraphSAGEConv, SimpleHGNConv

GRAPH = NODES, 200, RELATIONS


@pytest.mark.parametrize("composition", ["subtract", "multiply"])
def test_compgcn_is_its_formula(graph, x, composition):
    source, target = graph.edge_index
    both = RelationalGraph(
        torch.cat([graph.edge_index, graph.edge_index.flip(0)], dim=1),
        torch.cat([graph.edge_type, graph.edge_type + RELATIONS]),
        num_nodes=NODES,
        num_edge_types=2 * RELATIONS,
    )
    conv = CompGCNConv(WIDTH, 6, RELATIONS, composition).double()
    z = torch.randn(2 * RELATIONS, WIDTH, dtype=torch.float64, requires_grad=True)
    nodes, relations = conv(x, z, both)
    source, target = both.edge_index
    degree = torch.bincount(target, minlength=NODES).clamp(min=1).double()
    composed = x[source] * z[both.edge_type] if composition == "multiply" else x[source] - z[both.edge_type]
    message = composed / (degree[source] * degree[target]).sqrt()[:, None]
    is_inverse = both.edge_type >= RELATIONS
    expected = summed(message[~is_inverse] @ conv.forth, target[~is_inverse], NODES)
    expected = expected + summed(message[is_inverse] @ conv.back, target[is_inverse], NODES)
    own = x * conv.loop_relation if composition == "multiply" else x - conv.loop_relation
    torch.testing.assert_close(nodes, (expected + own @ conv.loop) / 3)
    torch.testing.assert_close(relations, z @ conv.relate)
    (gradient,) = torch.autograd.grad(nodes.sum(), z, retain_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad((expected + own @ conv.loop).sum() / 3, z)[0])


def test_simple_hgn_is_its_formula(graph, x):
    source, target = graph.edge_index
    conv = SimpleHGNConv(WIDTH, 6, RELATIONS, heads=2).double()
    z = (x @ conv.weight).view(NODES, 2, 6)
    score = (z * conv.at_source).sum(-1)[source] + (z * conv.at_target).sum(-1)[target]
    score = torch.nn.functional.leaky_relu(score + (conv.edge @ conv.edge_to_score)[graph.edge_type], 0.2)
    raised = score.exp()
    share = raised / summed(raised, target, NODES)[target]
    expected = summed(share[..., None] * z[source], target, NODES).flatten(1) + x @ conv.residual
    torch.testing.assert_close(conv(x, graph), expected)


def test_rgraphsage_is_its_formula(graph, x):
    source, target = graph.edge_index
    conv = RGraphSAGEConv(WIDTH, 6, RELATIONS, normalize=True).double()
    message = torch.einsum("ei,eio->eo", x[source], conv.weight[graph.edge_type])
    degree = torch.bincount(target, minlength=NODES).clamp(min=1)[:, None]
    expected = summed(message, target, NODES) / degree + x @ conv.own + conv.bias
    torch.testing.assert_close(conv(x, graph), torch.nn.functional.normalize(expected, dim=-1))
