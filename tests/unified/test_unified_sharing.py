"""Rows that one process has read, kept for the others: what is read once, and what happens where a process fails."""

import ctypes
import os
import threading

import pytest
import torch

from penstock import unified
from penstock.errors import TierReadError
from penstock.storages import address
from penstock.unified import _sharing
from penstock.unified._disk import ReadReport, RowFiles
from penstock.unified._files import find_table
from penstock.unified._library import library
from penstock.unified._rows import RowType
from penstock.unified._sharing import SharedReads, num_slots_in

KIND = RowType((4,), torch.float32, torch.float32)
NUM_SLOTS = 64
SIZE_BYTES = 64 + NUM_SLOTS * (16 + 24)
pytestmark = pytest.mark.skipif(library("sharing") is None, reason="needs a C compiler")


class Rows:
    """Files with row ``r`` of the numbers ``4 r`` to ``4 r + 3``, which count what is read."""

    def __init__(self):
        self.read_rows, self.fails = [], False

    def read(self, rows, kind, out, positions):
        if self.fails:
            raise TierReadError(tier="disk", file="rows", offset=0, size_bytes=16, reason="Input/output error")
        self.read_rows += rows.tolist()
        values = 4 * rows[:, None] + torch.arange(4)
        out.view(-1, 4)[torch.arange(len(rows)) if positions is None else positions] = values.to(out.dtype)
        return ReadReport(num_requests=len(rows), read_bytes=16 * len(rows))


def look_up(reads, files, rows):
    rows = torch.tensor(rows)
    out = torch.full((len(rows), 4), -1.0)
    num_shared, _ = reads.read(files, rows, KIND, out, None)
    assert torch.equal(out, (4 * rows[:, None] + torch.arange(4)).float())
    return num_shared


def test_memory_holds_as_many_slots_as_fit():
    assert num_slots_in(SIZE_BYTES, 16) == NUM_SLOTS
    assert num_slots_in(SIZE_BYTES - 1, 16) == NUM_SLOTS - 8
    assert num_slots_in(0, 16) == 0


def test_a_row_is_read_once_by_all_who_map_the_memory():
    memory, files = torch.zeros(SIZE_BYTES, dtype=torch.uint8), Rows()
    first, second = SharedReads(memory, KIND), SharedReads(memory, KIND)
    assert look_up(first, files, [1, 2, 3]) == 0
    assert look_up(second, files, [3, 4, 1]) == 2
    assert files.read_rows == [1, 2, 3, 4]


def test_a_row_that_a_batch_needs_twice_is_read_once():
    memory, files = torch.zeros(SIZE_BYTES, dtype=torch.uint8), Rows()
    assert look_up(SharedReads(memory, KIND), files, [7, 7, 0, 7]) == 2
    assert files.read_rows == [7, 0]


def test_rows_go_to_their_positions():
    memory, files = torch.zeros(SIZE_BYTES, dtype=torch.uint8), Rows()
    reads, out = SharedReads(memory, KIND), torch.full((4, 4), -1.0)
    for _ in range(2):
        reads.read(files, torch.tensor([9, 5]), KIND, out, torch.tensor([3, 1]))
        assert out[:, 0].tolist() == [-1, 20, -1, 36]


def test_old_rows_make_room():
    memory, files = torch.zeros(SIZE_BYTES, dtype=torch.uint8), Rows()
    reads = SharedReads(memory, KIND)
    look_up(reads, files, range(1000))  # far more than there are slots for: some are read without one
    assert sorted(files.read_rows) == list(range(1000))
    files.read_rows.clear()
    look_up(reads, files, range(1000, 1016))
    assert look_up(reads, files, range(1000, 1016)) >= 12  # sets of eight slots may have more than their share
    for start in range(0, 10_000, 100):
        look_up(reads, files, range(start, start + 100))


def test_a_read_that_fails_gives_its_claims_up():
    memory, files, broken = torch.zeros(SIZE_BYTES, dtype=torch.uint8), Rows(), Rows()
    broken.fails = True
    with pytest.raises(TierReadError):
        look_up(SharedReads(memory, KIND), broken, [1, 2])
    assert look_up(SharedReads(memory, KIND), files, [1, 2]) == 0
    assert files.read_rows == [1, 2]


