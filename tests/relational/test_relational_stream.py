"""Layers on graphs whose edges stay in a file: the same results and gradients as in memory, within a budget."""

import copy
import gc
import pickle
import subprocess
import sys
import textwrap
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import penstock
from penstock import unified
from penstock.errors import BudgetError, DoubleBackwardError
from penstock.relational import (
    CompGCNConv,
    HGTConv,
    RelationalGraph,
    RGATConv,
    RGCNConv,
    RGraphSAGEConv,
    SimpleHGNConv,
    _stream_graph,
    dropout,
    layer,
    maximum,
    softmax,
)
from penstock.tiers import Budget

N, E, TYPES, W = 60, 900, 4, 8
METADATA = (["node"], [("node", str(number), "node") for number in range(TYPES)])
BUDGETS = {"one block": "4MiB", "blocks": "250KiB", "parts": "60KiB"}
"""Budgets for which the graph is one block, several, and several with one target in parts."""


@pytest.fixture(scope="module")
def edges():
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(0, N, (2, E), generator=generator)
    edge_index[1, : E // 3] = 7  # a hub
    edge_index[1][edge_index[1] == 11] = 12  # a node without edges
    return edge_index, torch.randint(0, TYPES, (E,), generator=generator)


@pytest.fixture(scope="module")
def graph(edges):
    return RelationalGraph(*edges, num_nodes=N, num_edge_types=TYPES)


@pytest.fixture(scope="module")
def path(edges, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream")
    return unified.write_graph(folder / "edges.graph", edges, num_nodes=N, num_types=TYPES)


@pytest.fixture(params=BUDGETS.values(), ids=BUDGETS.keys())
def stream(request, path):
    return RelationalGraph.stream(path, budget=request.param)


def cuts_of(stream):
    """Return the blocks of all layers that have been through a graph."""
    return [cut for cuts in stream.work.blocks.values() for cut in cuts._cuts or ()]


def check_cuts(stream):
    """Raise unless a graph was cut as its budget is meant to."""
    cuts = cuts_of(stream)
    has_parts, num_layers = any(cut.parts for cut in cuts), len(stream.work.blocks)
    if stream.limit_bytes > 2**20:
        assert not has_parts and len(cuts) == num_layers
    else:
        assert len(cuts) > num_layers and (has_parts or stream.limit_bytes > 2**17)


def trained(call, *tensors):
    """Return the results of a call, and the gradients of its tensors that are not constant."""
    leaves = [
        tensor.detach().clone().requires_grad_(tensor.requires_grad) if type(tensor) is torch.Tensor else tensor
        for tensor in tensors
    ]
    results = call(*leaves)
    results = list(results) if isinstance(results, tuple) else [results]
    weighed = (result * torch.randn(result.shape, generator=torch.Generator().manual_seed(2)) for result in results)
    sum(part.sum() for part in weighed).backward()
    return [result.detach() for result in results] + [leaf.grad for leaf in leaves if leaf.grad is not None]


def check_same(ours, theirs, tolerance=1e-11):
    assert len(ours) == len(theirs)
    for first, second in zip(ours, theirs, strict=True):
        torch.testing.assert_close(first, second, rtol=tolerance, atol=tolerance)


def drawn(*shape, dtype=torch.float64, seed=1):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)).requires_grad_()


CONVS = {
    "RGCN": lambda: RGCNConv(W, W, TYPES),
    "RGCN with bases": lambda: RGCNConv(W, W, TYPES, num_bases=2, aggr="add"),
    "RGCN with blocks": lambda: RGCNConv(W, W, TYPES, num_blocks=2, root_weight=False),
    "RGAT": lambda: RGATConv(W, 4, TYPES, heads=2),
    "RGAT within relations": lambda: RGATConv(W, 4, TYPES, heads=2, attention_mechanism="within-relation"),
    "RGAT multiplicative": lambda: RGATConv(
        W, 4, TYPES, heads=2, dim=2, attention_mode="multiplicative-self-attention", mod="scaled"
    ),
    "HGT": lambda: HGTConv(W, W, METADATA, heads=2),
    "SimpleHGN": lambda: SimpleHGNConv(W, 4, TYPES, heads=2),
    "RGraphSAGE": lambda: RGraphSAGEConv(W, W, TYPES),
}


