"""HGT's maps of all node types in one operator: the same as a `Linear` for each, and only where nobody could tell."""

import pytest
import torch
from torch import nn

from penstock import native
from penstock.errors import DoubleBackwardError
from penstock.relational import HGTConv, RelationalGraph
from penstock.relational._linear import blend_by_type, map_by_type, may_map

SIZES = {"a": 50, "b": 0, "c": 33}
TYPES = [("a", "x", "c"), ("c", "y", "a"), ("a", "z", "a"), ("a", "w", "b")]
needs_a_compiler = pytest.mark.skipif(native.find_compiler() is None, reason="needs a C compiler")


@pytest.fixture
def graph():
    generator = torch.Generator().manual_seed(0)
    edges = {
        kind: torch.stack([torch.randint(SIZES[end], (70,), generator=generator) for end in (kind[0], kind[2])])
        for kind in TYPES[:3]
    }
    edges[TYPES[3]] = torch.empty(2, 0, dtype=torch.int64)
    return RelationalGraph.from_types(edges, SIZES)


def make_conv(width, out=12, heads=3, dtype=torch.float64):
    torch.manual_seed(0)
    conv = HGTConv(width, out, (list(SIZES), TYPES), heads=heads).to(dtype)
    with torch.no_grad():
        for parameter in conv.skip.values():
            parameter.uniform_(-2, 2)
    return conv


