"""The log of events, and what a round trip and a stall write into it."""

import threading

from parking import parked, plain

from penstock.tiers import EventLog
from waiting import eventually


def test_the_log_keeps_the_last_events_and_counts_all():
    log = EventLog(capacity=3)
    for number in range(5):
        log.add(lane="a", kind="park", label=str(number), size_bytes=1, start_s=0.0)
    assert log.num_recorded == 5
    assert [event.label for event in log.since()] == ["2", "3", "4"]
    assert [event.label for event in log.since(4)] == ["4"]
    assert [event.label for event in log.since(1)] == ["2", "3", "4"]
    assert log.since(5) == ()


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
        eventually(lambda: handle.record.transit._finished._cond._waiters)
        gate.opened.set()

    opener = threading.Thread(target=open_when_it_is_waited_for)
    opener.start()
    assert plain(handle.get()) == expected
    opener.join()
    assert waterfall.stall_s > 0
    assert waterfall.statistics().stall_s == waterfall.stall_s
    (stall,) = [event for event in waterfall.events.since() if event.kind == "stall"]
    assert (stall.lane, stall.label) == ("compute", "disk->device")
