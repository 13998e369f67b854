"""Advice about memory is given to drivers that accept it."""

from types import SimpleNamespace

import pytest
import torch
from unified_cases import table

from penstock import unified
from penstock.unified import _advice


class FakeBindings:
    """``cuda.bindings.runtime`` of two versions."""

    cudaDeviceAttr = SimpleNamespace(cudaDevAttrPageableMemoryAccess="pageable")
    cudaMemoryAdvise = SimpleNamespace(cudaMemAdviseSetReadMostly=1, cudaMemAdviseSetPreferredLocation=3)
    cudaMemLocationType = SimpleNamespace(cudaMemLocationTypeHost="host", cudaMemLocationTypeDevice="device")
    cudaMemLocation = SimpleNamespace

    def __init__(self, version, pageable=1, error=0):
        self.CUDART_VERSION, self.pageable, self.error, self.calls = version, pageable, error, []

    def cudaDeviceGetAttribute(self, attribute, device):
        return 0, self.pageable

    def cudaMemAdvise(self, address, size, advice, where):
        self.calls.append((address, size, advice, where))
        return (self.error,)


def test_advice_is_given_where_it_is_heard(monkeypatch):
    wrapped = unified.wrap(table())
    assert not unified.advise(wrapped, "read mostly") or torch.cuda.is_available()
    with pytest.raises(ValueError, match="'read mostly', 'prefer host' or 'prefer device'"):
        unified.advise(wrapped, "fast")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    for fake, taken in ((FakeBindings(12090), True), (FakeBindings(13000), True), (FakeBindings(12090, 0), False),
                        (FakeBindings(12090, error=1), False)):  # fmt: skip
        monkeypatch.setattr(_advice, "_runtime", lambda fake=fake: fake)
        assert [unified.advise(wrapped, advice) for advice in ("read mostly", "prefer host", "prefer device")] == [
            taken
        ] * 3
        if taken:
            address, size, advice, where = zip(*fake.calls, strict=True)
            assert set(address) == {wrapped.cpu().data_ptr()} and set(size) == {400} and advice == (1, 3, 3)
            if fake.CUDART_VERSION < 13000:
                assert where == (-1, -1, 2)
            else:
                assert [(location.type, location.id) for location in where] == [("host", 0), ("host", 0), ("device", 2)]