def step(conv, x, graph):
    """Results, and the gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    results = conv(x, graph)
    conv.zero_grad()
    (results * torch.linspace(-1, 1, results.numel(), dtype=results.dtype).view_as(results)).sum().backward()
    of_parameters = {name: parameter.grad for name, parameter in conv.named_parameters()}
    return {"results": results, "x": x.grad, **of_parameters}


@needs_a_compiler
@pytest.mark.parametrize("width", [12, 7], ids=["with a residual", "without"])
def test_a_map_for_all_types_is_a_map_for_each(graph, width, monkeypatch):
    conv, x = make_conv(width), torch.randn(sum(SIZES.values()), width, dtype=torch.float64)
    assert conv.kqv_lin.maps_at_once(x)
    at_once = step(conv, x, graph)
    monkeypatch.setattr("penstock.relational._hgt.may_map", lambda *_: False)
    for name, expected in step(conv, x, graph).items():
        if expected is None or at_once[name] is None:  # of a type that has no nodes
            assert "b" in name or expected is at_once[name]
            continue
        torch.testing.assert_close(at_once[name], expected, rtol=1e-12, atol=1e-12)


@needs_a_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_operator_keeps_pytorchs_rules(dtype):
    lins = [nn.Linear(5, 6).to(dtype) for _ in range(3)]
    x = torch.randn(9, 5, dtype=dtype, requires_grad=True)
    weight = torch.stack([lin.weight.detach() for lin in lins]).requires_grad_()
    bias = torch.stack([lin.bias.detach() for lin in lins]).requires_grad_()
    torch.library.opcheck(torch.ops.penstock.linear_by_type.default, (x, weight, bias, [4, 0, 5], 2, None, None))
    other, kept = torch.randn(9, 6, dtype=dtype, requires_grad=True), torch.randn(3, dtype=dtype, requires_grad=True)
    torch.library.opcheck(torch.ops.penstock.linear_by_type.default, (x, weight, bias, [4, 0, 5], 1, other, kept))
    parts = map_by_type(x, lins, [4, 0, 5], 2)
    expected = torch.cat([lins[0](x[:4]), lins[2](x[4:])])
    for part, own in zip(parts, expected.chunk(2, 1), strict=True):
        torch.testing.assert_close(part, own)


@needs_a_compiler
def test_a_blend_is_pytorchs_lerp():
    lins = [nn.Linear(5, 6).double() for _ in range(3)]
    x, other = (torch.randn(9, size, dtype=torch.float64, requires_grad=True) for size in (5, 6))
    shares = torch.rand(3, dtype=torch.float64, requires_grad=True)
    sizes, wanted = [4, 0, 5], [x, other, shares, *(part for lin in lins for part in (lin.weight, lin.bias))]
    weights = torch.randn(9, 6, dtype=torch.float64)
    mapped = torch.cat([lin(rows) for lin, rows in zip(lins, x.split(sizes), strict=True)])
    expected = torch.lerp(other, mapped, shares.repeat_interleave(torch.tensor(sizes))[:, None])
    computed = blend_by_type(x, lins, sizes, other, shares)
    torch.testing.assert_close(computed, expected)
    for gradient, other_gradient in zip(
        torch.autograd.grad((computed * weights).sum(), wanted),
        torch.autograd.grad((expected * weights).sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(gradient, other_gradient)


@needs_a_compiler
def test_a_part_that_nobody_reads_has_no_gradient():
    lins, x = [nn.Linear(4, 6)], torch.randn(8, 4)
    map_by_type(x, lins, [8], 3)[1].sum().backward()
    assert torch.equal(lins[0].bias.grad, torch.tensor([0.0, 0, 8, 8, 0, 0]))


@needs_a_compiler
def test_rows_that_do_not_lie_in_a_row():
    lins, wide = [nn.Linear(4, 3), nn.Linear(4, 3)], torch.randn(8, 10)
    (part,) = map_by_type(wide[:, ::2][:, :4], lins, [2, 6], 1)
    torch.testing.assert_close(part, torch.cat([lins[0](wide[:2, :8:2]), lins[1](wide[2:, :8:2])]))


@needs_a_compiler
def test_twice_differentiated():
    x = torch.randn(3, 4, requires_grad=True)
    (part,) = map_by_type(x, [nn.Linear(4, 3)], [3], 1)
    (gradient,) = torch.autograd.grad(part.square().sum(), x, create_graph=True)
    with pytest.raises(DoubleBackwardError, match="cannot be differentiated twice"):
        gradient.sum().backward()


def test_modules_with_hooks_are_called(graph):
    conv, x, called = make_conv(12), torch.randn(sum(SIZES.values()), 12, dtype=torch.float64), []
    before = conv(x, graph)
    for module in (conv.kqv_lin.lins["a"], conv.out_lin.lins["c"], conv.kqv_lin, conv.out_lin):
        handle = module.register_forward_hook(lambda module, *_: called.append(module))
        torch.testing.assert_close(conv(x, graph), before)
        handle.remove()
        assert module in called


def test_a_replaced_method_is_called(graph):
    conv, x, called = make_conv(12), torch.randn(sum(SIZES.values()), 12, dtype=torch.float64), []
    lin = conv.kqv_lin.lins["a"]
    real = lin.forward
    lin.forward = lambda rows: called.append(len(rows)) or real(rows)
    conv(x, graph)
    assert called == [SIZES["a"]]


def test_other_modules_are_called(graph):
    class Doubled(nn.Linear):
        def forward(self, rows):
            return 2 * super().forward(rows)

    conv, x = make_conv(12), torch.randn(sum(SIZES.values()), 12, dtype=torch.float64)
    other = Doubled(12, 12).double()
    conv.out_lin.lins["a"] = other
    results = conv(x, graph)
    with torch.no_grad():
        other.weight *= 2
        other.bias *= 2
    plain = nn.Linear(12, 12).double()
    plain.load_state_dict(other.state_dict())
    conv.out_lin.lins["a"] = plain
    torch.testing.assert_close(conv(x, graph), results)


def test_what_the_operator_does_not_do():
    lins, x = [nn.Module(), nn.Linear(4, 3), nn.Linear(4, 3)], torch.randn(2, 4)
    assert may_map(lins, x) == (native.find_compiler() is not None)
    assert not may_map(lins, x.half()) and not may_map(lins, x.double()) and not may_map(lins, torch.randn(2, 5))
    assert not may_map([*lins, nn.Linear(4, 3, bias=False)], x)
    assert not may_map([*lins, nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))], x)
    with torch.autocast("cpu", torch.bfloat16):
        assert not may_map(lins, x)


def test_under_compile(graph):
    conv = make_conv(12)
    x = {name: torch.randn(size, 12, dtype=torch.float64, requires_grad=True) for name, size in SIZES.items()}
    compiled = torch.compile(conv, backend="aot_eager", fullgraph=True)
    gradients = []
    for layer in (conv, compiled):
        results = layer(x, graph)
        sum(part.square().sum() for part in results.values()).backward()
        gradients.append([results["a"], results["c"], *(x[name].grad for name in SIZES)])
        for part in x.values():
            part.grad = None
    for expected, computed in zip(*gradients, strict=True):
        torch.testing.assert_close(computed, expected)


@needs_a_compiler
@pytest.mark.parametrize(("out", "num_parts"), [(12, 1), (12, 3), (800, 2)])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_types_of_many_rows_are_added_up_from_several_parts(out, num_parts, num_threads):
    """Of 2,048 rows, or of four for each column."""
    torch.manual_seed(0)
    sizes, width = [9000, 0, 5], 6
    x = torch.randn(sum(sizes), width, dtype=torch.float64, requires_grad=True)
    lins = [nn.Linear(width, out).double() for _ in sizes]
    parameters = [parameter for lin in lins for parameter in lin.parameters()]
    scale = torch.linspace(-1, 1, len(x) * out, dtype=torch.float64).view(len(x), out)
    before, runs = torch.get_num_threads(), []
    torch.set_num_threads(num_threads)
    try:
        for results in (
            torch.cat(map_by_type(x, lins, sizes, num_parts), 1),
            torch.cat([lin(rows) for lin, rows in zip(lins, x.split(sizes), strict=True)]),
        ):
            runs.append([results, *torch.autograd.grad((results * scale).sum(), [x, *parameters])])
    finally:
        torch.set_num_threads(before)
    for ours, plain in zip(*runs, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-10)
