"""Stream logic against a fake device: any order that the events allow must give the right bytes."""

import ctypes
import gc
import random
import threading
import warnings

import pytest
import torch
from fake_streams import FakeStreams, waterfall_on

from penstock.errors import TierDegradedWarning, TierReadError
from penstock.testing import FaultyTier
from penstock.tiers import Budget, DiskTier, EventLog, HandleState, HostTier
from penstock.tiers._build import build

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


def finished(waterfall, device):
    """Ends all copies and kernels; every look at a storage found its bytes, and nothing is held any more."""
    waterfall.drain()
    device.streams.finish()
    statistics = waterfall.statistics()
    assert device.failures == []
    assert statistics.num_live_handles == 0
    assert set(statistics.held_bytes.values()) == {0}
    return statistics


def make(streams, tmp_path, *, host, disk, max_in_flight=2 * SIZE, verify=True):
    (waterfall,) = build(
        [streams],
        Budget(host=host, disk=tmp_path if disk else None),
        [EventLog()],
        has_host=host is not None,
        max_in_flight_bytes=max_in_flight,
        verify=verify,
        pinned=False,
    )
    return waterfall


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
    statistics = finished(waterfall, device)
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


class Waiting(FakeStreams):
    """A device that has not come to anything yet, unless somebody waits for it."""

    def is_done(self, event):
        return event.is_passed


def test_room_stays_taken_until_a_copy_that_the_device_waits_for_has_passed(tmp_path):
    """Another device that shares the tier knows nothing of this one's order of work."""
    streams = Waiting(0)
    waterfall = make(streams, tmp_path, host="1MiB", disk=False)
    (tier,) = waterfall.tiers
    device = Device(streams)
    handle = waterfall.park(device.produce(1))
    handle.finish_out()
    assert handle.state is HandleState.PARKED
    assert not handle.is_settled
    handle.release()
    waterfall.reap()
    assert tier.used_bytes == 12288
    streams.finish()
    waterfall.reap()
    assert tier.used_bytes == 0
    assert finished(waterfall, device).parked_bytes == SIZE
    waterfall.close()


class DirectFile:
    """GPUDirect Storage for the fake device, whose memory is main memory: bytes go the moment they are asked for."""

    def __init__(self, spill):
        self.spill = spill
        self.num_writes = self.num_reads = 0
        self.error = None

    def write(self, storage, offset):
        self.num_writes += 1
        self._fail()
        assert self.spill.write(bytes(view_of(storage)), offset) == storage.nbytes()

    def read(self, storage, offset):
        self.num_reads += 1
        self._fail()
        assert self.spill.read(view_of(storage), offset) == storage.nbytes()

    def close(self):
        self.spill = None

    def _fail(self):
        if self.error:
            raise self.error


def view_of(storage):
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def make_direct(streams, tmp_path, *, host=None, max_in_flight=2 * SIZE):
    tier = DiskTier(tmp_path, direct=False)
    tier.open_to_device(DirectFile)
    tiers = [tier] if host is None else [HostTier(host, pinned=False), tier]
    return waterfall_on(streams, tiers, max_in_flight=max_in_flight, verify=False), tier._device_files[0]


@pytest.mark.parametrize("host", [None, "40KiB"])
@pytest.mark.parametrize("seed", range(12))
def test_device_and_disk_talk_directly(tmp_path, host, seed):
    streams = FakeStreams(seed)
    waterfall, file = make_direct(streams, tmp_path, host=host, max_in_flight=(1 + seed % 4) * 3 * 4096)
    device = Device(streams)
    for _ in range(3):
        run_step(waterfall, device, random.Random(seed))
    handles = [waterfall.park(device.produce(value)) for value in range(1, 9)]
    waterfall.drain()  # all have left, so that some must come back from the disk
    for value, handle in enumerate(handles, 1):
        device.consume(handle.get(), value)
        handle.release()
    statistics = finished(waterfall, device)
    assert file.num_writes > 0
    assert file.num_reads > 0
    assert statistics.written_to_disk_bytes > 0
    lanes = {event.lane for event in waterfall.events.since()}
    assert {"device->disk", "disk->device"} <= lanes
    assert not lanes & {"host->disk", "disk->host"}
    assert ("device->host" in lanes) == (host is not None)
    waterfall.close()


def test_a_direct_copy_waits_for_the_work_that_makes_its_bytes(tmp_path):
    """Without the waits, the same loop corrupts."""
    num_failures = 0
    for seed in range(12):
        streams = FakeStreams(seed)
        waterfall, _ = make_direct(streams, tmp_path)
        streams.synchronize = lambda event: None
        device = Device(streams)
        run_step(waterfall, device, random.Random(seed))
        waterfall.drain()
        streams.finish()
        num_failures += len(device.failures)
        waterfall.close()
    assert num_failures > 0


