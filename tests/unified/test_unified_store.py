"""Rows are read from their tiers by many threads, in forked processes, and until the store is closed."""

import os
import threading

import pytest
import torch
from unified_cases import large_table, tiered

from penstock import unified
from penstock.unified import _store

pytestmark = pytest.mark.usefixtures("no_buffers")


@pytest.mark.parametrize("index", [[3000], [-3001], [0, 5, 2**40]])
def test_rows_that_are_not_there(either, tmp_path, index):
    with (
        tiered(tmp_path, large_table(), 100) as features,
        pytest.raises(IndexError, match=f"index {index[-1]} at position"),
    ):
        features[torch.tensor(index)]
    with (
        unified.TieredFeatures(large_table()) as features,
        pytest.raises(IndexError, match=f"index {index[-1]} at position"),
    ):
        features[torch.tensor(index)]


@pytest.mark.parametrize("stored, scale", [(torch.float16, None), (torch.bfloat16, None), (torch.int8, torch.rand(9))])
def test_rows_widened_while_they_are_read(either, tmp_path, stored, scale):
    plain = large_table(dtype=stored)
    index = torch.randint(3000, (500,))
    with tiered(tmp_path, plain, 1000, dtype=torch.float32, scale=scale) as features:
        expected = plain[index].float() * (1 if scale is None else scale)
        assert torch.equal(features[index], expected)
        assert features.dtype is torch.float32
        assert features.plan.row_bytes == 9 * stored.itemsize


def test_hot_rows_are_the_most_wanted(tmp_path):
    scores = torch.rand(3000)
    wanted = scores.argsort(descending=True)
    with tiered(tmp_path, large_table(), 500, scores=scores) as features:
        assert features.plan.host_rows.tolist() == wanted[:500].sort().values.tolist()
        features[wanted[:500]]
        assert features.statistics().hit_rate == 1
        features[wanted[500:]]
        statistics = features.reset_statistics()
        assert (statistics.host_rows, statistics.disk_rows) == (500, 2500)
        assert statistics.disk_requests < 2500  # rows that lie together share a request
        assert features.statistics().host_rows == 0
        assert "16.7%" not in features.plan.explain() and "disk" in features.plan.explain()


def test_closing_waits_for_who_reads(tmp_path):
    """Never another file's bytes, and no crash."""
    plain, are_equal = large_table(), []
    features = tiered(tmp_path, plain, 5)

    def read():
        for _ in range(200):
            try:
                are_equal.append(torch.equal(features[torch.arange(3000)], plain))
            except ValueError:
                return

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    while len(are_equal) < 5:
        pass
    features.close()
    for thread in threads:
        thread.join()
    assert all(are_equal)


def test_reading_from_many_threads(tmp_path):
    plain = large_table()
    with tiered(tmp_path, plain, 500) as features:
        wrong = []

        def work(seed):
            generator = torch.Generator().manual_seed(seed)
            for _ in range(20):
                index = torch.randint(3000, (100,), generator=generator)
                if not torch.equal(features[index], plain[index]):
                    wrong.append(seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert features.statistics().host_rows + features.statistics().disk_rows == 6 * 20 * 100


def test_in_a_forked_child(tmp_path):
    plain = large_table()
    with tiered(tmp_path, plain, 500) as features:
        index = torch.arange(3000)
        child = os.fork()
        if not child:
            os._exit(0 if torch.equal(features[index], plain) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(features[index], plain)


def test_split_sorts_by_tier(either):
    places = torch.tensor([-1, 0, 2, -1, 1], dtype=torch.int32)
    (slots, positions), counts = _store.split(places, 1, torch.tensor([0, 1, 2, -1, -2, 1]))
    assert counts == [2, 2, 2]
    assert slots.tolist() == [0, 0, 1, 0, 0, 3]
    assert positions.tolist() == [1, 5, 2, 3, 0, 4]
