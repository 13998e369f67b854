"""Tiers below an accelerator."""

import contextlib
import threading

import pytest
import torch

from penstock import probe
from penstock.devices import backend_of
from penstock.errors import TierDegradedWarning, TierReadError
from penstock.host_stepping import HostLane, HostStep
from penstock.testing import FaultyTier, simulated
from penstock.tiers import Budget, HandleState, HostTier, ViewLayout, waterfall_for

NUM_ELEMENTS = 40_003


@pytest.fixture
def make_waterfall(tmp_path):
    made = []

    def make(device, host=None, disk=False, **options):
        budget = Budget(host=host, disk=tmp_path if disk else None)
        made.append(waterfall_for(device, budget, **{"max_in_flight": "1MiB", **options}))
        return made[-1]

    yield make
    for waterfall in made:
        waterfall.close()


def storages(device, count):
    return [torch.randn(NUM_ELEMENTS, device=device) for _ in range(count)]


def test_host_slabs_are_pinned_and_copied_to_directly(device):
    tier = HostTier("2MiB", pinned=True)
    extent = tier.reserve(2**20)
    assert tier.is_pinned
    host = tier.tensor(extent)
    assert host.is_pinned()
    source = torch.randint(256, (2**20,), device=device).to(torch.uint8)
    host.copy_(source, non_blocking=True)
    torch.accelerator.synchronize()
    assert torch.equal(host, source.cpu())
    tier.release(extent)
    tier.close()


@pytest.mark.parametrize("host, disk", [("8MiB", False), (None, True), ("3MiB", True)])
def test_bytes_come_back(device, make_waterfall, host, disk):
    waterfall = make_waterfall(device, host, disk, verify=True)
    tensors = storages(device, 12)
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


def test_what_is_still_being_computed_is_parked_as_it_will_be(device, make_waterfall):
    """The copy out waits for the work that was queued before it, on whichever stream that was."""
    waterfall = make_waterfall(device, "8MiB")
    streams = [torch.Stream(device=device) for _ in range(3)]
    handles, expected = [], []
    for stream in streams:
        with stream:
            value = torch.full((NUM_ELEMENTS,), 2.0, device=device)
            for _ in range(4):
                value = value * 1.5
            layout = ViewLayout.of(value)
            expected.append((layout, 2.0 * 1.5**4))
            handles.append(waterfall.park(value.untyped_storage()))
            del value
            torch.zeros(NUM_ELEMENTS, device=device)  # takes the memory, if it is free already
    for handle, (layout, number) in zip(handles, expected, strict=True):
        assert layout.rebuild(handle.get()).unique().tolist() == [number]
        handle.release()


def test_what_one_stream_fetches_another_may_use(device, make_waterfall):
    waterfall = make_waterfall(device, "8MiB")
    (tensor,) = storages(device, 1)
    copy, layout = tensor.cpu(), ViewLayout.of(tensor)
    handle = waterfall.park(tensor.untyped_storage())
    del tensor
    waterfall.drain()
    handle.prefetch()
    other = torch.Stream(device=device)
    with other:
        back = layout.rebuild(handle.get())
        doubled = back * 2
        handle.release()
        del back
    torch.zeros(NUM_ELEMENTS, device=device)  # its memory, were it not still in use by the other stream
    other.synchronize()
    assert torch.equal(doubled.cpu(), copy * 2)


def test_a_host_far_ahead_keeps_what_is_in_flight_within_its_bound(device, make_waterfall):
    bound = 4 * NUM_ELEMENTS * 4
    waterfall = make_waterfall(device, "8MiB", max_in_flight=bound)
    handles = []

    def park_all():
        for _ in range(16):
            handles.append(waterfall.park(torch.ones(NUM_ELEMENTS, device=device).untyped_storage()))

    report = probe.peak_bytes(park_all, device=device)
    assert waterfall.statistics().in_flight_peak_bytes <= bound
    assert report.activation_bytes <= bound + 2 * (NUM_ELEMENTS * 4 + 512)
    waterfall.drain()
    handles.clear()


