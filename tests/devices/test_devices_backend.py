"""Peaks of an allocator that several watch."""

import torch
from notes import DEVICE

from penstock import devices
from penstock.devices._accelerator import AcceleratorAllocator


def test_each_watch_has_a_beginning_of_its_own(monkeypatch):
    """The allocator has one for the whole process."""
    highest = {"now": 100, "peak": 100}

    def stats(_):
        peaks = {"allocated": highest["peak"], "requested": highest["peak"] - 1, "reserved": 2 * highest["peak"]}
        return {f"{name}_bytes": {"all": {"peak": peak}} for name, peak in peaks.items()}

    monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_getDeviceStats", stats)

    def reset(_):
        highest["peak"] = highest["now"]

    def rise_to(peak):
        highest["peak"] = max(highest["peak"], peak)

    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", reset)
    allocator = AcceleratorAllocator(DEVICE)
    rise_to(900)
    with allocator.watching() as outer:
        rise_to(500)
        with allocator.watching() as inner:
            rise_to(300)
            assert inner.peaks() == devices.Peaks(300, 299, 600)
            inner.restart()
            rise_to(200)
            assert inner.peaks() == devices.Peaks(200, 199, 400)
        assert outer.peaks() == devices.Peaks(500, 499, 1000)
    assert allocator._watches == []