def test_a_failed_direct_write_leaves_the_storage_on_the_device(tmp_path):
    streams = FakeStreams(0)
    waterfall, file = make_direct(streams, tmp_path, max_in_flight=100 * SIZE)
    file.error = RuntimeError("cuFileWrite failed: 5030")
    device = Device(streams)
    with pytest.warns(TierDegradedWarning, match="cuFileWrite failed: 5030"):  # in either call: the lane may be fast
        handle = waterfall.park(device.produce(7), label="7")
        waterfall.drain()
    assert handle.state is HandleState.KEPT
    device.consume(handle.get(), 7)
    streams.finish()
    assert device.failures == []
    assert waterfall.statistics().num_failed_writes == 1
    assert waterfall.statistics().held_bytes == {"disk": 0}
    waterfall.close()


def test_a_failed_direct_read_raises_and_a_later_one_works(tmp_path):
    streams = FakeStreams(0)
    waterfall, file = make_direct(streams, tmp_path)
    device = Device(streams)
    handle = waterfall.park(device.produce(7), label="7")
    waterfall.drain()
    assert handle.state is HandleState.PARKED
    file.error = OSError(5, "Input/output error")
    with pytest.raises(TierReadError, match="Input/output error"):
        handle.get()
    file.error = None
    device.consume(handle.get(), 7)
    streams.finish()
    assert device.failures == []
    waterfall.close()


def test_checksums_need_the_bytes_in_host_memory(tmp_path):
    streams = FakeStreams(0)
    tier = DiskTier(tmp_path)
    tier.open_to_device(DirectFile)
    waterfall = waterfall_on(streams, [tier], max_in_flight=2 * SIZE, verify=True)
    device = Device(streams)
    run_step(waterfall, device, random.Random(0))
    waterfall.drain()
    streams.finish()
    assert device.failures == []
    assert tier._device_files[0].num_writes == 0
    assert {"host->disk"} <= {event.lane for event in waterfall.events.since()}
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


def faulty_waterfall(streams, tmp_path, *, disk=None, staging="1MiB", **faults):
    tier = FaultyTier(DiskTier(disk or tmp_path), **faults)
    return waterfall_on(streams, [tier], max_in_flight=2 * SIZE, verify=True, staging=staging), tier


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


class HeldBack:
    """Holds the transfers of a tier back until the test lets them go on."""

    def __init__(self):
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self):
        self.begun.set()
        assert self.may_go_on.wait(600)


def kept_with_its_write_under_way(waterfall, device, write):
    """A storage that was wanted again before its copy out ended; its bytes are still on their way to disk."""
    handle = waterfall.park(device.produce(1))
    assert handle.prefetch()
    assert write.begun.wait(600)
    while handle.state is HandleState.LEAVING:
        waterfall.reap()
    assert handle.state is HandleState.KEPT
    return handle


def test_room_of_a_storage_that_stays_is_kept_until_its_write_has_ended(tmp_path):
    """The write reads staging memory and fills an extent; given to the next storage, either would corrupt it."""
    streams, write = FakeStreams(0), HeldBack()
    waterfall, tier = faulty_waterfall(streams, tmp_path, wait=write)
    device = Device(streams)
    handle = kept_with_its_write_under_way(waterfall, device, write)
    staging = waterfall._mover._staged.staging
    assert (tier.used_bytes, staging.used_bytes) == (12288, 12288)
    write.may_go_on.set()
    device.consume(handle.get(), 1)
    waterfall.drain()
    streams.finish()
    assert device.failures == []
    assert (tier.used_bytes, staging.used_bytes) == (0, 0)
    waterfall.close()


@pytest.mark.parametrize("is_released", [False, True])
def test_a_full_disk_waits_for_the_write_of_a_storage_that_stays(tmp_path, is_released):
    """Its room comes back in a moment, so the next storage is not kept on the device for want of it."""
    streams, write = FakeStreams(0), HeldBack()
    waterfall, _ = faulty_waterfall(streams, tmp_path, disk={tmp_path: 12288}, wait=write)
    device = Device(streams)
    first = kept_with_its_write_under_way(waterfall, device, write)
    device.consume(first.get(), 1)
    if is_released:
        first.release()
    wait_for_a_copy = waterfall._mover.wait_for_a_copy

    def wait():
        write.may_go_on.set()  # not before the disk was found full
        return wait_for_a_copy()

    waterfall._mover.wait_for_a_copy = wait
    second = waterfall.park(device.produce(2))
    assert write.may_go_on.is_set()
    assert second.state is HandleState.LEAVING
    waterfall.drain()
    device.consume(second.get(), 2)
    first.release()
    second.release()
    assert finished(waterfall, device).parked_bytes == SIZE
    assert waterfall._handles.num_leaving_room == 0
    waterfall.close()