@pytest.mark.parametrize("name", CONVS)
def test_layers_train_as_they_do_in_memory(name, graph, stream):
    torch.manual_seed(0)
    conv = CONVS[name]().double()
    same = copy.deepcopy(conv)
    theirs = trained(lambda x: same(x, graph), drawn(N, W))
    for _ in range(2):  # blocks are chosen in the first step
        conv.zero_grad()
        check_same(trained(lambda x: conv(x, stream), drawn(N, W)), theirs)
    check_same([p.grad for p in conv.parameters()], [p.grad for p in same.parameters()])
    check_cuts(stream)


@layer
def largest(g, x, weight):
    for e in g.edges():
        message = x[e.src] @ weight[e.etype]
    for n in g.nodes():
        result = n.max(message) + x[n]
    return result


@layer
def two_hops(g, x, weight):
    for e in g.edges():
        message = x[e.src] @ weight[e.etype]
    for n in g.nodes():
        near = n.mean(message)
    for e in g.edges():
        far = near[e.src] * x[e.dst]
    for n in g.nodes():
        result = n.sum(far) / maximum(n.degree(), 1)
    return result, near


@layer
def attention_of_maxima(g, x, weight):
    for e in g.edges():
        message = x[e.src] @ weight[e.etype]
    for n in g.nodes():
        near = n.max(message)
    for e in g.edges():
        share = softmax(near[e.src] * near[e.dst])
    for n in g.nodes():
        result = n.sum(share * near[e.src]) + n.degree()
    return result


@layer
def weighed(g, x, weight, by_edge):
    for e in g.edges():
        share = softmax(by_edge[e] * x[e.src] * x[e.dst], per_type=True)
        message = share * (x[e.src] @ weight[e.etype]) / e.siblings()
    for n in g.nodes():
        total = n.sum(message)
    return total


@pytest.mark.parametrize("emitter", ["auto", "eager"])
@pytest.mark.parametrize("own", [largest, two_hops, attention_of_maxima, weighed], ids=lambda own: own.__name__)
def test_own_layers(own, emitter, graph, path):
    own = own.with_options(emitter=emitter)
    tensors = [drawn(N, W), drawn(TYPES, W, W, seed=2)] + [drawn(E, 1, seed=3)] * (own.__name__ == "weighed")
    theirs = trained(lambda *args: own(graph, *args), *tensors)
    for budget in BUDGETS.values():
        stream = RelationalGraph.stream(path, budget=budget)
        check_same(trained(lambda *args: own(stream, *args), *tensors), theirs)  # noqa: B023  # called now
        check_cuts(stream)


