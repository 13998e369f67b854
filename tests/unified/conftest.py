import pytest

from penstock.unified import _disk, _draw, _graph, _rows, _store


@pytest.fixture(params=["compiled", "without a compiler"])
def either(request, monkeypatch):
    """With the C library, and as on a machine that has no compiler."""
    if request.param != "compiled":
        for module in (_disk, _draw, _graph, _rows, _store):
            monkeypatch.setattr(module, "library", lambda: None)
    return request.param
