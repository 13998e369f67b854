"""What every tier must do, whichever it is."""

import errno
import mmap
import random
import threading

import pytest
from object_store import ObjectStore

from penstock.directio import BLOCK_BYTES, SpillFile
from penstock.errors import TierFullError, TierReadError, TierWriteError
from penstock.testing import FaultyTier
from penstock.tiers import DiskTier, HostTier

MIB = 2**20
CAPACITY = 4 * MIB
SIZES = [1, 100, 4095, 4096, 4097, 5 * 4096, 70_001, MIB, 8 * MIB, 8 * MIB + 4096, 17 * MIB + 1]


def direct_disk(directory, capacity):
    if not is_direct(directory):
        pytest.skip("the file system of the temporary directory refuses O_DIRECT")
    return DiskTier({directory: capacity}, direct=True)


def striped_disk(directory, capacity):
    if not is_direct(directory):
        pytest.skip("the file system of the temporary directory refuses O_DIRECT")
    for name in ("first", "second"):
        (directory / name).mkdir(exist_ok=True)
    return DiskTier({directory / "first": capacity // 2, directory / "second": capacity // 2})


TIERS = {
    "host": lambda _, capacity: HostTier(capacity, pinned=False),
    "direct": direct_disk,
    "buffered": lambda directory, capacity: DiskTier({directory: capacity}, direct=False),
    "striped": striped_disk,
    "store": lambda _, capacity: ObjectStore(capacity),
}
"""Makes each tier from a folder and a capacity in bytes. A new tier is a line here, and every test below runs on it."""
FAULTY = "faulty "
"""Before the name of a tier with `FaultyTier` around it."""


def make_tier(kind, directory, capacity):
    return TIERS[kind.removeprefix(FAULTY)](directory, capacity)


def is_direct(directory):
    spill = SpillFile(directory)
    spill.close()
    return spill.is_direct


@pytest.fixture(params=TIERS)
def kind(request):
    return request.param


@pytest.fixture
def faulty(kind, tmp_path):
    """Makes a tier of each kind with faults around it."""
    tiers = []

    def make(**faults):
        tiers.append(FaultyTier(make_tier(kind, tmp_path, CAPACITY), **faults))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


@pytest.fixture(params=[*TIERS, "faulty host", "faulty direct", "faulty buffered"])
def make(request, tmp_path):
    """Makes tiers of every kind, of a given capacity."""
    tiers = []

    def make(capacity=CAPACITY):
        tier = make_tier(request.param, tmp_path, capacity)
        tiers.append(FaultyTier(tier) if request.param.startswith(FAULTY) else tier)
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


def memory(size_bytes, seed=None):
    """Page-aligned memory, as direct transfers want it; random bytes with a seed, else zeros."""
    view = memoryview(mmap.mmap(-1, size_bytes))
    if seed is not None:
        view[:] = random.Random(seed).randbytes(size_bytes)
    return view


def usable(tier, size_bytes):
    """``size_bytes`` as the tier wants them: whole blocks for direct transfers."""
    return -(-size_bytes // tier.alignment_bytes) * tier.alignment_bytes


def parts(extent, view):
    start = 0
    for piece in extent.pieces:
        yield piece, view[start : start + piece.size_bytes]
        start += piece.size_bytes


def write(tier, extent, view):
    for piece, part in parts(extent, view):
        tier.write(piece, part)


def read(tier, extent):
    view = memory(extent.size_bytes)
    for piece, part in parts(extent, view):
        tier.read(piece, part)
    return view


def round_trip(tier, size_bytes, seed):
    extent = tier.reserve(size_bytes)
    written = memory(size_bytes, seed)
    write(tier, extent, written)
    assert read(tier, extent) == written
    tier.release(extent)


@pytest.mark.parametrize("size_bytes", SIZES)
def test_bytes_come_back(make, size_bytes):
    tier = make(48 * MIB)
    size_bytes = usable(tier, size_bytes)
    extent = tier.reserve(size_bytes)
    assert extent.size_bytes == sum(piece.size_bytes for piece in extent.pieces) == size_bytes
    written = memory(size_bytes, seed=size_bytes)
    write(tier, extent, written)
    assert read(tier, extent) == written
    assert read(tier, extent) == written
    tier.release(extent)
    assert tier.used_bytes == 0


def test_space_that_nobody_wrote_to_can_be_read(make):
    """A copy out that is canceled writes nothing."""
    tier = make()
    extent = tier.reserve(BLOCK_BYTES)
    assert len(read(tier, extent)) == BLOCK_BYTES
    tier.release(extent)


def test_extents_do_not_disturb_each_other(make):
    tier = make(16 * MIB)
    choices = random.Random(0)
    live = []
    for seed in range(60):
        size_bytes = usable(tier, choices.randint(1, 300_000))
        extent = tier.reserve(size_bytes)
        write(tier, extent, memory(size_bytes, seed))
        live.append((extent, seed))
        if len(live) > 10:
            tier.release(live.pop(choices.randrange(len(live)))[0])
    for extent, seed in live:
        assert read(tier, extent) == memory(extent.size_bytes, seed)


def test_a_tier_says_what_it_is(make):
    tier = make()
    extent = tier.reserve(BLOCK_BYTES)
    assert tier.name == tier.place.name != "device"
    assert tier.alignment_bytes in (1, BLOCK_BYTES)
    assert tier.file_name(extent.pieces[0])
    tier.release(extent)


def test_the_account_of_bytes(make):
    tier = make()
    assert tier.capacity_bytes == CAPACITY
    assert tier.used_bytes == tier.reserved_bytes == 0
    first, second = tier.reserve(100), tier.reserve(3 * BLOCK_BYTES)
    assert tier.used_bytes == 4 * BLOCK_BYTES
    assert tier.used_bytes <= tier.reserved_bytes <= tier.capacity_bytes == CAPACITY
    tier.release(first)
    assert tier.used_bytes == 3 * BLOCK_BYTES
    tier.release(second)
    assert tier.used_bytes == 0
    assert tier.capacity_bytes == CAPACITY


def test_every_byte_of_the_capacity_can_be_used_and_used_again(make):
    tier = make()
    for _ in range(2):
        extents = [tier.reserve(CAPACITY // 16) for _ in range(16)]
        assert tier.used_bytes == CAPACITY
        with pytest.raises(TierFullError, match=r"no room for 1 B"):
            tier.reserve(1)
        assert tier.used_bytes == CAPACITY
        tier.release(extents.pop(7))
        extents.append(tier.reserve(CAPACITY // 16))
        for extent in extents:
            tier.release(extent)
        assert tier.used_bytes == 0


@pytest.mark.parametrize("capacity", [CAPACITY, 12 * MIB])
def test_a_reservation_that_fails_takes_nothing(make, capacity):
    tier = make(capacity)
    with pytest.raises(TierFullError):
        tier.reserve(capacity + 1)
    assert tier.used_bytes == 0
    tier.release(tier.reserve(capacity // 2))


def test_closing_gives_everything_back_and_may_be_repeated(make):
    tier = make()
    tier.release(tier.reserve(BLOCK_BYTES))
    tier.close()
    tier.close()
    assert tier.reserved_bytes == 0


def test_an_extent_may_be_released_after_the_tier_was_closed(make):
    """Handles outlive their waterfall in a graph that nobody dropped yet."""
    tier = make()
    extent = tier.reserve(BLOCK_BYTES)
    tier.close()
    tier.release(extent)


def test_several_threads_at_once(make):
    tier = make(16 * MIB)
    failures = []

    def work(number):
        try:
            for round_number in range(12):
                round_trip(tier, usable(tier, 5000 * (1 + number) + round_number), seed=100 * number + round_number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert tier.used_bytes == 0


@pytest.mark.parametrize("fault", ["short_write", "short_read"])
def test_short_transfers_are_completed(faulty, fault):
    tier = faulty(**{fault: 0.9})
    for seed, size_bytes in enumerate([BLOCK_BYTES, 40 * BLOCK_BYTES, MIB]):
        round_trip(tier, size_bytes, seed)
    assert tier.injected[fault] > 0


@pytest.mark.parametrize(
    ("fault", "transfer", "error"), [("write_error", "write", TierWriteError), ("read_error", "read", TierReadError)]
)
def test_a_failed_transfer_says_what_and_where(faulty, fault, transfer, error):
    tier = faulty(**{fault: 1.0})
    tier.reserve(BLOCK_BYTES)
    piece = tier.reserve(3 * BLOCK_BYTES).pieces[0]
    with pytest.raises(error) as caught:
        getattr(tier, transfer)(piece, memory(3 * BLOCK_BYTES))
    raised = caught.value
    assert isinstance(raised, OSError)
    assert (raised.tier, raised.file) == (tier.name, tier.file_name(piece))
    assert (raised.offset, raised.size_bytes, raised.errno) == (piece.offset, 3 * BLOCK_BYTES, errno.EIO)
    assert isinstance(raised.__cause__, OSError)
    for part in (
        repr(tier.name),
        tier.file_name(piece),
        f"offset {piece.offset} ",
        f"{3 * BLOCK_BYTES} bytes",
        "[Errno 5]",
    ):
        assert part in str(raised)


@pytest.mark.parametrize(("transfer", "error"), [("write", TierWriteError), ("read", TierReadError)])
def test_a_transfer_that_fails_midway_names_the_rest(faulty, monkeypatch, transfer, error):
    tier = faulty()
    piece = tier.reserve(4 * BLOCK_BYTES).pieces[0]
    real = getattr(tier, f"_{transfer}_some")

    def some(piece, start, view):
        if start:
            raise OSError(errno.EREMOTEIO, "gone")
        return real(piece, start, view[:BLOCK_BYTES])

    monkeypatch.setattr(tier, f"_{transfer}_some", some)
    with pytest.raises(error, match="gone") as caught:
        getattr(tier, transfer)(piece, memory(4 * BLOCK_BYTES))
    assert (caught.value.offset, caught.value.size_bytes) == (piece.offset + BLOCK_BYTES, 3 * BLOCK_BYTES)


@pytest.mark.parametrize(("transfer", "error"), [("write", TierWriteError), ("read", TierReadError)])
def test_a_transfer_that_moves_nothing_fails(faulty, monkeypatch, transfer, error):
    tier = faulty()
    piece = tier.reserve(BLOCK_BYTES).pieces[0]
    monkeypatch.setattr(tier, f"_{transfer}_some", lambda *_: 0)
    with pytest.raises(error, match="only 0 of the bytes") as caught:
        getattr(tier, transfer)(piece, memory(BLOCK_BYTES))
    assert caught.value.errno is None
    assert (caught.value.offset, caught.value.size_bytes) == (piece.offset, BLOCK_BYTES)


def test_a_transfer_that_creeps_ends(faulty, monkeypatch):
    """Less than a block at a time: byte by byte where any length will do, an error where blocks are wanted."""
    tier = faulty()
    piece = tier.reserve(BLOCK_BYTES).pieces[0]
    counts = []
    monkeypatch.setattr(tier, "_write_some", lambda *_: counts.append(1) or 1)
    if tier.alignment_bytes == 1:
        tier.write(piece, memory(BLOCK_BYTES))
        assert len(counts) == BLOCK_BYTES
    else:
        with pytest.raises(TierWriteError, match="only 1 of the bytes"):
            tier.write(piece, memory(BLOCK_BYTES))