def test_equal_largest_values_share_the_gradient(graph, stream):
    x, weight = drawn(N, W).round().requires_grad_(), torch.eye(W).double().expand(TYPES, W, W)
    check_same(trained(lambda a: largest(stream, a, weight), x), trained(lambda a: largest(graph, a, weight), x))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 30),
    st.integers(0, 200),
    st.integers(1, 5),
    st.sampled_from(["40KiB", "80KiB", "1MiB"]),
    st.booleans(),
)
def test_any_graph(tmp_path_factory, num_nodes, num_edges, num_types, budget, positions):
    generator = torch.Generator().manual_seed(num_nodes * 1000 + num_edges)
    edge_index = torch.randint(0, num_nodes, (2, num_edges), generator=generator)
    edge_index[1, : num_edges // 2] = 0
    types = torch.randint(0, num_types, (num_edges,), generator=generator)
    path = tmp_path_factory.mktemp("any") / "g"
    unified.write_graph(path, (edge_index, types), num_nodes=num_nodes, num_types=num_types, positions=positions)
    graph = RelationalGraph(edge_index, types, num_nodes=num_nodes, num_edge_types=num_types)
    stream = RelationalGraph.stream(path, budget=budget)
    for own in (largest, attention_of_maxima):
        tensors = [drawn(num_nodes, 4), drawn(num_types, 4, 4, seed=2)]
        check_same(
            trained(lambda *args: own(stream, *args), *tensors),  # noqa: B023  # called now
            trained(lambda *args: own(graph, *args), *tensors),  # noqa: B023
        )


def test_two_layers_and_an_optimizer(graph, stream):
    def losses(on):
        torch.manual_seed(0)
        convs = torch.nn.ModuleList([RGCNConv(W, W, TYPES), RGATConv(W, W, TYPES)]).double()
        optimizer = torch.optim.Adam(convs.parameters())
        x, found = drawn(N, W).detach(), []
        for _ in range(3):
            loss = convs[1](convs[0](x, on).relu(), on).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
        return found

    assert losses(stream) == pytest.approx(losses(graph), rel=1e-10)


def test_nodes_with_numbers_and_factors_of_edges(graph, stream):
    torch.manual_seed(0)
    conv = RGCNConv(N, W, TYPES, num_bases=3).double()
    order = torch.randperm(N)
    for x in (None, order):
        check_same(trained(lambda: conv(x, stream)), trained(lambda: conv(x, graph)))  # noqa: B023  # called now
    conv, norm = RGCNConv(W, W, TYPES).double(), drawn(E).abs().detach().requires_grad_()
    x = drawn(N, W)
    check_same(
        trained(lambda x, norm: conv(x, stream, edge_norm=norm), x, norm),
        trained(lambda x, norm: conv(x, graph, edge_norm=norm), x, norm),
    )
    relations, conv = drawn(TYPES, W), CompGCNConv(W, W, TYPES // 2).double()
    check_same(trained(lambda x: conv(x, relations, stream), x), trained(lambda x: conv(x, relations, graph), x))


def test_typed_nodes(tmp_path):
    generator = torch.Generator().manual_seed(0)
    counts = {"paper": 20, "author": 30}
    kinds = [("author", "writes", "paper"), ("paper", "cites", "paper")]
    by_type = {
        kind: torch.stack([torch.randint(0, counts[end], (200,), generator=generator) for end in (kind[0], kind[2])])
        for kind in kinds
    }
    graph = RelationalGraph.from_types(by_type, counts)
    path = unified.write_graph(tmp_path / "g", (graph.edge_index, graph.edge_type), num_nodes=50)
    stream = RelationalGraph.stream(path, budget="100KiB", node_counts=counts)
    assert (stream.node_counts(), stream.node_type_names) == ([20, 30], ("paper", "author"))
    torch.manual_seed(0)
    conv = HGTConv(W, W, (list(counts), kinds), heads=2).double()
    check_same(trained(lambda x: conv(x, stream), drawn(50, W)), trained(lambda x: conv(x, graph), drawn(50, W)))
    x = {name: drawn(count, W) for name, count in counts.items()}
    for name, rows in conv(x, graph).items():
        torch.testing.assert_close(conv(x, stream)[name], rows)
    with pytest.raises(ValueError, match="`node_counts` must have the number of nodes of each type, 50 in all"):
        RelationalGraph.stream(path, node_counts=[20, 31])


def test_sources_and_targets_that_are_different_nodes(tmp_path):
    generator = torch.Generator().manual_seed(0)
    ends = torch.stack(
        [torch.randint(0, 40, (300,), generator=generator), torch.randint(0, 9, (300,), generator=generator)]
    )
    types = torch.randint(0, 3, (300,), generator=generator)
    path = unified.write_graph(tmp_path / "g", (ends, types), num_nodes=9, num_sources=40)
    graph = RelationalGraph(ends, types, num_nodes=(40, 9))
    stream = RelationalGraph.stream(path, budget="60KiB")
    assert (stream.num_nodes, stream.is_block) == ((40, 9), True)
    conv = RGCNConv(W, W, 3).double()
    check_same(
        trained(lambda x, y: conv((x, y), stream), drawn(40, W), drawn(9, W, seed=5)),
        trained(lambda x, y: conv((x, y), graph), drawn(40, W), drawn(9, W, seed=5)),
    )
    with pytest.raises(ValueError, match="reads at sources what was reduced at targets"):
        two_hops(stream, drawn(40, W), drawn(3, W, W))


def test_rows_on_tiers(graph, path, tmp_path):
    x = drawn(N, W, dtype=torch.float32).detach()
    stream = RelationalGraph.stream(path, budget="150KiB")
    features = unified.TieredFeatures(x, host="3MiB", disk=tmp_path)
    for make in (CONVS["RGCN"], CONVS["RGAT"], CONVS["RGraphSAGE"]):
        torch.manual_seed(0)
        conv = make()
        theirs = trained(lambda: conv(x, graph))  # noqa: B023  # called now
        of_parameters = [parameter.grad.clone() for parameter in conv.parameters() if parameter.grad is not None]
        conv.zero_grad()
        check_same(trained(lambda: conv(features, stream)), theirs, 1e-4)  # noqa: B023
        check_same([p.grad for p in conv.parameters() if p.grad is not None], of_parameters, 1e-4)


def test_half_precision(graph, stream):
    conv = RGCNConv(W, W, TYPES).bfloat16()
    x = drawn(N, W, dtype=torch.float32).detach().bfloat16().requires_grad_()
    ours, theirs = trained(lambda x: conv(x, stream), x), trained(lambda x: conv(x, graph), x)
    assert [rows.dtype for rows in ours[1:]] == [rows.dtype for rows in theirs[1:]]
    check_same([rows.float() for rows in ours], [rows.float() for rows in theirs], 0.05)


def test_dropout_drops_the_same_in_backward(stream):
    conv, x = RGATConv(W, 2, TYPES, dropout=0.4).double(), drawn(N, W)

    def call(x):
        torch.manual_seed(3)
        return conv(x, stream)

    assert torch.autograd.gradcheck(call, (x,), fast_mode=True)
    assert not torch.equal(conv(x, stream), conv(x, stream))
    assert torch.equal(call(x), call(x))


@layer
def dropped_twice_read(g, x):
    for e in g.edges():
        message = dropout(x[e.src], 0.5)
    for n in g.nodes():
        near = n.sum(message)
    for e in g.edges():
        far = near[e.src] * 0 + message
    for n in g.nodes():
        again = n.sum(far)
    return near, again


def test_zeros_of_dropout_do_not_depend_on_blocks(graph, path):
    x, places = drawn(N, W), unified.open_graph(path).positions
    in_order = RelationalGraph(graph.edge_index[:, places], graph.edge_type[places], num_nodes=N)
    answers = []
    for on in (in_order, *(RelationalGraph.stream(path, budget=budget) for budget in BUDGETS.values())):
        torch.manual_seed(5)
        answers.append(trained(lambda x: dropped_twice_read(on, x), x))  # noqa: B023  # called now
        torch.testing.assert_close(answers[-1][0], answers[-1][1])
        check_same(answers[-1], answers[0])


def test_dropouts_that_would_depend_on_blocks_are_refused(stream):
    @layer
    def of_nodes(g, x):
        for n in g.nodes():
            rows = dropout(x[n], 0.5)
        for e in g.edges():
            message = rows[e.src]
        for n in g.nodes():
            total = n.sum(message)
        return total

    with pytest.raises(ValueError, match="of_nodes drops values of nodes, or more than once"):
        of_nodes(stream, drawn(N, W))


def test_targets_without_edges_and_hubs_cost_what_they_are(tmp_path):
    generator, num_nodes = torch.Generator().manual_seed(0), 20_000
    for first in (0, num_nodes - 2000):
        edge_index = torch.randint(0, num_nodes, (2, 40_000), generator=generator)
        edge_index[1] = first + edge_index[1] % 2000
        edge_index[1, :20_000] = first
        path = unified.write_graph(tmp_path / "g", (edge_index, torch.zeros(40_000).long()), num_nodes=num_nodes)
        stream, widest = RelationalGraph.stream(path, budget="2MiB"), []
        read = stream.read
        stream.read = lambda cut, read=read, widest=widest, **more: widest.append(cut) or read(cut, **more)
        RGCNConv(32, 32, 1)(drawn(num_nodes, 32, dtype=torch.float32), stream).sum().backward()
        assert max(cut.last_edge - cut.first_edge for cut in widest) < 10_000
        assert 10 < len(cuts_of(stream)) < 200
    assert RelationalGraph.stream(path, budget="64MiB").estimate(lambda: None).step_s >= 0


@pytest.mark.parametrize("budget", BUDGETS.values())
def test_infinities_stay(budget, graph, path):
    x = drawn(N, W).detach()
    x[5] = -torch.inf
    stream, weight = RelationalGraph.stream(path, budget=budget), torch.ones(TYPES, dtype=torch.float64)

    @layer
    def summed(g, x, weight):
        for e in g.edges():
            message = x[e.src] * weight[e.etype]
        for n in g.nodes():
            total = n.sum(message)
        return total, n.max(message)

    for ours, theirs in zip(summed(stream, x, weight), summed(graph, x, weight), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_inference_is_planned_as_such(path):
    conv, x = CONVS["RGAT"]().double(), drawn(N, W)
    stream = RelationalGraph.stream(path, budget="120KiB")
    with torch.no_grad():
        conv(x, stream)
    num_blocks = len(cuts_of(stream))
    conv(x, stream).sum().backward()
    assert len(cuts_of(stream)) > 2 * num_blocks
    with pytest.raises(ValueError, match="has no indexes in memory"):
        largest.explain(stream, x, drawn(TYPES, W, W))


def test_results_that_do_not_reach_the_loss_cost_nothing(stream):
    weight = torch.randn(TYPES, W, W, dtype=torch.float64)
    x = drawn(N, W)
    result, _ = two_hops(stream, x, weight)
    read = stream.statistics().num_edges
    result.sum().backward()
    assert x.grad is not None and stream.statistics().num_edges > read
    with torch.no_grad():
        assert not largest(stream, x, weight).requires_grad


@pytest.mark.parametrize("name", ["RGCN", "HGT"])
def test_blocks_keep_within_the_budget(name, path):
    conv = CONVS[name]().double()
    for budget in (40_000, 100_000, 400_000):
        stream = RelationalGraph.stream(path, budget=budget)
        conv(drawn(N, W), stream).sum().backward()
        (cuts,) = stream.work.blocks.values()
        for cut in cuts._cuts:
            blocks = [cuts._block(cut)] if not cut.parts else cuts.parts(cut)
            assert all(cuts.bytes_of(block) <= budget for block in blocks)
        assert [cut.first_target for cut in cuts._cuts[1:]] == [cut.last_target for cut in cuts._cuts[:-1]]
        for cut in cuts._cuts:
            ends = [cut.first_edge, *(end for _, end in cut.parts)]
            assert [begin for begin, _ in cut.parts] == ends[:-1] and ends[-1] in (cut.first_edge, cut.last_edge)


def test_a_budget_too_small_for_an_edge_is_refused_with_one_that_works(path):
    conv, x = CONVS["RGCN"]().double(), drawn(N, W)
    with pytest.raises(BudgetError, match=r"`budget` must be at least \d+ bytes") as caught:
        conv(x, RelationalGraph.stream(path, budget=1000))
    least = int(str(caught.value).partition("budget=")[2].rstrip(")"))
    for budget in (least // 2, least // 20, 1):
        with pytest.raises(BudgetError):
            conv(x, RelationalGraph.stream(path, budget=budget))
    # another edge may need more, which is said again
    for _ in range(20):
        try:
            conv(x, RelationalGraph.stream(path, budget=least)).sum().backward()
            return
        except BudgetError as error:
            least = int(str(error).partition("budget=")[2].rstrip(")"))
    pytest.fail(f"no budget was enough, up to {least}")


def test_an_account_that_rooms_share(path):
    budget = Budget(device="1MiB")
    stream = RelationalGraph.stream(path, budget=budget)
    assert stream.limit_bytes == 2**20 and budget.room_bytes("device") == 0
    for nothing in (Budget(), budget):
        with pytest.raises(ValueError, match="`budget` must limit the device's memory, and leave some of it free"):
            RelationalGraph.stream(path, budget=nothing)
    assert copy.deepcopy(stream).num_edges == E
    del stream
    gc.collect()
    assert budget.room_bytes("device") == 2**20


def test_estimates_go_through_a_part_of_the_graph(path):
    conv, x = CONVS["RGAT"]().double(), drawn(N, W)
    stream = RelationalGraph.stream(path, budget="120KiB")
    estimate = stream.estimate(lambda: conv(x, stream).sum().backward(), num_blocks=2)
    assert not cuts_of(stream)
    before = stream.statistics()
    conv(x, stream).sum().backward()
    num_blocks = stream.statistics().num_blocks - before.num_blocks
    assert num_blocks / 4 <= estimate.num_blocks <= 4 * num_blocks
    assert estimate.step_s >= estimate.forward_s + estimate.backward_s > 0
    assert estimate.read_bytes == 2 * (5 * E + 8 * N)
    assert f"{estimate.num_blocks} blocks" in str(estimate)
    assert str(stream.statistics()).startswith(f"{stream.statistics().num_blocks} blocks")


def test_a_failed_read_is_raised_and_loses_nothing(monkeypatch, graph, path):
    conv, x = CONVS["RGAT"]().double(), drawn(N, W)
    stream = RelationalGraph.stream(path, budget="120KiB")
    read, calls = _stream_graph.StreamedGraph.read, []

    def fails(self, cut, **arguments):
        calls.append(cut)
        if len(calls) == fail_at:
            raise OSError("Input/output error")
        return read(self, cut, **arguments)

    monkeypatch.setattr(_stream_graph.StreamedGraph, "read", fails)
    for fail_at in range(2, 14):  # noqa: B007  # `fails` reads it
        calls.clear()
        with pytest.raises(OSError, match="Input/output error"):
            conv(x, stream).sum().backward()
    fail_at = None
    check_same(trained(lambda x: conv(x, stream), x), trained(lambda x: conv(x, graph), x))


def test_what_needs_all_edges_in_memory_is_refused(path, edges):
    stream, x = RelationalGraph.stream(path), drawn(N, W)
    with pytest.raises(ValueError, match="returns values of edges"):
        RGATConv(W, W, TYPES).double()(x, stream, return_attention_weights=True)
    for ask, words in (
        (lambda: stream.edge_index, "open_graph"),
        (lambda: stream.edge_type, "open_graph"),
        (stream.pairs, r"\[num_edge_types \* num_sources, ...\]"),
        (lambda: stream.save("other"), "is in a file already"),
        (lambda: stream.charge_to(Budget(device="1GiB")), "account with which it is opened"),
        (lambda: stream.to("meta"), "device='meta'"),
    ):
        with pytest.raises(ValueError, match=words):
            ask()
    assert stream.to("cpu") is stream
    with pytest.raises(ValueError, match="x has 59 rows, but it is looked up by source"):
        RGATConv(W, W, TYPES).double()(x[1:], stream)
    with pytest.raises(ValueError, match="must be on one device"):
        largest(stream, x.to("meta"), drawn(TYPES, W, W))
    with pytest.raises(DoubleBackwardError):
        torch.autograd.grad(largest(stream, x, drawn(TYPES, W, W)).sum(), x, create_graph=True)
    with pytest.raises(FileNotFoundError):
        RelationalGraph.stream(path.with_name("none"))
    plain = unified.write_graph(path.with_name("plain"), edges[0], num_nodes=N)
    assert RelationalGraph.stream(plain).num_edge_types == 1


def test_copies_and_other_processes(graph, path):
    stream = pickle.loads(pickle.dumps(RelationalGraph.stream(path, budget="120KiB")))
    conv = CONVS["RGCN"]().double()
    check_same(trained(lambda x: conv(x, stream), drawn(N, W)), trained(lambda x: conv(x, graph), drawn(N, W)))
    assert torch.equal(stream.in_degrees(), graph.in_degrees())
    assert "num_edges=900" in repr(stream)


def test_compiled_models_break_their_graph_at_a_stream(graph, path):
    stream = RelationalGraph.stream(path, budget="120KiB")
    conv = CONVS["RGCN"]().double()
    compiled = torch.compile(lambda x: conv(x, stream).relu(), backend="eager")
    check_same(trained(compiled, drawn(N, W)), trained(lambda x: conv(x, graph).relu(), drawn(N, W)))


def test_inside_of_checkpoints_and_offloading(graph, path, tmp_path):
    stream = RelationalGraph.stream(path, budget="120KiB")
    torch.manual_seed(0)
    convs = torch.nn.ModuleList([CONVS["RGCN"](), CONVS["RGAT"]()]).double()
    theirs = trained(lambda x: convs[1](convs[0](x, graph), graph), drawn(N, W))

    def recomputed(x):
        return checkpoint(lambda rows: convs[1](convs[0](rows, stream), stream), x, use_reentrant=False)

    check_same(trained(recomputed, drawn(N, W)), theirs)
    offloader = penstock.offload.activations(convs, disk=tmp_path, min_size=1)
    for _ in range(2):
        with offloader:
            check_same(trained(lambda x: convs[1](convs[0](x, stream), stream), drawn(N, W)), theirs)


def test_what_backward_needs_is_only_held_by_autograd(path):
    stream, x = RelationalGraph.stream(path, budget="120KiB"), drawn(N, W)
    rows = x * 2
    alive = weakref.ref(rows)
    pack = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor)
    with pack:
        result = largest(stream, rows, drawn(TYPES, W, W, seed=2))
    del rows
    gc.collect()
    assert alive() is None
    result.sum().backward()
    assert x.grad is not None


def test_graphs_without_nodes_or_edges(tmp_path):
    for num_nodes in (0, 5):
        nothing = torch.empty(2, 0, dtype=torch.int64)
        path = unified.write_graph(tmp_path / "g", (nothing, nothing[0]), num_nodes=num_nodes)
        stream = RelationalGraph.stream(path, budget="1MiB")
        x = drawn(num_nodes, W)
        result = RGCNConv(W, 3, 1).double()(x, stream)
        result.sum().backward()
        assert result.shape == (num_nodes, 3) and x.grad.shape == x.shape
        with pytest.raises(ValueError, match="num_relations=2"):
            RGCNConv(W, 3, 2).double()(x, stream)


def test_a_graph_and_its_layers_are_freed(path):
    stream, conv = RelationalGraph.stream(path, budget="120KiB"), CONVS["RGCN"]().double()
    conv(drawn(N, W), stream).sum().backward()
    alive = weakref.ref(stream)
    del stream
    gc.collect()
    assert alive() is None


CAPPED = """
    import resource, sys, torch
    from penstock import relational, unified
    num_nodes, mode = 20_000, sys.argv[2]
    x = torch.randn(num_nodes, 16, requires_grad=True)
    conv = relational.RGATConv(16, 16, num_relations=8)
    graph = relational.RelationalGraph(torch.zeros(2, 1, dtype=torch.int64), num_nodes=num_nodes, num_edge_types=8)
    result = conv(x, graph)
    result.backward(torch.ones_like(result))  # which imports 40 MiB of PyTorch once
    topology = unified.open_graph(sys.argv[1])
    held = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) * 1024
    cap = topology.num_edges * 24 // 4  # a quarter of edge_index and edge_type
    stacks = 3 * 2**23  # reserved, not used, by the threads that read ahead
    resource.setrlimit(resource.RLIMIT_DATA, (held + cap + stacks,) * 2)
    try:
        if mode == "memory":
            targets = torch.arange(num_nodes).repeat_interleave(topology.degrees())
            ends, types = torch.stack([topology.sources.long(), targets]), topology.types.long()
            graph = relational.RelationalGraph(ends, types, num_nodes=num_nodes, num_edge_types=8)
        else:
            graph = relational.RelationalGraph.stream(sys.argv[1], budget="10MiB")
        conv(x, graph).sum().backward()
    except (MemoryError, RuntimeError) as error:
        print("failed", type(error).__name__)
    else:
        print("trained", bool(x.grad.isfinite().all()), graph.statistics().num_blocks > 20)
"""


def test_a_graph_four_times_a_hard_cap_trains(tmp_path):
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(0, 20_000, (2, 6_000_000), generator=generator)
    types = torch.randint(0, 8, (6_000_000,), generator=generator)
    path = unified.write_graph(tmp_path / "g", (edge_index, types), num_nodes=20_000, positions=False)
    answers = {}
    for mode in ("memory", "stream"):
        command = [sys.executable, "-c", textwrap.dedent(CAPPED), str(path), mode]
        answers[mode] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert answers["memory"][0] == "failed"
    assert answers["stream"] == ["trained", "True", "True"]