def test_failed_writes_that_hold_all_staging_memory_stop_no_fetch(tmp_path):
    streams = FakeStreams(0)
    waterfall, tier = faulty_waterfall(streams, tmp_path, staging="24KiB")
    device = Device(streams)
    handles = [waterfall.park(device.produce(1))]
    waterfall.drain()
    tier._probability["write_error"] = 1.0
    with pytest.warns(TierDegradedWarning, match="Input/output error"):
        handles += [waterfall.park(device.produce(value)) for value in (2, 3)]
        waterfall.drain()
    assert waterfall._mover._staged.staging.used_bytes == 24 * 1024
    assert [handle.prefetch() for handle in handles] == [True] * 3
    for value, handle in enumerate(handles, 1):
        device.consume(handle.get(), value)
        device.scribble()
        handle.release()
    assert finished(waterfall, device).fetched_bytes == 3 * SIZE
    assert waterfall._mover._staged.staging.used_bytes == 0
    waterfall.close()


def test_a_second_fetch_keeps_its_staging_when_the_first_went_without(tmp_path):
    streams, transfer = Waiting(0), HeldBack()
    transfer.may_go_on.set()
    waterfall, tier = faulty_waterfall(streams, tmp_path, staging="24KiB", wait=transfer)
    device = Device(streams)
    handle = waterfall.park(device.produce(1))
    waterfall.drain()
    tier._probability["write_error"] = 1.0
    with pytest.warns(TierDegradedWarning, match="Input/output error"):
        stuck = [waterfall.park(device.produce(value)) for value in (2, 3)]
        waterfall.drain()
    tier._probability["write_error"] = 0.0
    device.consume(handle.get(), 1)  # its copy in is queued, from memory of its own
    for without_room in stuck:
        without_room.release()
    transfer.may_go_on.clear()
    assert handle.prefetch()
    streams.finish()
    waterfall.reap()  # the first copy has passed; the second one's read is still filling its staging memory
    assert waterfall._mover._staged.staging.used_bytes == 12288
    transfer.may_go_on.set()
    device.consume(handle.get(), 1)
    handle.release()
    assert finished(waterfall, device).fetched_bytes == 2 * SIZE
    assert waterfall._mover._staged.staging.used_bytes == 0
    waterfall.close()


def test_a_dropped_handle_whose_copy_has_not_passed_leaves_its_room_to_the_next(tmp_path):
    streams = Waiting(0)
    waterfall = make(streams, tmp_path, host=12288, disk=False)
    device = Device(streams)
    handle = waterfall.park(device.produce(1))
    handle.finish_out()
    del handle
    second = waterfall.park(device.produce(2))
    assert second.state is HandleState.LEAVING
    device.consume(second.get(), 2)
    second.release()
    assert finished(waterfall, device).kept_bytes == 0
    waterfall.close()


@pytest.mark.parametrize("is_on_disk", [True, False])
def test_a_device_that_takes_no_copy_is_heard_of(tmp_path, monkeypatch, is_on_disk):
    """On a lane's thread, or where the bytes are in staging memory; nothing hangs, and nothing is left behind."""
    streams = FakeStreams(0)
    waterfall, tier = faulty_waterfall(streams, tmp_path)
    tier._probability["write_error"] = 0.0 if is_on_disk else 1.0
    device = Device(streams)
    with warnings.catch_warnings(action="ignore", category=TierDegradedWarning):
        handle = waterfall.park(device.produce(1))
        waterfall.drain()

    def refuse(*_):
        raise RuntimeError("no event to be had")

    with monkeypatch.context() as patch:
        patch.setattr(streams, "copy", refuse)
        with pytest.raises(RuntimeError, match="no event to be had"):
            handle.get()
        waterfall.drain()
    device.consume(handle.get(), 1)
    handle.release()
    finished(waterfall, device)
    assert waterfall._mover._staged.staging.used_bytes == 0
    waterfall.close()


@pytest.mark.parametrize("refused", ["copy", "submit"])
def test_a_copy_out_that_cannot_begin_leaves_the_bytes_where_they_are(tmp_path, monkeypatch, refused):
    streams = FakeStreams(0)
    waterfall, _ = faulty_waterfall(streams, tmp_path)
    device = Device(streams)

    def refuse(*_, **__):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(streams if refused == "copy" else waterfall._mover._staged.out, refused, refuse)
        with pytest.warns(TierDegradedWarning, match="can't start new thread"):
            handle = waterfall.park(device.produce(1))
            waterfall.drain()
    device.consume(handle.get(), 1)
    handle.release()
    assert finished(waterfall, device).held_bytes == {"disk": 0}
    assert waterfall._mover._staged.staging.used_bytes == 0
    waterfall.close()


def test_a_fetch_that_could_not_begin_may_be_tried_again(tmp_path, monkeypatch):
    """No thread to be had, say: the bytes stay where they are."""
    streams = FakeStreams(0)
    waterfall, _ = faulty_waterfall(streams, tmp_path)
    device = Device(streams)
    handle = waterfall.park(device.produce(1))
    waterfall.drain()

    def refuse(*args, **kwargs):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(waterfall._mover._staged.back, "submit", refuse)
        assert not handle.prefetch()
        with pytest.raises(RuntimeError, match="can't start new thread"):
            handle.get()
    assert handle.state is HandleState.PARKED
    assert waterfall._mover._staged.staging.used_bytes == 0
    device.consume(handle.get(), 1)
    handle.release()
    finished(waterfall, device)
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
