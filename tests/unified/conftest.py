import pytest

from penstock.unified import _disk, _draw, _graph, _rows, _store, _tiered


@pytest.fixture(params=["compiled", "without a compiler"])
def either(request, monkeypatch):
    """With the C library, and as on a machine that has no compiler."""
    if request.param != "compiled":
        for module in (_disk, _draw, _graph, _rows, _store):
            monkeypatch.setattr(module, "library", lambda: None)
    return request.param


@pytest.fixture
def no_buffers(monkeypatch):
    """Else every table of a test would fit beside the buffers' bytes."""
    monkeypatch.setattr(_tiered, "buffer_bytes_for", lambda stride_bytes: 0)
