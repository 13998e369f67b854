"""The shipped layers against PyG's, weights and all; and against plain PyTorch where PyG has none."""

import copy

import pytest
import torch
from relational_layers import random_graph, summed
from torch import nn

from penstock.relational import CompGCNConv, HGTConv, RelationalGraph, RGATConv, RGCNConv, RGraphSAGEConv, SimpleHGNConv

pyg = pytest.importorskip("torch_geometric.nn")
NODES, RELATIONS, WIDTH = 30, 5, 8


@pytest.fixture
def graph():
    return random_graph(NODES, 200, RELATIONS, torch.Generator().manual_seed(0))


@pytest.fixture
def x():
    return torch.randn(NODES, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def check(ours, theirs, call_ours, call_theirs, x):
    """Equal results and gradients with the same weights."""
    ours, theirs = ours.double(), theirs.double()
    if hasattr(theirs, "l2"):
        nn.init.constant_(theirs.l2, 0.1)  # which PyG leaves as memory happens to be
    ours.load_state_dict(theirs.state_dict())
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    actual, expected = call_ours(ours, inputs[0]), call_theirs(theirs, inputs[1])
    torch.testing.assert_close(actual, expected)
    weight = torch.randn_like(actual)
    (actual * weight).sum().backward()
    (expected * weight).sum().backward()
    if inputs[1].grad is not None:
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    mine = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        if parameter.grad is None:
            assert mine[name].grad is None or not mine[name].grad.any(), name
        else:
            torch.testing.assert_close(mine[name].grad, parameter.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    "options",
    [{}, {"num_bases": 3}, {"num_blocks": 4}, {"aggr": "add"}, {"root_weight": False, "bias": False}],
    ids=str,
)
@pytest.mark.parametrize("takes_graph", [True, False])
def test_rgcn_is_pygs(graph, x, options, takes_graph):
    edges = (graph,) if takes_graph else (graph.edge_index, graph.edge_type)
    check(
        RGCNConv(WIDTH, 12, RELATIONS, **options),
        pyg.RGCNConv(WIDTH, 12, RELATIONS, **options),
        lambda layer, x: layer(x, *edges),
        lambda layer, x: layer(x, graph.edge_index, graph.edge_type),
        x,
    )


@pytest.mark.parametrize("options", [{}, {"num_bases": 2}], ids=str)
def test_rgcn_without_features_is_pygs(graph, x, options):
    check(
        RGCNConv(NODES, 12, RELATIONS, **options),
        pyg.RGCNConv(NODES, 12, RELATIONS, **options),
        lambda layer, _: layer(None, graph),
        lambda layer, _: layer(None, graph.edge_index, graph.edge_type),
        x,
    )


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
def test_rgat_is_pygs(graph, x, options):
    attributes = (torch.randn(graph.num_edges, 3, dtype=torch.float64),) if "edge_dim" in options else ()
    check(
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


@pytest.mark.parametrize(
    ("widths", "heads"), [(8, 1), ({"a": 8, "b": 6, "c": 12}, 2), (12, 3)], ids=["same", "different", "residual"]
)
def test_hgt_is_pygs(widths, heads):
    sizes = {"a": 10, "b": 7, "c": 4}
    types = [("a", "x", "b"), ("b", "y", "a"), ("a", "z", "a"), ("c", "w", "a")]
    generator = torch.Generator().manual_seed(0)
    edges = {
        kind: torch.stack([torch.randint(sizes[end], (25,), generator=generator) for end in (kind[0], kind[2])])
        for kind in types
    }
    theirs = pyg.HGTConv(widths, 12, (list(sizes), types), heads=heads).double()
    ours = HGTConv(widths, 12, (list(sizes), types), heads=heads).double()
    ours.load_state_dict(theirs.state_dict())
    width_of = widths if isinstance(widths, dict) else dict.fromkeys(sizes, widths)
    xs = {name: torch.randn(size, width_of[name]).double().requires_grad_() for name, size in sizes.items()}
    others = {name: tensor.detach().clone().requires_grad_() for name, tensor in xs.items()}
    actual, expected = ours(xs, edges), theirs(others, edges)
    assert actual.keys() == expected.keys()
    for results in (actual, expected):
        sum((tensor**2).sum() for tensor in results.values()).backward()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor)
    for name in sizes:
        torch.testing.assert_close(xs[name].grad, others[name].grad)
    mine = dict(ours.named_parameters())
    for name, tensor in theirs.named_parameters():
        assert (mine[name].grad is None) == (tensor.grad is None)
        if tensor.grad is not None:
            torch.testing.assert_close(mine[name].grad, tensor.grad)
    if not isinstance(widths, dict):
        whole = ours(torch.cat([tensor.detach() for tensor in xs.values()]), RelationalGraph.from_types(edges, sizes))
        torch.testing.assert_close(whole.split(list(sizes.values()))[0], actual["a"])


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
