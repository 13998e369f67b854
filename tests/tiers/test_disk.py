"""What only the disk tier does: several directories, scattered room, and a budget that others share."""

import errno
import gc
import os

import pytest

from penstock.directio import BLOCK_BYTES, SpillFile
from penstock.errors import TierDegradedWarning, TierFullError
from penstock.tiers import Budget, DiskTier

MIB = 2**20


@pytest.fixture
def directories(tmp_path):
    paths = [tmp_path / "first", tmp_path / "second"]
    for path in paths:
        path.mkdir()
    return paths


@pytest.mark.parametrize("disk", [None, [], {}])
def test_it_needs_a_directory(disk):
    with pytest.raises(ValueError, match=r"DiskTier\('/nvme'\)"):
        DiskTier(disk)


def test_requests_are_dealt_over_the_directories(directories):
    tier = DiskTier(dict.fromkeys(directories, "64MiB"), direct=False)
    extent = tier.reserve(40 * MIB)
    assert [piece.size_bytes for piece in extent.pieces] == [8 * MIB] * 5
    assert sorted(piece.file for piece in extent.pieces) in ([0, 0, 0, 1, 1], [0, 0, 1, 1, 1])
    assert all(first.file != second.file for first, second in zip(extent.pieces, extent.pieces[1:], strict=False))
    tier.close()


def test_a_full_directory_leaves_its_turn_to_the_others(directories):
    first, second = directories
    tier = DiskTier({first: "64KiB", second: "1MiB"}, direct=False)
    extents = [tier.reserve(64 * 1024) for _ in range(17)]
    assert sum(piece.file == 0 for extent in extents for piece in extent.pieces) == 1
    with pytest.raises(TierFullError) as caught:
        tier.reserve(1)
    assert all(str(directory) in str(caught.value) for directory in directories)
    tier.close()


def test_gaps_that_do_not_touch_are_room_too(tmp_path):
    tier = DiskTier({tmp_path: 16 * BLOCK_BYTES}, direct=False)
    extents = [tier.reserve(BLOCK_BYTES) for _ in range(16)]
    for extent in extents[::2]:
        tier.release(extent)
    scattered = tier.reserve(8 * BLOCK_BYTES - 5)
    assert len(scattered.pieces) == 8
    assert [piece.size_bytes for piece in scattered.pieces] == [BLOCK_BYTES] * 7 + [BLOCK_BYTES - 5]
    tier.release(scattered)
    assert tier.used_bytes == 8 * BLOCK_BYTES
    tier.close()


def test_the_budget_is_charged_for_what_the_file_takes_and_credited_at_the_end(tmp_path):
    budget = Budget(disk={tmp_path: "1MiB"})
    tier = DiskTier(budget.disk_bytes, budget=budget, direct=False)
    tier.release(tier.reserve(100))
    assert budget.held_bytes(str(tmp_path)) == tier.reserved_bytes > 0
    tier.close()
    tier.close()
    assert budget.held_bytes(str(tmp_path)) == 0


def test_two_tiers_share_a_budget_to_the_last_block(tmp_path):
    """Growing in large steps must not refuse what a small step would grant."""
    budget = Budget(disk={tmp_path: "300MiB"})
    first, second = (DiskTier(budget.disk_bytes, budget=budget, direct=False) for _ in range(2))
    first.reserve(BLOCK_BYTES)
    second.reserve(BLOCK_BYTES)
    assert budget.held_bytes(str(tmp_path)) <= 300 * MIB
    first.close()
    second.close()


def test_a_disk_that_fills_up_outside_of_us_is_a_full_tier(tmp_path, monkeypatch):
    budget = Budget(disk={tmp_path: "1MiB"})
    tier = DiskTier(budget.disk_bytes, budget=budget, direct=False)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("penstock.directio.os.posix_fallocate", full)
    with pytest.raises(TierFullError, match="No space left"):
        tier.reserve(100)
    assert budget.held_bytes(str(tmp_path)) == tier.used_bytes == 0
    tier.close()


def test_a_share_of_the_file_system_is_left_to_others(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path, direct=False)
    system = os.statvfs(tmp_path)  # of one moment, since other programs write and delete
    monkeypatch.setattr("penstock.tiers._disk.os.statvfs", lambda _: system)
    assert 0 <= tier.capacity_bytes <= system.f_bavail * system.f_frsize
    tier.close()


def test_a_file_system_without_direct_io_warns_and_works(tmp_path, monkeypatch):
    real = os.open

    def buffered(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr("penstock.directio.os.open", buffered)
    with pytest.warns(TierDegradedWarning, match=str(tmp_path)):
        tier = DiskTier({tmp_path: "1MiB"})
    assert not tier.is_direct
    assert tier.alignment_bytes == 1
    extent = tier.reserve(100)
    tier.write(extent.pieces[0], memoryview(b"x" * 100))
    target = bytearray(100)
    tier.read(extent.pieces[0], memoryview(target))
    assert target == b"x" * 100
    tier.close()


def test_asking_for_buffered_files_warns_of_nothing(tmp_path):
    tier = DiskTier({tmp_path: "1MiB"}, direct=False)
    assert not tier.is_direct
    tier.close()


def test_a_directory_that_cannot_be_used_leaves_no_file_open(tmp_path, monkeypatch):
    opened = []
    real = SpillFile.__init__

    def noted(spill, *args, **kwargs):
        real(spill, *args, **kwargs)
        opened.append(spill._descriptor)

    monkeypatch.setattr(SpillFile, "__init__", noted)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        DiskTier([tmp_path, tmp_path / "nowhere"])
    assert len(opened) == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


def test_closing_again_gives_nothing_back_twice(tmp_path):
    budget = Budget(disk=tmp_path)
    tier = DiskTier(tmp_path, budget=budget)
    tier.reserve(4096)
    assert budget.held_bytes(str(tmp_path)) > 0
    for _ in range(2):
        tier.close()
        assert budget.held_bytes(str(tmp_path)) == 0


def test_a_tier_that_nobody_has_any_more_is_closed(tmp_path):
    budget = Budget(disk=tmp_path)
    tier = DiskTier(tmp_path, budget=budget)
    tier.reserve(4096)
    del tier
    gc.collect()
    assert budget.held_bytes(str(tmp_path)) == 0


def test_a_buffer_that_is_too_small_is_refused(tmp_path):
    tier = DiskTier(tmp_path)
    (piece,) = tier.reserve(8192).pieces
    with pytest.raises(ValueError, match="`view` must have the 8192 bytes of the piece, got 4096"):
        tier.read(piece, memoryview(bytearray(4096)))
    tier.close()
