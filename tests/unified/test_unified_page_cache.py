"""Rows that the page cache holds are copied from it; all others are read past it, whatever else happens meanwhile."""

import ctypes
import mmap
import os
import resource
import threading

import numpy as np
import pytest
import torch
from unified_cases import numbers, room

from penstock import unified
from penstock.unified import _page_cache
from penstock.unified._disk import RowFiles
from penstock.unified._files import find_table
from penstock.unified._library import library
from penstock.unified._rows import RowType

pytestmark = [
    pytest.mark.usefixtures("no_buffers"),
    pytest.mark.skipif(library() is None, reason="no C compiler"),
]
NUM_ROWS = 2000


def drop(path):
    """Drop a file's pages from the page cache; skip the test where the file system keeps them."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    with mmap.mmap(descriptor, 0, mmap.MAP_PRIVATE) as pages:
        is_there = (ctypes.c_ubyte * -(-len(pages) // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(pages)
        ctypes.CDLL(None).mincore(ctypes.byref(start), ctypes.c_size_t(len(pages)), is_there)
        del start
    os.close(descriptor)
    if any(is_there):
        pytest.skip("this file system keeps its pages")


def touch(path, *pages):
    """Read single pages of a file through the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    for page in pages:
        os.pread(descriptor, 1, page * mmap.PAGESIZE)
    os.close(descriptor)


