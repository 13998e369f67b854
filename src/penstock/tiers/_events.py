"""The event type shared by all lanes, and the bounded log that keeps the events."""

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from penstock.arguments import checked
from penstock.links import Link


class Copy(Protocol):
    """The attributes of a copy that an event records."""

    @property
    def label(self) -> str:
        """Name of the bytes."""

    @property
    def size_bytes(self) -> int:
        """Size of the copy in bytes."""

    @property
    def start_s(self) -> float:
        """When it began, in seconds of ``time.time()``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A copy on a lane, or a wait of the computation for one, with its times."""

    lane: str
    """Name of the link, such as ``"device->disk"``; ``"compute"`` for a stall."""
    kind: str
    """``"park"``, ``"fetch"`` or ``"stall"``."""
    label: str
    """Name of the bytes, as the caller gave it: usually a module's name."""
    size_bytes: int
    """Bytes moved, or waited for."""
    start_s: float
    """When it began, in seconds of ``time.time()``."""
    end_s: float
    """When it ended, in the same seconds."""

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


class EventLog:
    """The last ``capacity`` events of all lanes, and the number ever recorded. Safe to use from any thread."""

    @checked("EventLog(capacity=100_000)", capacity=1)
    def __init__(self, capacity: int = 100_000):
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=capacity)
        self._num_recorded = 0

    @checked("log.add(lane='out', kind='copy', label='a', size_bytes=4096, start_s=0.0)")
    def add(
        self, *, lane: str, kind: str, label: str, size_bytes: int, start_s: float, end_s: float | None = None
    ) -> Event:
        """Record an event from ``start_s`` to ``end_s`` (``time.time()``); without ``end_s`` it ends now."""
        end_s = time.time() if end_s is None else end_s
        event = Event(lane=lane, kind=kind, label=label, size_bytes=size_bytes, start_s=start_s, end_s=end_s)
        with self._lock:
            self._events.append(event)
            self._num_recorded += 1
        return event

    @property
    def num_recorded(self) -> int:
        """Number of events recorded so far, including those no longer kept: a position for ``since``."""
        return self._num_recorded

    @checked("log.since(0)", position=0)
    def since(self, position: int = 0) -> tuple[Event, ...]:
        """Return the events recorded after ``position`` that are still kept."""
        with self._lock:
            skip = max(0, position - (self._num_recorded - len(self._events)))
            return tuple(self._events)[skip:]


def note_copy(events: EventLog, link: Link, kind: str, copy: Copy) -> None:
    """Record a copy over a link that ends now."""
    events.add(lane=link.name, kind=kind, label=copy.label, size_bytes=copy.size_bytes, start_s=copy.start_s)
