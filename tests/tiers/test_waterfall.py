"""Parking and fetching main memory through a disk: the right bytes, whatever happens on the way."""

import gc
import json
import os
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cycles import faulty_waterfall, run_cycles
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.errors import ForkedProcessError, TierDegradedWarning, TierReadError
from penstock.probe import ledger, peak_bytes
from penstock.tiers import Budget, EventLog, HandleState, ViewLayout, ssd_life_s, waterfall_for, write_trace
from penstock.tiers._memory_mover import _WRITE_THREADS

MIB = 2**20
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.fixture
def make(tmp_path):
    """Makes faulty waterfalls on the temporary directory; ends them at the end."""
    waterfalls = []

    def make(**settings):
        waterfalls.append(faulty_waterfall(tmp_path, **settings))
        return waterfalls[-1]

    yield make
    for waterfall, _ in waterfalls:
        waterfall.close()


@pytest.fixture
def waterfall(make):
    return make()[0]


class Gate:
    """Holds transfers back until it is opened; says when the first has come."""

    def __init__(self):
        self.begun, self.opened = threading.Event(), threading.Event()

    def __call__(self):
        self.begun.set()
        self.opened.wait()

    def shut(self):
        self.begun.clear()
        self.opened.clear()


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.opened.set()


def random_bytes(size_bytes, seed=0):
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def plain(storage):
    """The bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()


def parked(waterfall, size_bytes=50_000, seed=0):
    """A handle whose bytes have left, and the bytes."""
    tensor = random_bytes(size_bytes, seed)
    expected = plain(tensor.untyped_storage())
    handle = waterfall.park(tensor.untyped_storage(), label=f"storage {seed}")
    del tensor
    waterfall.drain()
    assert handle.state is HandleState.PARKED
    return handle, expected


def park_all(waterfall, tensors):
    """Handles of the tensors' storages, after all copies have ended, well or not; warnings have been given."""
    handles = [waterfall.park(tensor.untyped_storage()) for tensor in tensors]
    waterfall.drain()
    waterfall.drain()
    return handles


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back(waterfall, dtype):
    tensor = random_bytes(48_000).fill_(1).view(dtype) if dtype is torch.bool else random_bytes(48_000).view(dtype)
    expected = plain(tensor.untyped_storage())
    layout = ViewLayout.of(tensor)
    handle = waterfall.park(tensor.untyped_storage())
    shape = tensor.shape
    del tensor
    waterfall.drain()
    rebuilt = layout.rebuild(handle.get())
    assert (rebuilt.dtype, rebuilt.shape) == (dtype, shape)
    assert plain(rebuilt.untyped_storage()) == expected


VIEWS = {
    "whole": lambda base: base,
    "offset": lambda base: base[7:],
    "transposed": lambda base: base.view(20, 50, 3).permute(2, 0, 1),
    "strided": lambda base: base[1::7],
    "expanded": lambda base: base[3:4].expand(9),
    "expanded inside": lambda base: base[:12].view(3, 1, 4).expand(3, 5, 4),
    "scalar": lambda base: base[11],
    "empty": lambda base: base[5:5],
    "overlapping": lambda base: base.unfold(0, 8, 2),
    "conjugated": lambda base: base.conj(),
    "conjugated twice": lambda base: base.conj().T.conj() if base.dim() == 2 else base.conj().conj(),
    "imaginary part of a conjugate": lambda base: base.conj().imag,
    "real part": lambda base: base.real[2:],
}


@pytest.mark.parametrize("name", VIEWS)
def test_every_view_comes_back(waterfall, name):
    base = torch.randn(3000, dtype=torch.complex64)
    view = VIEWS[name](base)
    expected = view.resolve_conj().resolve_neg().clone()
    facts = (view.dtype, view.shape, view.stride(), view.storage_offset(), view.is_conj(), view.is_neg())
    layout = ViewLayout.of(view)
    handle = waterfall.park(view.untyped_storage())
    del base, view
    waterfall.drain()
    rebuilt = layout.rebuild(handle.get())
    assert facts == (
        rebuilt.dtype, rebuilt.shape, rebuilt.stride(), rebuilt.storage_offset(), rebuilt.is_conj(), rebuilt.is_neg()
    )  # fmt: skip
    assert torch.equal(rebuilt, expected)
    assert not rebuilt.requires_grad


