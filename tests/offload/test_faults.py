"""Faults of the world in mid-step, and bad input: nothing is lost, and it is said once, or refused clearly."""

import errno
import gc
import os
import signal
import subprocess
import sys
import warnings
from unittest import mock

import pytest
import torch
from _helpers import everything_parked, num_changes
from torch import nn

from penstock import offload
from penstock.directio import SpillFile
from penstock.errors import (
    BudgetError,
    OffloadDeclinedWarning,
    PenstockWarning,
    TierDegradedWarning,
    TierReadError,
)
from penstock.offload import _learn
from penstock.tiers import Budget, Waterfall

SETTINGS = {"min_size": 0, "min_saving": 0.0, "max_stall": 1.0, "max_in_flight": "1MiB"}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())])


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


def train(model, offloader, steps=3):
    batch = torch.ones(512, 64)
    for _ in range(steps):
        model.zero_grad()
        with offloader:
            loss = model(batch).square().mean()
            for waterfall in offloader._waterfalls.values():
                waterfall.drain()  # so that nothing is forwarded from memory
            loss.backward()
    return gradients(model)


@pytest.fixture
def parked():
    with everything_parked():
        yield


@pytest.fixture
def expected():
    model = make_model()
    model(torch.ones(512, 64)).square().mean().backward()
    return gradients(model)


def same(left, right):
    return all(torch.equal(ours, theirs) for ours, theirs in zip(left, right, strict=True))


@pytest.mark.usefixtures("parked")
def test_a_full_disk_keeps_storages_and_says_so_once(tmp_path, expected):
    model = make_model()
    offloader = offload.activations(model, disk={tmp_path: "200KiB"}, **SETTINGS)
    with pytest.warns(TierDegradedWarning, match="stays on the device") as caught:
        assert same(train(model, offloader), expected)
    assert len(caught) == 1
    statistics = offloader.statistics()
    assert statistics.failed_bytes > 0
    assert offloader.tier_statistics().reserved_bytes["disk"] <= 200 * 1024
    offloader.close()


@pytest.mark.usefixtures("parked")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failing_write_keeps_storages_and_says_so_once(tmp_path, expected, monkeypatch, code):
    model = make_model()
    offloader = offload.activations(model, disk=tmp_path, **SETTINGS)

    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(SpillFile, "write", fail)
    with pytest.warns(TierDegradedWarning, match=os.strerror(code)) as caught:
        assert same(train(model, offloader), expected)
    assert len(caught) == 1
    assert offloader.statistics().failed_bytes > 0
    assert offloader.tier_statistics().num_failed_writes > 0
    offloader.close()


@pytest.mark.usefixtures("parked")
def test_a_failing_read_raises_from_backward_and_training_can_go_on(tmp_path, expected, monkeypatch):
    model = make_model()
    offloader = offload.activations(model, disk=tmp_path, **SETTINGS)

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(SpillFile, "read", fail)
        with pytest.raises(TierReadError, match="Input/output error") as caught:
            train(model, offloader)
    assert caught.value.errno == errno.EIO
    assert caught.value.tier == "disk"
    assert str(tmp_path) in caught.value.file
    del caught
    gc.collect()
    assert same(train(model, offloader), expected)
    offloader.close()


@pytest.mark.usefixtures("parked")
def test_a_corrupt_read_is_never_a_wrong_number(tmp_path, monkeypatch):
    model = make_model()
    offloader = offload.activations(model, disk=tmp_path, verify=True, **SETTINGS)
    read = SpillFile.read

    def corrupt(self, view, offset):
        count = read(self, view, offset)
        view[0] ^= 1
        return count

    monkeypatch.setattr(SpillFile, "read", corrupt)
    with pytest.raises(TierReadError, match="CRC-32"):
        train(model, offloader)
    offloader.close()


def test_a_killed_process_leaves_no_file(tmp_path):
    code = (
        "import sys, torch, penstock\n"
        "model = torch.nn.Linear(512, 512)\n"
        f"offloader = penstock.offload.activations(model, disk={str(tmp_path)!r}, min_size=0)\n"
        "with offloader:\n"
        "    loss = torch.tanh(model(torch.ones(512, 512))).sum()\n"
        "print('parked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    assert child.stdout.readline() == b"parked\n"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert list(tmp_path.iterdir()) == []


def test_directories_are_checked_when_the_offloader_is_made(tmp_path):
    with pytest.raises(FileNotFoundError, match="mkdir -p"):
        offload.activations(make_model(), disk=tmp_path / "missing")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is a file"):
        offload.activations(make_model(), disk=tmp_path / "file")


def test_without_permission_the_directory_is_named(tmp_path, monkeypatch):
    def refuse(*_arguments, **_keywords):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError, match=str(tmp_path)):
        offload.activations(make_model(), disk=tmp_path)


