"""Fixtures for all tests."""

import gc

import pytest


@pytest.fixture(autouse=True)
def _bandwidth_cache_of_its_own(tmp_path_factory, monkeypatch):
    """No test reads or writes the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def collected():
    """Collects garbage before and after, so that counts of live objects mean something."""
    gc.collect()
    yield
    gc.collect()
