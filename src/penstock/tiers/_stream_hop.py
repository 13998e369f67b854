"""The hop between device memory and pinned host memory: copies on two streams, one for each direction.

The host runs ahead of the device, so a copy is only queued here. `poll` notices which copies have finished.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.devices import DeviceTimeline, Stream, StreamEvent, Streams
from penstock.links import DEVICE, HOST, Link
from penstock.tiers._events import EventLog
from penstock.tiers._handle import Handle
from penstock.tiers._handles import Box, Handles
from penstock.tiers._transit import Transit


@dataclass(slots=True, eq=False)
class _Copy:
    """A copy that is queued on a stream and not yet known to have finished."""

    handle: Handle
    box: Box
    transit: Transit
    started: StreamEvent
    passed: StreamEvent
    source: torch.Tensor | None = None
    """For a copy in: the host memory that it reads, which may exist for this copy alone."""
    on_passed: Callable[[], None] | None = None
    """For a copy in: called when it has finished."""

    @property
    def size_bytes(self) -> int:
        return self.handle.size_bytes


class _Rate:
    """Bytes per second of the copies on one stream, by the device's own clock."""

    def __init__(self) -> None:
        self._copied_bytes = 0
        self._busy_s = 0.0

    def add(self, copy: _Copy, streams: Streams) -> None:
        self._copied_bytes += copy.size_bytes
        self._busy_s += streams.elapsed_s(copy.started, copy.passed)

    def bytes_per_s(self) -> float | None:
        return self._copied_bytes / self._busy_s if self._busy_s else None


