"""What test_relational_triton.py runs in a process of its own: Triton decides at import whether it interprets."""

import contextlib
import functools
import itertools
import sys
from unittest import mock

import torch
from relational_layers import (
    application_of,
    heads,
    many_functions,
    operands_of,
    plain,
    random_graph,
    rgat,
    rgcn,
    tensors,
)

from penstock import relational
from penstock.relational import _run, _triton
from penstock.relational._elementwise import FUNCTIONS
from penstock.relational._tune import Choices, Schedule

LAYERS = {"rgcn": rgcn, "rgat": rgat, "heads": heads, "many_functions": many_functions}
# Every pair of values of every two passes occurs.
PAIRWISE = [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
# One instance for each group, and one for several, each with groups of three rows and more in parts.
SCHEDULES = [Schedule(4, lanes=False, split=8, warps=4), Schedule(8, lanes=True, split=8, warps=4)]
ONE_ROW = Schedule(1, lanes=False, split=8, warps=4)


@relational.layer
def broadcast_sums(g, x, weight):
    """Values that are the same along what is summed."""
    for e in g.edges():
        value = (x[e.src] + weight[e.etype]).sum(-1) * relational.dot(weight[e.etype] + 0 * x[e.src], x[e.dst])
    for n in g.nodes():
        total = n.sum(value)
    return total


@relational.layer
def largest(g, x, weight):
    """A maximum that others read, and one that is the result."""
    for e in g.edges():
        message = x[e.src] @ weight[e.etype]
    for n in g.nodes():
        found = n.max(message)
        result = relational.concat(found, n.sum(relational.tanh(message)))
    return result, found


def corners():
    """Sums of what is broadcast, at widths that need no padding; maxima in half precision."""
    generator = torch.Generator().manual_seed(5)
    graph = random_graph(9, 50, 3, generator, hub=True)
    for width in (1, 3, 4, 8):
        x, weight = torch.randn(9, width, generator=generator), torch.randn(3, 1, generator=generator)
        compare(broadcast_sums, graph, torch.float32, 1e-4, x, weight)
    x, weight = torch.randn(9, 4, generator=generator), torch.randn(3, 4, 16, generator=generator)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float16, 2e-2)):
        compare(largest, graph, dtype, tolerance, x, weight)


def functions():
    """Every function of the table, beside PyTorch."""
    generator = torch.Generator().manual_seed(6)
    graph = random_graph(7, 30, 3, generator)
    for record in FUNCTIONS.values():
        given = operands_of(record, graph, torch.float32, generator)
        if record.derivative is None:
            found, expected = (
                application_of(record).with_options(emitter=emitter)(graph, *given) for emitter in ("triton", "eager")
            )
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            print("equal", record.name, flush=True)
        else:
            compare(application_of(record), graph, torch.float32, 1e-4, *given)


def compare(one, graph, dtype, tolerance, *inputs):
    """With the eager emitter in float32, of the same rounded inputs."""
    found = []
    for emitter, kind in (("triton", dtype), ("eager", torch.float32)):
        given = [value.to(dtype).to(kind).requires_grad_() for value in inputs]
        result = one.with_options(emitter=emitter)(graph, *given)
        result = result if isinstance(result, tuple) else (result,)
        total = sum((value.float() * torch.linspace(-1, 1, value.numel()).view_as(value)).sum() for value in result)
        found.append([*result, *torch.autograd.grad(total, given, materialize_grads=True)])
    for mine, theirs in zip(*found, strict=True):
        assert mine.dtype is dtype
        torch.testing.assert_close(mine.float(), theirs, rtol=tolerance, atol=tolerance)
    print("equal", one.__name__, dtype, flush=True)


def equality():
    """The layers of the tests under pairs of passes, groups whole and in parts, no edges at all."""
    generator = torch.Generator().manual_seed(0)
    for (name, one), (number, passes) in itertools.product(LAYERS.items(), enumerate(PAIRWISE)):
        options = dict(zip(("compact", "reorder", "sum_first"), passes, strict=True))
        compiled = one.with_options(emitter="triton", **options)
        for num_edges, schedule in ((40, SCHEDULES[number % 2]), (0, SCHEDULES[0])):
            graph = random_graph(7, num_edges, 3, generator, hub=True)
            with scheduled(schedule):
                check(name, compiled, graph, tensors(name, graph, 5, torch.float32, generator), generator)
        print("equal", name, passes, flush=True)


def layers():
    """Every layer that is shipped, beside its eager self: results and gradients, dropout's zeros included."""
    for number, (name, call) in enumerate(shipped()):
        found = []
        for emitter in ("triton", "eager"):
            with only(emitter), scheduled(SCHEDULES[number % 2]):
                found.append(call(torch.float32))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)
        print("equal", name, flush=True)


