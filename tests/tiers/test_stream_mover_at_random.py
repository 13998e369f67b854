"""The stream mover under random calls and faults: right bytes, nothing kept, no hang, whatever the order."""

import contextlib
import gc
import random
import warnings

import pytest
from fake_streams import FakeStreams
from test_stream_mover import Device, DirectFile, finished

from penstock.errors import TierDegradedWarning, TierReadError
from penstock.testing import FaultyTier
from penstock.tiers import Budget, DiskTier, EventLog
from penstock.tiers._build import _joined
from penstock.tiers._host import HostTier
from penstock.tiers._stream_mover import StreamMover

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
    staging = HostTier(2 * max_in_flight, pinned=False)
    verify = choices.random() < 0.7
    mover = StreamMover(streams, staging, EventLog(), max_in_flight_bytes=max_in_flight, verify=verify)
    return _joined(tiers, mover, mover._events), staging


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


@pytest.mark.parametrize("seed", range(40))
def test_right_bytes_after_any_calls(tmp_path, seed):
    choices, streams = random.Random(seed), FakeStreams(seed)
    waterfall, staging = random_waterfall(streams, choices, tmp_path)
    device = Device(streams)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TierDegradedWarning)
        call_at_random(waterfall, device, choices, num_calls=150)
        gc.collect()
        waterfall.reap()
        finished(waterfall, device)
    assert staging.used_bytes == 0
    assert waterfall._num_leaving_room == 0
    waterfall.close()
