"""Layers inside of what trains them: offloading, planned recomputation, DDP, data-loader workers, several graphs."""

import copy

import pytest
import torch
from relational_layers import random_graph
from torch import nn
from torch.utils.data import DataLoader, Dataset

import penstock
from penstock.relational import HGTConv, RelationalGraph, RGATConv, RGCNConv
from ranks import run_in_ranks

GRAPH = 200, 1500, 4


class Model(nn.Module):
    def __init__(self, num_types=4):
        super().__init__()
        self.first, self.second = RGCNConv(8, 16, num_types), RGATConv(16, 8, num_types, heads=2)

    def forward(self, x, graph):
        return self.second(torch.relu(self.first(x, graph)), graph)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


def gradients(model, call):
    model.zero_grad()
    call().square().mean().backward()
    return [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]  # PyG's RGAT has some for other modes


def test_inside_of_offload(tmp_path):
    graph, x = random_graph(2000, 6000, 4, torch.Generator().manual_seed(0)), torch.randn(2000, 32)
    layers = nn.ModuleList(RGCNConv(32, 32, 4) for _ in range(8))

    def loss():
        rows = x
        for module in layers:
            rows = torch.tanh(module(rows, graph))
        return rows

    expected = gradients(layers, loss)
    plain = penstock.probe.peak_bytes(lambda: gradients(layers, loss), device="cpu")
    budget = plain.start_bytes + int(0.8 * plain.activation_bytes)  # without one a slow disk is a reason to keep all
    spilled = penstock.offload.activations(layers, disk=tmp_path, min_size=1024, budget=budget)
    for _ in range(4):
        with spilled:
            actual = gradients(layers, loss)
    assert spilled.statistics().fetched_bytes > 0
    spilled.close()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(actual, expected, strict=True))


def test_inside_of_remat(graph, model):
    """Part of a longer chain, under nine tenths of what keeping everything takes."""
    x = torch.randn(200, 8)
    widen = nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8))

    def loss(x):
        return model(widen(x), graph).square().mean()

    expected = gradients(model, lambda: model(widen(x), graph))
    model.zero_grad()
    problem = penstock.remat.optimize(loss, [x], None).plan.problem
    everything = penstock.remat.plan(problem, 2**62)
    step = penstock.remat.optimize(loss, [x], budget=int(0.9 * everything.keep_all_peak_bytes))
    assert step.plan.peak_bytes <= 0.9 * everything.keep_all_peak_bytes < everything.peak_bytes
    step(x).backward()
    actual = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_checkpointed(graph, model):
    x = torch.randn(200, 8)
    expected = gradients(model, lambda: model(x, graph))
    actual = gradients(model, lambda: torch.utils.checkpoint.checkpoint(model, x, graph, use_reentrant=False))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(actual, expected, strict=True))


def test_copies_and_moves_of_modules(graph, model):
    """What `copy.deepcopy`, ``state_dict`` and ``double`` do to any module."""
    x = torch.randn(200, 8)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x, graph), model(x, graph))
    twin.load_state_dict(model.state_dict())
    twin.double()
    torch.testing.assert_close(twin(x.double(), graph).float(), model(x, graph))


def test_several_graphs_under_one_compile(model):
    """Of other sizes, so that sizes become symbols; and back to the first."""
    compiled = torch.compile(lambda x, graph: model(x, graph).sum(), backend="aot_eager", fullgraph=True)
    graphs = [random_graph(n, 5 * n, 4, torch.Generator().manual_seed(n)) for n in (50, 70, 90)]
    for graph in [*graphs, graphs[0]]:
        x = torch.randn(graph.num_sources, 8, requires_grad=True)
        actual, expected = compiled(x, graph), model(x, graph).sum()
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(*(torch.autograd.grad(result, x)[0] for result in (actual, expected)))


class Blocks(Dataset):
    """Blocks of a few targets each, sampled where the loader's workers are."""

    def __init__(self, graph):
        self.graph = graph

    def __len__(self):
        return 6

    def __getitem__(self, number):
        keep = self.graph.edge_index[1] < 10 * (number + 1)
        sizes = (200, 10 * (number + 1))
        edge_index, edge_type = self.graph.edge_index[:, keep], self.graph.edge_type[keep]
        block = RelationalGraph(edge_index, edge_type, num_nodes=sizes, num_edge_types=4)
        torch.manual_seed(0)
        return block, RGCNConv(8, 4, 4)(torch.ones(200, 8), block).detach()


def whole(items):
    return items[0]


def test_blocks_from_workers(graph):
    """A worker samples, and may run a layer; what it sends has its indexes."""
    loader = DataLoader(Blocks(graph), num_workers=2, collate_fn=whole)
    for number, (block, result) in enumerate(loader):
        assert block.num_nodes == (200, 10 * (number + 1))
        torch.manual_seed(0)
        assert torch.equal(RGCNConv(8, 4, 4)(torch.ones(200, 8), block), result)


def train_in_a_group(rank, folder):
    torch.manual_seed(0)
    parallel = nn.parallel.DistributedDataParallel(Model(), find_unused_parameters=True)
    graph = random_graph(60, 300, 4, torch.Generator().manual_seed(rank))
    parallel(torch.ones(60, 8), graph).square().mean().backward()
    torch.save(
        [parameter.grad for parameter in parallel.module.parameters() if parameter.grad is not None],
        folder / f"{rank}.pt",
    )


def test_ddp_gives_the_mean_of_its_ranks(tmp_path, model):
    run_in_ranks(train_in_a_group, tmp_path, directory=tmp_path)
    by_rank = []
    for rank in range(2):
        graph = random_graph(60, 300, 4, torch.Generator().manual_seed(rank))
        by_rank.append(gradients(model, lambda graph=graph: model(torch.ones(60, 8), graph)))
    for rank in range(2):
        for actual, first, second in zip(torch.load(tmp_path / f"{rank}.pt"), *by_rank, strict=True):
            torch.testing.assert_close(actual, (first + second) / 2)


def test_a_typed_layer_takes_another_graph_of_the_same_types():
    edges = {("a", "to", "b"): torch.tensor([[0, 1], [1, 0]]), ("b", "of", "a"): torch.tensor([[0], [1]])}
    conv = HGTConv(4, 8, (["a", "b"], list(edges)), heads=2)
    for count in (2, 5):
        sizes = {"a": count, "b": count + 1}
        actual = conv({name: torch.randn(size, 4) for name, size in sizes.items()}, edges)
        assert {name: len(rows) for name, rows in actual.items()} == sizes
