"""Layers, graphs and a plain PyTorch oracle that the tests of `penstock.relational` share."""

import torch
from torch import nn

from penstock.relational import RelationalGraph, concat, dot, elu, gelu, layer, leaky_relu, maximum, relu, sigmoid, tanh
from penstock.relational import softmax as edge_softmax

NODES, RELATIONS, WIDTH = 30, 5, 8
"""Sizes of the graphs and rows with which whole layers are tested."""


@layer
def rgcn(g, x, weight, norm):
    for e in g.edges():
        message = norm[e] * (x[e.src] @ weight[e.etype])
    for n in g.nodes():
        total = n.sum(message)
    return total


@layer
def rgat(g, x, weight, at_source, at_target):
    for e in g.edges():
        source = x[e.src] @ weight[e.etype]
        target = x[e.dst] @ weight[e.etype]
        score = leaky_relu(dot(source, at_source[e.etype]) + dot(target, at_target[e.etype]), 0.2)
        message = edge_softmax(score) * source
    for n in g.nodes():
        total = n.sum(message)
    return total


@layer
def heads(g, key, query, to_key, prior):
    for e in g.edges():
        score = dot(key[e.src] @ to_key[e.etype], query[e.dst]) * prior[e.etype]
        message = edge_softmax(score, per_type=True).unsqueeze(-1) * key[e.src]
    for n in g.nodes():
        total = n.sum(message)
    return total


@layer
def attention(g, key, query, value, to_key, to_value):
    """Attention of HGT, with heads."""
    for e in g.edges():
        score = dot(key[e.src] @ to_key[e.etype], query[e.dst])
        message = edge_softmax(score).unsqueeze(-1) * (value[e.src] @ to_value[e.etype])
    for n in g.nodes():
        total = n.sum(message)
    return total


@layer
def many_functions(g, x, edge, by_type, shared):
    """Node values on both ends, parts of rows, maxima, means, functions, two results."""
    for n in g.nodes():
        z = tanh(x[n] @ shared)
        first = z[..., 0:2]
    for e in g.edges():
        both = concat(z[e.src], z[e.dst], edge[e])
        gate = sigmoid(dot(both, by_type[e.etype]))
        value = gelu(first[e.src]) * gate - elu(first[e.dst]) / 3
        difference = maximum(z[e.src], z[e.dst]).sum(-1) * relu(gate)
    for n in g.nodes():
        result = concat(n.max(value), n.mean(value)) + n.sum(difference).unsqueeze(-1)
    return result, value


def application_of(record):
    """A layer that applies a function of the table to both ends of an edge, or to its source."""

    def applied(g, x, y):
        for e in g.edges():
            operands = (x[e.src], y[e.dst])[: record.num_operands]
            value = operands[0].tracer.map(record.name, *operands, parameter=0.25)
        for n in g.nodes():
            total = n.sum(value)
        return total, value

    return layer(applied)


def operands_of(record, graph, dtype, generator):
    """Operands in the function's domain, some of which are equal."""
    x, y = (torch.randn(count, 3, generator=generator) for count in (graph.num_sources, graph.num_targets))
    if record.name in ("log", "sqrt"):
        x = x.abs() + 0.1
    y[::2] = x[0]
    return [operand.to(dtype) for operand in (x, y)]


def tensors(name, graph, width, dtype, generator):
    """Random arguments of a layer, by name; all want gradients."""
    nodes, edges, types = graph.num_sources, graph.num_edges, graph.num_edge_types
    shapes = {
        "rgcn": {"x": (nodes, width), "weight": (types, width, 3), "norm": (edges,)},
        "rgat": {
            "x": (nodes, width), "weight": (types, width, 3), "at_source": (types, 3), "at_target": (types, 3),
        },
        "heads": {
            "key": (nodes, 2, width), "query": (nodes, 2, 3), "to_key": (types, 2, width, 3), "prior": (types, 2),
        },
        "many_functions": {"x": (nodes, width), "edge": (edges, 2), "by_type": (types, 8), "shared": (width, 3)},
    }[name]  # fmt: skip
    return {key: torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for key, shape in shapes.items()}


