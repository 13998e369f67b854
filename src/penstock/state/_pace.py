"""The pace of the host, which must not run too far ahead of the device while pages wait for room."""

from collections import deque

from penstock.devices import StreamEvent, Streams

_MOST_AHEAD = 4
"""Operators on pages by which the host may be ahead of the device while a page waits for room."""


class Pace:
    """A brake for the host.

    In a step without a plan, the room of a page that leaves is only noticed once its copy is complete. So a host that
    is many operators ahead finds room only by making the device wait for copies out: then copies in, copies out and
    computation mostly take turns. Steps that follow a plan need no brake.
    """

    def __init__(self, streams: Streams | None):
        self._streams = streams
        self._marks: deque[StreamEvent] = deque()

    def hold(self) -> None:
        """Wait until the device has come close. Called for each operator at which a page waits for room."""
        if self._streams is None:
            return
        self._marks.append(self._streams.record(self._streams.current(), is_timed=False))
        if len(self._marks) > _MOST_AHEAD:
            mark = self._marks.popleft()
            if not self._streams.is_done(mark):
                self._streams.synchronize(mark)