@pytest.mark.usefixtures("parked")
def test_without_direct_io_it_warns_and_works(tmp_path, expected, monkeypatch):
    system_open = os.open

    def refuse_direct(path, flags, *arguments, **keywords):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return system_open(path, flags, *arguments, **keywords)

    monkeypatch.setattr(os, "open", refuse_direct)
    model = make_model()
    with pytest.warns(TierDegradedWarning, match="O_DIRECT"):
        offloader = offload.activations(model, disk=tmp_path, **SETTINGS)
    assert same(train(model, offloader), expected)
    assert offloader.statistics().parked_bytes > 0
    offloader.close()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({}, "no place to offload to"),
        ({"disk": ".", "min_size": "six"}, "'six' is not a size"),
        ({"disk": ".", "budget": "6 bananas"}, "6GiB"),
        ({"disk": ".", "max_stall": 3}, "share between 0 and 1"),
        ({"disk": ".", "budget": Budget(disk=".")}, "not both"),
        ({"disk": 7}, "`disk` must be text, a path"),
        ({"disk": ".", "max_in_flight": -1}, "cannot be negative"),
    ],
)
def test_bad_settings_show_the_call_that_works(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        offload.activations(make_model(), **settings)


@pytest.mark.parametrize("given, words", [(lambda x: x, "the function <lambda>"), (3, "3 .int."), (None, "None")])
def test_what_is_no_module_is_named(given, words):
    with pytest.raises(TypeError, match=rf"`model` must be a torch.nn.Module, got {words}.*activations\(model, disk="):
        offload.activations(given, disk=".")


def test_host_memory_is_ignored_on_a_cpu_with_a_warning(tmp_path):
    with pytest.warns(PenstockWarning, match="ignored for a model on the CPU"):
        offload.activations(make_model(), disk=tmp_path, host="1GiB").close()


def test_a_budget_below_the_parameters_is_refused_at_once(tmp_path):
    with pytest.raises(BudgetError, match="needs at least .* because its parameters and gradients"):
        offload.activations(make_model(), disk=tmp_path, budget="100KiB")


def test_a_closed_offloader_says_so(tmp_path):
    offloader = offload.activations(make_model(), disk=tmp_path)
    offloader.close()
    offloader.close()
    with pytest.raises(ValueError, match="closed"), offloader:
        pass


@pytest.mark.parametrize(
    "settings, declines", [({"min_saving": 0.99}, True), ({"min_saving": 0.0, "max_stall": 1.0}, False)]
)
def test_it_declines_by_the_stated_inequality_and_says_so(tmp_path, expected, settings, declines):
    model = make_model()
    offloader = offload.activations(model, disk=tmp_path, **{**SETTINGS, **settings})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = train(model, offloader)
    assert same(result, expected)
    messages = [str(warning.message) for warning in caught if warning.category is OffloadDeclinedWarning]
    assert len(messages) == declines
    assert bool(offloader.statistics().declined) == declines
    if declines:
        assert "min_saving" in messages[0]
        before = offloader.tier_statistics().parked_bytes
        train(model, offloader)
        assert offloader.tier_statistics().parked_bytes == before
    offloader.close()


def test_a_small_batch_that_is_declined_does_not_speak_for_a_large_one(tmp_path):
    """Every kind of cycle has its plan; the one that is not worth it is kept, and said so once."""
    model = make_model()
    offloader = offload.activations(model, disk=tmp_path, **SETTINGS | {"min_saving": 0.3, "max_stall": 1.0})

    def step(size, rates):
        with mock.patch.object(Waterfall, "rates_bytes_per_s", return_value=(rates, rates)), offloader:
            model(torch.ones(size, 64)).square().mean().backward()
        return offloader.statistics()

    with pytest.warns(OffloadDeclinedWarning, match="min_saving") as caught:
        step(256, 1e3)
        step(257, 1e3)
    assert len(caught) == 1
    kept = step(256, 1e3)
    assert "min_saving" in kept.declined
    assert kept.parked_bytes == 0
    assert kept.kept_bytes["kept: offloading is declined"] > 0
    step(512, 1e12)
    large = step(512, 1e12)
    assert large.declined == ""
    assert large.parked_bytes > 0
    assert large.predicted_peak_bytes is not None
    assert step(256, 1e3).declined
    offloader.close()


def test_each_shape_of_batch_follows_its_own_plan(tmp_path):
    model = make_model()
    offloader = offload.activations(model, disk=tmp_path, **SETTINGS)
    sizes = [512, 300, 512, 300, 400, 300, 400, 512]
    with everything_parked():
        for index, size in enumerate(sizes):
            with offloader:
                model(torch.ones(size, 64)).square().mean().backward()
            is_planned = offloader.statistics().predicted_peak_bytes is not None
            assert is_planned == (size in sizes[:index]), index
    assert num_changes(offloader) == 0
    offloader.close()


def test_kinds_beyond_the_last_that_is_planned_for_still_train(tmp_path, monkeypatch):
    monkeypatch.setattr(_learn, "_MAX_LESSONS", 2)
    model = make_model()
    offloader = offload.activations(model, disk=tmp_path, **SETTINGS)
    with everything_parked():
        for size in [300, 400, 500, 300, 400, 500]:
            with offloader:
                model(torch.ones(size, 64)).square().mean().backward()
            assert offloader.statistics().parked_bytes + offloader.statistics().forwarded_bytes > 0
    assert offloader.statistics().predicted_peak_bytes is None
    assert len(offloader._learner._lessons) == 2
    offloader.close()


def test_an_offloader_that_cannot_be_made_leaves_the_model_as_it_was(tmp_path):
    model = make_model()
    with pytest.raises(FileNotFoundError, match="does not exist"):
        offload.activations(model, disk=tmp_path / "missing")
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