class StreamHop:
    """Copies between a device with streams and host memory, in both directions."""

    way_out = Link(DEVICE, HOST)
    way_in = Link(HOST, DEVICE)

    def __init__(self, streams: Streams, handles: Handles, events: EventLog):
        self.in_flight_bytes = 0
        """Bytes being copied out whose memory the device still holds."""
        self.peak_in_flight_bytes = 0
        """The highest value of ``in_flight_bytes``."""
        self.out_rate, self.in_rate = _Rate(), _Rate()
        self._streams = streams
        self._handles = handles
        self._events = events
        self._out, self._in = streams.create(), streams.create()
        self._timeline = DeviceTimeline(streams)
        self._lock = threading.Lock()  # guards the copies in, which lane threads queue too
        self._leaving: deque[_Copy] = deque()
        self._passing: deque[_Copy] = deque()  # the device has given their storages up and waits for the copies
        self._arriving: deque[_Copy] = deque()
        self._stalls: deque[tuple[StreamEvent, StreamEvent]] = deque()
        self._stall_s = 0.0

    @property
    def has_leaving(self) -> bool:
        """Whether there is a copy out whose storage the device still holds."""
        return bool(self._leaving)

    @property
    def holds_handles(self) -> bool:
        """Whether it holds handles that nobody else may hold by now."""
        return bool(self._arriving or self._passing)

    def send(self, handle: Handle, storage: torch.UntypedStorage, transit: Transit, target: torch.Tensor) -> None:
        """Queue the copy out, into host memory of at least the storage's size, after the work that made the bytes."""
        self._streams.wait(self._out, transit.produced)
        started = self._streams.record(self._out)
        self._streams.copy(self._out, target[: handle.size_bytes], as_bytes(storage))
        transit.left = self._streams.record(self._out)
        self._leaving.append(_Copy(handle, [storage], transit, started, transit.left))
        self.in_flight_bytes += handle.size_bytes
        self.peak_in_flight_bytes = max(self.peak_in_flight_bytes, self.in_flight_bytes)

    def bring(
        self,
        handle: Handle,
        box: Box,
        transit: Transit,
        source: torch.Tensor,
        on_passed: Callable[[], None] | None = None,
    ) -> None:
        """Queue the copy in, after the work that used its memory before and its own copy out.

        May run on a lane thread.
        """
        with self._lock:
            self._streams.wait(self._in, transit.ready)
            if transit.left is not None:
                self._streams.wait(self._in, transit.left)
            started = self._streams.record(self._in)
            self._streams.copy(self._in, as_bytes(box[0]), source[: handle.size_bytes])
            transit.arrived = self._streams.record(self._in)
            self._arriving.append(_Copy(handle, box, transit, started, transit.arrived, source, on_passed))
        transit.is_queued.set()

    def let_wait(self, stream: Stream, event: StreamEvent) -> None:
        """Make ``stream`` wait for a copy, and record how long the device waits."""
        if self._streams.is_done(event):
            return
        start = self._streams.record(stream)
        self._streams.wait(stream, event)
        self._stalls.append((start, self._streams.record(stream)))

    def let_oldest_leave(self) -> None:
        """Make the device wait for the oldest copy out, so that work queued from now on may use its memory."""
        oldest, current = self._leaving[0], self._streams.current()
        self.let_wait(oldest.transit.home, oldest.passed)
        if current != oldest.transit.home:  # this stream may have allocated the memory, and may get it back
            self.let_wait(current, oldest.passed)
        self._handles.begun(oldest.handle)  # its space in the tier is in use until the copy has finished
        self._passing.append(oldest)
        self._finish_leaving()

    def let_go(self, transit: Transit) -> None:
        """Drop the reference to the storage of a copy in, once the computation was told to wait for that copy."""
        with self._lock:
            for copy in self._arriving:
                if copy.transit is transit:
                    copy.box.clear()

    def wait_for_a_copy(self) -> bool:
        """Block until a copy has finished whose end may free space; return ``False`` if there is none."""
        for copies in (self._arriving, self._passing, self._leaving):
            if copies:
                self._streams.synchronize(copies[0].passed)
                return True
        return False

    def poll(self) -> None:
        """Report the copies that have finished."""
        self._sum_stalls()
        while self._passing and self._streams.is_done(self._passing[0].passed):
            copy = self._passing.popleft()
            self._note(self.way_out, "park", copy, self.out_rate)
            self._handles.landed(copy.handle)
        while self._leaving and self._streams.is_done(self._leaving[0].passed):
            self._note(self.way_out, "park", self._leaving[0], self.out_rate)
            self._finish_leaving()
        while True:
            with self._lock:
                if not self._arriving or not self._streams.is_done(self._arriving[0].passed):
                    break
                copy = self._arriving.popleft()
            self._note(self.way_in, "fetch", copy, self.in_rate)
            if copy.on_passed is not None:
                copy.on_passed()
            self._handles.arrived(copy.handle, copy.box, None)

    def stall_s(self) -> float:
        """Return the seconds that the device's streams waited for copies."""
        self._sum_stalls()
        return self._stall_s

    def _sum_stalls(self) -> None:
        while self._stalls and self._streams.is_done(self._stalls[0][1]):
            self._stall_s += self._streams.elapsed_s(*self._stalls.popleft())

    def drain(self) -> None:
        """Block until all copies have finished, and report them."""
        for copies in (self._passing, self._leaving, self._arriving):
            for copy in list(copies):
                self._streams.synchronize(copy.passed)
        self.poll()

    def _finish_leaving(self) -> None:
        copy = self._leaving.popleft()
        self.in_flight_bytes -= copy.size_bytes
        self._handles.left(copy.handle, copy.box, None)

    def _note(self, link: Link, kind: str, copy: _Copy, rate: _Rate) -> None:
        """Record a finished copy: its duration by the device's clock, and when it ran."""
        rate.add(copy, self._streams)
        start_s, end_s = self._timeline.host_s(copy.started), self._timeline.host_s(copy.passed)
        label = copy.handle.label
        self._events.add(
            lane=link.name, kind=kind, label=label, size_bytes=copy.size_bytes, start_s=start_s, end_s=end_s
        )


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the storage as a ``uint8`` tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload, no-any-return]
