"""The traffic of one waterfall after ``park``: what the methods of its handles do.

`Waterfall` is the way in, and makes the handles. Each handle then calls the `Traffic` that all of them share.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence

import torch

from penstock.errors import ForkedProcessError
from penstock.forks import renewed_in_child
from penstock.links import Link
from penstock.tiers._events import EventLog
from penstock.tiers._handle import Handle
from penstock.tiers._handles import Handles
from penstock.tiers._host_work import HostWork, Settling
from penstock.tiers._mover import Mover
from penstock.tiers._record import HandleState
from penstock.tiers._tier import Tier


class Traffic:
    """The copies that handles of one waterfall ask for, and how long the computation waited for them."""

    def __init__(self, tiers: Sequence[Tier], mover: Mover, handles: Handles, events: EventLog):
        self.handles = handles
        self.events = events
        self.stall_s = 0.0
        """Seconds that the computation has waited for copies, as far as the host knows."""
        self.device_changes: list[tuple[float, int]] | None = None
        """``(time.time(), change in bytes)`` of what handles hold on the device; a list if they are collected."""
        self.can_overwrite = mover.can_overwrite
        """Whether later bytes of a storage may go where its earlier ones are."""
        self.is_quiet = False
        """Whether `reap` does not ask the device."""
        self.is_closed = False
        """Whether the waterfall takes no more calls, because it is closed or being closed."""
        self.is_gone = False
        """Whether nobody calls ``reap`` any more."""
        self._tiers = tiers
        self._mover = mover
        self._abandoned: deque[Handle] = deque()
        self._is_forked_copy = False
        self._all.add(self)

    def _orphan(self) -> None:
        """Refuse further work, in a forked child."""
        self._is_forked_copy = True
        self.handles.lock = threading.RLock()

    _all = renewed_in_child(_orphan)

    def refuse_if_gone(self) -> None:
        """Raise an error in a forked child, and after ``close``."""
        if self._is_forked_copy:
            raise ForkedProcessError(
                "these parked bytes belong to the parent process; a forked child cannot fetch them. Compute in the "
                "process that parked, or start the child with multiprocessing's 'spawn' method."
            )
        if self.is_closed:
            raise ValueError(
                "this waterfall is closed, and the bytes parked in it are gone; close it after the last get()"
            )

    def begin_close(self) -> bool:
        """Refuse further calls; return whether there is something to close here."""
        if self._is_forked_copy or self.is_closed:
            return False
        self.is_closed = True
        return True

    def get(self, handle: Handle, into: torch.UntypedStorage | None = None) -> torch.UntypedStorage:
        """Return the storage, from memory or by a copy, and wait for it."""
        self.refuse_if_gone()
        self.reap()
        self._cancel_out(handle)
        storage = self.handles.forward(handle)
        if storage is not None:
            self._mover.hand_back(handle, storage)
            return storage
        if handle.record.state is HandleState.ARRIVING or self._start_in(handle, into):
            start_s = time.time()
            waited_s = self._mover.finish_in(handle)
            if waited_s:
                self.note_stall(handle, start_s, waited_s, is_back=True)
        storage = self.handles.take(handle)
        self.reap()  # the copy in held it as well; from now on only the caller holds it
        return storage

    def prefetch(self, handle: Handle, into: torch.UntypedStorage | None = None, after: HostWork | None = None) -> bool:
        """Begin a copy in, or keep bytes that are leaving; return ``False`` if the device has no memory for them."""
        self.refuse_if_gone()
        self._cancel_out(handle)
        if self.handles.want(handle):
            return True
        record = handle.record
        if record.state is not HandleState.PARKED or record.alive(handle.size_bytes) is not None:
            return record.state is not HandleState.RELEASED
        try:
            return self._start_in(handle, into, after)
        except RuntimeError:  # out of device memory; get() tries again when more is free, and raises if not
            return False

    def finish_out(self, handle: Handle) -> None:
        """Wait for the end of the copy out, if it is under way."""
        if handle.record.state is HandleState.LEAVING:
            start_s = time.time()
            waited_s = self._mover.finish_out(handle)
            if waited_s:
                self.note_stall(handle, start_s, waited_s, is_back=False)
        self.reap()

    def let_go(self, handle: Handle) -> None:
        """Let the copy out go on by itself, and count the device copy as gone."""
        if handle.record.state is HandleState.LEAVING:
            start_s = time.time()
            waited_s = self._mover.let_go(handle)
            if waited_s:
                self.note_stall(handle, start_s, waited_s, is_back=False)
        self.reap()  # storages that nobody else holds any more

    def before_write(self, handle: Handle) -> None:
        """Make the device wait for a copy out that still reads the storage."""
        if handle.record.state in (HandleState.LEAVING, HandleState.KEPT):
            self._mover.before_write(handle)

    def release(self, handle: Handle) -> None:
        """Give the space in the tier back, at once or when the last copy that touches it has ended."""
        self._cancel_out(handle)
        self.handles.release(handle)

    def abandon(self, handle: Handle) -> None:
        """Note a handle for release later: finalizers run anywhere, even while this thread holds the lock."""
        if self.is_gone:
            self.release(handle)  # nobody calls reap() any more, and its edges are still in memory
        elif not self._is_forked_copy:
            self._abandoned.append(handle)

    @property
    def has_abandoned(self) -> bool:
        """Whether ``reap`` has handles to release."""
        return bool(self._abandoned)

    def reap(self) -> None:
        """Drop device copies whose copy out is complete, and free the space of garbage-collected handles."""
        if not self.is_quiet:
            self._mover.poll()
        while self._abandoned:
            self.release(self._abandoned.popleft())
        leftovers = self.handles.leftovers
        while leftovers:
            handle, box = leftovers.popleft()
            box.clear()  # here, on the computing thread: its allocator and its profiler must see the memory go
            if handle is not None and handle.record.state is HandleState.PARKED and not handle.record.was_forwarded:
                self.note_change(-handle.size_bytes)

    def note_change(self, size_bytes: int) -> None:
        """Note that handles hold that many bytes more on the device."""
        if self.device_changes is not None:
            self.device_changes.append((time.time(), size_bytes))

    def note_stall(self, handle: Handle, start_s: float, waited_s: float, *, is_back: bool) -> None:
        """Record that the computation waited for a copy, out or back."""
        self.stall_s += waited_s
        room = handle.record.room
        link = self._mover.link_to(self._tiers[0] if room is None else room.tier)
        if is_back:
            link = Link(link.target, link.source)
        self.events.add(lane="compute", kind="stall", label=str(link), size_bytes=handle.size_bytes, start_s=start_s)

    def settling(self, handle: Handle) -> Settling:
        """Return the copies that touch the handle's bytes in host memory now."""
        return self._mover.settling(handle)

    def _start_in(self, handle: Handle, into: torch.UntypedStorage | None, after: HostWork | None = None) -> bool:
        """Begin a copy in and return whether it began; it does not if another thread has released the handle."""
        self.note_change(handle.size_bytes)  # before the allocation, so that sums never count it twice
        room = None
        try:
            storage = self._mover.allocate(handle, into)
            room = self.handles.call(handle, storage)
            if room is not None:
                self._mover.start_in(handle, storage, room, after)
        except BaseException:
            if into is not None:
                if into.nbytes():
                    self._mover.give_back(into)
                into.resize_(0)  # otherwise it would be taken for the bytes that are still in the tier
            self.note_change(-handle.size_bytes)
            if room is not None:
                self.handles.refuse(handle)
            raise
        if room is None:
            self.note_change(-handle.size_bytes)
        return room is not None

    def _cancel_out(self, handle: Handle) -> None:
        """Cancel the copy out if it has not begun, because the storage is wanted or no longer needed."""
        if handle.record.state is HandleState.LEAVING and self._mover.cancel_out(handle):
            self.handles.take_back(handle)