@pytest.mark.parametrize("size_bytes", [1, 63, 4095, 4096, 4097, 8192, 12_345, 3 * MIB, 9 * MIB + 5])
def test_every_size_comes_back(make, size_bytes):
    waterfall, _ = make(verify=True)
    handle, expected = parked(waterfall, size_bytes)
    storage = handle.get()
    assert storage.nbytes() == size_bytes
    assert plain(storage) == expected


def test_an_empty_storage_comes_back(waterfall):
    handle = waterfall.park(torch.empty(0).untyped_storage())
    waterfall.drain()
    assert handle.get().nbytes() == 0


@pytest.mark.parametrize("size_bytes", [100, 4096, 300_000, 5 * MIB])
def test_the_address_keeps_its_place_in_the_page(waterfall, size_bytes):
    """So that kernels that peel their loops by alignment give the same bits."""
    tensors = [torch.empty(size_bytes, dtype=torch.uint8) for _ in range(5)]
    remainders = [tensor.data_ptr() % 4096 for tensor in tensors]
    handles = [waterfall.park(tensor.untyped_storage()) for tensor in tensors]
    tensors.clear()
    waterfall.drain()
    assert [handle.get().data_ptr() % 4096 for handle in handles] == remainders


def test_the_processor_copies_no_more_than_the_edges(waterfall):
    before = ledger.held_bytes
    handles = [waterfall.park(random_bytes(2 * MIB + 77, seed).untyped_storage()) for seed in range(4)]
    waterfall.drain()
    bounced = waterfall.statistics().bounced_bytes
    assert bounced <= 4 * 2 * 4095
    assert ledger.held_bytes - before == bounced
    handles.clear()
    gc.collect()
    waterfall.drain()
    assert ledger.held_bytes == before


def test_statistics_and_events_of_a_round_trip(waterfall):
    handle, _ = parked(waterfall)
    held = waterfall.statistics()
    assert held.parked_bytes == held.written_to_disk_bytes == 50_000
    assert held.num_live_handles == 1
    assert 0 < held.held_bytes["disk"] <= 50_000
    assert held.reserved_bytes["disk"] >= held.held_bytes["disk"]
    assert held.in_flight_peak_bytes == 50_000
    handle.get()
    handle.release()
    done = waterfall.statistics()
    assert (done.fetched_bytes, done.forwarded_bytes, done.kept_bytes, done.num_failed_writes) == (50_000, 0, 0, 0)
    assert (done.num_live_handles, done.held_bytes) == (0, {"disk": 0})
    kinds = {event.kind: event for event in waterfall.events.since()}
    assert kinds["park"].lane == "device->disk"
    assert kinds["fetch"].lane == "disk->device"
    for kind in ("park", "fetch"):
        event = kinds[kind]
        assert (event.label, event.size_bytes) == ("storage 0", 50_000)
        assert event.end_s >= event.start_s > 0
        assert event.duration_s == event.end_s - event.start_s
    assert [rate is not None and rate > 0 for rate in waterfall.rates_bytes_per_s()] == [True, True]


def test_a_stall_is_an_event_and_a_sum(make, gate):
    waterfall, _ = make(wait=gate)
    gate.opened.set()
    handle, expected = parked(waterfall)
    gate.shut()
    assert handle.prefetch()
    gate.begun.wait()

    def open_when_it_is_waited_for():
        while not handle.record.transit._finished._cond._waiters:
            threading.Event().wait(0.001)
        gate.opened.set()

    opener = threading.Thread(target=open_when_it_is_waited_for)
    opener.start()
    assert plain(handle.get()) == expected
    opener.join()
    assert waterfall.stall_s > 0
    assert waterfall.statistics().stall_s == waterfall.stall_s
    (stall,) = [event for event in waterfall.events.since() if event.kind == "stall"]
    assert (stall.lane, stall.label) == ("compute", "disk->device")


