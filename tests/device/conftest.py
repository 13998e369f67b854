"""These tests train on an accelerator: on CUDA where there is one, on the simulated one by `--device sim`."""

import gc
import os

import pytest
import torch

from penstock.testing import simulated

HERE = "tests/device"
CONDITIONS = {
    "prompt": {},
    "delayed": {"delay_us": (0, 300), "poison": True, "late": 0.2},
    "lazy": {"lazy": True, "poison": True, "late": 1.0},
}
"""Of the simulated device. Hardware has its own."""


os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # budgets here are of models smaller than its 32 MiB
os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "128")


def pytest_collection_modifyitems(config, items):
    kind, reason = _kind(config)
    for item in items:
        if HERE not in str(item.path).replace("\\", "/"):
            continue
        item.add_marker(pytest.mark.device)
        if reason is None and kind == "sim" and item.get_closest_marker("cuda_only"):
            item.add_marker(pytest.mark.skip(reason=item.get_closest_marker("cuda_only").args[0]))
        elif reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def _kind(config):
    """The kind of device, and why these tests cannot run."""
    asked = config.getoption("--device")
    if asked == "sim":
        return "sim", simulated.why_not()
    if torch.cuda.is_available():
        return "cuda", None
    return "cuda", "needs a CUDA device, or `--device sim`"


@pytest.fixture(scope="session")
def kind(request):
    """The kind of device, which its name is too."""
    kind, _ = _kind(request.config)
    if kind == "sim":
        simulated.load()
    return kind


@pytest.fixture(params=CONDITIONS)
def device(request, kind):
    """The device, once under each of the conditions that are simulated; any race fails the test."""
    if kind != "sim":
        if request.param != "prompt":
            pytest.skip("conditions are simulated")
        yield kind
        return
    simulated.take_races()
    with simulated.conditions(**CONDITIONS[request.param]):
        yield kind
        gc.collect()
        torch.accelerator.synchronize()
    assert simulated.take_races() == []


@pytest.fixture
def prompt_device(kind):
    """The device under one condition, where others would show nothing more."""
    if kind == "sim":
        simulated.take_races()
    yield kind
    gc.collect()
    torch.accelerator.synchronize()
    if kind == "sim":
        assert simulated.take_races() == []


@pytest.fixture(autouse=True)
def _threads(kind):
    """Sums of the simulated device are the processor's: their order must not depend on its threads."""
    if kind == "sim":
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)
    else:
        yield
