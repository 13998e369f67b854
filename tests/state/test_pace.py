"""The pace of the host: how far it may be ahead of the device while pages wait for room."""

from penstock.state._pace import _MOST_AHEAD, Pace


class Streams:
    """Marks are numbers; those below ``passed`` the device has passed."""

    def __init__(self):
        self.passed, self.marks, self.waited = 0, 0, []

    def current(self):
        return "current"

    def record(self, stream, *, is_timed):
        assert stream == "current"
        assert not is_timed
        self.marks += 1
        return self.marks - 1

    def is_done(self, mark):
        return mark < self.passed

    def synchronize(self, mark):
        self.waited.append(mark)
        self.passed = mark + 1


def test_the_host_waits_for_what_came_a_few_operators_before():
    streams = Streams()
    pace = Pace(streams)
    for _ in range(_MOST_AHEAD):
        pace.hold()
    assert streams.waited == []
    pace.hold()
    pace.hold()
    assert streams.waited == [0, 1]


def test_it_does_not_wait_for_a_device_that_is_close():
    streams = Streams()
    pace = Pace(streams)
    for _ in range(3 * _MOST_AHEAD):
        streams.passed = streams.marks
        pace.hold()
    assert streams.waited == []


def test_a_device_without_streams_is_never_behind():
    Pace(None).hold()
