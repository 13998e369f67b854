"""The times at which a device passed its events, in seconds of the host's clock."""

import time

from penstock.devices._backend import StreamEvent, Streams

_ANCHOR_S = 30.0
"""Longest use of an anchor: events give milliseconds as ``float32``, which after 30 s are exact to 2 us."""


class DeviceTimeline:
    """Timed events of one device on the clock of ``time.time()``, to compare them with those of the host."""

    def __init__(self, streams: Streams):
        self._streams = streams
        mark = streams.record(streams.create())
        streams.synchronize(mark)  # returns at once, since nothing else is on this stream
        self._mark, self._mark_s = mark, time.time()

    def host_s(self, event: StreamEvent) -> float:
        """Return when the device passed ``event``; it must have passed it."""
        past_s = self._streams.elapsed_s(self._mark, event)
        at_s = self._mark_s + past_s
        if past_s > _ANCHOR_S:
            self._mark, self._mark_s = event, at_s
        return at_s