@pytest.fixture
def plain():
    return numbers((NUM_ROWS, mmap.PAGESIZE // 4))


@pytest.fixture
def path(tmp_path, plain):
    """A file with a page for each row, behind one for the header."""
    path = unified.write_features(tmp_path / "x.rows", plain)
    assert find_table(path).first_byte == find_table(path).stride_bytes == mmap.PAGESIZE
    return path


def opened(path, plain, *pages, **options):
    """Open a file of which these pages alone are cached; to read its header brings some of the first ones."""
    features = unified.TieredFeatures(path, host=room(len(plain), plain, 0), in_flight=0, **options)
    drop(path)
    touch(path, *pages)
    return features


def test_what_is_cached_needs_no_disk(path, plain):
    index = torch.randint(-NUM_ROWS, NUM_ROWS, (500,), generator=torch.Generator().manual_seed(1))
    with opened(path, plain) as features:
        assert torch.equal(features[index], plain[index])
        first = features.reset_statistics()
        assert (first.cached_rows, first.disk_rows) == (0, 500) and first.disk_read_bytes >= first.disk_row_bytes > 0
    with opened(path, plain, *range(1, NUM_ROWS + 1)) as features:
        assert torch.equal(features[index], plain[index])
        warm = features.statistics()
        assert (warm.cached_rows, warm.disk_rows, warm.disk_requests, warm.disk_s) == (500, 0, 0, 0.0)
        assert warm.hit_rate == 0  # nothing was held, which is what a plan speaks of


def test_each_row_comes_from_where_it_is(path, plain):
    cached = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(2))[:300]
    with opened(path, plain, *(1 + cached).tolist()) as features:
        assert torch.equal(features[torch.arange(NUM_ROWS)], plain)
        assert features.statistics().cached_rows == 300
        assert features.statistics().disk_rows == NUM_ROWS - 300
        features.reset_statistics()
        assert torch.equal(features[cached], plain[cached])
        assert features.statistics().disk_rows == 0  # reading the others has not changed what is cached


def test_a_row_needs_all_of_its_pages(tmp_path):
    plain = numbers((900, 1500))  # rows of 6,000 bytes, which begin anywhere
    np.save(tmp_path / "x.npy", plain.numpy())
    table = find_table(tmp_path / "x.npy")
    with opened(tmp_path / "x.npy", plain, *range(0, table.end_byte // mmap.PAGESIZE, 2)) as features:
        assert torch.equal(features[torch.arange(900)], plain)
        assert features.statistics().cached_rows == 0
    begins = [table.first_byte + row * table.stride_bytes for row in range(900)]
    whole = [begin >= 100 * mmap.PAGESIZE and begin + table.row_bytes <= 140 * mmap.PAGESIZE for begin in begins]
    with opened(tmp_path / "x.npy", plain, *range(100, 140)) as features:
        assert torch.equal(features[torch.arange(900)], plain)
        assert features.statistics().cached_rows == sum(whole) > 20


@pytest.mark.parametrize("stored, scale", [(torch.float16, None), (torch.bfloat16, None), (torch.int8, 0.5)])
def test_cached_rows_are_widened(tmp_path, stored, scale):
    plain = numbers((NUM_ROWS, 300), stored)
    path = unified.write_features(tmp_path / "x.rows", plain)
    with opened(path, plain, dtype=torch.float32, scale=scale) as features:
        path.read_bytes()
        index = torch.randint(NUM_ROWS, (1500,))  # enough for several threads
        assert torch.equal(features[index], plain[index].float() * (scale or 1))
        assert features.statistics().cached_rows == 1500


def test_rows_of_several_files(tmp_path, plain):
    paths = [unified.write_features(tmp_path / f"{number}.rows", plain[number::3]) for number in range(3)]
    files, kind = RowFiles([find_table(path) for path in paths]), RowType(plain.shape[1:], plain.dtype, plain.dtype)
    for path in paths:
        drop(path)
    paths[1].read_bytes()
    index = torch.randint(NUM_ROWS, (700,), generator=torch.Generator().manual_seed(3))
    out, places = kind.empty(700), torch.randperm(700)
    report = files.read(index, kind, out, places)
    assert torch.equal(out[places], plain[index])
    assert report.num_cached == int((index % 3 == 1).sum()) > 0
    files.close()


def test_pages_that_leave_are_noticed(path, plain):
    with opened(path, plain, *range(1, NUM_ROWS + 1)) as features:
        index = torch.arange(0, NUM_ROWS, 4)
        assert torch.equal(features[index], plain[index])
        assert features.reset_statistics().cached_rows == len(index)
        pages = features._store.files._cache._maps[0].base
        pages.obj.madvise(mmap.MADV_DONTNEED) if isinstance(pages, memoryview) else pages.madvise(mmap.MADV_DONTNEED)
        drop(path)
        assert torch.equal(features[index], plain[index])  # some were still believed to be there
        features.reset_statistics()
        others = index + 1
        assert torch.equal(features[others], plain[others])
        assert features.statistics().cached_rows < len(others) // 4


def test_a_file_of_somebody_else(path, plain, monkeypatch):
    """The system says that all of it is cached, so a few pages are sampled."""
    monkeypatch.setattr(_page_cache, "is_told_of", lambda _: False)
    index = torch.arange(0, NUM_ROWS, 4)
    with opened(path, plain) as features:
        for _ in range(20):
            assert torch.equal(features[index], plain[index])
        assert features.statistics().cached_rows == 0
        cache = features._store.files._cache
        assert cache._next_s > 0 and cache._wait_s == 2.0  # it was looked at once, for one page
        features.reset_statistics()
        path.read_bytes()
        cache._next_s = 0.0
        assert torch.equal(features[index], plain[index])
        assert features.statistics().cached_rows == len(index)
        cache.learn(num_rows=100, num_faults=50)
        assert cache.usable(1000) is None


def test_a_sample_takes_a_page_where_little_is_cached(path, plain, monkeypatch):
    monkeypatch.setattr(_page_cache, "is_told_of", lambda _: False)
    with opened(path, plain) as features:
        features[torch.arange(NUM_ROWS)]
    monkeypatch.undo()
    kind = RowType(plain.shape[1:], plain.dtype, plain.dtype)
    files = RowFiles([find_table(path)])
    report = files.read(torch.arange(10, NUM_ROWS), kind, kind.empty(NUM_ROWS - 10), None)  # behind the header's pages
    files.close()
    assert report.num_cached <= 1


def test_a_kernel_without_io_uring(path, plain):
    """Where no ring can be opened, threads read."""
    with opened(path, plain) as features:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, before[1]))
        try:
            rows = features[torch.arange(NUM_ROWS)]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert torch.equal(rows, plain)


def test_threads_and_children_share_what_is_known(path, plain):
    results = []

    def read(features, seed):
        for number in range(20):
            index = torch.randint(NUM_ROWS, (300,), generator=torch.Generator().manual_seed(100 * seed + number))
            results.append(torch.equal(features[index], plain[index]))

    with opened(path, plain, *range(1, NUM_ROWS, 2)) as features:
        threads = [threading.Thread(target=read, args=(features, seed)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [True] * 80
        assert features.statistics().cached_rows > 1000
        child = os.fork()
        if not child:
            torch.set_num_threads(1)  # OpenMP's threads are not there
            os._exit(0 if torch.equal(features[torch.arange(NUM_ROWS)], plain) else 1)
        assert os.waitpid(child, 0)[1] == 0
