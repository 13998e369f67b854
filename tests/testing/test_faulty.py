"""A tier that fails on demand."""

import errno
import mmap
import threading

import pytest

from penstock.errors import TierFullError, TierReadError, TierWriteError
from penstock.testing import FaultyTier
from penstock.tiers import DiskTier, HostTier

BLOCK = 4096
FAULTS = ["full", "write_error", "read_error", "short_write", "short_read", "corrupt"]


@pytest.fixture
def make():
    tiers = []

    def make(**faults):
        tiers.append(FaultyTier(HostTier("1MiB", pinned=False), **faults))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


def calls(tier, num_calls):
    """What happens in a fixed series of calls."""
    outcomes = []
    for number in range(num_calls):
        data = bytes([number % 251 + 1]) * BLOCK
        target = bytearray(BLOCK)
        try:
            extent = tier.reserve(BLOCK)
            tier.write(extent.pieces[0], memoryview(data))
            tier.read(extent.pieces[0], memoryview(target))
        except (TierFullError, TierReadError, TierWriteError) as error:
            outcomes.append(type(error).__name__)
        else:
            outcomes.append("same" if target == data else "corrupt")
            tier.release(extent)
    return outcomes


def test_without_faults_it_is_the_inner_tier(make):
    tier = make()
    assert calls(tier, 20) == ["same"] * 20
    assert set(tier.injected.values()) == {0}
    assert (tier.name, tier.alignment_bytes, tier.capacity_bytes) == ("host", 1, 2**20)
    assert tier.used_bytes == 0
    assert tier.reserved_bytes == 2**20


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ("full", "TierFullError"),
        ("write_error", "TierWriteError"),
        ("read_error", "TierReadError"),
        ("corrupt", "corrupt"),
        ("short_write", "same"),
        ("short_read", "same"),
    ],
)
def test_each_fault_does_what_it_says_and_is_counted(make, fault, outcome):
    tier = make(**{fault: 1.0})
    assert calls(tier, 3) == [outcome] * 3
    assert tier.injected[fault] >= 3
    assert sum(tier.injected.values()) == tier.injected[fault]


@pytest.mark.parametrize("fault", ["write_error", "read_error"])
def test_errors_are_those_of_a_device(make, fault):
    tier = make(**{fault: 1.0})
    piece = tier.reserve(BLOCK).pieces[0]
    with pytest.raises((TierReadError, TierWriteError), match="injected") as caught:
        (tier.write if fault == "write_error" else tier.read)(piece, memoryview(bytearray(BLOCK)))
    assert caught.value.errno == errno.EIO


def test_one_byte_is_changed(make):
    tier = make(corrupt=1.0)
    piece = tier.reserve(BLOCK).pieces[0]
    target = bytearray(BLOCK)
    tier.write(piece, memoryview(bytes(BLOCK)))
    tier.read(piece, memoryview(target))
    assert sorted(target)[-2:] == [0, 0xFF]


def test_the_seed_fixes_which_calls_fail(make):
    faults = dict.fromkeys(FAULTS, 0.2)
    first, again, other = (make(seed=seed, **faults) for seed in (1, 1, 2))
    outcomes = calls(first, 60)
    assert outcomes == calls(again, 60)
    assert first.injected == again.injected
    assert outcomes != calls(other, 60)
    assert len(set(outcomes)) == 5, "every outcome occurs"
    assert all(first.injected[fault] > 0 for fault in FAULTS)


def test_wait_is_called_before_each_transfer(make):
    order = []
    tier = make(wait=lambda: order.append("wait"))
    piece = tier.reserve(BLOCK).pieces[0]
    tier.write(piece, memoryview(bytes(BLOCK)))
    order.append("written")
    tier.read(piece, memoryview(bytearray(BLOCK)))
    assert order == ["wait", "written", "wait"]


def test_wait_holds_a_transfer_back(make):
    gate, order = threading.Event(), []
    tier = make(wait=gate.wait)
    piece = tier.reserve(BLOCK).pieces[0]
    thread = threading.Thread(target=lambda: (tier.write(piece, memoryview(bytes(BLOCK))), order.append("written")))
    thread.start()
    order.append("opened")
    gate.set()
    thread.join()
    assert order == ["opened", "written"]


def test_short_transfers_keep_to_whole_blocks(tmp_path):
    """Direct I/O refuses any other length."""
    inner = DiskTier({tmp_path: "1MiB"}, direct=False)
    inner.alignment_bytes = BLOCK
    tier = FaultyTier(inner, short_write=1.0, short_read=1.0)
    lengths = []
    real = inner._write_some
    inner._write_some = lambda piece, offset, view: lengths.append(len(view)) or real(piece, offset, view)
    extent = tier.reserve(40 * BLOCK)
    tier.write(extent.pieces[0], memoryview(mmap.mmap(-1, 40 * BLOCK)))
    assert sum(lengths) == 40 * BLOCK
    assert len(lengths) > 1
    assert all(length % BLOCK == 0 for length in lengths)
    tier.close()
