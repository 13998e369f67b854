"""Accesses of one piece of host memory by streams and by the host, in the order in which they were asked for.

Work on a device runs when its stream comes to it. So before the host reads, it waits for the device's last write;
before it writes, for reads, too; and a stream waits for what other streams wrote, or, where it writes, read.
"""

import threading
from typing import Any, Protocol

import torch


class Marks(Protocol):
    """Marks in a device's streams: a small surface, so that a fake can stand in for it."""

    def stream(self, device: torch.device) -> Any:
        """The stream on which work of the calling thread is queued now."""

    def record(self, stream: Any) -> Any:
        """A mark after all that is on the stream so far."""

    def wait(self, stream: Any, mark: Any) -> None:
        """Lets later work on the stream wait for the mark."""

    def synchronize(self, mark: Any) -> None:
        """Blocks the calling thread until the device has passed the mark."""


class CudaMarks:
    """Those of CUDA."""

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The current one, read live."""
        return torch.cuda.current_stream(device)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """An event."""
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, mark: torch.cuda.Event) -> None:
        """On the device; the host goes on."""
        stream.wait_event(mark)

    def synchronize(self, mark: torch.cuda.Event) -> None:
        """On the host."""
        mark.synchronize()


class Order:
    """What devices have yet to do with one piece of memory."""

    def __init__(self, marks: Marks):
        self._marks = marks
        self._lock = threading.Lock()
        self._write: tuple[Any, Any] | None = None
        self._reads: dict[Any, Any] = {}

    def before_device(self, device: torch.device, *, writes: bool) -> None:
        """Lets the current stream wait for what other streams did first."""
        stream = self._marks.stream(device)
        with self._lock:
            others = [self._write] if self._write is not None else []
            others += self._reads.items() if writes else []
        for other, mark in others:
            if other != stream:
                self._marks.wait(stream, mark)

    def after_device(self, device: torch.device, *, writes: bool) -> None:
        """Notes what was just queued on the current stream."""
        stream = self._marks.stream(device)
        mark = self._marks.record(stream)
        with self._lock:
            if writes:
                self._write = (stream, mark)
                self._reads.clear()  # the write came after them
            else:
                self._reads[stream] = mark

    def before_host(self, *, writes: bool) -> None:
        """Blocks until the device has written, and where the host will write, has read."""
        if self._write is None and not self._reads:
            return
        with self._lock:
            marks = [self._write[1]] if self._write is not None else []
            marks += self._reads.values() if writes else []
        for mark in marks:
            self._marks.synchronize(mark)
        with self._lock:  # what came since from other threads has no order with us
            if self._write is not None and self._write[1] in marks:
                self._write = None
            if writes:
                self._reads = {stream: mark for stream, mark in self._reads.items() if mark not in marks}