def test_put_and_get_at_once_and_a_release_in_flight(device, make_waterfall):
    waterfall = make_waterfall(device, "8MiB", disk=True)
    for _ in range(6):
        (tensor,) = storages(device, 1)
        copy, layout = tensor.cpu(), ViewLayout.of(tensor)
        kept, dropped = (waterfall.park(tensor.clone().untyped_storage()) for _ in range(2))
        dropped.release()
        kept.prefetch()
        assert torch.equal(layout.rebuild(kept.get()).cpu(), copy)
        kept.release()
    waterfall.drain()
    assert set(waterfall.statistics().held_bytes.values()) == {0}


def test_a_backward_thread_of_autograds_fetches_on_the_stream_of_forward(device, make_waterfall):
    """Autograd computes on a thread of its own, on the stream that forward had."""
    waterfall = make_waterfall(device, "8MiB")
    seen = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            context.layout = ViewLayout.of(x)
            context.handle = waterfall.park(x.clone().untyped_storage())
            return x * 2

        @staticmethod
        def backward(context, gradient):
            seen.append((threading.get_ident(), torch.accelerator.current_stream()))
            value = context.layout.rebuild(context.handle.get())
            context.handle.release()
            return gradient * value

    x = torch.randn(NUM_ELEMENTS, device=device, requires_grad=True)
    torch.accelerator.synchronize()
    stream = torch.Stream(device=device)
    with stream:
        y = Doubled.apply(x).sum()
        y.backward()
    stream.synchronize()
    assert torch.equal(x.grad.cpu(), x.detach().cpu())
    ((thread, used),) = seen
    assert (thread != threading.get_ident(), used) == (True, stream)


def test_a_disk_that_is_full_or_fails_loses_nothing(device, tmp_path, make_waterfall):
    waterfall = make_waterfall(device, None, disk=True)
    waterfall.tiers = (FaultyTier(waterfall.tiers[-1], write_error=1.0),)
    tensors = storages(device, 4)
    copies = [tensor.cpu() for tensor in tensors]
    layouts = [ViewLayout.of(tensor) for tensor in tensors]
    with pytest.warns(TierDegradedWarning):
        handles = [waterfall.park(tensors.pop(0).untyped_storage()) for _ in range(4)]
        waterfall.drain()
    for handle, layout, copy in zip(handles, layouts, copies, strict=True):
        assert torch.equal(layout.rebuild(handle.get()).cpu(), copy)
        handle.release()


def test_a_read_that_fails_says_where(device, make_waterfall):
    waterfall = make_waterfall(device, None, disk=True)
    (tensor,) = storages(device, 1)
    handle = waterfall.park(tensor.untyped_storage())
    del tensor
    waterfall.drain()
    waterfall.tiers = (FaultyTier(waterfall.tiers[-1], read_error=1.0),)
    handle.record.room.tier = waterfall.tiers[-1]
    with pytest.raises(TierReadError, match="disk"):
        handle.get()


def test_links_are_measured(prompt_device, tmp_path):
    lanes = {lane.lane: lane.bandwidth_bytes_per_s for lane in probe.bandwidths(tmp_path)}
    assert set(lanes) == {"host->disk", "disk->host", "device->host", "host->device"}
    assert all(rate > 0 for rate in lanes.values())


def test_time_is_the_devices_own(prompt_device):
    backend = backend_of(prompt_device)
    value = torch.randn(256, 256, device=prompt_device)
    assert backend.seconds(lambda: value @ value) > 0
    assert backend.is_on_default_stream()
    with torch.Stream(device=prompt_device):
        assert not backend.is_on_default_stream()


@pytest.mark.parametrize("host, disk", [("8MiB", False), (None, True)], ids=["host", "disk"])
def test_no_room_for_a_copy_in_leaves_the_bytes_below(prompt_device, make_waterfall, host, disk):
    """In advance it is tried again when the bytes are asked for; then it is PyTorch's error."""
    if prompt_device != "sim":
        pytest.skip("a limit of memory is simulated")
    waterfall = make_waterfall(prompt_device, host, disk, verify=True)
    (tensor,) = storages(prompt_device, 1)
    expected, layout = tensor.cpu(), ViewLayout.of(tensor)
    handle = waterfall.park(tensor.untyped_storage())
    del tensor
    waterfall.drain()
    torch.accelerator.synchronize()
    with simulated.conditions(limit=torch.accelerator.memory_allocated() + 512):
        with contextlib.suppress(torch.OutOfMemoryError):
            handle.prefetch()
        with pytest.raises(torch.OutOfMemoryError):
            handle.get()
    found = layout.rebuild(handle.get())
    assert torch.equal(found.cpu(), expected)
    del found
    handle.release()
    waterfall.drain()
    assert set(waterfall.statistics().held_bytes.values()) == {0}


