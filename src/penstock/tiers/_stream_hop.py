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
from penstock.tiers._host_work import HostWork, StreamQueue
from penstock.tiers._lane import LaneJob
from penstock.tiers._lane_memory import LaneMemory


@dataclass(slots=True, eq=False)
class Transit:
    """A stream mover's record of one handle's copies: the events that they wait for."""

    home: Stream = None
    """The stream that owns the memory of the current copy."""
    produced: StreamEvent = None
    """Done when the bytes are ready to be copied out."""
    left: StreamEvent = None
    """Done when the bytes are in host memory."""
    ready: StreamEvent = None
    """Done when the memory of the copy in may be written."""
    arrived: StreamEvent = None
    """Done when the bytes are back on the device; set when that copy is queued."""
    is_queued: threading.Event | None = None
    """Set when ``arrived`` is set, or when there will be no such copy because it took another route or failed.

    ``None`` before the first copy in.
    """
    direct: LaneJob | None = None
    """The copy directly from device to disk, begun or finished."""

    def begin_in(self, home: Stream, ready: StreamEvent) -> None:
        """Start another copy in, into memory of the stream ``home``."""
        self.home, self.ready, self.arrived = home, ready, None
        self.is_queued = threading.Event()

    def note_queued(self) -> None:
        """Let go on who waits until the copy in is queued, or until there will be none."""
        if self.is_queued is not None:
            self.is_queued.set()


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


class Direction:
    """One direction of the hop: its stream, and the sum and the events of the copies that have finished on it."""

    def __init__(self, link: Link, kind: str, streams: Streams, stream: Stream, log: EventLog, times: DeviceTimeline):
        self.stream = stream
        self._streams = streams
        self._link = link
        self._kind = kind
        self._timeline = times
        self._events = log
        self._copied_bytes = 0
        self._busy_s = 0.0

    def note(self, copy: _Copy) -> None:
        """Record a finished copy: its duration by the device's clock, and when it ran."""
        taken_s, end_s = self._streams.elapsed_s(copy.started, copy.passed), self._timeline.host_s(copy.passed)
        self._copied_bytes += copy.size_bytes
        self._busy_s += taken_s
        self._events.add(
            lane=self._link.name,
            kind=self._kind,
            label=copy.handle.label,
            size_bytes=copy.size_bytes,
            start_s=end_s - taken_s,
            end_s=end_s,
        )

    def bytes_per_s(self) -> float | None:
        """Return bytes per second over the time in which copies ran; ``None`` before the first has finished."""
        return self._copied_bytes / self._busy_s if self._busy_s else None


class Stalls:
    """The waits of a device's streams for copies."""

    def __init__(self, streams: Streams):
        self._streams = streams
        self._waits: deque[tuple[StreamEvent, StreamEvent]] = deque()
        self._passed_s = 0.0

    def let_wait(self, stream: Stream, event: StreamEvent) -> None:
        """Make ``stream`` wait for a copy, and record how long the device waits, without asking whether it does."""
        start = self._streams.record(stream)
        self._streams.wait(stream, event)
        self._waits.append((start, self._streams.record(stream)))

    def sum_up(self) -> float:
        """Return the seconds that the streams have waited, and drop the events of waits that are over."""
        while self._waits and self._streams.is_done(self._waits[0][1]):
            self._passed_s += self._streams.elapsed_s(*self._waits.popleft())
        return self._passed_s


