"""Tiers below a real GPU."""

import warnings

import pytest
import torch

from penstock import probe
from penstock.tiers import Budget, HandleState, HostTier, ViewLayout, waterfall_for


def test_host_slabs_are_pinned_and_copied_to_directly():
    tier = HostTier("64MiB", pinned=True)
    extent = tier.reserve(2**20)
    assert tier.is_pinned
    host = tier.tensor(extent)
    assert host.is_pinned()
    source = torch.randint(256, (2**20,), dtype=torch.uint8, device="cuda")
    host.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(host, source.cpu())
    tier.release(extent)
    tier.close()


@pytest.mark.parametrize("host, disk", [("256MiB", False), (None, True), ("64MiB", True)])
def test_bytes_come_back(tmp_path, host, disk):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        budget = Budget(host=host, disk=tmp_path if disk else None)
        waterfall = waterfall_for("cuda", budget, max_in_flight="16MiB", verify=True)
    tensors = [torch.randn(1_000_003, device="cuda") for _ in range(12)]
    copies = [tensor.cpu() for tensor in tensors]
    layouts = [ViewLayout.of(tensor) for tensor in tensors]
    handles = [waterfall.park(tensors.pop(0).untyped_storage()) for _ in range(12)]
    waterfall.drain()
    assert all(handle.state is HandleState.PARKED for handle in handles)
    for handle in handles:
        handle.prefetch()
    for handle, layout, copy in zip(handles, layouts, copies, strict=True):
        assert torch.equal(layout.rebuild(handle.get()).cpu(), copy)
        handle.release()
    waterfall.drain()
    assert set(waterfall.statistics().held_bytes.values()) == {0}
    waterfall.close()


def test_device_memory_is_bounded_by_what_is_in_flight():
    waterfall = waterfall_for("cuda", Budget(host="2GiB"), max_in_flight="64MiB")
    handles = []

    def park_all():
        for _ in range(32):
            handles.append(waterfall.park(torch.ones(8 * 2**20, device="cuda").untyped_storage()))

    report = probe.peak_bytes(park_all, device="cuda")
    assert report.activation_bytes <= 5 * 32 * 2**20
    waterfall.drain()
    handles.clear()
    waterfall.close()


def test_bandwidths_name_the_links(tmp_path):
    lanes = {lane.lane: lane.bandwidth_bytes_per_s for lane in probe.bandwidths(tmp_path)}
    assert set(lanes) == {"host->disk", "disk->host", "device->host", "host->device"}
    assert all(rate > 0 for rate in lanes.values())
