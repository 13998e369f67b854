"""What handles do after ``park``: forwarding, fetching, giving back, and forked children."""

import gc
import os
import threading

import pytest
import torch
from parking import parked, plain, random_bytes
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.errors import ForkedProcessError
from penstock.probe import peak_bytes
from penstock.tiers import HandleState
from penstock.tiers._memory_mover import _WRITE_THREADS

MIB = 2**20


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


def test_a_prefetch_that_failed_and_was_released_says_nothing(make):
    waterfall, _ = make(read_error=1.0)
    handle, _ = parked(waterfall)
    handle.prefetch()
    handle.release()
    waterfall.drain()
    assert waterfall.tiers[0].used_bytes == 0


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


def test_no_computing_thread_owns_a_waterfall(waterfall):
    """Several may compute, one after another: autograd runs backward on a thread of its own."""
    handle, expected = parked(waterfall)
    results = []
    thread = threading.Thread(target=lambda: results.append(plain(handle.get())))
    thread.start()
    thread.join()
    assert results == [expected]
