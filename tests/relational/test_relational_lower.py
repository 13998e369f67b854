"""Layers whose values meet at the edges of templates: shared memory, heads, sums into the same rows."""

from functools import partial
from unittest import mock

import pytest
import torch
from relational_layers import check_like_plain, rand, summed

from penstock.relational import RelationalGraph, RGATConv, RGCNConv, _run, _triton, concat, dot, layer, tanh


def test_types_reshaped_do_not_share_memory(graph, emitter):
    @layer
    def two(g, x, y, a, b):
        for e in g.edges():
            message = x[e.src] @ tanh(a[e.etype]) + y[e.src] @ b[e.etype].reshape(4, 3)
        for n in g.nodes():
            total = n.sum(message)
        return total

    def plain(source, target, kind, x, y, a, b):
        message = torch.einsum("ei,eio->eo", x[source], torch.tanh(a)[kind])
        message = message + torch.einsum("ei,eio->eo", y[source], b.view(-1, 4, 3)[kind])
        return summed(message, target, 6)

    check_like_plain(
        two.with_options(emitter=emitter), graph, plain, rand(6, 4), rand(6, 4), rand(3, 4, 3), rand(3, 12)
    )


def test_edges_times_a_shared_matrix(graph, emitter):
    @layer
    def shared(g, edge, x, w):
        for e in g.edges():
            message = concat(x[e.src], edge[e]) @ w
        for n in g.nodes():
            total = n.sum(message)
        return total

    def plain(source, target, kind, edge, x, w):
        return summed(torch.cat([x[source], edge], dim=1) @ w, target, 6)

    check_like_plain(shared.with_options(emitter=emitter), graph, plain, rand(25, 2), rand(6, 2), rand(4, 3))


def test_heads_of_matrices_alone(graph, emitter):
    @layer
    def headed(g, x, w, a):
        for e in g.edges():
            z = x[e.src] @ w[e.etype]
            score = dot(x[e.dst] @ w[e.etype], a[e.etype])
        for n in g.nodes():
            total = n.sum(score.unsqueeze(-1) * z)
        return total

    def plain(source, target, kind, x, w, a):
        z, y = (torch.einsum("ei,ehio->eho", x[end], w[kind]) for end in (source, target))
        return summed((y * a[kind][:, None]).sum(-1, keepdim=True) * z, target, 6)

    check_like_plain(headed.with_options(emitter=emitter), graph, plain, rand(6, 3), rand(3, 2, 3, 4), rand(3, 4))


@layer
def target_before_source(g, x, left, right):
    for e in g.edges():
        message = tanh(x[e.dst] @ left[e.etype] + x[e.src] @ right[e.etype])
    for n in g.nodes():
        total = n.sum(message)
    return total


@layer
def ends_of_sums(g, x, first, second):
    for e in g.edges():
        left, right = x[e.src] @ first[e.etype], x[e.src] @ second[e.etype]
    for n in g.nodes():
        p, q = n.sum(left), n.sum(right)
    for e in g.edges():
        both = p[e.src] + q[e.dst]
    return both