def claimed(memory, rows, kind=KIND):
    """Claims rows and never reads them, as a process that is killed."""
    reads = SharedReads(memory, kind)
    rows, verdicts = torch.tensor(rows), torch.empty(len(rows), dtype=torch.int8)
    claims, out = torch.empty(2, len(rows), dtype=torch.int64), torch.empty(len(rows), 4)
    library("sharing").penstock_sharing_look(
        ctypes.byref(reads._shared), address(rows), None, len(rows), address(out), address(verdicts),
        address(claims[0]), address(claims[1]),
    )  # fmt: skip
    return verdicts.tolist()


def test_a_process_that_has_ended_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(_sharing, "_PATIENCE_NS", 3600 * 10**9)
    memory, files = torch.zeros(SIZE_BYTES, dtype=torch.uint8).share_memory_(), Rows()
    child = os.fork()
    if not child:
        claimed(memory, [1, 2, 3])
        os._exit(0)
    os.waitpid(child, 0)
    assert claimed(memory, [2]) == [3]  # it is another's
    assert look_up(SharedReads(memory, KIND), files, [1, 2, 4]) == 0
    assert sorted(files.read_rows) == [1, 2, 4]
    assert look_up(SharedReads(memory, KIND), files, [1, 2]) == 2  # and has been published


def test_a_process_that_hangs_is_waited_for_only_so_long(monkeypatch):
    monkeypatch.setattr(_sharing, "_PATIENCE_NS", 10**7)
    memory, files = torch.zeros(SIZE_BYTES, dtype=torch.uint8), Rows()
    assert claimed(memory, [1, 2]) == [1, 1]  # by this process, which lives
    assert look_up(SharedReads(memory, KIND), files, [1, 2]) == 0
    assert files.read_rows == [1, 2]
    assert look_up(SharedReads(memory, KIND), files, [1, 2]) == 2


def test_slots_of_ended_processes_are_used_again():
    memory, files = torch.zeros(SIZE_BYTES, dtype=torch.uint8).share_memory_(), Rows()
    child = os.fork()
    if not child:
        claimed(memory, range(1000))  # all slots
        os._exit(0)
    os.waitpid(child, 0)
    look_up(SharedReads(memory, KIND), files, range(5000, 5010))
    assert look_up(SharedReads(memory, KIND), files, range(5000, 5010)) >= 8


def test_many_threads_get_right_rows():
    memory, files = torch.zeros(SIZE_BYTES, dtype=torch.uint8), Rows()
    wrong = []

    def work(seed):
        generator, reads = torch.Generator().manual_seed(seed), SharedReads(memory, KIND)
        for number in range(300):
            rows = torch.randint(40 + 10 * (number % 20), (20,), generator=generator)
            out = torch.empty(20, 4)
            reads.read(files, rows, KIND, out, None)
            if not torch.equal(out, (4 * rows[:, None] + torch.arange(4)).float()):
                wrong.append(rows)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and 0 < len(files.read_rows) < 6 * 300 * 20


def test_processes_that_are_killed_anywhere_leave_right_rows():
    """A hundred processes read rows of the same few sets, and are killed while they do."""
    memory = torch.zeros(SIZE_BYTES, dtype=torch.uint8).share_memory_()
    for number in range(100):
        child = os.fork()
        if not child:
            files, reads = Rows(), SharedReads(memory, KIND)
            while True:
                reads.read(files, torch.randint(200, (20,)), KIND, torch.empty(20, 4), None)
        for _ in range(1 + number % 5):
            look_up(SharedReads(memory, KIND), Rows(), torch.randint(200, (30,)).tolist())
        os.kill(child, 9)
        os.waitpid(child, 0)
    look_up(SharedReads(memory, KIND), Rows(), range(200))


def test_what_the_page_cache_has_is_not_looked_up(tmp_path):
    table = torch.arange(4000.0).view(-1, 4)
    unified.write_features(tmp_path / "rows", table)
    (tmp_path / "rows").read_bytes()
    files, memory = RowFiles([find_table(tmp_path / "rows")]), torch.zeros(SIZE_BYTES, dtype=torch.uint8)
    if not files.read(torch.arange(1000), KIND, torch.empty(1000, 4), None).num_cached:
        pytest.skip("the system does not tell what is in its page cache")
    reads, out = SharedReads(memory, KIND), torch.empty(8, 4)
    for _ in range(16):
        num_shared, (report,) = reads.read(files, torch.arange(8), KIND, out, None)
        assert num_shared == 0 and report.num_cached == 8 and torch.equal(out, table[:8])
    assert reads.read(files, torch.arange(8), KIND, out, None)[0] == 8  # once more, in case it has changed
