"""Every emitter, with every combination of passes, against plain PyTorch in float64: results and gradients."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from relational_layers import heads, many_functions, plain, random_graph, rgat, rgcn, tensors

from penstock.relational import RelationalGraph

LAYERS = {"rgcn": rgcn, "rgat": rgat, "heads": heads, "many_functions": many_functions}
PASSES = [
    *(
        dict(zip(("compact", "reorder", "sum_first"), on, strict=True))
        for on in itertools.product((True, False), repeat=3)
    ),
    {"reuse_sums": False},
]
COMPILED = {
    (name, emitter, number): function.with_options(emitter=emitter, **passes)
    for name, function in LAYERS.items()
    for emitter in ("eager", "c")
    for number, passes in enumerate(PASSES)
}


def check(name, compiled, graph, arguments, generator, tolerance=1e-9):
    actual = compiled(graph, **arguments)
    actual = actual if isinstance(actual, tuple) else (actual,)
    expected = plain(name, graph, arguments)
    weights = [torch.randn(value.shape, dtype=value.dtype, generator=generator) for value in expected]
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    gradients = [
        torch.autograd.grad(
            sum((value * weight).sum() for value, weight in zip(outputs, weights, strict=True)),
            list(arguments.values()),
        )
        for outputs in (actual, expected)
    ]
    for key, mine, theirs in zip(arguments, *gradients, strict=True):
        torch.testing.assert_close(
            mine, theirs, rtol=tolerance, atol=tolerance, msg=lambda text, key=key: f"{key}: {text}"
        )


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    num_nodes=st.integers(1, 30),
    num_edges=st.sampled_from([0, 1, 7, 60]),
    num_types=st.integers(1, 6),
    hub=st.booleans(),
)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("emitter", ["eager", "c"])
def test_results_and_gradients_are_those_of_plain_pytorch(name, emitter, seed, num_nodes, num_edges, num_types, hub):
    generator = torch.Generator().manual_seed(seed)
    graph = random_graph(num_nodes, num_edges, num_types, generator, hub=hub)
    arguments = tensors(name, graph, 4, torch.float64, generator)
    for number in range(len(PASSES)):
        check(name, COMPILED[name, emitter, number], graph, arguments, generator)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_many_edges_are_shared_among_threads(name, num_threads):
    """Groups that span the runs of several threads, a hub among them; equal to the bit when repeated."""
    generator = torch.Generator().manual_seed(0)
    graph = random_graph(60, 9000, 5, generator, hub=True)
    arguments = tensors(name, graph, 20, torch.float64, generator)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        check(name, COMPILED[name, "c", 0], graph, arguments, generator, tolerance=1e-8)
        first, second = (COMPILED[name, "c", 0](graph, **arguments) for _ in range(2))
    finally:
        torch.set_num_threads(before)
    for mine, theirs in zip(*(x if isinstance(x, tuple) else (x,) for x in (first, second)), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("emitter", ["eager", "c"])
def test_gradients_are_those_of_finite_differences(name, emitter):
    generator = torch.Generator().manual_seed(3)
    graph = random_graph(6, 15, 3, generator)
    arguments = tensors(name, graph, 3, torch.float64, generator)
    compiled = COMPILED[name, emitter, 0]
    assert torch.autograd.gradcheck(
        lambda *values: compiled(graph, **dict(zip(arguments, values, strict=True))), tuple(arguments.values())
    )


@pytest.mark.parametrize("name", LAYERS)
def test_single_precision_is_close_to_double(name):
    generator = torch.Generator().manual_seed(1)
    graph = random_graph(40, 300, 4, generator)
    double = tensors(name, graph, 8, torch.float64, generator)
    single = {key: tensor.detach().float() for key, tensor in double.items()}
    actual, expected = (COMPILED[name, "c", 0](graph, **arguments) for arguments in (single, double))
    for mine, theirs in zip(*(x if isinstance(x, tuple) else (x,) for x in (actual, expected)), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4)


def test_a_block_has_sources_and_targets_of_its_own():
    """A sampled mini-batch: sources begin with the targets."""
    generator = torch.Generator().manual_seed(2)
    whole = random_graph(12, 50, 4, generator)
    keep = whole.edge_index[1] < 5
    block = RelationalGraph(whole.edge_index[:, keep], whole.edge_type[keep], num_nodes=(12, 5), num_edge_types=4)
    arguments = tensors("rgat", whole, 4, torch.float64, generator)
    for compiled in (COMPILED["rgat", "c", 0], COMPILED["rgat", "eager", 0]):
        actual = compiled(block, **arguments)
        expected = compiled(whole, **arguments)[:5]
        torch.testing.assert_close(actual, expected)
        of_block, of_whole = (
            torch.autograd.grad(value.sum(), list(arguments.values())) for value in (actual, expected)
        )
        for mine, theirs in zip(of_block, of_whole, strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.fixture
def uninitialized_is_nan():
    """New tensors hold NaN where nothing is written."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.usefixtures("uninitialized_is_nan")
def test_nodes_that_no_edge_enters_have_zeros(name, num_threads):
    """Nodes without edges are first, last, between others, and where the rows of two threads meet."""
    generator = torch.Generator().manual_seed(0)
    entered = torch.tensor([3, 4, 7, 20, 21, 22, 50])
    ranks = torch.randint(len(entered), (2, 9000), generator=generator).sort().values
    graph = RelationalGraph(entered[ranks], torch.randint(5, (9000,), generator=generator), num_nodes=60)
    arguments = tensors(name, graph, 6, torch.float64, generator)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        check(name, COMPILED[name, "c", 0], graph, arguments, generator, tolerance=1e-8)
    finally:
        torch.set_num_threads(before)
