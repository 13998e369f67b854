"""Large blocks of main memory that are kept for the next tensors of their size."""

import subprocess
import sys
import threading

import pytest
import torch

from penstock import probe
from penstock.native import keep_freed_blocks, memory_library
from penstock.tiers import trim_freed_memory

MIB = 2**20
pytestmark = pytest.mark.skipif(memory_library() is None, reason="needs a C compiler")


@pytest.fixture(autouse=True)
def kept():
    """Eight MiB are kept, and nothing to begin with."""
    before = keep_freed_blocks(0)
    keep_freed_blocks(8 * MIB)
    yield
    keep_freed_blocks(before)


def made(size_bytes):
    """A tensor that was written to, and its address."""
    tensor = torch.ones(size_bytes, dtype=torch.uint8)
    return tensor, tensor.data_ptr()


IN_A_FRESH_PROCESS = """
import torch
from penstock.native import keep_freed_blocks
from penstock.tiers import trim_freed_memory
from penstock.tiers._malloc import give_back_freed_memory

give_back_freed_memory()  # so that malloc maps large blocks one by one
keep_freed_blocks(0)
keep_freed_blocks(8 * 2**20)

def made(size_bytes):
    tensor = torch.ones(size_bytes, dtype=torch.uint8)
    return tensor, tensor.data_ptr()

def mapped(address):
    with open("/proc/self/maps") as file:
        ranges = [line.split()[0].split("-") for line in file]
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)

pairs = [made(3 * 2**20) for _ in range(4)]
addresses = [address for _, address in pairs]
while pairs:
    del pairs[0]
assert [mapped(address) for address in addresses] == [False, False, True, True]
trim_freed_memory()
assert not any(map(mapped, addresses))

(large, address), small = made(9 * 2**20), made(2**18)[0]
del large, small
assert not mapped(address)  # more than the most
assert keep_freed_blocks(0) == 8 * 2**20
tensor, address = made(3 * 2**20)
del tensor
assert not mapped(address)
"""


def test_the_oldest_blocks_and_the_largest_go_back_to_the_system():
    """In a process whose heap has no room for them, or malloc would not map them."""
    subprocess.run([sys.executable, "-c", IN_A_FRESH_PROCESS], check=True)


def test_the_next_tensor_of_the_size_gets_the_block():
    tensor, address = made(3 * MIB)
    del tensor
    smaller = torch.empty(2 * MIB, dtype=torch.uint8)
    assert smaller.data_ptr() != address  # a third of it would be unused
    again = torch.empty(3 * MIB - 1000, dtype=torch.uint8)
    assert again.data_ptr() == address
    other = torch.empty(3 * MIB, dtype=torch.uint8)
    assert other.data_ptr() != address


def test_trimming_frees_what_is_kept_and_keeps_on():
    tensor, address = made(3 * MIB)
    del tensor
    trim_freed_memory()
    assert keep_freed_blocks(8 * MIB) == 8 * MIB
    tensor, address = made(3 * MIB)
    del tensor
    assert made(3 * MIB)[1] == address


def test_what_is_kept_is_counted_as_freed():
    def step():
        for _ in range(5):
            made(4 * MIB)

    step()
    peak = probe.peak_bytes(step)
    assert peak.peak_bytes - peak.start_bytes == 4 * MIB


def test_threads_take_and_give_at_once():
    errors = []

    def work(value):
        for number in range(300):
            tensor = torch.full((MIB + 4096 * (number % 7),), value, dtype=torch.uint8)
            if not bool((tensor == value).all()):
                errors.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
