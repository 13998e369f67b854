import functools

import pytest

from penstock.unified import _disk, _draw, _fill, _graph, _page_cache, _rows, _store, _tiered


@pytest.fixture(params=["compiled", "without io_uring", "without a compiler"])
def either(request, monkeypatch):
    """With the C library, with it where the kernel allows no io_uring, and as on a machine that has no compiler."""
    if request.param == "without a compiler":
        for module in (_disk, _draw, _graph, _rows, _store):
            monkeypatch.setattr(module, "library", lambda *_: None)
    elif request.param == "without io_uring":
        monkeypatch.setattr(_fill, "RowFiles", functools.partial(_disk.RowFiles, by_ring=False))
    return request.param


@pytest.fixture
def no_buffers(monkeypatch):
    """Else every table of a test would fit beside the buffers' bytes."""
    monkeypatch.setattr(_tiered, "buffer_bytes_for", lambda *_: 0)


@pytest.fixture
def no_page_cache(monkeypatch):
    """As if no page of a file were in the page cache."""
    monkeypatch.setattr(_page_cache.PageCache, "of", lambda *_: None)
