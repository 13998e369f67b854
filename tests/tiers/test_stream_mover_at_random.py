"""The stream mover under random calls and faults: right bytes, nothing kept, no hang, whatever the order."""

import contextlib
import gc
import os
import random
import warnings

import pytest
from fake_streams import FakeStreams, waterfall_on
from test_stream_mover import Device, DirectFile, finished

from penstock.errors import TierDegradedWarning, TierReadError
from penstock.testing import FaultyTier
from penstock.tiers import Budget, DiskTier, HostTier
from waiting import eventually

SEEDS = range(int(os.environ.get("PENSTOCK_SEEDS", "30")))
SIZES = (64, 8192, 8192 + 64, 5 * 4096 - 1)
LARGEST_PAGES = 5
CALLS = ("park", "prefetch", "get") * 2 + ("finish", "release", "drop", "pass")


def random_waterfall(streams, choices, tmp_path):
    """Host memory, a disk that fails now and then, or both; staging memory for two to eight of the largest storages."""
    max_in_flight = LARGEST_PAGES * 4096 * choices.randint(1, 4)
    tiers = []
    if choices.random() < 0.4:
        tiers.append(HostTier(choices.randint(1, 60) * 4096, pinned=False))
    if not tiers or choices.random() < 0.8:
        pages = choices.choice([None, choices.randint(5, 80)])
        disk = DiskTier(tmp_path if pages is None else {tmp_path: pages * 4096}, budget=Budget(disk=tmp_path))
        if choices.random() < 0.2:
            disk.open_to_device(DirectFile)
        faults = choices.choice(
            [{}, {"write_error": 0.1}, {"full": 0.2}, {"read_error": 0.1, "short_read": 0.3, "short_write": 0.3}]
        )
        tiers.append(disk if disk.talks_to_device else FaultyTier(disk, seed=choices.random(), **faults))
    waterfall = waterfall_on(streams, tiers, max_in_flight=max_in_flight, verify=choices.random() < 0.7)
    return waterfall, waterfall._mover._staged.staging


def call_at_random(waterfall, device, choices, num_calls):
    """Calls that a training loop may make, in any order; each fetched storage is looked at by a later kernel."""
    live, value = [], 0
    for _ in range(num_calls):
        call = choices.choice(CALLS)
        if call == "park" and len(live) < 12:
            value = value % 200 + 1
            live.append((waterfall.park(device.produce(value, choices.choice(SIZES)), label=str(value)), value))
        elif call == "pass" or not live:
            choices.choice([device.scribble, waterfall.reap, lambda: device.produce(0xEE, choices.choice(SIZES))])()
        else:
            index = choices.randrange(len(live))
            handle, expected = live[index]
            if call == "prefetch":
                assert handle.prefetch()
            elif call == "get":
                with contextlib.suppress(TierReadError):  # the injected ones; a later get may succeed
                    device.consume(handle.get(), expected)
            elif call == "finish":
                handle.finish_out()
            else:
                if call == "release":
                    handle.release()
                del live[index]
            del handle


def let_go(waterfalls):
    """Until no handle is left; the last of a copy that failed goes with the locals of its lane's thread."""

    def is_none_left():
        gc.collect()
        for waterfall in waterfalls:
            waterfall.drain()
        return not any(waterfall.counts()["num_live_handles"] for waterfall in waterfalls)

    eventually(is_none_left)


@pytest.mark.parametrize("seed", SEEDS)
def test_right_bytes_after_any_calls(tmp_path, seed):
    choices, streams = random.Random(seed), FakeStreams(seed)
    waterfall, staging = random_waterfall(streams, choices, tmp_path)
    device = Device(streams)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TierDegradedWarning)
        call_at_random(waterfall, device, choices, num_calls=150)
        let_go([waterfall])
        finished(waterfall, device)
    assert staging.used_bytes == 0
    assert waterfall._handles.num_leaving_room == 0
    waterfall.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_two_devices_fetch_what_either_parked(tmp_path, seed):
    """Borrowed handles, as a fleet's devices have them, while their originals come and go."""
    choices = random.Random(seed)
    first, staging = random_waterfall(FakeStreams(seed), choices, tmp_path)
    second = waterfall_on(
        FakeStreams(-seed), first.tiers, max_in_flight=staging.capacity_bytes // 2, verify=first._mover._verify
    )
    waterfalls = [first, second]
    devices = [Device(waterfall._mover._streams) for waterfall in waterfalls]
    live = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TierDegradedWarning)
        for call in range(150):
            index = choices.randrange(2)
            if choices.random() < 0.3 and len(live) < 12:
                handle = waterfalls[index].park(devices[index].produce(call + 1, choices.choice(SIZES)))
                live.append((handle, call + 1, index))
            if not live:
                continue
            handle, value, index = live[choices.randrange(len(live))]
            if handle.is_settled and choices.random() < 0.4:
                live.append((waterfalls[1 - index].borrow(handle), value, 1 - index))
            elif choices.random() < 0.3:
                handle.prefetch()
            elif choices.random() < 0.5:
                with contextlib.suppress(TierReadError):
                    devices[index].consume(handle.get(), value)
            else:
                live.remove((handle, value, index))
            del handle
        live.clear()
        let_go(waterfalls)
    for device in devices:
        device.streams.finish()
        assert device.failures == []
    for waterfall in waterfalls:
        assert waterfall.statistics().num_live_handles == 0
    assert set(first.statistics().held_bytes.values()) == {0}
    assert staging.used_bytes == second._mover._staged.staging.used_bytes == 0
    for waterfall in waterfalls:
        waterfall.close()