def test_bytes_that_begin_in_host_memory(device, make_waterfall):
    """A handle without a copy out: the host writes, the device gets what it wrote, again after another write."""
    waterfall = make_waterfall(device, host="4MiB")
    free_bytes = waterfall.tiers[0].capacity_bytes - waterfall.tiers[0].used_bytes
    handle = waterfall.reserve(2**20, "made here")
    assert handle is not None and handle.is_settled and handle.is_in_memory
    for value in (3, 5):
        torch.accelerator.synchronize()
        waterfall.reap()  # the copy in of before has ended
        handle.host_tensor().fill_(value)
        assert (as_tensor(handle.get()) == value).all()
    assert waterfall.reserve(2**23) is None
    handle.release()
    assert waterfall.tiers[0].capacity_bytes - waterfall.tiers[0].used_bytes == free_bytes
    assert waterfall.statistics().num_live_handles == 0


class Fill(HostStep):
    """Writes to a handle's bytes in host memory, once nothing reads them."""

    def __init__(self, handle, value):
        super().__init__()
        self.handle, self.value, self.settling = handle, value, handle.settling()

    def compute(self):
        self.settling.wait()
        assert self.settling.is_done
        self.handle.host_memory().fill_(self.value)


@pytest.mark.parametrize("has_lane_memory", [True, False])
def test_a_copy_in_waits_for_the_host_and_those_after_it_for_their_turn(device, make_waterfall, has_lane_memory):
    waterfall = make_waterfall(device, host="16MiB", has_lane_memory=has_lane_memory)
    storages = [torch.full((2**18,), value, dtype=torch.uint8, device=device).untyped_storage() for value in range(3)]
    handles = [waterfall.park(storage) for storage in storages]
    work = Fill(handles[0], 7)
    for handle, storage in zip(handles, storages, strict=True):
        handle.let_go()
        waterfall.give_back(storage)
        storage.resize_(0)
    lane = HostLane()
    thread = threading.Timer(0.05, lane.put, (work,), {"is_first": False})
    for handle, storage in zip(handles, storages, strict=True):
        assert handle.prefetch(into=storage, after=work if handle is handles[0] else None)
    assert not work.is_done
    thread.start()
    values = [as_tensor(handle.get(into=storage)) for handle, storage in zip(handles, storages, strict=True)]
    assert [value.unique().tolist() for value in values] == [[7], [1], [2]]
    thread.join()
    lane.close()


def test_memory_that_is_used_again_behind_work_of_the_hosts_waits_for_who_used_it(device, make_waterfall):
    waterfall = make_waterfall(device, host="16MiB", has_lane_memory=True)
    storages = [torch.full((2**18,), value, dtype=torch.uint8, device=device).untyped_storage() for value in range(3)]
    handles = [waterfall.park(storage) for storage in storages]
    work = Fill(handles[0], 7)
    for handle, storage in zip(handles, storages, strict=True):
        handle.let_go()
        waterfall.give_back(storage)
        storage.resize_(0)
    used = torch.empty(0, dtype=torch.uint8, device=device).set_(handles[1].get(into=storages[1]))
    assert handles[0].prefetch(into=storages[0], after=work)
    copied = used + 1
    address = storages[1].data_ptr()
    waterfall.give_back(storages[1])
    storages[1].resize_(0)
    assert handles[2].prefetch(into=storages[2])
    assert storages[2].data_ptr() == address
    work.run()
    assert as_tensor(handles[2].get(into=storages[2])).unique().tolist() == [2]
    assert as_tensor(handles[0].get(into=storages[0])).unique().tolist() == [7]
    assert copied.unique().tolist() == [2]


def as_tensor(storage):
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).cpu()
