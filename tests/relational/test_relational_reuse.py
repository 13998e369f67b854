"""Sums that follow from results, and values that traversals share: the same gradients with less work."""

import re

import pytest
import torch
from relational_layers import (
    attention,
    attention_of,
    check_like_plain,
    heads,
    many_functions,
    plain_attention,
    rgat,
    rgcn,
    tensors,
)
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.relational import RelationalGraph, dropout, layer, softmax
from penstock.relational._domain import OF_TYPES
from penstock.relational._lower import ROW_BY_ROW
from penstock.relational._run import _compiled_program
from penstock.relational._share import MOST_NUMBERS, shared

GRAPH = 20, 80, 4


def sums_over_edges(compiled, graph, *args, **kwargs):
    """Values per target that the backward program sums over edges."""
    backward = compiled.explain(graph, *args, **kwargs).rsplit("backward\n", 1)[1]
    return len(re.findall(r"^%\d+ +target .* sum of %\d+ over edge rows$", backward, re.MULTILINE))


@pytest.mark.parametrize("num_heads", [1, 4])
def test_a_softmax_sums_once_less_in_backward(graph, emitter, num_heads):
    arguments = attention_of(20, 4, num_heads, 3)
    compiled = attention.with_options(emitter=emitter)
    check_like_plain(compiled, graph, plain_attention, *arguments)
    before = sums_over_edges(compiled.with_options(reuse_sums=False), graph, *arguments)
    assert sums_over_edges(compiled, graph, *arguments) == before - 1


def test_heads_as_wide_as_rows_are_not_taken_for_them(graph, emitter):
    """Scores per head and products per column have the same shape here."""
    check_like_plain(attention.with_options(emitter=emitter), graph, plain_attention, *attention_of(20, 4, 3, 3))


def test_nodes_that_no_edge_enters_have_gradients_without_nan(emitter):
    graph = RelationalGraph(torch.tensor([[0, 1, 2], [4, 4, 3]]), torch.tensor([0, 1, 1]), num_nodes=6)
    arguments = attention_of(6, 2, 2, 3)
    check_like_plain(attention.with_options(emitter=emitter), graph, plain_attention, *arguments)
    attention.with_options(emitter=emitter)(graph, *arguments).sum().backward()
    assert all(argument.grad.isfinite().all() for argument in arguments)


def test_what_is_not_the_same_sum_stays(graph):
    """A softmax per type is not what is summed per node, nor is one of which dropout has taken parts."""

    @layer
    def dropping(g, x, score):
        for e in g.edges():
            message = dropout(softmax(score[e]), 0.5) * x[e.src]
        for n in g.nodes():
            total = n.sum(message)
        return total

    score = torch.randn(graph.num_edges, 1, requires_grad=True)
    cases = [(dropping, [torch.randn(20, 3, requires_grad=True), score], {})]
    cases.append((heads, [], tensors("heads", graph, 4, torch.float64, torch.Generator().manual_seed(0))))
    for compiled, args, kwargs in cases:
        texts = [
            compiled.with_options(emitter="eager", reuse_sums=reuse).explain(graph, *args, **kwargs)
            for reuse in (True, False)
        ]
        assert texts[0] == texts[1]


@pytest.mark.parametrize("compiled", [attention, rgat])
def test_scores_are_raised_once_in_backward(graph, compiled):
    arguments = (
        attention_of(20, 4, 2, 3)
        if compiled is attention
        else tensors("rgat", graph, 4, torch.float64, torch.Generator().manual_seed(0)).values()
    )
    backward = compiled.with_options(emitter="c").source(graph, *arguments).rsplit("#include <string.h>", 1)[1]
    assert len(re.findall(r"= .*\bEXP\(", backward)) == 1


@pytest.mark.parametrize(("compiled", "name"), [(rgcn, "rgcn"), (rgat, "rgat"), (heads, "heads")])
def test_only_few_numbers_an_edge_are_stored(graph, compiled, name):
    arguments = tensors(name, graph, 4, torch.float64, torch.Generator().manual_seed(0))
    traced, descriptions, is_unified = compiled._asked(graph, (), arguments)
    program = _compiled_program(
        compiled, graph, traced, descriptions, is_grad_enabled=True, is_unified=is_unified
    ).backward.program
    stored = shared(program, set(program.outputs), ROW_BY_ROW)
    assert bool(stored) == (name != "rgcn")
    for place in stored:
        assert torch.Size(program[place].shape).numel() <= MOST_NUMBERS and program[place].domain not in OF_TYPES


def test_kept_values_get_no_gradients(graph):
    """Autograd would fill a tensor of zeros for every value that forward keeps for backward."""
    x = torch.randn(20, 4, requires_grad=True)
    created = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            created.append((str(function), getattr(result, "shape", None)))
            return result

    total = many_functions.with_options(emitter="eager")(
        graph, x, torch.randn(80, 2), torch.randn(4, 8), torch.randn(4, 3)
    )[0]
    with Recorder():
        total.sum().backward()
    zeros = [shape for name, shape in created if "zeros" in name]
    assert any("relational_layer_backward" in name for name, _ in created)
    assert zeros == [(graph.num_edges, 2)]  # of the layer's second result, which the loss does not read


@pytest.mark.parametrize("num_heads", [1, 4])
def test_backward_may_read_the_result_itself(graph, emitter, num_heads):
    """One tensor less for each call, which must not be written to in place."""
    shared = attention.with_options(emitter=emitter, shares_results=True)
    arguments = attention_of(GRAPH[0], GRAPH[2], num_heads, 8)
    check_like_plain(shared, graph, plain_attention, *arguments)
    counts = [
        len(list(compiled(graph, *arguments).grad_fn.saved_tensors))
        for compiled in (shared, attention.with_options(emitter=emitter))
    ]
    assert counts[0] == counts[1]
    result = shared(graph, *arguments)
    result.relu_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()
    attention.with_options(emitter=emitter)(graph, *arguments).relu_().sum().backward()
