"""Stream logic against a fake device: any order that the events allow must give the right bytes."""

import ctypes
import gc
import random

import pytest
import torch
from fake_streams import FakeStreams

from penstock.errors import TierDegradedWarning, TierReadError
from penstock.testing import FaultyTier
from penstock.tiers import Budget, DiskTier, EventLog, HandleState
from penstock.tiers._build import _joined, stream_waterfall
from penstock.tiers._host import HostTier
from penstock.tiers._stream_mover import StreamMover

SIZE = 8192 + 64


class Device:
    """A training loop on the fake device: kernels fill storages, later kernels look at them."""

    def __init__(self, streams):
        self.streams = streams
        self.failures = []

    def produce(self, value, size=SIZE):
        storage = self.streams.allocate(size)
        address = storage.data_ptr()
        self.streams.launch(lambda: ctypes.memset(address, value, size))
        return storage

    def scribble(self):
        """Temporary memory of an operator: takes the block that was freed last and writes garbage into it."""
        self.produce(0xEE)

    def consume(self, storage, value):
        address, size = storage.data_ptr(), storage.nbytes()

        def look():
            if ctypes.string_at(address, size) != bytes([value]) * size:
                self.failures.append(value)

        self.streams.launch(look)


def run_step(waterfall, device, choices, num_storages=8):
    handles = []
    for value in range(1, num_storages + 1):
        handles.append(waterfall.park(device.produce(value), label=str(value)))
        if choices.random() < 0.7:
            device.scribble()
    for index in reversed(range(num_storages)):
        if choices.random() < 0.2:
            handles[choices.randrange(num_storages)].finish_out()
        for ahead in range(index, max(-1, index - choices.randrange(4)), -1):
            handles[ahead].prefetch()
        storage = handles[index].get()
        device.consume(storage, index + 1)
        del storage
        if choices.random() < 0.5:
            handles[index].release()
        device.scribble()
    handles.clear()
    gc.collect()


def make(streams, tmp_path, *, host, disk, max_in_flight=2 * SIZE, verify=True):
    budget = Budget(host=host, disk=tmp_path if disk else None)
    disks = [DiskTier(tmp_path, budget=budget)] if disk else []
    return stream_waterfall(
        streams, disks, budget, EventLog(), max_in_flight_bytes=max_in_flight, verify=verify, pinned=False
    )


@pytest.mark.parametrize("host, disk", [("64KiB", False), ("200KiB", True), (None, True), ("1MiB", False)])
@pytest.mark.parametrize("seed", range(12))
def test_right_bytes_in_any_order(tmp_path, host, disk, seed):
    if host == "64KiB":
        host = 9 * 3 * 4096  # pages for eight storages and one more
    streams = FakeStreams(seed)
    waterfall = make(streams, tmp_path, host=host, disk=disk, max_in_flight=(1 + seed % 4) * 3 * 4096)
    device = Device(streams)
    for _ in range(3):
        run_step(waterfall, device, random.Random(seed))
    waterfall.drain()
    streams.finish()
    statistics = waterfall.statistics()
    assert device.failures == []
    assert statistics.num_live_handles == 0
    assert set(statistics.held_bytes.values()) == {0}
    assert statistics.parked_bytes > 0
    assert statistics.in_flight_peak_bytes <= max((1 + seed % 4) * 3 * 4096, SIZE)
    waterfall.close()


def test_finishing_a_copy_out_frees_the_device_copy_at_once(tmp_path):
    """The device waits, not the host: its memory can be given to what is queued next."""
    streams = FakeStreams(3)
    waterfall = make(streams, tmp_path, host="1MiB", disk=False, max_in_flight=100 * SIZE)
    device = Device(streams)
    handles = [waterfall.park(device.produce(value), label=str(value)) for value in (1, 2, 3)]
    assert [handle.state for handle in handles] == [HandleState.LEAVING] * 3
    handles[1].finish_out()
    assert [handle.state for handle in handles] == [HandleState.PARKED] * 2 + [HandleState.LEAVING]
    device.scribble()
    for value, handle in zip((1, 2, 3), handles, strict=True):
        device.consume(handle.get(), value)
    waterfall.drain()
    streams.finish()
    assert device.failures == []
    waterfall.close()


def test_a_device_that_ignores_waits_is_caught(tmp_path):
    """The fake can see races: without waits, the same loop corrupts."""
    num_failures = 0
    for seed in range(12):
        streams = FakeStreams(seed, obeys=False)
        waterfall = make(streams, tmp_path, host="1MiB", disk=False)
        device = Device(streams)
        run_step(waterfall, device, random.Random(seed))
        waterfall.drain()
        streams.finish()
        num_failures += len(device.failures)
        waterfall.close()
    assert num_failures > 0


def faulty_waterfall(streams, tmp_path, **faults):
    tier = FaultyTier(DiskTier(tmp_path), **faults)
    mover = StreamMover(streams, HostTier("1MiB", pinned=False), EventLog(), max_in_flight_bytes=2 * SIZE, verify=True)
    return _joined([tier], mover, mover._events), tier


def test_a_failed_write_leaves_the_bytes_in_host_memory(tmp_path):
    streams = FakeStreams(0)
    waterfall, _ = faulty_waterfall(streams, tmp_path, write_error=1.0)
    device = Device(streams)
    with pytest.warns(TierDegradedWarning, match="Input/output error"):
        run_step(waterfall, device, random.Random(0))
        waterfall.drain()
    streams.finish()
    assert device.failures == []
    assert waterfall.statistics().num_failed_writes == 8
    assert waterfall.statistics().held_bytes == {"disk": 0}
    waterfall.close()


@pytest.mark.parametrize("faults", [{"read_error": 1.0}, {"corrupt": 1.0}])
def test_a_failed_read_raises_and_hands_nothing_out(tmp_path, faults):
    streams = FakeStreams(0)
    waterfall, _ = faulty_waterfall(streams, tmp_path, **faults)
    device = Device(streams)
    handle = waterfall.park(device.produce(7))
    waterfall.drain()
    assert handle.state is HandleState.PARKED
    with pytest.raises(TierReadError, match="tier 'disk'"):
        handle.get()
    handle.release()
    waterfall.drain()
    assert waterfall.statistics().held_bytes == {"disk": 0}
    waterfall.close()


def test_uses_bytes_not_views(tmp_path):
    streams = FakeStreams(3)
    waterfall = make(streams, tmp_path, host="1MiB", disk=False)
    tensor = torch.arange(1000, dtype=torch.float64)
    handle = waterfall.park(tensor.untyped_storage())
    waterfall.drain()
    fetched = torch.empty(0, dtype=torch.float64).set_(handle.get(), 0, (1000,), (1,))
    streams.finish()
    assert torch.equal(fetched, torch.arange(1000, dtype=torch.float64))
    waterfall.close()