def test_a_trace_loads(waterfall, tmp_path):
    handle, _ = parked(waterfall)
    handle.get()
    file = tmp_path / "trace.json"
    events = waterfall.events.since()
    write_trace(file, events, memory=[(events[0].start_s - 1, 5), (events[0].end_s, 6)], name="test")
    rows = json.loads(file.read_text())["traceEvents"]
    spans = [row for row in rows if row["ph"] == "X"]
    assert {row["name"] for row in spans} >= {"park storage 0", "fetch storage 0"}
    assert all(row["ts"] >= 0 and row["dur"] >= 0 for row in spans)
    assert [row["args"]["bytes"] for row in rows if row["ph"] == "C"] == [5, 6]
    names = {row["args"]["name"] for row in rows if row["ph"] == "M"}
    assert names >= {"test", "device->disk", "disk->device"}
    file.unlink()


def test_an_empty_trace_loads(tmp_path):
    write_trace(tmp_path / "trace.json", [])
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) == 1


def test_the_log_keeps_the_last_events_and_counts_all():
    log = EventLog(capacity=3)
    for number in range(5):
        log.add(lane="a", kind="park", label=str(number), size_bytes=1, start_s=0.0)
    assert log.num_recorded == 5
    assert [event.label for event in log.since()] == ["2", "3", "4"]
    assert [event.label for event in log.since(4)] == ["4"]
    assert [event.label for event in log.since(1)] == ["2", "3", "4"]
    assert log.since(5) == ()


@pytest.mark.parametrize(("written", "days"), [(0, float("inf")), (6 * 10**12, 100.0)])
def test_the_life_of_an_ssd(written, days):
    life_s = ssd_life_s(capacity_bytes=10**12, written_bytes=written, duration_s=86400)
    assert life_s / 86400 == pytest.approx(days)


# Forwarding: what is still in memory is never read.


def test_what_is_still_leaving_is_forwarded(make, gate):
    waterfall, tier = make(wait=gate, read_error=1.0)
    tensor = random_bytes(50_000)
    handle = waterfall.park(tensor.untyped_storage())
    gate.begun.wait()
    assert handle.state is HandleState.LEAVING
    assert handle.get().data_ptr() == tensor.data_ptr()
    gate.opened.set()
    waterfall.drain()
    statistics = waterfall.statistics()
    assert (statistics.forwarded_bytes, statistics.fetched_bytes) == (50_000, 0)
    assert tier.injected["read_error"] == 0


def test_what_was_forwarded_and_dropped_is_read(make, gate):
    waterfall, _ = make(wait=gate)
    tensor = random_bytes(50_000)
    expected = plain(tensor.untyped_storage())
    handle = waterfall.park(tensor.untyped_storage())
    gate.begun.wait()
    handle.get()
    del tensor
    gate.opened.set()
    waterfall.drain()
    assert plain(handle.get()) == expected
    assert waterfall.statistics().fetched_bytes == 50_000


def test_a_copy_that_has_not_begun_is_taken_back(make, gate):
    waterfall, _ = make(wait=gate)
    busy = [waterfall.park(random_bytes(2 * 8192).untyped_storage()) for _ in range(_WRITE_THREADS)]
    tensor = random_bytes(50_000)
    expected = plain(tensor.untyped_storage())
    waiting = waterfall.park(tensor.untyped_storage())
    del tensor
    used = waterfall.tiers[0].used_bytes
    assert plain(waiting.get()) == expected
    assert waiting.state is HandleState.KEPT
    assert waterfall.tiers[0].used_bytes < used, "its room is given back at once"
    gate.opened.set()
    waterfall.drain()
    assert waterfall.statistics().parked_bytes == len(busy) * 2 * 8192
    assert all(handle.state is HandleState.PARKED for handle in busy)
    assert plain(waiting.get()) == expected


def test_a_prefetch_of_what_is_leaving_keeps_it(make, gate):
    waterfall, tier = make(wait=gate, read_error=1.0)
    tensor = random_bytes(50_000)
    expected, address = plain(tensor.untyped_storage()), tensor.data_ptr()
    handle = waterfall.park(tensor.untyped_storage())
    del tensor
    gate.begun.wait()
    assert handle.prefetch()
    gate.opened.set()
    waterfall.drain()
    assert handle.state is HandleState.KEPT
    assert handle.get().data_ptr() == address
    assert plain(handle.get()) == expected
    assert waterfall.tiers[0].used_bytes == 0
    assert tier.injected["read_error"] == 0


