"""Streams and the host access memory one after the other."""

import torch

from penstock.unified import _order


class FakeStreams:
    """Streams by name; a log of what waits for what."""

    def __init__(self):
        self.stream, self.log, self.count = "a", [], 0

    def current(self):
        return self.stream

    def record(self, stream, *, is_timed=True):
        self.count += 1
        return f"{stream}{self.count}"

    def wait(self, stream, mark):
        self.log.append((stream, mark))

    def synchronize(self, mark):
        self.log.append(("host", mark))


def test_accesses_stay_in_order():
    marks = FakeStreams()
    order, device = _order.DeviceOrder(lambda device: marks), torch.device("meta")

    def on(stream, *, writes):
        marks.stream = stream
        order.before_device(device, writes=writes)
        order.after_device(device, writes=writes)
        waits, marks.log = marks.log, []
        return waits

    def host(*, writes):
        order.before_host(writes=writes)
        waits, marks.log = marks.log, []
        return waits

    assert on("a", writes=False) == []  # a1
    assert host(writes=False) == []  # reads do not disturb reads
    assert on("b", writes=False) == []  # b2
    assert on("b", writes=True) == [("b", "a1")]  # b3 writes after what a reads
    assert on("b", writes=False) == []  # b4, behind its own write
    assert on("a", writes=False) == [("a", "b3")]  # a5
    assert host(writes=False) == [("host", "b3")]
    assert host(writes=False) == []  # passed
    assert sorted(host(writes=True)) == [("host", "a5"), ("host", "b4")]
    assert host(writes=True) == []
