"""Memory and threads near to a device, on a machine that is made of files."""

import os
import types

import pytest
import torch

from penstock import devices, probe
from penstock.devices import _numa
from penstock.devices._cuda import Cuda
from penstock.tiers import HostTier
from penstock.tiers._lane import Lane

MINE = sorted(os.sched_getaffinity(0))


@pytest.fixture
def two_nodes(tmp_path, monkeypatch):
    """The first processor is on node 0, all others are on node 1; a device is near to node 1."""
    for node, processors in ((0, MINE[:1]), (1, MINE[1:])):
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        (folder / "cpulist").write_text(",".join(map(str, processors)) + "\n")
    device = tmp_path / "0000:3b:00.0"
    device.mkdir()
    (device / "numa_node").write_text("1\n")
    monkeypatch.setattr(_numa, "_NODES", tmp_path)
    monkeypatch.setattr(_numa, "_PCI", tmp_path)
    return tmp_path


def test_a_device_is_near_to_what_the_bus_says(two_nodes, monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda _: torch.cuda)
    properties = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    backend = Cuda(torch.device("cuda", 0))
    assert backend.numa_node == 1
    (two_nodes / "0000:3b:00.0" / "numa_node").write_text("-1\n")  # as Linux says where there is one node only
    assert backend.numa_node is None
    properties.pci_bus_id = 0x3C
    assert backend.numa_node is None
    del properties.pci_domain_id
    assert backend.numa_node is None
    assert devices.backend_of("cpu").numa_node is None


def test_lists_of_processors(two_nodes):
    (two_nodes / "node0" / "cpulist").write_text(f"{MINE[0]}-{MINE[-1]},100000-100003\n")
    assert _numa.processors_of(0) == set(MINE)
    (two_nodes / "node0" / "cpulist").write_text("\n")
    assert _numa.processors_of(0) == set()
    assert _numa.processors_of(7) == set()


@pytest.mark.skipif(len(MINE) < 2, reason="needs two processors")
def test_memory_is_mapped_on_its_node_and_threads_go_back(two_nodes, monkeypatch):
    seen = []
    pinned = lambda size_bytes: seen.append(os.sched_getaffinity(0)) or torch.zeros(size_bytes, dtype=torch.uint8)  # noqa: E731
    monkeypatch.setattr("penstock.tiers._host.pinned_memory", pinned)
    monkeypatch.setattr("penstock.tiers._host.unpin_memory", lambda _: None)
    for node, processors in ((0, MINE[:1]), (1, MINE[1:]), (None, MINE), (9, MINE)):
        tier = HostTier("64KiB", pinned=True, node=node)
        tier.prepare(2**16)
        tier.close()
        assert seen.pop() == set(processors)
        assert os.sched_getaffinity(0) == set(MINE)


@pytest.mark.skipif(len(MINE) < 2, reason="needs two processors")
def test_threads_of_a_lane_stay_on_its_node(two_nodes):
    seen = []
    lane = Lane("there", num_threads=2, max_in_flight_bytes=10, node=0)
    job = lane.submit(
        [lambda: seen.append(os.sched_getaffinity(0))] * 4, size_bytes=1, label="", on_done=lambda _: None
    )
    job.wait()
    lane.close()
    assert seen == [set(MINE[:1])] * 4
    assert os.sched_getaffinity(0) == set(MINE)


def test_the_probe_shows_it(monkeypatch):
    backend = types.SimpleNamespace(device="cuda:0", name="a GPU", numa_node=1)
    assert probe._machine._described(backend) == "cuda:0 a GPU, NUMA node 1"
    backend.numa_node = None
    assert probe._machine._described(backend) == "cuda:0 a GPU"
