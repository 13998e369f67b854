"""Fixtures for all tests."""

import contextlib
import gc
import itertools
import json
import multiprocessing
import os
import platform
import shutil
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

from penstock.directio import memory_file_system
from penstock.testing import simulated

collect_ignore_glob = ["*conftest.py"]
"""They are loaded all the same, but not searched for doctests, for which those of two folders have one name."""


def pytest_addoption(parser):
    parser.addoption(
        "--slow-disk",
        type=float,
        metavar="MB_PER_S",
        help="let all direct reads and writes together move that many megabytes a second: no test may fail for it",
    )
    parser.addoption(
        "--device",
        choices=("cuda", "sim"),
        help="what tests/device train on: CUDA, as they do without it where there is one, or the simulated accelerator",
    )


BUILD = Path(__file__).parents[1] / "build" / "tests"
"""What is compiled for tests, and fonts that were looked for: kept from one run to the next, and by nobody else."""


def pytest_configure(config):
    if memory_file_system(tempfile.gettempdir()):
        _leave_main_memory()
    (BUILD / "native").mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ.setdefault("MPLCONFIGDIR", str(BUILD / "matplotlib"))
    cache = tempfile.mkdtemp(prefix="penstock-tests-")
    config.add_cleanup(lambda: shutil.rmtree(cache, ignore_errors=True))
    _compiled_in(Path(cache))
    os.environ["XDG_CACHE_HOME"] = cache
    if config.getoption("--device") == "sim" and simulated.why_not() is None:
        simulated.compile_device()  # once, before there are several processes
    # tests in several processes begin with what takes them seconds to import
    multiprocessing.set_forkserver_preload(
        [
            "torch.distributed.fsdp",
            "torch.distributed.pipelining",
            "torch.distributed.tensor.parallel",
            "penstock.offload",
            "benchmarks.fleet_peers",
            "benchmarks.gpu_items",
        ]
    )
    if config.getoption("--slow-disk") is not None:
        _slow_the_disk(config.getoption("--slow-disk") * 1e6)


def _leave_main_memory():
    """Where /tmp is main memory, tests take a folder on a disk: nothing spills to memory."""
    for folder in (Path("/var/tmp"), Path(__file__).parents[1] / "build"):
        folder.mkdir(exist_ok=True)
        if not memory_file_system(folder) and os.access(folder, os.W_OK):
            os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
            return


def _slow_the_disk(bytes_per_s):
    """In this process and in those forked from it; every byte that a tier moves passes through these two calls."""
    lock = threading.Lock()
    free_s = 0.0

    def take(size_bytes):
        nonlocal free_s
        with lock:
            free_s = max(free_s, time.monotonic()) + size_bytes / bytes_per_s
            wait_s = free_s - time.monotonic()
        time.sleep(max(0.0, wait_s))

    def slowed(call):
        def moved(descriptor, views, offset, *flags):
            take(sum(view.nbytes for view in map(memoryview, views)))
            return call(descriptor, views, offset, *flags)

        return moved

    os.pwritev, os.preadv = slowed(os.pwritev), slowed(os.preadv)


@pytest.fixture(scope="session")
def _known(tmp_path_factory):
    """What a machine that has run Penstock before knows, for all tests and the processes that they start.

    The disk is known to carry 1 GB/s, so that no plan depends on how busy it is, and nobody moves two gigabytes to
    find out.
    """
    root = tmp_path_factory.getbasetemp()
    lanes = [
        {"lane": lane, "bandwidth_bytes_per_s": 1e9, "is_direct": True, "measured_s": time.time()}
        for lane in ("device->disk", "disk->device")
    ]
    disks = {os.stat(path).st_dev for path in (root, Path.cwd(), tempfile.gettempdir())}
    return json.dumps({f"{platform.node()}/cpu/{disk}": lanes for disk in disks})


@pytest.fixture(autouse=True)
def _cache_of_its_own(_known, monkeypatch, tmp_path_factory):
    """No test reads or writes the user's cache."""
    cache = tmp_path_factory.getbasetemp() / f"cache-{next(_number)}"
    _compiled_in(cache)
    (cache / "penstock" / "bandwidths.json").write_text(_known)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return cache


_number = itertools.count()


def _compiled_in(cache):
    """Makes a cache in which everything that tests have compiled before is compiled."""
    (cache / "penstock").mkdir(parents=True)
    (cache / "penstock" / "native").symlink_to(BUILD / "native")


@pytest.fixture
def empty_cache(_cache_of_its_own):
    """For tests of what is measured or compiled when nothing is known yet, and of what they break in the cache."""
    shutil.rmtree(_cache_of_its_own / "penstock")


@pytest.fixture(autouse=True, scope="module")
def _old_objects_are_left_alone():
    """A collection looks at what a file's tests made, not at a million objects of libraries, which takes half a second.

    What lives when a file begins is never collected; its tests count none of that.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def capturing_is_imported():
    """Hundreds of thousands of objects, which are there before a file's tests begin, so that no collection sees them.

    It is the first capture that imports most of PyTorch's compiler.
    """
    torch.compile(torch.square, backend="aot_eager")(torch.ones(1, requires_grad=True)).backward()


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
