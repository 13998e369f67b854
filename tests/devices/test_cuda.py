"""CUDA's own part of a device, in the order of its calls, with a runtime that takes notes."""

import pytest
import torch

from penstock.devices import _cuda
from penstock.devices._accelerator import Accelerator
from penstock.devices._cuda import Cuda

DEVICE = torch.device("cuda", 0)
PORTABLE_AND_MAPPED = 3


class Runtime:
    """CUDA's, as far as it registers memory of the host; a refusal stays behind until somebody's next launch."""

    def __init__(self):
        self.calls = []
        self.status = 0

    def cudaHostRegister(self, address, size_bytes, flags):
        self.calls.append(("register", address, size_bytes, flags))
        return self.status

    def cudaHostUnregister(self, address):
        self.calls.append(("unregister", address))
        return 0


@pytest.fixture
def runtime(monkeypatch):
    fake, zeros = Runtime(), torch.zeros

    def noted(*size, device=None, **options):
        if device == DEVICE:
            fake.calls.append(("launch",))
            raise RuntimeError("CUDA error: part or all of the requested memory range is already mapped")
        return zeros(*size, device=device, **options)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch, "zeros", noted)
    return fake


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda _: torch.cuda)
    return Cuda(DEVICE)


def test_it_overrides_what_its_docstring_lists():
    own = {name for name in vars(Cuda) if name in vars(Accelerator) or hasattr(Accelerator, name)} - set(vars(object))
    own -= {"__module__", "__doc__", "__abstractmethods__", "_abc_impl", "__firstlineno__", "__static_attributes__"}
    assert own == {"numa_node", "pinned_memory", "unpin", "register", "unregister"}
    assert all(f"`{name}`" in _cuda.__doc__ for name in own)


def test_pinned_memory_is_mapped_then_registered_at_its_exact_size(backend, runtime):
    memory = backend.pinned_memory(3 * 2**20 + 5)
    assert (memory.dtype, memory.nbytes) == (torch.uint8, 3 * 2**20 + 5)
    assert memory.data_ptr() % 4096 == 0
    address = memory.data_ptr()
    backend.unpin(memory)
    assert runtime.calls == [
        ("register", address, 3 * 2**20 + 5, PORTABLE_AND_MAPPED),
        ("unregister", address),
    ]
    assert memory.sum() == 0  # unpinned, and still memory


def test_a_refusal_is_forgotten_before_somebody_else_launches(backend, runtime):
    runtime.status = 712
    assert backend.pinned_memory(4096) is None
    assert [call[0] for call in runtime.calls] == ["register", "launch"]


def test_memory_that_exists_is_registered_where_it_is(backend, runtime):
    memory = torch.arange(100)
    assert backend.register(memory)
    backend.unregister(memory.data_ptr())
    assert runtime.calls == [
        ("register", memory.data_ptr(), 800, PORTABLE_AND_MAPPED),
        ("unregister", memory.data_ptr()),
    ]


def test_a_device_that_cannot_be_reached_pins_nothing(backend, monkeypatch):
    def no_context():
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", no_context)
    assert backend.pinned_memory(4096) is None
    assert not backend.register(torch.arange(3))