def half():
    """Half precision: stored so, summed in float32. The interpreter multiplies no matrices of bfloat16."""
    is_half = _triton._is_half
    _triton._is_half = lambda *tensors: tensors[0].dtype is torch.float16 and is_half(*tensors)
    for dtype, tolerance in ((torch.float16, 4e-3), (torch.bfloat16, 3e-2)):
        for name, call in shipped():
            with only("triton"):
                found = call(dtype)
            with only("eager"):
                expected = call(torch.float32)
            for one, other in zip(found, expected, strict=True):
                assert one.dtype is dtype, (name, one.dtype)
                torch.testing.assert_close(one.float(), other, rtol=tolerance * 4, atol=tolerance * 4)
            print("equal", name, dtype, flush=True)


def repeated():
    """The same bits again; another schedule adds in another order."""
    generator = torch.Generator().manual_seed(4)
    graph = random_graph(9, 60, 3, generator, hub=True)
    for name, one in LAYERS.items():
        arguments = tensors(name, graph, 5, torch.float32, generator)
        found = []
        for schedule in (SCHEDULES[0], SCHEDULES[0], SCHEDULES[1]):
            with scheduled(schedule):
                result = one.with_options(emitter="triton")(graph, **arguments)
            found.append(result[0] if isinstance(result, tuple) else result)
        assert torch.equal(found[0], found[1])
        torch.testing.assert_close(found[0], found[2], rtol=1e-4, atol=1e-4)
        print("equal", name, flush=True)


def compile_all():
    """Every kernel of the shipped layers and of the tests' to PTX for sm_90."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int32: "*i32"}
    seen = set()

    def launch(kernel, grid, arguments, constants, *, warps):
        types = [names[one.dtype] if isinstance(one, torch.Tensor) else "i32" for one in arguments]
        key = (kernel.src, tuple(types), tuple(constants.items()), warps)
        if key in seen:
            return
        seen.add(key)
        signature = dict(zip(kernel.arg_names, [*types, *["constexpr"] * len(constants)], strict=True))
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
        assert ".target sm_90" in made.asm["ptx"]
        print("compiled", kernel.__name__, flush=True)

    with mock.patch.object(_triton, "launch", launch), only("triton"):
        for number, ((_, call), schedule) in enumerate(itertools.product(shipped(), SCHEDULES)):
            with scheduled(schedule):
                call((torch.float32, torch.bfloat16, torch.float16)[number % 3])
        generator = torch.Generator().manual_seed(0)
        for (name, one), schedule in itertools.product(LAYERS.items(), [*SCHEDULES, ONE_ROW]):
            graph = random_graph(7, 40, 3, generator)
            with scheduled(schedule):
                found = one(graph, **tensors(name, graph, 5, torch.float32, generator))
                (found[0] if isinstance(found, tuple) else found).sum().backward()


def tuned():
    """How many variants a layer compiles for its traversals, and how many runs are timed."""
    import triton
    from triton.backends.compiler import GPUTarget

    class Driver:
        get_current_device = get_current_stream = staticmethod(lambda *_: 0)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

    triton.runtime.driver.set_active(Driver())
    timed, functions = [], set()

    def seconds(run):
        timed.append(run)
        return (5, 3, 4)[len(timed) % 3]

    def launch(kernel, grid, arguments, constants, *, warps):
        functions.add(kernel)

    calls = {name: call for name, call in shipped() if name in ("RGCNConv", "RGATConv")}
    for _, call in itertools.product(range(2), calls.values()):
        timed.clear()
        functions.clear()
        with (
            mock.patch.object(_triton, "launch", launch), mock.patch.object(_triton, "_mean_ms", seconds),
            mock.patch.object(_triton, "_is_timed", return_value=True), only("triton"),
            mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
            mock.patch.object(
                _triton.CompiledTriton, "choices",
                functools.cache(lambda self, device: Choices(self.module.__name__, "NVIDIA H200")),
            ),
        ):  # fmt: skip
            call(torch.float32)
        generated = [one for one in functions if one.__module__.startswith("relational_layer_")]
        num_variants = sum(len(one.device_caches[0][0]) for one in generated)
        print("tuned", len(generated), "kernels", num_variants, "variants", len(timed), "timed", flush=True)


def shipped():
    """Names, and functions of a dtype that give a layer's result and every gradient."""
    generator = torch.Generator().manual_seed(1)
    graph = random_graph(9, 40, 3, generator, hub=True)
    both_ways = random_graph(9, 40, 6, generator)
    x = torch.linspace(-1, 1, 54).reshape(9, 6).sin()
    edge_attr = torch.randn(40, 2, generator=generator)
    per_relation = "within-relation"
    made = {
        "RGCNConv": lambda: relational.RGCNConv(6, 20, 3),
        "RGCNConv bases": lambda: relational.RGCNConv(6, 20, 3, num_bases=2),
        "RGCNConv blocks": lambda: relational.RGCNConv(6, 20, 3, num_blocks=2),
        "RGATConv": lambda: relational.RGATConv(6, 20, 3, heads=2, dropout=0.3),
        "RGATConv edges": lambda: relational.RGATConv(6, 20, 3, edge_dim=2),
        "RGATConv within": lambda: relational.RGATConv(6, 20, 3, heads=2, attention_mechanism=per_relation),
        "RGATConv products": lambda: relational.RGATConv(
            6, 20, 3, heads=2, dim=2, attention_mode="multiplicative-self-attention"
        ),
        "CompGCNConv subtract": lambda: relational.CompGCNConv(6, 20, 3),
        "CompGCNConv multiply": lambda: relational.CompGCNConv(6, 20, 3, composition="multiply"),
        "SimpleHGNConv": lambda: relational.SimpleHGNConv(6, 20, 3, heads=2),
        "RGraphSAGEConv": lambda: relational.RGraphSAGEConv(6, 20, 3),
    }
    for name, make in made.items():
        torch.manual_seed(2)
        layer = make()
        if name.startswith("CompGCN"):
            inputs = (x, torch.linspace(-1, 1, 36).reshape(6, 6))
            yield name, bound(layer, lambda layer, x, relation: layer(x, relation, both_ways)[0], *inputs)
        elif name == "RGATConv edges":
            yield name, bound(layer, lambda layer, x, edges: layer(x, graph, edge_attr=edges), x, edge_attr)
        else:
            yield name, bound(layer, lambda layer, x: layer(x, graph), x)
    torch.manual_seed(2)
    edges = {("a", "to", "b"): graph.edge_index[:, :20] % 4, ("b", "from", "a"): graph.edge_index[:, 20:] % 4}
    hgt = relational.HGTConv(6, 20, (["a", "b"], list(edges)), heads=2)
    yield (
        "HGTConv",
        bound(hgt, lambda layer, x: torch.cat(list(layer({"a": x[:4], "b": x[4:8]}, edges).values())), x[:8]),
    )


