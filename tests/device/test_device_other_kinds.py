"""What rooms with kernels of their own do on accelerators that are not CUDA's: PyTorch's operators, or a clear no."""

import pytest
import torch

from penstock import unified
from penstock.relational import RelationalGraph, RGATConv, RGCNConv

NUM_NODES, NUM_EDGES, WIDTH = 40, 300, 8


@pytest.fixture(autouse=True)
def _other_kind(kind):
    if kind == "cuda":
        pytest.skip("CUDA has the kernels")


def test_host_memory_is_read_in_place_by_cuda_alone(prompt_device):
    features = unified.wrap(torch.randn(NUM_NODES, WIDTH))
    with pytest.raises(ValueError, match="unified tensors work with CUDA and the CPU"):
        features[torch.arange(3).to(prompt_device)]
    with pytest.raises(ValueError, match="`device` must be the CPU or a CUDA device"):
        unified.TieredFeatures(torch.randn(NUM_NODES, WIDTH), device=prompt_device)


@pytest.mark.parametrize("layer", [RGCNConv, RGATConv], ids=lambda layer: layer.__name__)
def test_relational_layers_run_on_pytorchs_operators(device, layer):
    torch.manual_seed(0)
    conv, edges = layer(WIDTH, WIDTH, num_relations=3), torch.randint(NUM_NODES, (2, NUM_EDGES))
    x, types = torch.randn(NUM_NODES, WIDTH), torch.randint(3, (NUM_EDGES,))
    outcomes = []
    for place in ("cpu", device):
        conv = conv.to(place)
        conv.zero_grad()
        ours = x.detach().to(place, copy=True).requires_grad_()
        out = conv(ours, edges.to(place), types.to(place))
        out.square().sum().backward()
        gradients = [parameter.grad for parameter in conv.parameters() if parameter.grad is not None]
        outcomes.append([value.cpu().clone() for value in (out.detach(), ours.grad, *gradients)])
    for outcome, two in zip(*outcomes, strict=True):
        torch.testing.assert_close(outcome, two, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layer", [RGCNConv, RGATConv], ids=lambda layer: layer.__name__)
def test_streamed_layers_get_their_blocks_on_the_device(device, layer, tmp_path):
    torch.manual_seed(0)
    conv, edges = layer(WIDTH, WIDTH, num_relations=3), torch.randint(NUM_NODES, (2, NUM_EDGES))
    x, types = torch.randn(NUM_NODES, WIDTH), torch.randint(3, (NUM_EDGES,))
    edges[1, : NUM_EDGES // 2] = 0
    path = unified.write_graph(tmp_path / "g", (edges, types), num_nodes=NUM_NODES, num_types=3)
    outcomes = []
    for place in ("cpu", device):
        graph = RelationalGraph.stream(path, budget="60KiB", device=place)
        conv = conv.to(place)
        conv.zero_grad()
        ours = x.detach().to(place, copy=True).requires_grad_()
        out = conv(ours, graph)
        out.square().sum().backward()
        gradients = [parameter.grad for parameter in conv.parameters() if parameter.grad is not None]
        outcomes.append([value.cpu().clone() for value in (out.detach(), ours.grad, *gradients)])
        assert out.device.type == torch.device(place).type and graph.statistics().num_blocks > 4
    for outcome, two in zip(*outcomes, strict=True):
        torch.testing.assert_close(outcome, two, rtol=1e-4, atol=1e-4)
