"""Random puts and gets under random faults: no wrong byte, and nothing left over. Also run by a benchmark, for long."""

import gc
import random
import warnings
from collections import Counter

import torch

from penstock.errors import TierDegradedWarning, TierReadError
from penstock.probe import ledger
from penstock.testing import FaultyTier
from penstock.tiers import Budget, DiskTier, EventLog, HandleState
from penstock.tiers._build import build

FAULTS = ("full", "write_error", "read_error", "short_write", "short_read", "corrupt")
MAX_LIVE = 8


def faulty_waterfall(directory, *, capacity="64MiB", max_in_flight_bytes=8 * 2**20, verify=False, **faults):
    """A waterfall below main memory on one directory, and the tier that fails as told."""
    tier = FaultyTier(DiskTier({directory: capacity}), **faults)
    (waterfall,) = build(
        [None],
        Budget(tiers=[tier]),
        [EventLog()],
        has_host=False,
        max_in_flight_bytes=max_in_flight_bytes,
        verify=verify,
    )
    return waterfall, tier


def run_cycles(seed, num_cycles, directory):
    """Parks and fetches ``num_cycles`` storages in random order, under faults; returns counts of what happened.

    ``num_wrong`` (storages that came back different), ``num_live_handles``, ``used_bytes`` and ``ledger_bytes`` must be
    0. Any failure other than ``TierReadError`` is raised.
    """
    choices = random.Random(seed)
    probabilities = {fault: choices.choice([0.0, 0.02, 0.1, 0.5]) for fault in FAULTS}
    gc.collect()  # what tests before this one left would be given back in the middle of it
    ledger_bytes = ledger.held_bytes
    waterfall, tier = faulty_waterfall(
        directory,
        capacity=choices.choice(["64KiB", "1MiB"]),
        max_in_flight_bytes=choices.choice([4096, 2**17]),
        verify=True,
        seed=seed,
        **probabilities,
    )
    driver = _Driver(waterfall, choices)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TierDegradedWarning)
        for _ in range(num_cycles):
            driver.cycle()
        driver.finish()
        waterfall.drain()
        gc.collect()  # a failed get leaves its handle in a cycle with the error's traceback
        waterfall.drain()
    statistics = waterfall.statistics()
    waterfall.close()
    return {
        **driver.counts,
        "num_wrong": driver.counts["num_wrong"],
        "num_live_handles": statistics.num_live_handles,
        "used_bytes": tier.used_bytes,
        "ledger_bytes": ledger.held_bytes - ledger_bytes,
        "num_failed_writes": statistics.num_failed_writes,
        **{f"injected_{fault}": tier.injected[fault] for fault in FAULTS},
    }


class _Driver:
    """A few parked storages, what they must hold, and what of them is held."""

    def __init__(self, waterfall, choices):
        self.counts = Counter()
        self._waterfall = waterfall
        self._choices = choices
        self._live = []

    def cycle(self):
        """Parks one more storage, does something to some, and takes leave of one if there are many."""
        self._park()
        for _ in range(self._choices.randrange(4)):
            entry = self._choices.choice(self._live)
            self._choices.choice(
                [self._get, self._get, self._prefetch, self._let_go, self._release, self._pause, self._finish_out]
            )(entry)
        if len(self._live) > MAX_LIVE:
            self._end(self._live.pop(self._choices.randrange(len(self._live))))

    def finish(self):
        """Gets all that are left once more."""
        while self._live:
            self._end(self._live.pop())

    def _park(self):
        size_bytes = self._choices.choice([1, 100, 4096, 9000, 30_000, self._choices.randint(1, 50_000)])
        expected = self._choices.randbytes(size_bytes)
        tensor = torch.empty(size_bytes + 64, dtype=torch.uint8)
        offset = self._choices.choice([0, 1, 64])  # storages begin where the allocator lets them; views begin anywhere
        tensor[offset : offset + size_bytes] = torch.frombuffer(bytearray(expected), dtype=torch.uint8)
        handle = self._waterfall.park(tensor.untyped_storage(), label=str(size_bytes))
        is_shared = self._choices.random() < 0.2
        self._live.append([handle, offset, expected, tensor.untyped_storage() if is_shared else None])
        self.counts["num_cycles"] += 1

    def _get(self, entry):
        handle, offset, expected, _ = entry
        if handle.state is HandleState.RELEASED:
            return
        self.counts["num_gets"] += 1
        try:
            storage = handle.get()
        except TierReadError:
            self.counts["num_read_errors"] += 1
            return
        bytes_ = torch.empty(0, dtype=torch.uint8).set_(storage)[offset : offset + len(expected)]
        self.counts["num_wrong"] += bytes_.numpy().tobytes() != expected
        entry[3] = storage if self._choices.random() < 0.5 else None

    def _prefetch(self, entry):
        self.counts["num_prefetches"] += entry[0].prefetch()

    def _finish_out(self, entry):
        entry[0].finish_out()
        assert entry[0].state is not HandleState.LEAVING

    def _let_go(self, entry):
        entry[3] = None

    def _release(self, entry):
        if self._choices.random() < 0.3:
            entry[0].release()

    def _pause(self, entry):
        self._waterfall.drain() if self._choices.random() < 0.5 else self._waterfall.reap()

    def _end(self, entry):
        self._get(entry)
        if self._choices.random() < 0.5:
            entry[0].release()  # else the garbage collector finds it
