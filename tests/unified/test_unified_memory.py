"""Host memory is allocated at its exact size, registered once, and unregistered when nothing reaches it."""

import gc

import pytest
import torch
from unified_cases import table

from penstock import tiers, unified
from penstock.devices._cuda import Cuda
from penstock.errors import BudgetError, TierDegradedWarning
from penstock.probe import ledger
from penstock.unified import _tensor


def test_memory_of_exactly_its_size_on_one_account():
    budget = tiers.Budget(host="1MiB")
    before = ledger.held_bytes
    zeros = unified.empty(1000, 7, dtype=torch.float64, budget=budget)
    assert zeros.shape == (1000, 7) and (zeros.cpu() == 0).all()
    assert budget.held_bytes("host") == 56_000 == ledger.held_bytes - before
    with pytest.raises(BudgetError, match="budget of 1.0 MiB"):
        unified.empty((3000, 100), budget=budget)
    view = zeros[10:20]
    del zeros
    gc.collect()
    assert budget.held_bytes("host") == 56_000  # a view keeps it
    del view
    gc.collect()
    assert budget.held_bytes("host") == 0
    assert unified.empty(0, 3).shape == (0, 3)


class FakeRuntime:
    """What CUDA is asked to register."""

    def __init__(self, status=0):
        self.status, self.held, self.calls = status, {}, []

    def cudaHostRegister(self, address, size, flags):
        self.calls.append((address, size, flags))
        if self.status == 0:
            self.held[address] = size
        return self.status

    def cudaHostUnregister(self, address):
        del self.held[address]
        return 0


@pytest.fixture
def cuda(monkeypatch):
    """A machine with CUDA, as far as registering goes."""
    runtime = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr("penstock.devices._pin.accelerator_type", lambda: "cuda")
    monkeypatch.setattr("penstock.devices._pin.backend_of", lambda _: Cuda(torch.device("cuda", 0)))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self, device=None: False)
    return runtime


def test_memory_is_registered_once_at_its_exact_size_and_let_go(cuda):
    plain = table()
    wrapped = unified.wrap(plain)
    assert wrapped.is_registered
    assert cuda.held == {plain.data_ptr(): plain.nbytes}
    views = wrapped[2:], wrapped.detach()
    again = unified.wrap(wrapped, prefer="host")
    assert len(cuda.calls) == 1
    del wrapped, views
    gc.collect()
    assert cuda.held
    del again
    gc.collect()
    assert not cuda.held
    unified.empty(0)  # nothing to register
    assert len(cuda.calls) == 1


def test_memory_that_somebody_else_registered_is_theirs(cuda, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self, device=None: True)
    wrapped = unified.wrap(table())
    assert wrapped.is_registered
    assert not cuda.calls
    del wrapped
    gc.collect()  # not unregistered


def test_a_part_of_registered_memory_keeps_all_of_it(cuda, monkeypatch):
    plain = torch.zeros(1000)
    array = plain.numpy()
    whole = unified.wrap(plain)
    part = unified.wrap(torch.from_numpy(array[100:200]))
    assert len(cuda.calls) == 1 and part.is_registered
    del whole
    gc.collect()
    assert cuda.held  # the part needs it
    del part
    gc.collect()
    assert not cuda.held


def test_memory_that_is_wrapped_twice_is_registered_once(cuda):
    plain = table()
    first, second = unified.wrap(plain), unified.wrap(plain[3:])
    assert len(cuda.calls) == 1
    del first
    gc.collect()
    assert second.is_registered and cuda.held
    del second
    gc.collect()
    assert not cuda.held


def test_a_refused_registration_is_said_and_rows_are_gathered_by_the_cpu(cuda, monkeypatch):
    cuda.status = 2
    monkeypatch.setattr(_tensor, "_device", lambda: torch.device("meta"))
    with pytest.warns(TierDegradedWarning, match="ulimit -l") as caught:
        wrapped = unified.wrap(table())
    assert caught[0].filename == __file__
    assert torch.equal(wrapped[torch.tensor([3])], table()[3:4])
    with pytest.raises(ValueError, match="only rows can be read"):
        wrapped.in_place.on(torch.device("cuda", 0))
    with pytest.raises(ValueError, match="cannot read host memory in place"):
        wrapped.in_place.on(torch.device("xpu", 0))
