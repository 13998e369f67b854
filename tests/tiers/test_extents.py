"""The extent allocator against a set of blocks: whatever the order, no byte is handed out twice or lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InternalError
from penstock.tiers._extents import ExtentAllocator

ALIGNMENT = 16

OPERATION = st.one_of(
    st.tuples(st.sampled_from(["reserve", "scattered"]), st.integers(1, 20 * ALIGNMENT)),
    st.tuples(st.just("give back"), st.integers(0, 10**6)),
    st.tuples(st.just("grow"), st.integers(1, 8)),
)


class Account:
    """What must be true of the allocator, kept as a plain set of blocks."""

    def __init__(self):
        self.allocator = ExtentAllocator(alignment_bytes=ALIGNMENT)
        self.taken = set()
        self.live = []

    def take(self, ranges, asked):
        for offset, size in ranges:
            assert offset % ALIGNMENT == size % ALIGNMENT == 0
            assert offset >= 0
            assert offset + size <= self.allocator.capacity_bytes
            blocks = set(range(offset // ALIGNMENT, (offset + size) // ALIGNMENT))
            assert not blocks & self.taken, "handed out twice"
            self.taken |= blocks
        assert sum(size for _, size in ranges) == self.allocator.rounded(asked)
        self.live.append(ranges)

    def give_back(self, index):
        for offset, size in self.live.pop(index):
            self.allocator.give_back(offset, size)
            self.taken -= set(range(offset // ALIGNMENT, (offset + size) // ALIGNMENT))

    def apply(self, operation, number):
        allocator = self.allocator
        if operation == "reserve":
            largest = max((size for _, size in allocator._gaps), default=0)
            offset = allocator.reserve(number)
            assert (offset is None) == (largest < allocator.rounded(number))
            if offset is not None:
                self.take([(offset, allocator.rounded(number))], number)
        elif operation == "scattered":
            enough = allocator.free_bytes >= allocator.rounded(number)
            ranges = allocator.reserve_scattered(number)
            assert (ranges is not None) == enough
            if ranges is not None:
                self.take(ranges, number)
        elif operation == "grow":
            allocator.grow(number * ALIGNMENT)
        elif self.live:
            self.give_back(number % len(self.live))

    def check(self):
        allocator = self.allocator
        assert allocator.free_bytes == allocator.capacity_bytes - len(self.taken) * ALIGNMENT
        assert allocator.free_bytes == sum(size for _, size in allocator._gaps)
        ends = [offset + size for offset, size in allocator._gaps]
        starts = [offset for offset, _ in allocator._gaps]
        assert all(end < start for end, start in zip(ends, starts[1:], strict=False)), "gaps touch or are out of order"


@settings(deadline=None, max_examples=150, database=None)
@given(st.lists(OPERATION, max_size=60))
def test_any_order_of_calls(operations):
    account = Account()
    account.allocator.grow(32 * ALIGNMENT)
    for operation, number in operations:
        account.apply(operation, number)
        account.check()
    while account.live:
        account.give_back(0)
        account.check()
    assert account.allocator._gaps == [(0, account.allocator.capacity_bytes)], "not merged back into one gap"


@pytest.fixture
def allocator():
    allocator = ExtentAllocator(alignment_bytes=ALIGNMENT)
    allocator.grow(10 * ALIGNMENT)
    return allocator


@pytest.mark.parametrize(("asked", "taken"), [(1, 16), (15, 16), (16, 16), (17, 32), (160, 160)])
def test_a_reservation_takes_its_size_rounded_up_and_no_more(allocator, asked, taken):
    allocator.reserve(asked)
    assert allocator.free_bytes == 160 - taken


@pytest.mark.parametrize("size_bytes", [20, 32])
def test_the_size_asked_for_or_the_rounded_one_may_be_given_back(allocator, size_bytes):
    allocator.reserve(16)
    allocator.give_back(allocator.reserve(20), size_bytes)
    assert allocator._gaps == [(16, 144)]


@pytest.mark.parametrize(("offset", "size_bytes"), [(0, 32), (16, 16), (0, 16), (0, 160), (128, 64)])
def test_giving_back_twice_is_our_bug(allocator, offset, size_bytes):
    held = allocator.reserve(32)
    kept = allocator.reserve(96)
    allocator.give_back(held, 32)
    with pytest.raises(InternalError, match="given back twice"):
        allocator.give_back(offset, size_bytes)
    assert allocator.free_bytes == 64
    allocator.give_back(kept, 96)
    assert allocator._gaps == [(0, 160)]


def test_the_smallest_gap_that_fits_is_taken(allocator):
    ranges = [allocator.reserve(size) for size in (48, 16, 32, 16)]
    allocator.give_back(ranges[0], 48)
    allocator.give_back(ranges[2], 32)
    assert allocator.reserve(32) == ranges[2]
    assert allocator.reserve(48) in (ranges[0], 112)


def test_too_little_is_none(allocator):
    assert allocator.reserve(161) is None
    assert allocator.reserve_scattered(161) is None
    assert allocator.free_bytes == 160


def test_scattered_takes_gaps_that_do_not_touch(allocator):
    offsets = [allocator.reserve(16) for _ in range(10)]
    for offset in offsets[::2]:
        allocator.give_back(offset, 16)
    assert allocator.reserve(32) is None
    assert sum(size for _, size in allocator.reserve_scattered(80)) == 80
    assert allocator.free_bytes == 0