def bound(layer, call, *inputs):
    return lambda dtype: gradients(layer, dtype, call, *inputs)


def gradients(layer, dtype, call, *inputs):
    torch.manual_seed(3)
    layer.to(dtype)
    given = [one.to(dtype).requires_grad_() for one in inputs]
    found = call(layer, *given)
    weight = torch.linspace(-1, 1, found.numel()).reshape(found.shape).to(dtype)
    wanted = [*given, *layer.parameters()]
    result = [found.detach(), *torch.autograd.grad((found * weight).sum(), wanted, allow_unused=True)]
    layer.float()
    return [one for one in result if one is not None]


@contextlib.contextmanager
def only(emitter):
    """Every layer through one emitter, variants made anew."""
    trace = _run.Layer._trace

    def forgetful(*args):
        traced = trace(*args)
        traced.variants.clear()
        return traced

    with mock.patch.object(_run, "_chosen", return_value=emitter), mock.patch.object(_run.Layer, "_trace", forgetful):
        yield


@contextlib.contextmanager
def scheduled(schedule):
    with mock.patch.object(_triton, "schedules", return_value=[schedule]):
        yield


def check(name, compiled, graph, arguments, generator, tolerance=1e-4):
    found = compiled(graph, **arguments)
    found = found if isinstance(found, tuple) else (found,)
    double = {key: one.detach().double().requires_grad_() for key, one in arguments.items()}
    expected = plain(name, graph, double)
    weights = [torch.randn(one.shape, dtype=torch.float64, generator=generator) for one in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)
    gradients = [
        torch.autograd.grad(sum((one * weight).sum() for one, weight in zip(outputs, weights, strict=True)), inputs)
        for outputs, inputs in ((found, list(arguments.values())), (expected, list(double.values())))
    ]
    for key, one, other in zip(arguments, *gradients, strict=True):
        torch.testing.assert_close(
            one.double(), other, rtol=tolerance, atol=tolerance, msg=lambda text, key=key: f"{key}: {text}"
        )


if __name__ == "__main__":
    for part in sys.argv[1:]:
        print("part", part, flush=True)
        globals()[part]()
