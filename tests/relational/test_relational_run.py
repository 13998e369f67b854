"""Layers in the tools around them: `torch.compile`, autocast, threads, forks, double backward, caches."""

import multiprocessing
import subprocess
import sys
import threading

import pytest
import torch
from relational_layers import rand, random_graph, rgat, rgcn, summed, tensors

from penstock.errors import DoubleBackwardError
from penstock.relational import RelationalGraph, RGCNConv, dot, layer, softmax

GRAPH = 20, 80, 4


@pytest.fixture
def arguments(graph):
    return tensors("rgat", graph, 5, torch.float64, torch.Generator().manual_seed(1))


def test_compiles_without_a_graph_break(graph, arguments):
    compiled = torch.compile(lambda **named: rgat(graph, **named).relu().sum(), fullgraph=True, backend="aot_eager")
    actual, expected = compiled(**arguments), rgat(graph, **arguments).relu().sum()
    torch.testing.assert_close(actual, expected)
    gradients = [torch.autograd.grad(result, list(arguments.values())) for result in (actual, expected)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_operator_is_sound(graph, arguments):
    calls = []
    original = torch.ops.penstock.relational_layer.default

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is original:
                calls.append(args)
            return function(*args, **(kwargs or {}))

    with Recorder():
        rgat(graph, **arguments)
    (call,) = calls
    fresh = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in call[0]]
    torch.library.opcheck(original, (fresh, *call[1:]), test_utils=("test_schema", "test_faketensor"))


def test_double_backward_is_refused(graph, arguments):
    (gradient,) = torch.autograd.grad(rgat(graph, **arguments).sum(), arguments["x"], create_graph=True)
    with pytest.raises(DoubleBackwardError, match="cannot be differentiated twice"):
        gradient.sum().backward()


def test_a_first_call_does_not_import_the_compiler():
    """Which takes PyTorch a second."""
    code = """
import sys, torch
from penstock.relational import RelationalGraph, RGCNConv
graph = RelationalGraph(torch.tensor([[0, 1], [1, 0]]))
RGCNConv(4, 4, 1)(torch.ones(2, 4), graph).sum().backward()
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_autocast_computes_in_single_precision(graph):
    conv = RGCNConv(5, 3, 4)
    x = torch.randn(20, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = conv(torch.nn.Linear(5, 5)(x), graph)
    assert actual.isfinite().all()
    actual.float().sum().backward()
    assert conv.weight.grad.dtype == torch.float32


def test_threads_do_not_disturb_each_other(graph, arguments):
    expected = rgat(graph, **arguments)
    wrong = []

    def work():
        for _ in range(20):
            if not torch.equal(rgat(graph, **arguments), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def _in_child(graph, arguments, queue):
    queue.put(rgat(graph, **arguments).sum().item())


def test_a_forked_process_computes_the_same():
    big = random_graph(50, 9000, 4, torch.Generator().manual_seed(0))
    arguments = tensors("rgat", big, 5, torch.float64, torch.Generator().manual_seed(1))
    detached = {name: tensor.detach() for name, tensor in arguments.items()}
    expected = rgat(big, **detached).sum().item()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(big, detached, queue))
    child.start()
    actual = queue.get(timeout=600)
    child.join()
    assert actual == pytest.approx(expected, rel=1e-12)


def test_one_openmp_runtime(graph, arguments):
    rgat(graph, **arguments)
    with open("/proc/self/maps") as file:
        runtimes = {line.split()[-1] for line in file if "libgomp" in line or "libiomp" in line or "libomp" in line}
    assert len(runtimes) == 1, runtimes


def test_another_graph_is_not_compiled_again(graph, monkeypatch):
    from penstock.relational import _native

    arguments = tensors("rgcn", graph, 5, torch.float64, torch.Generator().manual_seed(1))
    rgcn(graph, **arguments).sum().backward()
    monkeypatch.setattr(_native.native, "compile_source", lambda *_, **__: pytest.fail("compiled again"))
    for seed in range(3):
        another = random_graph(25, 80, 4, torch.Generator().manual_seed(seed))
        if (
            another.indexes.count(_native.Domain.TARGET_AND_TYPE)
            < another.indexes.count(_native.Domain.SOURCE_AND_TYPE)
        ) == (
            graph.indexes.count(_native.Domain.TARGET_AND_TYPE) < graph.indexes.count(_native.Domain.SOURCE_AND_TYPE)
        ):
            rgcn(
                another, **tensors("rgcn", another, 5, torch.float64, torch.Generator().manual_seed(1))
            ).sum().backward()


@pytest.mark.parametrize("missing", ["libraries", "compiler"])
def test_no_compiler_no_matter(graph, arguments, monkeypatch, missing):
    """Without a compiler a wheel's libraries still serve, but generated kernels cannot be compiled."""
    from penstock.relational import _native

    if missing == "libraries":
        monkeypatch.setattr(_native.native, "load", lambda *_, **__: None)
    else:
        monkeypatch.setattr(_native.native, "can_compile", lambda: False)
        monkeypatch.setattr(_native.native, "compile_source", lambda *_, **__: pytest.fail("there is no compiler"))
    fresh = rgat.with_options()
    actual = fresh(graph, **arguments)
    monkeypatch.undo()
    torch.testing.assert_close(actual, rgat(graph, **arguments))


