"""Host memory in huge pages."""

import mmap
from pathlib import Path

import pytest
import torch

from penstock.devices import want_huge_pages

MAPS = Path("/proc/self/smaps")


def wants_huge_pages(address):
    """Whether the kernel notes so of the mapping that holds an address."""
    begin, end = 0, 0
    for line in MAPS.read_text().splitlines():
        head = line.split(" ", 1)[0]
        if not head.endswith(":"):
            begin, end = (int(part, 16) for part in head.split("-"))
        elif head == "VmFlags:" and begin <= address < end:
            return "hg" in line.split()
    raise AssertionError("no such mapping")


@pytest.fixture(autouse=True)
def _needs_flags():
    if not MAPS.exists() or "VmFlags" not in MAPS.read_text():
        pytest.skip("the kernel does not tell the flags of mappings")


def mapped(size_bytes):
    return torch.frombuffer(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE), dtype=torch.uint8)


def test_large_memory_asks_for_huge_pages_and_keeps_its_contents():
    memory = mapped(8 * 2**20)
    memory[::4096] = torch.arange(2048).to(torch.uint8)
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("the kernel has no huge pages")
    want_huge_pages(memory)
    assert wants_huge_pages(memory.data_ptr() + 4 * 2**20)
    assert torch.equal(memory[::4096], torch.arange(2048).to(torch.uint8))


def test_only_whole_pages_inside_are_asked_for():
    area = mmap.mmap(-1, 16 * 2**20, flags=mmap.MAP_PRIVATE)
    memory = torch.frombuffer(area, dtype=torch.uint8, offset=4097, count=8 * 2**20)
    want_huge_pages(memory[4096:])  # of which the whole storage counts
    assert not wants_huge_pages(memory.data_ptr())
    assert wants_huge_pages(memory.data_ptr() + 4096)
    assert not wants_huge_pages(memory.data_ptr() + 8 * 2**20)


def test_small_memory_stays_as_it_is():
    memory = mapped(2**20)
    want_huge_pages(memory)
    assert not wants_huge_pages(memory.data_ptr())


def test_other_memory_is_refused():
    for other in (torch.empty(2**24, device="meta"), 4096, None):
        with pytest.raises((TypeError, ValueError), match="memory"):
            want_huge_pages(other)