class StreamHop:
    """Copies between a device with streams and host memory, in both directions."""

    def __init__(self, streams: Streams, handles: Handles, events: EventLog):
        self.in_flight_bytes = 0
        """Bytes being copied out whose memory the device still holds."""
        self.peak_in_flight_bytes = 0
        """The highest value of ``in_flight_bytes``."""
        out, back = streams.create(), streams.create()
        times = DeviceTimeline(streams)
        self.out = Direction(Link(DEVICE, HOST), "park", streams, out, events, times)
        self.back = Direction(Link(HOST, DEVICE), "fetch", streams, back, events, times)
        self.stalls = Stalls(streams)
        self.queue = StreamQueue()
        """The work for the stream of copies in."""
        self._streams = streams
        self._handles = handles
        self._lock = threading.Lock()  # guards the copies in, which lane threads queue too
        self._leaving: deque[_Copy] = deque()
        self._passing: deque[_Copy] = deque()  # the device has given their storages up and waits for the copies
        self._arriving: deque[_Copy] = deque()

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
        stream = self.out.stream
        self._streams.wait(stream, transit.produced)
        started = self._streams.record(stream)
        self._streams.copy(stream, _start_of(target, handle.size_bytes), as_bytes(storage))
        transit.left = self._streams.record(stream)
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
        *,
        after: HostWork | None = None,
    ) -> None:
        """Queue the copy in, after the work that used its memory before, its own copy out, and work of the host's.

        May run on a lane thread.
        """

        def failed(error: RuntimeError) -> None:
            self._handles.arrived(handle, box, error)  # whoever waits for the bytes gets it
            transit.note_queued()

        self.queue.put(lambda: self._bring(handle, box, transit, source, on_passed), after, failed)

    def _bring(
        self,
        handle: Handle,
        box: Box,
        transit: Transit,
        source: torch.Tensor,
        on_passed: Callable[[], None] | None,
    ) -> None:
        stream = self.back.stream
        with self._lock:
            self._streams.wait(stream, transit.ready)
            if transit.left is not None:
                self._streams.wait(stream, transit.left)
            started = self._streams.record(stream)
            self._streams.copy(stream, as_bytes(box[0]), _start_of(source, handle.size_bytes))
            transit.arrived = self._streams.record(stream)
            self._arriving.append(_Copy(handle, box, transit, started, transit.arrived, source, on_passed))
        transit.note_queued()

    def let_oldest_leave(self) -> None:
        """Make the device wait for the oldest copy out, so that work queued from now on may use its memory."""
        self._let_leave(self._leaving[0])

    def let_leave(self, handle: Handle, memory: LaneMemory | None) -> None:
        """Do so for the copy out of a handle. If it leaves ``memory``, only that waits."""
        copy = next(copy for copy in self._leaving if copy.handle is handle)
        if memory is not None and memory.has(copy.box[0]):
            memory.give_back(copy.box[0].data_ptr(), copy.passed)
            self._pass(copy)
        else:
            self._let_leave(copy)

    def _let_leave(self, copy: _Copy) -> None:
        current = self._streams.current()
        self.stalls.let_wait(copy.transit.home, copy.passed)
        if current != copy.transit.home:  # this stream may have allocated the memory, and may get it back
            self.stalls.let_wait(current, copy.passed)
        self._pass(copy)

    def _pass(self, copy: _Copy) -> None:
        """Let the device have the memory of a copy out that is under way."""
        # Its space in the tier is in use until the copy has finished. That the device waits is not enough: the work of
        # another device that shares the tier does not wait for the copy.
        self._handles.begun(copy.handle)
        self._passing.append(copy)
        self._finish_leaving(copy)

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
        self.stalls.sum_up()
        while self._passing and self._streams.is_done(self._passing[0].passed):
            copy = self._passing.popleft()
            self.out.note(copy)
            self._handles.landed(copy.handle)
        while self._leaving and self._streams.is_done(self._leaving[0].passed):
            self.out.note(self._leaving[0])
            self._finish_leaving(self._leaving[0])
        while True:
            with self._lock:
                if not self._arriving or not self._streams.is_done(self._arriving[0].passed):
                    break
                copy = self._arriving.popleft()
            self.back.note(copy)
            if copy.on_passed is not None:
                copy.on_passed()
            self._handles.arrived(copy.handle, copy.box, None)

    def drain(self) -> None:
        """Block until all copies have finished, and report them."""
        self.queue.drain()
        for copies in (self._passing, self._leaving, self._arriving):
            for copy in list(copies):
                self._streams.synchronize(copy.passed)
        self.poll()

    def _finish_leaving(self, copy: _Copy) -> None:
        self._leaving.remove(copy)
        self.in_flight_bytes -= copy.size_bytes
        self._handles.left(copy.handle, copy.box, None)


def _start_of(memory: torch.Tensor, size_bytes: int) -> torch.Tensor:
    return memory if len(memory) == size_bytes else memory[:size_bytes]


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the storage as a ``uint8`` tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload, no-any-return]
