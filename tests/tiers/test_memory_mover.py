"""Copies where the device is main memory: addresses, edges, bytes in flight, and whose memory it is."""

import gc

import pytest
import torch
from parking import parked, plain, random_bytes

from penstock.probe import ledger, peak_bytes
from penstock.tiers import HandleState

MIB = 2**20


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


def test_short_transfers_are_completed(make):
    waterfall, tier = make(short_write=0.9, short_read=0.9, verify=True)
    handle, expected = parked(waterfall, MIB)
    assert plain(handle.get()) == expected
    assert tier.injected["short_write"] > 0
    assert tier.injected["short_read"] > 0


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