def test_finishing_a_copy_out_frees_the_device_copy(waterfall):
    tensor = random_bytes(50_000)
    weak = StorageWeakRef(tensor.untyped_storage())
    handle = waterfall.park(tensor.untyped_storage())
    del tensor
    handle.finish_out()
    assert handle.state is HandleState.PARKED
    assert weak.expired()
    assert waterfall.statistics().parked_bytes == 50_000
    handle.finish_out()
    handle.get()
    handle.finish_out()
    assert waterfall.statistics().parked_bytes == 50_000


def test_what_somebody_holds_is_handed_back_without_a_read(make):
    waterfall, tier = make(read_error=1.0)
    tensor = random_bytes(50_000)
    handle = waterfall.park(tensor.untyped_storage())
    waterfall.drain()
    assert handle.state is HandleState.PARKED
    assert handle.is_held_elsewhere
    assert handle.prefetch()
    assert handle.get().data_ptr() == tensor.data_ptr()
    assert tier.injected["read_error"] == 0
    del tensor
    assert not handle.is_held_elsewhere


def test_prefetch_then_get(waterfall):
    handle, expected = parked(waterfall)
    assert handle.prefetch()
    assert handle.prefetch()
    assert handle.state is HandleState.ARRIVING
    assert plain(handle.get()) == expected
    assert waterfall.statistics().fetched_bytes == 50_000
    assert len([event for event in waterfall.events.since() if event.kind == "fetch"]) == 1


def test_get_twice_is_the_same_storage_while_it_is_held(waterfall):
    handle, expected = parked(waterfall)
    first = handle.get()
    waterfall.drain()
    assert handle.get().data_ptr() == first.data_ptr()
    assert waterfall.statistics().fetched_bytes == 50_000
    del first
    assert plain(handle.get()) == expected
    assert waterfall.statistics().fetched_bytes == 100_000


def test_bytes_outlive_their_handle(waterfall):
    handle, expected = parked(waterfall)
    storage = handle.get()
    handle.release()
    del handle
    waterfall.drain()
    assert plain(storage) == expected


@pytest.mark.parametrize("call", ["get", "prefetch"])
def test_after_release(waterfall, call):
    handle, _ = parked(waterfall)
    handle.release()
    handle.release()
    assert handle.state is HandleState.RELEASED
    assert waterfall.statistics().held_bytes == {"disk": 0}
    assert "released" in repr(handle)
    if call == "prefetch":
        assert handle.prefetch() is False
    else:
        with pytest.raises(ValueError, match="released"):
            handle.get()


def test_release_while_leaving(make, gate):
    waterfall, _ = make(wait=gate)
    handle = waterfall.park(random_bytes(50_000).untyped_storage())
    gate.begun.wait()
    handle.release()
    assert waterfall.tiers[0].used_bytes > 0, "the copy still writes there"
    gate.opened.set()
    waterfall.drain()
    assert (handle.state, waterfall.tiers[0].used_bytes) == (HandleState.RELEASED, 0)
    assert waterfall.statistics().num_live_handles == 0


def test_release_while_arriving(make, gate):
    waterfall, _ = make(wait=gate)
    gate.opened.set()
    handle, _ = parked(waterfall)
    gate.shut()
    handle.prefetch()
    gate.begun.wait()
    handle.release()
    assert waterfall.tiers[0].used_bytes > 0, "the copy still reads there"
    gate.opened.set()
    waterfall.drain()
    assert (handle.state, waterfall.tiers[0].used_bytes) == (HandleState.RELEASED, 0)


@pytest.mark.parametrize("is_leaving", [True, False])
def test_abandoned_handles_give_their_room_back(make, gate, collected, is_leaving):
    waterfall, _ = make(wait=gate)
    if not is_leaving:
        gate.opened.set()
    handles = [waterfall.park(random_bytes(20_000, seed).untyped_storage()) for seed in range(3)]
    if not is_leaving:
        waterfall.drain()
    assert waterfall.tiers[0].used_bytes > 0
    handles.clear()
    gate.opened.set()
    waterfall.drain()
    gc.collect()
    waterfall.drain()
    assert waterfall.statistics().num_live_handles == 0
    assert waterfall.tiers[0].used_bytes == 0


