"""Accesses of one piece of host memory by streams and by the host, in the order in which they were asked for.

Work on a device runs when its stream comes to it. So before the host reads, it waits for the device's last write;
before it writes, for reads, too; and a stream waits for what other streams wrote, or, where it writes, read.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch

from penstock.devices import Streams, backend_of


def _streams_of(device: torch.device) -> Streams:
    streams = backend_of(device).streams
    assert streams is not None
    return streams


class Order:
    """What devices have yet to do with one piece of memory."""

    def __init__(self, streams_of: Callable[[torch.device], Streams] = _streams_of):
        self._streams_of = streams_of
        self._lock = threading.Lock()
        self._write: _Access | None = None
        self._reads: dict[Any, _Access] = {}

    def before_device(self, device: torch.device, *, writes: bool) -> None:
        """Lets the current stream wait for what other streams did first."""
        streams = self._streams_of(device)
        stream = streams.current()
        for other, _, mark in self._pending(writes=writes):
            if other != stream:
                streams.wait(stream, mark)

    def after_device(self, device: torch.device, *, writes: bool) -> None:
        """Notes what was just queued on the current stream."""
        streams = self._streams_of(device)
        stream = streams.current()
        access = stream, streams, streams.record(stream, is_timed=False)
        with self._lock:
            if writes:
                self._write = access
                self._reads.clear()  # the write came after them
            else:
                self._reads[stream] = access

    def before_host(self, *, writes: bool) -> None:
        """Blocks until the device has written, and where the host will write, has read."""
        if self._write is None and not self._reads:
            return
        passed = self._pending(writes=writes)
        for _, streams, mark in passed:
            streams.synchronize(mark)
        with self._lock:  # what came since from other threads has no order with us
            if self._write in passed:
                self._write = None
            if writes:
                self._reads = {stream: one for stream, one in self._reads.items() if one not in passed}

    def _pending(self, *, writes: bool) -> list["_Access"]:
        """What an access comes after."""
        with self._lock:
            found = [] if self._write is None else [self._write]
            return found + (list(self._reads.values()) if writes else [])


_Access = tuple[Any, Streams, Any]
"""A stream, whose it is, and the mark behind the access."""
