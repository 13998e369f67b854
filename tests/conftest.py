"""Fixtures for all tests."""

import contextlib
import gc
import os
import tempfile
from pathlib import Path

import pytest
import torch

from penstock.directio import memory_file_system


def pytest_configure():
    """Where /tmp is main memory, tests take a folder on a disk: nothing spills to memory."""
    if memory_file_system(tempfile.gettempdir()):
        folders = [Path("/var/tmp"), Path(__file__).parents[1] / "build"]
        for folder in folders:
            folder.mkdir(exist_ok=True)
            if not memory_file_system(folder) and os.access(folder, os.W_OK):
                os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
                return


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


@pytest.fixture
def one_thread():
    """OpenMP's threads wait by spinning, which starves lane threads where cores are few and tensors tiny."""
    with on_one_thread():
        yield


@pytest.fixture(scope="module")
def one_thread_for_the_module():
    """The same, for what other fixtures of a module compute once."""
    with on_one_thread():
        yield


@contextlib.contextmanager
def on_one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
