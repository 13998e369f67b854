"""The devices of this machine."""

import pytest
import torch
from notes import DEVICE, Notes

from penstock import devices


@pytest.fixture
def notes(monkeypatch):
    return Notes().install(monkeypatch)


@pytest.fixture
def alone(monkeypatch):
    """A machine without an accelerator."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)


def test_a_machine_without_an_accelerator(alone):
    assert devices.accelerator_type() is None
    assert devices.accelerators() == []
    assert devices.kinds() == ("cpu",)
    assert devices.used_device() == torch.device("cpu")
    for device in ("meta", "cuda", "cuda:0"):
        assert not devices.has_backend(torch.device(device))
        with pytest.raises(ValueError, match=rf"must be 'cpu' on this machine, got '{device[:4]}'"):
            devices.backend_of(device)


def test_accelerators_are_named_and_kept(notes):
    assert devices.kinds() == ("cpu", "cuda")
    assert devices.accelerators() == [torch.device("cuda", 0), DEVICE]
    assert devices.backend_of("cuda").device == DEVICE  # the current one
    assert devices.backend_of("cuda:1") is devices.backend_of(DEVICE)
    assert devices.used_device() == torch.device("cpu")  # nothing was made there
    with pytest.raises(ValueError, match="must be 'cpu' or 'cuda' on this machine, got 'meta'"):
        devices.backend_of("meta")


def test_an_accelerator_without_streams_is_none(monkeypatch):
    Notes().install(monkeypatch, kind="mps", count=1)
    assert devices.kinds() == ("cpu",)
    assert devices.accelerators() == []
