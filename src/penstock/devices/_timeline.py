"""When a device passed its marks, in seconds of the host's clock."""

import time

from penstock.devices._backend import StreamEvent, Streams

_ANCHOR_S = 30.0
"""An anchor is not used for longer: events tell milliseconds as ``float32``, of which 2 us are left after 30 s."""


class DeviceTimeline:
    """Timed events of one device on the clock of ``time.time()``, so that they can be laid beside what the host did."""

    def __init__(self, streams: Streams):
        self._streams = streams
        mark = streams.record(streams.create())
        streams.synchronize(mark)  # on a stream on which nothing else is, so at once
        self._mark, self._mark_s = mark, time.time()

    def host_s(self, event: StreamEvent) -> float:
        """When the device passed ``event``, which it has."""
        past_s = self._streams.elapsed_s(self._mark, event)
        at_s = self._mark_s + past_s
        if past_s > _ANCHOR_S:
            self._mark, self._mark_s = event, at_s
        return at_s
