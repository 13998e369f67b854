"""Mini-batches made in advance on a stream of their own, by any accelerator."""

import gc

import pytest
import torch

from penstock import unified
from penstock.testing import simulated
from penstock.unified import _loader, _store

NUM_NODES, WIDTH = 400, 16


class OnDevice(unified.NeighborSampler):
    """The CPU's draws, moved to the device, as CUDA's kernels would leave them there."""

    def __init__(self, graph, device):
        super().__init__(graph, [3, 3])
        self.on_cpu, self.device = unified.NeighborSampler(graph, [3, 3]), torch.device(device)

    def sample(self, seeds, **given):
        made = self.on_cpu.sample(seeds, **given)
        names = ("nodes", "rows", "cols", "edges", "seeds")
        for name in names:
            object.__setattr__(made, name, getattr(made, name).to(self.device))
        return made


def loader_of(device):
    graph = unified.Graph(torch.randint(NUM_NODES, (2, 3000), generator=torch.Generator().manual_seed(0)), NUM_NODES)
    plain = torch.randn(NUM_NODES, WIDTH, generator=torch.Generator().manual_seed(1))
    features, labels = plain.to(device).clone(), torch.arange(NUM_NODES)  # which the device may still be making
    sampler = OnDevice(graph, device)
    return plain, unified.Loader(sampler, features, torch.arange(200), labels=labels, batch_size=20, ahead=3)


def used(loader):
    """Sums of the rows of each batch, made by a step, and its nodes."""
    found = []
    for batch in loader:
        found.append((batch.nodes.clone(), batch.x.square().sum(1)))
        del batch  # and its memory goes to the next
    return [(nodes.cpu(), sums.cpu()) for nodes, sums in found]


def test_a_step_waits_for_rows_that_were_read_in_advance(device):
    plain, loader = loader_of(device)
    batches = used(loader)
    assert len(batches) == len(loader)
    for nodes, sums in batches:
        torch.testing.assert_close(sums, plain[nodes].square().sum(1))


def test_without_the_wait_there_is_a_race(kind, monkeypatch):
    if kind != "sim":
        pytest.skip("races are found by the simulated device")
    simulated.take_races()
    _, loader = loader_of(kind)
    monkeypatch.setattr(_loader._Beside, "hand_over", lambda *_: None)
    with simulated.conditions(lazy=True):
        used(loader)
        gc.collect()
        torch.accelerator.synchronize()
    assert simulated.take_races()


def test_slots_lie_where_a_device_copies_from_by_itself(prompt_device):
    places = torch.tensor([0, 1, 2, -1], dtype=torch.int32)
    found, counts = _store.split(places, 1, torch.tensor([3, 0, 2, 1]), is_pinned=True)
    assert found.is_pinned() and counts == [1, 2, 1]
    assert found.to(prompt_device, non_blocking=True).cpu().tolist() == [[0, 1, 0, 3], [1, 2, 3, 0]]