@pytest.mark.parametrize("emitter", ["c", "eager"])
@pytest.mark.parametrize("name", ["target_before_source", "ends_of_sums"])
def test_sums_into_the_same_rows_come_from_their_own_ends(emitter, name):
    generator = torch.Generator().manual_seed(0)
    index, kind = torch.randint(8, (2, 40), generator=generator), torch.randint(3, (40,), generator=generator)
    graph = RelationalGraph(index, kind, num_nodes=8, num_edge_types=3)
    x = torch.randn(8, 4, dtype=torch.float64, generator=generator).requires_grad_()
    first, second = (torch.randn(3, 4, 5, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(2))
    (source, target), empty = index, torch.zeros(8, 5, dtype=torch.float64)

    def product(end, weight):
        return torch.einsum("ei,eio->eo", x[end], weight[kind])

    if name == "target_before_source":
        expected = empty.index_add(0, target, torch.tanh(product(target, first) + product(source, second)))
        actual = target_before_source.with_options(emitter=emitter)(graph, x, first, second)
    else:
        p, q = (empty.index_add(0, target, product(source, weight)) for weight in (first, second))
        expected = p[source] + q[target]
        actual = ends_of_sums.with_options(emitter=emitter)(graph, x, first, second)
    torch.testing.assert_close(actual, expected)
    weight = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    for mine, theirs in zip(
        *(torch.autograd.grad((y * weight).sum(), (x, first, second)) for y in (actual, expected)), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("num_heads", [1, 2])
def test_a_product_is_added_to_a_value_where_it_lies(graph, emitter, num_heads):
    """In backward, to the sum of the source's gradients, through a reshape where there are heads."""

    @layer
    def scored(g, x, y, w, key):
        for e in g.edges():
            z = x[e.src] @ w[e.etype]
            score = tanh(z @ key + y[e.dst])
            message = score.reshape(num_heads, 2, 1) * z.reshape(num_heads, 1, -1)
        for n in g.nodes():
            total = n.sum(message)
        return total

    def plain(source, target, kind, x, y, w, key):
        z = torch.einsum("ei,eio->eo", x[source], w[kind])
        message = torch.tanh(z @ key + y[target]).view(-1, num_heads, 2, 1) * z.view(len(z), num_heads, 1, -1)
        return summed(message, target, 6)

    arguments = rand(6, 4), rand(6, 2 * num_heads), rand(3, 4, 8), rand(8, 2 * num_heads)
    if emitter != "eager":
        backward = (
            scored.with_options(emitter=emitter).explain(graph, *arguments).split("\nbackward, step by step\n")[1]
        )
        assert backward.count(" added to %") == 1
    check_like_plain(scored.with_options(emitter=emitter), graph, plain, *arguments)


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (RGCNConv, 3),
        (RGATConv, 10),
        (partial(RGATConv, heads=2), 9),
        (partial(RGATConv, heads=2, attention_mechanism="within-relation"), 9),
        (partial(RGATConv, attention_per_relation=True), 10),
        (partial(RGATConv, mod="additive"), 11),
    ],
)
def test_traversals_that_are_alike_share_a_kernel(graph, make, most):
    """Compiling one takes most of a second, and training waits for it."""
    pytest.importorskip("triton")
    kernels, products = set(), {"typed_matmul", "typed_outer", "add_parts"}

    def launch(kernel, grid, arguments, constants, *, warps):
        kernels.add(kernel)

    conv, x = make(8, 4, num_relations=3), rand(6, 8).detach().float().requires_grad_()
    with mock.patch.object(_triton, "launch", launch), mock.patch.object(_run, "_chosen", return_value="triton"):
        conv(x, graph).sum().backward()
    assert len({kernel for kernel in kernels if kernel.fn.__name__ not in products}) == most


def test_a_product_is_not_added_to_rows_that_are_anothers(graph, emitter):
    """Values of nodes that edges read at their targets, and that the nodes themselves read."""

    @layer
    def noded(g, x, w, key):
        for n in g.nodes():
            h = tanh(x[n]) @ w + tanh(x[n])
        for e in g.edges():
            message = (h[e.dst] @ w) * dot(h[e.dst], key[e.etype]).unsqueeze(-1)
        for n in g.nodes():
            total = n.sum(message)
        return total

    def plain(source, target, kind, x, w, key):
        h = torch.tanh(x) @ w + torch.tanh(x)
        return summed((h @ w)[target] * (h[target] * key[kind]).sum(-1, keepdim=True), target, 6)

    check_like_plain(noded.with_options(emitter=emitter), graph, plain, rand(6, 8), rand(8, 8), rand(3, 8))


@pytest.mark.parametrize(("width", "columns"), [(64, 1), (256 * 65_535, 65_535), (4096 * 4096, 4096)])
def test_parts_of_wide_rows_fit_into_a_grid(width, columns):
    """CUDA takes at most 65,535 instances along the second dimension."""
    pytest.importorskip("triton")
    grids, number = [], torch.zeros(1)
    split = _triton.Split(number, number, number)
    call = mock.Mock(spec=["fixed"])
    with mock.patch.object(_triton, "launch", lambda kernel, grid, *arguments, **flags: grids.append(grid)):
        _triton._TritonCall._add_parts(call, split, number, number, width, is_max=False)
    assert grids == [(1, columns)]
