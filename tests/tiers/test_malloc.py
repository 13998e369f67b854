"""Heaps are trimmed when the process has grown, and what they kept goes back to the system."""

import sys

import pytest
import torch

from penstock.tiers import HeapKeeper, _malloc


def test_it_trims_after_every_growth_by_the_slack(monkeypatch):
    held, trims = [100], []
    monkeypatch.setattr(_malloc, "resident_bytes", lambda: held[0])
    monkeypatch.setattr(_malloc, "trim_freed_memory", lambda: trims.append(held.__setitem__(0, held[0] - 30)))
    keeper = HeapKeeper(50)
    looks = []
    for now in (120, 150, 151, 160, 171, 172):
        held[0] = now
        looks.append(keeper.look())
    assert looks == [False, False, True, False, False, True]  # after the first it holds 121
    assert len(trims) == 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what is held is read from /proc")
def test_holes_go_back_to_the_system():
    blocks = [torch.ones(64 * 1024, dtype=torch.uint8) for _ in range(4000)]  # 256 MB, from the heap
    keeper = HeapKeeper(2**40)
    before = _malloc.resident_bytes()
    del blocks[::2]
    assert not keeper.look()
    if _malloc.trim_freed_memory():
        assert before - _malloc.resident_bytes() > 60e6
    assert all(bool(block.all()) for block in blocks)