def test_abandoned_room_serves_the_next_storage(make, collected):
    waterfall, _ = make(capacity="64KiB")
    for seed in range(5):
        handle, expected = parked(waterfall, 60_000, seed)
        assert plain(handle.get()) == expected
        del handle


# What can go wrong.


def test_a_full_disk_keeps_the_storage_and_warns_once(make):
    waterfall, _ = make(capacity="64KiB")
    handle, _ = parked(waterfall, 60_000)
    tensor = random_bytes(60_000, 1)
    with pytest.warns(TierDegradedWarning, match="no room for") as caught:
        kept = [waterfall.park(tensor.untyped_storage()) for _ in range(3)]
    assert len(caught) == 1
    assert [handle.state for handle in kept] == [HandleState.KEPT] * 3
    assert kept[0].prefetch()
    assert kept[0].get().data_ptr() == tensor.data_ptr()
    statistics = waterfall.statistics()
    assert (statistics.kept_bytes, statistics.num_failed_writes, statistics.parked_bytes) == (180_000, 0, 60_000)
    handle.release()
    again = waterfall.park(tensor.untyped_storage())
    waterfall.drain()
    assert again.state is HandleState.PARKED


def test_the_budget_of_the_disk_is_kept(tmp_path, collected):
    budget = Budget(disk={tmp_path: "256KiB"})
    waterfall = waterfall_for("cpu", budget)
    with pytest.warns(TierDegradedWarning):
        handles = park_all(waterfall, [random_bytes(60_000, seed) for seed in range(8)])
    statistics = waterfall.statistics()
    assert statistics.parked_bytes + statistics.kept_bytes == 480_000
    assert statistics.parked_bytes >= 180_000
    assert budget.peak_bytes(str(tmp_path)) <= 2**18
    assert [plain(handle.get()) for handle in handles] == [
        plain(random_bytes(60_000, seed).untyped_storage()) for seed in range(8)
    ]
    waterfall.close()
    assert budget.held_bytes(str(tmp_path)) == 0


def test_a_failed_write_keeps_the_storage_and_warns_once(make):
    waterfall, _ = make(write_error=1.0)
    tensors = [random_bytes(50_000, seed) for seed in range(3)]
    with pytest.warns(TierDegradedWarning, match="Input/output error") as caught:
        handles = park_all(waterfall, tensors)
    assert len(caught) == 1
    assert [handle.state for handle in handles] == [HandleState.KEPT] * 3
    assert [handle.get().data_ptr() for handle in handles] == [tensor.data_ptr() for tensor in tensors]
    statistics = waterfall.statistics()
    assert (statistics.kept_bytes, statistics.num_failed_writes, statistics.parked_bytes) == (150_000, 3, 0)
    assert statistics.held_bytes == {"disk": 0}, "its room is given back"


def test_a_write_that_fails_midway_keeps_the_storage(make, monkeypatch):
    """The storage is whole in memory, though part of it is on the disk."""
    waterfall, tier = make()
    real = tier._write_some

    def second_fails(piece, start, view):
        if piece.offset or start:
            raise OSError(5, "Input/output error")
        return real(piece, start, view[:4096])

    monkeypatch.setattr(tier, "_write_some", second_fails)
    tensor = random_bytes(9 * MIB)
    expected = plain(tensor.untyped_storage())
    box = [tensor]
    del tensor
    with pytest.warns(TierDegradedWarning):
        (handle,) = park_all(waterfall, box)
    box.clear()
    assert handle.state is HandleState.KEPT
    assert plain(handle.get()) == expected


def test_short_transfers_are_completed(make):
    waterfall, tier = make(short_write=0.9, short_read=0.9, verify=True)
    handle, expected = parked(waterfall, MIB)
    assert plain(handle.get()) == expected
    assert tier.injected["short_write"] > 0
    assert tier.injected["short_read"] > 0


