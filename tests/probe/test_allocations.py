"""The record of PyTorch's allocator: it overlaps with anything, and nothing of the user's program notices it."""

import gc
import itertools
import os
import threading

import pytest
import torch

from penstock import native
from penstock.probe import _allocations, can_record, peak_bytes, record_memory

KIB = 1024
counted = pytest.mark.skipif(native.find_compiler() is None, reason="needs a C compiler")
pytestmark = counted


def block(kib):
    return torch.empty(kib * KIB, dtype=torch.uint8)


def sizes(events):
    return [size for _, _, size in events]


def test_what_is_taken_and_given_back_is_seen_in_order():
    with _allocations.record() as events:
        block(3)
        block(5)
    assert sizes(events) == [3 * KIB, -1, 5 * KIB, -1]
    assert events[0][1] == events[1][1]
    assert [time_ns for time_ns, _, _ in events] == sorted(time_ns for time_ns, _, _ in events)


def test_recordings_overlap_in_any_order():
    first, second = _allocations.record(), _allocations.record()
    early = first.__enter__()
    one = block(1)
    late = second.__enter__()
    two = block(2)
    first.__exit__(None, None, None)
    three = block(3)
    second.__exit__(None, None, None)
    del one, two, three
    assert sizes(early) == [1 * KIB, 2 * KIB]
    assert sizes(late) == [2 * KIB, 3 * KIB]


def test_a_block_from_before_is_seen_when_it_goes():
    before = block(7)
    address = before.data_ptr()
    with _allocations.record() as events:
        del before
    assert [(event[1], event[2]) for event in events] == [(address, -1)]


def test_a_storage_that_is_emptied_and_filled_in_place_is_seen():
    storage = block(64).untyped_storage()
    with _allocations.record() as events:
        storage.resize_(0)
        storage.resize_(64 * KIB)
    assert [size for size in sizes(events) if size != -1] == [64 * KIB]
    assert -1 in sizes(events)


def test_what_another_thread_frees_is_seen_and_what_it_takes_is_not():
    held = []
    with _allocations.record() as events:
        held.append(block(11))
        for do in (held.pop, lambda: held.append(block(13))):
            thread = threading.Thread(target=do)
            thread.start()
            thread.join()
    assert sizes(events) == [11 * KIB, -1]


def test_threads_record_at_the_same_time():
    ready, done, found = threading.Barrier(4), [], {}

    def run(kib):
        with record_memory("cpu", this_thread_only=True) as recording:
            ready.wait()
            for _ in range(200):
                done.append(block(kib))
                done.pop()
            ready.wait()
        found[kib] = recording.report

    threads = [threading.Thread(target=run, args=(kib,)) for kib in (10, 20, 30, 40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {kib: sum(size == kib * KIB for _, size in changes(found[kib])) for kib in found} == dict.fromkeys(
        found, 200
    )


def changes(report):
    held = [size for _, size in report.timeline]
    return [(0, after - before) for before, after in itertools.pairwise(held)] + [(0, held[0])]


def test_a_profiler_of_the_users_around_inside_and_across_is_not_disturbed():
    def allocations(profiler):
        return sum(
            max(0, event.nbytes()) for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
        )

    def profiler():
        return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)

    with profiler() as around:
        assert peak_bytes(lambda: block(64), device="cpu").activation_bytes == 64 * KIB
    assert allocations(around) >= 64 * KIB

    def profiled():
        with profiler() as inside:
            block(128)
        return inside

    report = peak_bytes(profiled, device="cpu")
    assert allocations(report.result) == 128 * KIB
    assert report.activation_bytes >= 128 * KIB

    crossing = profiler()
    with record_memory("cpu") as recording:
        kept = block(32)
        crossing.__enter__()
        more = block(16)
    last = block(8)
    crossing.__exit__(None, None, None)
    del kept, more, last
    assert recording.report.activation_bytes >= 48 * KIB
    assert allocations(crossing) >= 24 * KIB


def test_a_region_may_begin_in_one_recording_and_end_in_the_next():
    for _ in range(100):
        first = _allocations.record()
        first.__enter__()
        region = torch.profiler.record_function("across")
        region.__enter__()
        block(1)
        first.__exit__(None, None, None)
        with _allocations.record() as events:
            block(2)
            region.__exit__(None, None, None)
        assert [size for size in sizes(events) if size != -1][:1] == [2 * KIB]


def test_a_forked_child_can_record_while_the_parent_records():
    with _allocations.record():
        child = os.fork()
        if child == 0:
            with _allocations.record() as events:
                block(3)
            os._exit(0 if 3 * KIB in sizes(events) else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_a_backward_in_a_thread_frees_what_forward_took():
    weight = torch.randn(64, 64, requires_grad=True)
    hidden = torch.randn(256, 64)
    with record_memory("cpu", this_thread_only=True) as recording:
        loss = (hidden @ weight).tanh().sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        del loss
        gc.collect()
    assert recording.report.timeline[-1][1] <= 2 * KIB


def test_the_allocator_is_found_beside_threads_that_free():
    """It is looked for once in a process, at any time. If that fails, nothing is counted from then on."""
    library, is_over = _allocations._counter(), threading.Event()

    def go_on():
        while not is_over.is_set():
            block(1)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        assert all(_allocations._sees_blocks(library) for _ in range(300))
    finally:
        is_over.set()
        thread.join()


# without the library


@pytest.fixture
def without_library(monkeypatch):
    monkeypatch.setattr(_allocations, "_counter", lambda: None)


def test_without_the_library_whole_calls_are_measured(without_library):
    assert not can_record("cpu")
    assert peak_bytes(lambda: block(64), device="cpu").activation_bytes == 64 * KIB


def test_without_the_library_a_running_profiler_is_refused(without_library):
    with (
        torch.autograd.profiler.profile(profile_memory=True),
        pytest.raises(RuntimeError, match="profiler is already running"),
    ):
        peak_bytes(lambda: None, device="cpu")
    assert peak_bytes(lambda: block(64), device="cpu").activation_bytes == 64 * KIB


def test_without_the_library_a_profiler_of_another_thread_is_refused(without_library):
    refused = []

    def measure():
        with pytest.raises(RuntimeError, match="profiler is already running") as caught:
            peak_bytes(lambda: None, device="cpu")
        refused.append(caught.value)

    thread = threading.Thread(target=measure)
    with torch.autograd.profiler.profile():
        thread.start()
        thread.join()
    assert refused


def test_without_the_library_measuring_inside_of_measuring_is_refused(without_library):
    with record_memory("cpu") as recording, pytest.raises(RuntimeError, match="two of them break each other"):
        peak_bytes(lambda: None, device="cpu")
    assert recording.report.activation_bytes == 0
