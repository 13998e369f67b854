"""Relational layers by Triton on a device, against the same layers on the CPU in float64."""

import pytest
import torch

from penstock.relational import CompGCNConv, RelationalGraph, RGATConv, RGCNConv, RGraphSAGEConv, SimpleHGNConv
from penstock.relational._tune import BACKGROUND
from penstock.tiers import Budget
from penstock.unified import write_graph

pytestmark = pytest.mark.cuda_only("kernels of Triton's run on CUDA")

MADE = {
    "RGCN": lambda: RGCNConv(24, 40, 6),
    "RGCN bases": lambda: RGCNConv(24, 40, 6, num_bases=3),
    "RGCN blocks": lambda: RGCNConv(24, 40, 6, num_blocks=4),
    "RGAT": lambda: RGATConv(24, 40, 6, heads=2),
    "CompGCN": lambda: CompGCNConv(24, 40, 3),
    "SimpleHGN": lambda: SimpleHGNConv(24, 40, 6, heads=2),
    "RGraphSAGE": lambda: RGraphSAGEConv(24, 40, 6),
}


def graph_of(num_nodes, num_edges, hub):
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=generator)
    edge_index[1, : int(hub * num_edges)] = 0
    return RelationalGraph(
        edge_index, torch.randint(6, (num_edges,), generator=generator), num_nodes=num_nodes, num_edge_types=6
    )


def spread(count, like):
    """Numbers that every dtype holds exactly."""
    return (torch.arange(count) * 37 % 256 / 128 - 1).to(like)


def gradients(layer, graph, x):
    extra = (spread(6 * 24, x).view(6, 24),)
    found = layer(x, *(extra if isinstance(layer, CompGCNConv) else ()), graph)
    found = found[0] if isinstance(found, tuple) else found
    weight = spread(found.numel(), found).view_as(found)
    wanted = [x, *layer.parameters()]
    return [
        found.detach(),
        *(
            gradient
            for gradient in torch.autograd.grad((found * weight).sum(), wanted, allow_unused=True)
            if gradient is not None
        ),
    ]


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("hub", [0, 0.5])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2), (torch.float16, 2e-2)])
def test_results_and_gradients_are_those_of_the_cpu(name, hub, dtype, tolerance):
    torch.manual_seed(0)
    layer, graph, x = MADE[name]().to(dtype), graph_of(3000, 40_000, hub), torch.randn(3000, 24).to(dtype)
    expected = gradients(layer.double(), graph, x.double().requires_grad_())  # of the same numbers
    on_device = layer.to("cuda", dtype)
    there, rows = graph.to("cuda"), x.to("cuda", dtype).requires_grad_()
    for _ in range(2):
        gradients(on_device, there, rows)
    BACKGROUND.wait()  # the next call chooses the schedules
    found = [gradients(on_device, there, rows) for _ in range(2)]
    for first, again, other in zip(*found, expected, strict=True):
        assert first.dtype is dtype
        assert torch.equal(first, again)
        assert ((first.cpu().double() - other).norm() / other.norm().clamp(min=1e-6)).item() < tolerance


@pytest.mark.parametrize("name", ["RGCN", "RGAT", "SimpleHGN"])
def test_a_stream_is_the_graph_on_the_device(name, tmp_path):
    torch.manual_seed(0)
    layer, graph, x = MADE[name](), graph_of(3000, 40_000, 0.5), torch.randn(3000, 24)
    expected = gradients(layer.double(), graph, x.double().requires_grad_())
    path = write_graph(tmp_path / "g", (graph.edge_index, graph.edge_type), num_nodes=3000, num_types=6)
    stream = RelationalGraph.stream(path, budget="8MiB", device="cuda")
    found = gradients(layer.to("cuda", torch.float32), stream, x.cuda().requires_grad_())
    for first, other in zip(found, expected, strict=True):
        assert ((first.cpu().double() - other).norm() / other.norm().clamp(min=1e-6)).item() < 1e-4


def test_no_edges_and_a_captured_graph():
    layer, x = RGCNConv(24, 40, 6).cuda(), torch.randn(10, 24, device="cuda")
    empty = RelationalGraph(torch.zeros(2, 0, dtype=torch.int64).cuda(), num_nodes=10, num_edge_types=6)
    torch.testing.assert_close(layer(x, empty), x @ layer.root + layer.bias)
    graph, x = graph_of(500, 3000, 0).to("cuda"), torch.randn(500, 24, device="cuda")
    with torch.no_grad():
        expected = layer(x, graph)
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            found = layer(x, graph)
        captured.replay()
    torch.testing.assert_close(found, expected)


def test_a_graph_takes_its_account_along():
    account = Budget(device="1MiB")
    graph = graph_of(100, 1000, 0).charge_to(account)
    (one,) = [use.held_bytes for use in account.uses() if use.place == "device"]
    there = graph.to("cuda")
    del graph
    (both,) = [use.held_bytes for use in account.uses() if use.place == "device"]
    assert one == both == there.edge_index.nbytes + there.edge_type.nbytes


def test_attention_trains_where_gathered_matrices_would_not_fit():
    """PyG's RGAT gathers a matrix for every edge: 5 million of 64 x 64 are 76 GiB."""
    graph = graph_of(500_000, 5_000_000, 0.01).to("cuda")
    layer, x = RGATConv(64, 64, 6).cuda(), torch.randn(500_000, 64, device="cuda", requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    layer(x, graph).square().mean().backward()
    assert torch.isfinite(x.grad).all()
    assert torch.cuda.max_memory_allocated() < 16 * 2**30