@pytest.mark.parametrize(
    ("faults", "reason"), [({"read_error": 1.0}, "Input/output error"), ({"corrupt": 1.0}, "CRC-32")]
)
@pytest.mark.parametrize("is_prefetched", [True, False])
def test_a_failed_read_raises_and_hands_nothing_out(make, faults, reason, is_prefetched):
    waterfall, tier = make(verify=True, **faults)
    handle, expected = parked(waterfall)
    if is_prefetched:
        handle.prefetch()
    for _ in range(2):
        with pytest.raises(TierReadError, match=reason) as caught:
            handle.get()
        assert caught.value.tier == "disk"
        assert caught.value.size_bytes > 0
    assert handle.state is HandleState.PARKED
    tier._probability.update(dict.fromkeys(faults, 0.0))
    assert plain(handle.get()) == expected, "the device may have recovered"
    assert waterfall.statistics().fetched_bytes == 50_000


def test_a_prefetch_that_failed_and_was_released_says_nothing(make):
    waterfall, _ = make(read_error=1.0)
    handle, _ = parked(waterfall)
    handle.prefetch()
    handle.release()
    waterfall.drain()
    assert waterfall.tiers[0].used_bytes == 0


def test_without_verify_no_checksum_is_computed(make, monkeypatch):
    def refuse(_):
        raise AssertionError("computed a checksum")

    monkeypatch.setattr("penstock.tiers._memory_mover.zlib.crc32", refuse)
    waterfall, _ = make(verify=False)
    handle, expected = parked(waterfall)
    assert plain(handle.get()) == expected


