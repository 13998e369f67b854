"""Times of a device's events on the host's clock."""

import pytest
import torch

from penstock import devices


class Clocked:
    """Streams of a device whose clock and the host's are one, with ``float32`` milliseconds as PyTorch tells them."""

    def __init__(self):
        self.now_s = 0.0

    def create(self):
        return self

    def record(self, stream):
        return self.now_s

    def synchronize(self, event):
        """It is over."""

    def elapsed_s(self, start, end):
        return torch.tensor((end - start) * 1e3, dtype=torch.float32).item() / 1e3


def test_a_devices_marks_are_on_the_hosts_clock_for_days(monkeypatch):
    streams = Clocked()
    monkeypatch.setattr("penstock.devices._timeline.time.time", lambda: 1e6 + streams.now_s)
    timeline = devices.DeviceTimeline(streams)
    for _ in range(20_000):
        streams.now_s += 10.0
        assert timeline.host_s(streams.record(streams)) == pytest.approx(1e6 + streams.now_s, abs=1e-3)
