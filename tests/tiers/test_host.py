"""What only the host tier does: slabs, contiguous tensors, pinning."""

import copy
import errno
import os

import pytest
import torch

from penstock.devices._cuda import Cuda
from penstock.errors import TierDegradedWarning, TierFullError
from penstock.probe import ledger
from penstock.tiers import Budget, HostTier

PAGE = 4096


@pytest.fixture
def tier():
    tier = HostTier("1MiB", pinned=False)
    yield tier
    tier.close()


class Cudart:
    """Stands in for the CUDA runtime: counts, and answers what it is told to."""

    def __init__(self, answer):
        self.answer = answer
        self.registered, self.unregistered = [], []

    def cudaHostRegister(self, address, size_bytes, flags):
        self.registered.append((address, size_bytes))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def cudaHostUnregister(self, address):
        self.unregistered.append(address)


def test_an_extent_is_one_page_aligned_tensor(tier):
    extents = [tier.reserve(size) for size in (100, 5000, PAGE)]
    tensors = [tier.tensor(extent) for extent in extents]
    assert [tuple(tensor.shape) for tensor in tensors] == [(100,), (5000,), (PAGE,)]
    assert all(tensor.dtype is torch.uint8 and tensor.data_ptr() % PAGE == 0 for tensor in tensors)
    tensors[0].fill_(7)
    target = bytearray(100)
    tier.read(extents[0].pieces[0], memoryview(target))
    assert target == bytes([7]) * 100


def test_room_must_be_contiguous(tier):
    extents = [tier.reserve(PAGE) for _ in range(256)]
    for extent in extents[::2]:
        tier.release(extent)
    with pytest.raises(TierFullError, match="without a large enough gap"):
        tier.reserve(2 * PAGE)
    tier.release(extents[1])
    tier.reserve(3 * PAGE)


def test_slabs_are_as_large_as_the_capacity_allows(tier):
    tier.reserve(1)
    assert tier.reserved_bytes == 2**20
    assert not tier.is_pinned


@pytest.mark.parametrize("capacity", [0, 100, PAGE - 1])
def test_less_than_a_page_holds_nothing(capacity):
    tier = HostTier(capacity, pinned=False)
    with pytest.raises(TierFullError):
        tier.reserve(1)
    tier.close()


def test_a_large_reservation_gets_a_slab_of_its_own(monkeypatch):
    monkeypatch.setattr("penstock.tiers._host.SLAB_BYTES", 4 * PAGE)
    tier = HostTier(16 * PAGE, pinned=False)
    small, large = tier.reserve(1), tier.reserve(10 * PAGE)
    assert [extent.pieces[0].file for extent in (small, large)] == [0, 1]
    assert tier.reserved_bytes == 14 * PAGE
    assert tier.file_name(large.pieces[0]) == "slab 1"
    tier.close()


def test_the_ledger_knows_of_the_slabs(tier):
    before = ledger.held_bytes
    tier.reserve(1)
    assert ledger.held_bytes - before == 2**20
    tier.close()
    assert ledger.held_bytes == before


def test_the_budget_is_charged_for_slabs_and_credited_at_the_end():
    budget = Budget(host="64KiB")
    tier = HostTier("64KiB", pinned=False, budget=budget)
    tier.release(tier.reserve(1))
    assert budget.held_bytes("host") == tier.reserved_bytes
    tier.close()
    tier.close()
    assert budget.held_bytes("host") == 0


def test_a_spent_budget_is_a_full_tier():
    budget = Budget(host="64KiB")
    budget.charge("host", 2**16)
    tier = HostTier("64KiB", pinned=False, budget=budget)
    with pytest.raises(TierFullError, match="budget"):
        tier.reserve(1)
    tier.close()


def test_what_the_budget_has_left_is_room():
    """A slab shrinks to what others left of the budget."""
    budget = Budget(host="64KiB")
    budget.charge("host", 2**15)
    tier = HostTier("64KiB", pinned=False, budget=budget)
    tier.reserve(PAGE)
    assert budget.held_bytes("host") <= 2**16
    tier.close()


def test_memory_that_the_system_refuses_is_not_charged(monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr("penstock.devices._host_memory.mmap.mmap", refuse)
    budget = Budget(host="64KiB")
    tier = HostTier("64KiB", pinned=False, budget=budget)
    with pytest.raises(TierFullError, match="Cannot allocate memory"):
        tier.reserve(1)
    assert budget.held_bytes("host") == 0
    tier.close()


def test_a_tensor_outlives_the_tier(tier):
    tensor = tier.tensor(tier.reserve(100))
    tensor.fill_(3)
    tier.close()
    assert tensor.sum().item() == 300


@pytest.fixture
def install(monkeypatch):
    """Lets this machine have a CUDA device, as far as pinning goes."""

    def stand_in(answer):
        cudart = Cudart(answer)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
        monkeypatch.setattr("penstock.devices._pin.accelerator_type", lambda: "cuda")
        monkeypatch.setattr("penstock.devices._pin.backend_of", lambda _: Cuda(torch.device("cuda", 0)))
        return cudart

    return stand_in


def test_pinned_slabs_are_registered_once_and_unregistered(install):
    cudart = install(0)
    tier = HostTier("64KiB", pinned=True)
    extents = [tier.reserve(PAGE), tier.reserve(PAGE)]
    assert tier.is_pinned
    address = tier.tensor(extents[0]).data_ptr()
    assert cudart.registered == [(address, 2**16)]
    tier.close()
    assert cudart.unregistered == [address]


@pytest.mark.parametrize("answer", [2, RuntimeError("CUDA error: out of memory")])
def test_a_refusal_to_pin_warns_once_and_works(install, monkeypatch, answer):
    cudart = install(answer)
    monkeypatch.setattr("penstock.tiers._host.SLAB_BYTES", PAGE)
    tier = HostTier("64KiB", pinned=True)
    with pytest.warns(TierDegradedWarning, match="ulimit -l") as caught:
        extents = [tier.reserve(PAGE) for _ in range(3)]
    assert len(caught) == 1
    assert len(cudart.registered) == 3
    assert not tier.is_pinned
    assert tier.tensor(extents[2]).shape == (PAGE,)
    tier.close()
    assert cudart.unregistered == []


def test_a_closed_tier_takes_nothing_more():
    tier = HostTier("1MiB", pinned=False)
    tier.close()
    with pytest.raises(ValueError, match="this host tier is closed; make a new one"):
        tier.reserve(4096)
    tier.close()


def test_tiers_are_not_copied():
    tier = HostTier("1MiB", pinned=False)
    with pytest.raises(TypeError, match="a host tier cannot be copied or pickled"):
        copy.copy(tier)
    tier.close()