def plain(name, graph, arguments):
    """The same layer by gathering everything for every edge."""
    source, target = graph.edge_index
    kind, count = graph.edge_type, graph.num_targets
    match name:
        case "rgcn":
            message = arguments["norm"][:, None] * torch.einsum(
                "ei,eio->eo", arguments["x"][source], arguments["weight"][kind]
            )
            return (summed(message, target, count),)
        case "rgat":
            at_source, at_target = (
                torch.einsum("ei,eio->eo", arguments["x"][end], arguments["weight"][kind]) for end in (source, target)
            )
            score = (at_source * arguments["at_source"][kind]).sum(-1) + (at_target * arguments["at_target"][kind]).sum(
                -1
            )
            share = softmax(torch.nn.functional.leaky_relu(score, 0.2), target, count)
            return (summed(share[:, None] * at_source, target, count),)
        case "heads":
            key = torch.einsum("ehi,ehio->eho", arguments["key"][source], arguments["to_key"][kind])
            score = (key * arguments["query"][target]).sum(-1) * arguments["prior"][kind]
            share = softmax(score, target * graph.num_edge_types + kind, count * graph.num_edge_types)
            return (summed(share[..., None] * arguments["key"][source], target, count),)
    z = torch.tanh(arguments["x"] @ arguments["shared"])
    first = z[:, :2]
    both = torch.cat([z[source], z[target], arguments["edge"]], dim=-1)
    gate = torch.sigmoid((both * arguments["by_type"][kind]).sum(-1, keepdim=True))
    functional = torch.nn.functional
    value = functional.gelu(first[source]) * gate - functional.elu(first[target]) / 3
    difference = torch.maximum(z[source], z[target]).sum(-1) * torch.relu(gate[:, 0])
    largest = value.new_zeros(count, 2).scatter_reduce(
        0, target[:, None].expand_as(value), value, "amax", include_self=False
    )
    degree = torch.bincount(target, minlength=count).clamp(min=1)[:, None]
    result = torch.cat([largest, summed(value, target, count) / degree], dim=-1)
    return result + summed(difference, target, count)[:, None], value


def attention_of(num_nodes, num_types, num_heads, width):
    rows, matrices = (num_nodes, num_heads, width), (num_types, num_heads, width, width)
    generator = torch.Generator().manual_seed(2)
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in (rows, rows, rows, matrices, matrices)
    ]


def plain_attention(source, target, kind, key, query, value, to_key, to_value):
    score = (torch.einsum("ehi,ehio->eho", key[source], to_key[kind]) * query[target]).sum(-1)
    share = softmax(score, target, len(key)).unsqueeze(-1)
    return summed(share * torch.einsum("ehi,ehio->eho", value[source], to_value[kind]), target, len(key))


def summed(value, index, count):
    return value.new_zeros(count, *value.shape[1:]).index_add(0, index, value)


def softmax(score, index, count):
    largest = score.new_full((count, *score.shape[1:]), -torch.inf)
    places = index.view(-1, *[1] * (score.dim() - 1)).expand_as(score)
    largest = largest.scatter_reduce(0, places, score.detach(), "amax")
    raised = (score - largest[index]).exp()
    return raised / summed(raised, index, count)[index]


def random_graph(num_nodes, num_edges, num_types, generator, *, hub=False):
    """With repeated edges and self-loops as they come, relations that do not occur, and perhaps a hub."""
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=generator)
    if hub:
        edge_index[1, : num_edges // 2] = 0
    edge_type = torch.randint(max(1, num_types - 1), (num_edges,), generator=generator)
    return RelationalGraph(edge_index, edge_type, num_nodes=num_nodes, num_edge_types=num_types)


def rand(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def check_like_plain(compiled, graph, plain, *arguments):
    """Equal to ``plain(source, target, kind, *arguments)``, gradients too."""
    actual = compiled(graph, *arguments)
    expected = plain(*graph.edge_index, graph.edge_type, *arguments)
    actual, expected = (result if isinstance(result, tuple) else (result,) for result in (actual, expected))
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    weights = [torch.randn_like(result) for result in expected]
    gradients = [
        torch.autograd.grad(
            sum((a * b).sum() for a, b in zip(results, weights, strict=True)), arguments, allow_unused=True
        )
        for results in (actual, expected)
    ]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(
            torch.zeros(()) if mine is None else mine, torch.zeros(()) if theirs is None else theirs
        )


def check_like_pyg(ours, theirs, call_ours, call_theirs, x):
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
