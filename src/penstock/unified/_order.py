"""The order of accesses to one piece of host memory by streams and by the host.

Work on a device runs later than it is queued. So before the host reads, it waits for the device's last write; before it
writes, it waits for reads too. A stream waits for what other streams have written, and, if it writes, for what they
read.
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


class DeviceOrder:
    """The pending accesses of devices to one piece of memory."""

    def __init__(self, streams_of: Callable[[torch.device], Streams] = _streams_of):
        self._streams_of = streams_of
        self._lock = threading.Lock()
        self._write: _Access | None = None
        self._reads: dict[Any, _Access] = {}

    def before_device(self, device: torch.device, *, writes: bool) -> None:
        """Make the current stream wait for earlier accesses by other streams."""
        streams = self._streams_of(device)
        stream = streams.current()
        for earlier, _, mark in self._pending(writes=writes):
            if earlier != stream:
                streams.wait(stream, mark)

    def after_device(self, device: torch.device, *, writes: bool) -> None:
        """Note the access that was just queued on the current stream."""
        streams = self._streams_of(device)
        stream = streams.current()
        access = stream, streams, streams.record(stream, is_timed=False)
        with self._lock:
            if writes:
                self._write = access
                self._reads.clear()  # the write came after them
            else:
                self._reads[stream] = access  # its mark also comes after this stream's earlier reads

    def before_host(self, *, writes: bool) -> None:
        """Block until the device has written, and, if the host will write, until it has read."""
        if self._write is None and not self._reads:
            return
        passed = self._pending(writes=writes)
        for _, streams, mark in passed:
            streams.synchronize(mark)
        with self._lock:  # accesses that other threads added meanwhile are not ordered with ours
            if self._write in passed:
                self._write = None
            if writes:
                self._reads = {stream: access for stream, access in self._reads.items() if access not in passed}

    def _pending(self, *, writes: bool) -> list["_Access"]:
        """Return the accesses that a new access must wait for."""
        with self._lock:
            writing = [] if self._write is None else [self._write]
            return writing + (list(self._reads.values()) if writes else [])


_Access = tuple[Any, Streams, Any]
"""A stream, its device's streams, and the event after the access."""