def test_a_device_without_memory_is_asked_again(waterfall, monkeypatch):
    handle, expected = parked(waterfall)

    def refuse(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("penstock.tiers._memory_mover.allocate", refuse)
        assert handle.prefetch() is False
        with pytest.raises(RuntimeError, match="out of memory"):
            handle.get()
    assert plain(handle.get()) == expected
    handle.release()
    assert waterfall.statistics().held_bytes == {"disk": 0}


def test_after_close_no_bytes_are_made_up(make):
    waterfall, _ = make()
    handle, _ = parked(waterfall)
    waterfall.close()
    waterfall.close()
    torch.full((50_000,), 0xAB, dtype=torch.uint8)
    for _ in range(3):
        with pytest.raises(ValueError, match="closed"):
            handle.get()
    with pytest.raises(ValueError, match="closed"):
        waterfall.park(random_bytes(100).untyped_storage())
    handle.release()
    assert waterfall.statistics().num_live_handles == 0


# Memory.


def test_bytes_in_flight_are_bounded(make):
    waterfall, _ = make(max_in_flight_bytes=200_000)
    handles = [waterfall.park(random_bytes(60_000, seed).untyped_storage()) for seed in range(20)]
    waterfall.drain()
    assert 60_000 <= waterfall.statistics().in_flight_peak_bytes <= 200_000
    assert len(handles) == 20


def test_one_storage_above_the_bound_goes_alone(make):
    waterfall, _ = make(max_in_flight_bytes=1000)
    handles = [waterfall.park(random_bytes(60_000, seed).untyped_storage()) for seed in range(4)]
    waterfall.drain()
    assert waterfall.statistics().in_flight_peak_bytes == 60_000
    assert len(handles) == 4


def test_parking_frees_memory_on_the_computing_thread(make):
    waterfall, _ = make(capacity="128MiB", max_in_flight_bytes=8 * MIB)

    def park_all():
        handles = []
        for _ in range(20):
            tensor = torch.ones(MIB)
            handles.append(waterfall.park(tensor.untyped_storage()))
            del tensor
        waterfall.drain()
        return handles

    report = peak_bytes(park_all, device="cpu")
    assert 8 * MIB <= report.activation_bytes <= 20 * MIB
    assert report.timeline[-1][1] - report.start_bytes < MIB, "all of it was freed where the profiler sees it"
    assert all(handle.state is HandleState.PARKED for handle in report.result)


def test_fetching_takes_memory_on_the_computing_thread(make):
    waterfall, _ = make(capacity="128MiB")
    handles = [parked(waterfall, 4 * MIB, seed)[0] for seed in range(3)]

    def fetch_one_after_another():
        for handle in handles:
            handle.get()
            waterfall.reap()

    report = peak_bytes(fetch_one_after_another, device="cpu")
    assert 4 * MIB <= report.activation_bytes <= 9 * MIB
    assert report.timeline[-1][1] - report.start_bytes < MIB


def test_fetched_bytes_count_once(waterfall, collected):
    """Of what is alive at the start of a measurement: not both the storage and the block that it borrows from."""
    handle, _ = parked(waterfall, 4 * MIB)
    before = peak_bytes(lambda: None, device="cpu").start_bytes
    storage = handle.get()
    tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
    waterfall.drain()
    assert peak_bytes(lambda: None, device="cpu").start_bytes - before in range(4 * MIB, 4 * MIB + 4097)
    assert tensor.nbytes == 4 * MIB


def test_changes_on_the_device_are_noted(make, gate):
    """Leaving and coming back; what the caller does with the bytes afterwards is not the waterfall's to tell."""
    waterfall, _ = make()
    waterfall.device_changes = []
    handle, _ = parked(waterfall)
    assert [size for _, size in waterfall.device_changes] == [50_000, -50_000]
    held = handle.get()
    waterfall.drain()
    assert [size for _, size in waterfall.device_changes] == [50_000, -50_000, 50_000]
    handle.release()
    waterfall.drain()
    assert [size for _, size in waterfall.device_changes] == [50_000, -50_000, 50_000]
    assert held.nbytes() == 50_000


# Forks.


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("is_leaving", [True, False])
def test_a_forked_child_is_refused_and_the_parent_goes_on(waterfall, is_leaving):
    handle, expected = parked(waterfall)
    leaving = waterfall.park(random_bytes(MIB, 1).untyped_storage()) if is_leaving else None
    child = os.fork()
    if not child:
        try:
            os._exit(0 if is_refused(waterfall, handle) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert plain(handle.get()) == expected
    if leaving is not None:
        assert plain(leaving.get()) == plain(random_bytes(MIB, 1).untyped_storage())


def is_refused(waterfall, handle):
    storage = torch.UntypedStorage(100)
    for call in (handle.get, handle.prefetch, lambda: waterfall.park(storage)):
        try:
            call()
        except ForkedProcessError:
            continue
        return False
    handle.release()
    del handle
    gc.collect()
    waterfall.close()
    return True


# What a waterfall is made of.


def test_a_processor_needs_a_disk():
    with pytest.raises(ValueError, match=r"Budget\(disk='/nvme'\)"):
        waterfall_for("cpu", Budget(host="1GiB"))


def test_other_devices_are_refused(tmp_path):
    with pytest.raises(ValueError, match="got 'meta'"):
        waterfall_for("meta", Budget(disk={tmp_path: "1MiB"}))


def test_no_computing_thread_owns_a_waterfall(waterfall):
    """Several may compute, one after another: autograd runs backward on a thread of its own."""
    handle, expected = parked(waterfall)
    results = []
    thread = threading.Thread(target=lambda: results.append(plain(handle.get())))
    thread.start()
    thread.join()
    assert results == [expected]


@settings(deadline=None, max_examples=25, database=None)
@given(seed=st.integers(0, 2**32))
def test_random_cycles_under_random_faults(tmp_path_factory, seed):
    figures = run_cycles(seed, 40, tmp_path_factory.mktemp("spill"))
    assert {name: figures[name] for name in ("num_wrong", "num_live_handles", "used_bytes", "ledger_bytes")} == {
        "num_wrong": 0,
        "num_live_handles": 0,
        "used_bytes": 0,
        "ledger_bytes": 0,
    }
    assert figures["num_cycles"] == 40


def test_the_life_of_an_ssd_ends_at_once_where_all_is_written_in_no_time():
    assert ssd_life_s(capacity_bytes=10**12, written_bytes=10**9, duration_s=0.0) == 0
    assert ssd_life_s(capacity_bytes=10**12, written_bytes=10**9, duration_s=float("inf")) == float("inf")
    assert ssd_life_s(capacity_bytes=10**12, written_bytes=0, duration_s=1.0) == float("inf")


def test_below_main_memory_there_is_no_host_memory(waterfall):
    assert waterfall.reserve(4096) is None
    assert waterfall.statistics().num_live_handles == 0
