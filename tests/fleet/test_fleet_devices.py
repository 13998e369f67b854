"""Devices of a fleet that this machine lacks."""

import pytest
import torch

from penstock.fleet import Device, Fleet, _devices


@pytest.mark.parametrize("device", ["cuda:0", "cuda", torch.device("cuda", 0), Device(name="cuda:0")])
def test_a_device_that_is_not_here_is_refused_by_name(monkeypatch, device):
    monkeypatch.setattr(_devices, "accelerators", list)
    with pytest.raises(
        ValueError, match=r"`devices` must name .*, got 'cuda.*PyTorch finds no accelerator here.*\['cpu'\]"
    ):
        Fleet(devices=[device], budget="1MiB")


def test_devices_that_are_here_are_named(monkeypatch):
    monkeypatch.setattr(_devices, "accelerators", lambda: [torch.device("cuda", index) for index in range(2)])
    with pytest.raises(ValueError, match=r"got 'cuda:2'; there are cuda:0, cuda:1 and cpu"):
        Fleet(devices=["cpu", "cuda:2"], budget="1MiB")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", ""])
def test_what_is_no_device_is_refused_in_a_line(name):
    with pytest.raises(ValueError, match=f"`devices` must name 'cpu' or accelerators, got '{name}'"):
        Fleet(devices=[name], budget="1MiB")
