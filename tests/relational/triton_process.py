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
from penstock.relational import _run, _triton, _tune
from penstock.relational._elementwise import FUNCTIONS
from penstock.relational._tune import Choices, RowSchedule

LAYERS = {"rgcn": rgcn, "rgat": rgat, "heads": heads, "many_functions": many_functions}
# Every pair of values of every two passes occurs.
PAIRWISE = [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
# One instance for each group, and one for several, each with groups of three rows and more in parts.
SCHEDULES = [RowSchedule(4, lanes=False, split=8, warps=4), RowSchedule(8, lanes=True, split=8, warps=4)]
ONE_ROW = RowSchedule(1, lanes=False, split=8, warps=4)


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
        most = n.max(message)
        result = relational.concat(most, n.sum(relational.tanh(message)))
    return result, most


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
        operands = operands_of(record, graph, torch.float32, generator)
        if record.derivative is None:
            actual, expected = (
                application_of(record).with_options(emitter=emitter)(graph, *operands)
                for emitter in ("triton", "eager")
            )
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
            print("equal", record.name, flush=True)
        else:
            compare(application_of(record), graph, torch.float32, 1e-4, *operands)


def compare(compiled, graph, dtype, tolerance, *inputs):
    """With the eager emitter in float32, of the same rounded inputs."""
    results = []
    for emitter, kind in (("triton", dtype), ("eager", torch.float32)):
        rounded = [value.to(dtype).to(kind).requires_grad_() for value in inputs]
        result = compiled.with_options(emitter=emitter)(graph, *rounded)
        result = result if isinstance(result, tuple) else (result,)
        total = sum((value.float() * torch.linspace(-1, 1, value.numel()).view_as(value)).sum() for value in result)
        results.append([*result, *torch.autograd.grad(total, rounded, materialize_grads=True)])
    for mine, theirs in zip(*results, strict=True):
        assert mine.dtype is dtype
        torch.testing.assert_close(mine.float(), theirs, rtol=tolerance, atol=tolerance)
    print("equal", compiled.__name__, dtype, flush=True)


def equality():
    """The layers of the tests under pairs of passes, groups whole and in parts, no edges at all."""
    generator = torch.Generator().manual_seed(0)
    for (name, function), (number, passes) in itertools.product(LAYERS.items(), enumerate(PAIRWISE)):
        options = dict(zip(("compact", "reorder", "sum_first"), passes, strict=True))
        compiled = function.with_options(emitter="triton", **options)
        for num_edges, schedule in ((40, SCHEDULES[number % 2]), (0, SCHEDULES[0])):
            graph = random_graph(7, num_edges, 3, generator, hub=True)
            with scheduled(schedule):
                check(name, compiled, graph, tensors(name, graph, 5, torch.float32, generator), generator)
        print("equal", name, passes, flush=True)


def layers():
    """Every layer that is shipped, beside its eager self: results and gradients, dropout's zeros included."""
    for number, (name, call) in enumerate(shipped()):
        results = []
        for emitter in ("triton", "eager"):
            with only(emitter), scheduled(SCHEDULES[number % 2]):
                results.append(call(torch.float32))
        for mine, theirs in zip(*results, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-4, atol=2e-4)
        print("equal", name, flush=True)


def half():
    """Half precision: stored so, summed in float32. The interpreter multiplies no matrices of bfloat16."""
    is_half = _triton._is_half
    _triton._is_half = lambda *tensors: tensors[0].dtype is torch.float16 and is_half(*tensors)
    for dtype, tolerance in ((torch.float16, 4e-3), (torch.bfloat16, 3e-2)):
        for name, call in shipped():
            with only("triton"):
                actual = call(dtype)
            with only("eager"):
                expected = call(torch.float32)
            for mine, theirs in zip(actual, expected, strict=True):
                assert mine.dtype is dtype, (name, mine.dtype)
                torch.testing.assert_close(mine.float(), theirs, rtol=tolerance * 4, atol=tolerance * 4)
            print("equal", name, dtype, flush=True)


def repeated():
    """The same bits again; another schedule adds in another order."""
    generator = torch.Generator().manual_seed(4)
    graph = random_graph(9, 60, 3, generator, hub=True)
    for name, compiled in LAYERS.items():
        arguments = tensors(name, graph, 5, torch.float32, generator)
        results = []
        for schedule in (SCHEDULES[0], SCHEDULES[0], SCHEDULES[1]):
            with scheduled(schedule):
                result = compiled.with_options(emitter="triton")(graph, **arguments)
            results.append(result[0] if isinstance(result, tuple) else result)
        assert torch.equal(results[0], results[1])
        torch.testing.assert_close(results[0], results[2], rtol=1e-4, atol=1e-4)
        print("equal", name, flush=True)


def compile_all():
    """Every kernel of the shipped layers and of the tests' to PTX for sm_90."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int32: "*i32"}
    seen = set()

    def launch(kernel, grid, arguments, constants, *, warps):
        types = [names[value.dtype] if isinstance(value, torch.Tensor) else "i32" for value in arguments]
        key = (kernel.src, tuple(types), tuple(constants.items()), warps)
        if key in seen:
            return
        seen.add(key)
        signature = dict(zip(kernel.arg_names, [*types, *["constexpr"] * len(constants)], strict=True))
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
        assert ".target sm_90" in binary.asm["ptx"]
        print("compiled", kernel.__name__, flush=True)

    with mock.patch.object(_triton, "launch", launch), only("triton"):
        for number, ((_, call), schedule) in enumerate(itertools.product(shipped(), SCHEDULES)):
            with scheduled(schedule):
                call((torch.float32, torch.bfloat16, torch.float16)[number % 3])
        generator = torch.Generator().manual_seed(0)
        for (name, compiled), schedule in itertools.product(LAYERS.items(), [*SCHEDULES, ONE_ROW]):
            graph = random_graph(7, 40, 3, generator)
            with scheduled(schedule):
                result = compiled(graph, **tensors(name, graph, 5, torch.float32, generator))
                (result[0] if isinstance(result, tuple) else result).sum().backward()


def tuned():
    """How many variants a layer compiles for its traversals, and how many runs are timed."""
    import triton
    from triton.backends.compiler import GPUTarget

    class Driver:
        get_current_device = get_current_stream = staticmethod(lambda *_: 0)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

    triton.runtime.driver.set_active(Driver())
    timed, functions, fixed = [], set(), _triton._fixed_kernels()
    fixed = [getattr(fixed, name) for name in ("typed_matmul", "typed_outer", "add_parts")]

    def seconds(run):
        timed.append(run)
        return (5, 3, 4)[len(timed) % 3]

    def launch(kernel, grid, arguments, constants, *, warps):
        kernel.warmup(*arguments, grid=grid, **constants, num_warps=warps)
        if kernel not in fixed:
            functions.add(kernel)

    def say(name, when):
        variants, products = (
            sum(len(function.device_caches[0][0]) for function in kernels) for kernels in (functions, fixed)
        )
        print(f"{name} {when}: {variants} of {len(functions)}, {products} of products, {len(timed)} timed", flush=True)
        timed.clear()

    calls = {name: call for name, call in shipped() if name in ("RGCNConv", "RGATConv")}
    for name, call in calls.items():
        functions.clear()
        with (
            mock.patch.object(_triton, "launch", launch), mock.patch.object(_triton, "_mean_ms", seconds),
            mock.patch.object(_triton, "_is_timed", return_value=True),
            mock.patch.object(_run, "_chosen", return_value="triton"),
            mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
            mock.patch.object(
                _triton.CompiledTriton, "choices",
                functools.cache(lambda self, device: Choices(self.module.__name__, "NVIDIA H200")),
            ),
        ):  # fmt: skip
            call(torch.float32)
            say(name, "first step")
            call(torch.float32)
            _tune.BACKGROUND.wait()
            call(torch.float32)
            say(name, "third step")
            call(torch.float32)
            say(name, "fourth step")


def shipped():
    """Names, and functions of a dtype that give a layer's result and every gradient."""
    generator = torch.Generator().manual_seed(1)
    graph = random_graph(9, 40, 3, generator, hub=True)
    both_ways = random_graph(9, 40, 6, generator)
    x = torch.linspace(-1, 1, 54).reshape(9, 6).sin()
    edge_attr = torch.randn(40, 2, generator=generator)
    per_relation = "within-relation"
    makers = {
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
    for name, make in makers.items():
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
    rounded = [tensor.to(dtype).requires_grad_() for tensor in inputs]
    actual = call(layer, *rounded)
    weight = torch.linspace(-1, 1, actual.numel()).reshape(actual.shape).to(dtype)
    wanted = [*rounded, *layer.parameters()]
    result = [actual.detach(), *torch.autograd.grad((actual * weight).sum(), wanted, allow_unused=True)]
    layer.float()
    return [value for value in result if value is not None]


@contextlib.contextmanager
def only(emitter):
    """Every layer through one emitter, variants made anew."""
    trace = _run.Layer._trace

    def forgetful(*args):
        traced = trace(*args)
        traced.programs.clear()
        return traced

    with mock.patch.object(_run, "_chosen", return_value=emitter), mock.patch.object(_run.Layer, "_trace", forgetful):
        yield


@contextlib.contextmanager
def scheduled(schedule):
    with mock.patch.object(_triton, "schedules", return_value=[schedule]):
        yield


def check(name, compiled, graph, arguments, generator, tolerance=1e-4):
    actual = compiled(graph, **arguments)
    actual = actual if isinstance(actual, tuple) else (actual,)
    double = {key: value.detach().double().requires_grad_() for key, value in arguments.items()}
    expected = plain(name, graph, double)
    weights = [torch.randn(value.shape, dtype=torch.float64, generator=generator) for value in expected]
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=tolerance, atol=tolerance)
    gradients = [
        torch.autograd.grad(sum((value * weight).sum() for value, weight in zip(outputs, weights, strict=True)), inputs)
        for outputs, inputs in ((actual, list(arguments.values())), (expected, list(double.values())))
    ]
    for key, mine, theirs in zip(arguments, *gradients, strict=True):
        torch.testing.assert_close(
            mine.double(), theirs, rtol=tolerance, atol=tolerance, msg=lambda text, key=key: f"{key}: {text}"
        )


if __name__ == "__main__":
    for part in sys.argv[1:]:
        print("part", part, flush=True)
        globals()[part]()