def test_another_default_device_and_dtype_change_nothing(arguments):
    expected = rgat(random_graph(20, 80, 4, torch.Generator().manual_seed(1)), **arguments)
    graph = random_graph(20, 80, 4, torch.Generator().manual_seed(1))
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.bfloat16)
    try:
        actual = rgat(graph, **arguments)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert torch.equal(actual, expected)


def test_what_was_generated_can_be_read(graph, arguments):
    assert rgat.source(graph, **arguments).count("int step") >= 4
    assert rgat.with_options(emitter="eager").source(graph, **arguments) == ""
    steps = rgat.explain(graph, **arguments).rsplit("step by step", 1)[1]
    assert all("MFLOP" in line for line in steps.strip().splitlines())


@pytest.fixture
def small():
    return random_graph(6, 25, 3, torch.Generator().manual_seed(0))


@layer
def by_own_type(g, x, weight):
    for e in g.edges():
        message = x[e.src]
    for n in g.nodes():
        total = n.sum(message) * weight[n.ntype]
    return total


@pytest.mark.parametrize("emitter", ["c", "eager"])
def test_a_table_of_as_many_types_as_sources_is_not_cut(emitter):
    block = RelationalGraph(
        torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]]), num_nodes=(4, 2),
        node_type=(torch.arange(4), torch.tensor([1, 3])), num_node_types=4,
    )  # fmt: skip
    x, weight = torch.rand(4, 3), torch.arange(4.0).requires_grad_()
    actual = by_own_type.with_options(emitter=emitter)(block, x, weight)
    expected = torch.stack([x[0] + x[2], 3 * (x[1] + x[3])])
    torch.testing.assert_close(actual, expected)
    (gradient,) = torch.autograd.grad(actual.sum(), weight)
    torch.testing.assert_close(gradient, torch.tensor([0, (x[0] + x[2]).sum(), 0, (x[1] + x[3]).sum()]))


def test_the_same_name_is_used_in_two_ways(small, emitter):
    @layer
    def either(g, x, w, by_type):
        for e in g.edges():
            message = x[e.src] * (w[e.etype] if by_type else w)
        for n in g.nodes():
            total = n.sum(message)
        return total

    compiled = either.with_options(emitter=emitter)
    x = rand(6, 1)
    assert compiled(small, x, rand(3, 1), True).shape == (6, 1)
    assert compiled(small, x, rand(1), False).shape == (6, 1)
    assert compiled(small, x, rand(3), False).shape == (6, 3)


def test_ends_with_features_of_their_own(small, emitter):
    @layer
    def both(g, x):
        for e in g.edges():
            message = x[e.src] * x[e.dst]
        for n in g.nodes():
            total = n.sum(message)
        return total

    a, b = rand(6, 2), rand(6, 2)
    source, target = small.edge_index
    actual = both.with_options(emitter=emitter)(small, (a, b))
    torch.testing.assert_close(actual, summed(a[source] * b[target], target, 6))
    with pytest.raises(ValueError, match="do not broadcast"):
        both(small, (a, rand(6, 3)))


def test_a_block_does_not_read_targets_at_sources(emitter):
    @layer
    def two_steps(g, x):
        for n in g.nodes():
            for e in g.edges():
                z = n.sum(x[e.src])
        for n in g.nodes():
            for e in g.edges():
                total = n.sum(z[e.src])
        return total

    block = RelationalGraph(torch.tensor([[0, 11], [1, 4]]), num_nodes=(12, 5))
    with pytest.raises(ValueError, match="in a block sources and targets are different nodes"):
        two_steps.with_options(emitter=emitter)(block, rand(12, 2))


@pytest.mark.parametrize("emitter", ["eager", "c"])
def test_dots_take_their_products_at_targets_if_these_are_few(emitter):
    @layer
    def scored(g, key, query, value, weight):
        for e in g.edges():
            share = softmax(dot(key[e.src] @ weight[e.etype], query[e.dst]))
        for n in g.nodes():
            total = n.sum(share.unsqueeze(-1) * value[e.src])
        return total

    generator = torch.Generator().manual_seed(0)
    ends = [torch.randint(0, count, (600,), generator=generator) for count in (400, 5)]
    types = torch.randint(0, 3, (600,), generator=generator)
    shapes = {"key": (400, 2, 4), "query": (5, 2, 4), "value": (400, 2, 4), "weight": (3, 2, 4, 4)}
    graph = RelationalGraph(torch.stack(ends), types, num_nodes=(400, 5))
    answers = []
    for reorders in (True, False):
        leaves = {
            name: torch.randn(
                *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(number)
            ).requires_grad_()
            for number, (name, shape) in enumerate(shapes.items())
        }
        own = scored.with_options(emitter=emitter, reorder=reorders)
        assert ("dots at targets" in own.explain(graph, **leaves)) is reorders
        result = own(graph, **leaves)
        result.square().sum().backward()
        answers.append([result, *(leaf.grad for leaf in leaves.values())])
    for ours, theirs in zip(*answers, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
