"""Copies in that begin when the host has finished something, and work of the host's that begins when copies have ended.

An update on the host reads what is copied out and writes what is copied in next. Nobody who issues copies waits for it:
the host's thread waits for the copies out by their events, and a copy in that comes too early is held back, with all
that its stream is given after it, so that the order of the stream stays as it was asked for.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.devices import StreamEvent, Streams


class HostWork(Protocol):
    """Work of another thread that writes to host memory."""

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""

    def wait(self) -> None:
        """Block until it has ended."""

    def when_done(self, call: Callable[[], None]) -> None:
        """Call a function when it has ended, in its thread, or now if it has."""


class Settling:
    """The copies that touched a handle's bytes at some moment. Any thread may ask for their end."""

    def __init__(self, streams: Streams | None = None, events: Sequence[StreamEvent] = ()):
        self._streams, self._events = streams, events

    @property
    def is_done(self) -> bool:
        """Whether they have ended."""
        return self._streams is None or all(self._streams.is_done(event) for event in self._events)

    def wait(self) -> None:
        """Block until they have ended."""
        for event in self._events:
            assert self._streams is not None
            self._streams.synchronize(event)


class StreamQueue:
    """Work for one stream, in order. From the first entry that the host's work holds back, all of it waits."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._held: deque[_Held] = deque()
        self._error: RuntimeError | None = None
        """The error of something that nobody waited for, for the next one who asks."""

    def put(
        self,
        give: Callable[[], None],
        after: HostWork | None = None,
        failed: Callable[[RuntimeError], None] | None = None,
    ) -> None:
        """Call ``give`` when ``after`` has ended and all before it was given.

        That may be in the thread of ``after``, where its error goes to ``failed``.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            is_free = after is None or after.is_done
            if is_free and not self._held:
                give()
                return
            self._held.append(_Held(give, after, failed))
        if after is not None and not is_free:
            after.when_done(self._go_on)

    def drain(self) -> None:
        """Block until everything was given."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held)

    def _go_on(self) -> None:
        with self._changed:
            while self._held and (self._held[0].after is None or self._held[0].after.is_done):
                held = self._held.popleft()
                try:
                    held.give()
                except RuntimeError as error:
                    if held.failed is None:
                        self._error = error
                    else:
                        held.failed(error)
            self._changed.notify_all()


@dataclass(slots=True)
class _Held:
    """An entry of a queue that was not given to its stream yet."""

    give: Callable[[], None]
    after: HostWork | None
    failed: Callable[[RuntimeError], None] | None
