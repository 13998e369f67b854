"""The waterfall: storages leave the device for the first tier that has room, and come back byte for byte.

What happens to each handle is in `_handles.py`, under one lock; how bytes move is the mover's business
(`_memory_mover.py` where the device is main memory, `_stream_mover.py` for accelerators). Rules kept here:

- The device copy is dropped only after the copy out is complete, and by the computing thread alone, so that its
  allocator and its profiler see it.
- A storage somebody still holds is handed back from memory (forwarding), never read.
- No room, or a failed copy out: the storage stays where it is, one warning is given, and a counter shows it.
- A failed copy in raises at ``get``; no other bytes are ever returned.
"""

import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch

from penstock.arguments import checked
from penstock.errors import ForkedProcessError, InternalError, TierDegradedWarning, TierFullError
from penstock.links import Link
from penstock.tiers._events import EventLog
from penstock.tiers._handle import Handle, HandleState
from penstock.tiers._handles import Handles
from penstock.tiers._room import Room
from penstock.tiers._statistics import TierStatistics
from penstock.tiers._tier import Tier


class Mover(Protocol):
    """How bytes move between one device and the tiers. Called by the computing thread, never under the lock.

    It reports to the `Handles` of its waterfall how copies end.
    """

    max_in_flight_bytes: int
    """Bound on the bytes on their way out. Changed by ``bound_in_flight``."""

    @property
    def has_staging(self) -> bool:
        """Whether bytes on their way out take as much host memory."""

    def bound_in_flight(self, size_bytes: int) -> None:
        """Lets that many bytes be on their way out at once."""

    def link_to(self, tier: Tier) -> Link:
        """The first link from the device on the way to ``tier``, for events."""

    @property
    def in_flight_peak_bytes(self) -> int:
        """The most bytes that were on their way out at once."""

    def make_room(self, size_bytes: int) -> float:
        """Waits until ``size_bytes`` more may be on their way out; returns the seconds the computation waited."""

    def reserve(self, tiers: Sequence[Tier], handle: Handle) -> Room:
        """Room for the handle in the first tier that has it. Raises ``TierFullError``."""

    @property
    def holds_handles(self) -> bool:
        """Whether it holds handles for copies that go on after ``park`` or ``get``; they may be nobody's by now."""

    def wait_for_a_copy(self) -> bool:
        """Waits for a copy whose end may give room back; ``False`` when there is none to wait for."""

    def start_out(self, handle: Handle, storage: torch.UntypedStorage, room: Room) -> None:
        """Begins the copy out. Raises ``RuntimeError`` where it cannot; then there is none."""

    def cancel_out(self, handle: Handle) -> bool:
        """Takes a copy out back, if it has not begun."""

    def hand_back(self, handle: Handle, storage: torch.UntypedStorage) -> None:
        """Lets the computation use ``storage``, which has not left, on a stream other than the one that parked it."""

    def finish_out(self, handle: Handle) -> float:
        """Waits for the copy out, or lets the device wait; returns the seconds the computation waited."""

    def before_write(self, handle: Handle) -> None:
        """Lets the device's later work wait until the copy out has read the storage."""

    def allocate(self, handle: Handle, into: torch.UntypedStorage | None = None) -> torch.UntypedStorage:
        """Memory on the device for a copy in. Raises ``RuntimeError`` where there is none."""

    def start_in(self, handle: Handle, storage: torch.UntypedStorage, room: Room) -> None:
        """Begins the copy into ``storage``. Raises ``RuntimeError`` where it cannot; then there is none."""

    def finish_in(self, handle: Handle) -> float:
        """Lets the computation wait for the copy in; returns the seconds it waited."""

    def rates_bytes_per_s(self) -> tuple[float | None, float | None]:
        """What the way out and the way in carried while busy; ``None`` before anything went that way."""

    def poll(self) -> None:
        """Notices finished copies."""

    def borrow(self, handle: Handle, original: Handle, room: Room) -> Room:
        """A way to ``room``, that of ``original``, which another mover has filled, for ``handle``."""

    def device_stall_s(self) -> float:
        """Seconds that the device's own queue waited for copies, beside what ``make_room`` and ``finish_in`` report."""

    def drain(self) -> None:
        """Waits for all copies."""

    def close(self) -> None:
        """Drains and ends the lanes."""


class Waterfall:
    """Parks storages of one device in the first of ``tiers`` that has room. Made by ``waterfall_for``.

    ``park`` and the handles' ``get`` belong to the computing thread; several may compute, one after another.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        mover: Mover,
        handles: Handles,
        events: EventLog,
        *,
        not_ours: Sequence[Tier] = (),
    ):
        self.tiers = tuple(tiers)
        self._not_ours = tuple(not_ours)
        self.events = events
        self._mover = mover
        self._handles = handles
        self._abandoned: deque[Handle] = deque()
        self.device_changes: list[tuple[float, int]] | None = None
        """Set to a list to collect ``(seconds of time.time(), change in bytes)`` of what handles hold on the device."""
        self._has_warned = False
        self._is_forked_copy = self._is_closed = self._is_gone = False
        self._stall_s = 0.0
        _waterfalls.add(self)

    @checked("waterfall.park(tensor.untyped_storage())")
    def park(self, storage: torch.UntypedStorage, label: str = "") -> Handle:
        """Begins to copy ``storage`` out and returns its handle, which keeps the storage alive until that is done.

        Waits while too many bytes are on their way. The storage must not be written to before the copy is done; whoever
        shares it checks versions. Where no tier has room the handle keeps the storage (state ``KEPT``).
        """
        self._refuse_if_gone()
        handle = Handle(self, storage, label)
        self._handles.add()
        self._note_change(handle.size_bytes)
        start_s = time.time()
        waited_s = self._mover.make_room(handle.size_bytes)
        if waited_s:
            self._note_stall(handle, start_s, waited_s, is_back=False)
        self.reap()
        try:
            room = self._reserve(handle)
        except TierFullError as error:
            self._handles.keep(handle, str(error))
        else:
            self._handles.give(handle, room)
            try:
                self._mover.start_out(handle, storage, room)
            except RuntimeError as error:  # nothing has begun: no thread or no event to be had
                self._handles.keep(handle, str(error))
        self._warn_of_troubles()
        return handle

    @checked("waterfall.borrow(handle)")
    def borrow(self, original: Handle) -> Handle:
        """A handle on this device to bytes that another waterfall of the same tiers parked; nothing is copied.

        The room is that of ``original``, which the new handle keeps alive. Raises ``InternalError`` unless ``original``
        ``is_settled``.
        """
        room = original._room
        if room is None or not original.is_settled:
            raise InternalError(f"{original!r} cannot be borrowed: its copy out has not ended")
        handle = Handle(self, torch.UntypedStorage(0), original.label)
        self._handles.lend(handle, original, self._mover.borrow(handle, original, room))
        self._handles.add()
        return handle

    def reap(self) -> None:
        """Drops device copies whose copy out is complete, and gives back the room of abandoned handles."""
        self._mover.poll()
        while self._abandoned:
            self._release(self._abandoned.popleft())
        leftovers = self._handles.leftovers
        while leftovers:
            gone, box = leftovers.popleft()
            box.clear()
            if gone is not None and gone._state is HandleState.PARKED and not gone._was_forwarded:
                self._note_change(-gone.size_bytes)

    def drain(self) -> None:
        """Waits for all copies under way and drops what they free."""
        self._mover.drain()
        self.reap()
        self._warn_of_troubles()

    def statistics(self) -> TierStatistics:
        """Sums since the beginning."""
        self.reap()
        with self._handles.lock:
            return TierStatistics(
                **self._handles.counts,
                stall_s=self._stall_s + self._mover.device_stall_s(),
                in_flight_peak_bytes=self._mover.in_flight_peak_bytes,
                held_bytes={tier.name: tier.used_bytes for tier in self.tiers},
                reserved_bytes={tier.name: tier.reserved_bytes for tier in self.tiers},
            )

    def counts(self) -> dict[str, int]:
        """The sums alone, from any thread."""
        with self._handles.lock:
            return dict(self._handles.counts)

    @property
    def stall_s(self) -> float:
        """Seconds the computation has waited for copies, as far as the host knows."""
        return self._stall_s

    @property
    def max_in_flight_bytes(self) -> int:
        """How many bytes may be on their way out at once: the computation waits above it."""
        return self._mover.max_in_flight_bytes

    @property
    def has_staging(self) -> bool:
        """Whether bytes on their way out take as much host memory, so that it bounds them."""
        return self._mover.has_staging

    @checked("waterfall.bound_in_flight(2**27)", size_bytes=0)
    def bound_in_flight(self, size_bytes: int) -> None:
        """Lets that many bytes be on their way out from now on, and staging memory grow with it."""
        if size_bytes != self._mover.max_in_flight_bytes:
            self._mover.bound_in_flight(size_bytes)

    def rates_bytes_per_s(self) -> tuple[float | None, float | None]:
        """Bandwidth out of and into the device while copies were under way; ``None`` before there were any."""
        return self._mover.rates_bytes_per_s()

    def close(self) -> None:
        """Waits for the copies, ends the lanes and closes the tiers, but for those of the user's own.

        What is parked can no longer be fetched.
        """
        if self._is_forked_copy or self._is_closed:
            return
        self._is_closed = True
        self._mover.close()
        self.reap()
        for tier in self.tiers:
            if tier not in self._not_ours:
                tier.close()
        self._is_gone = True
        self.reap()

    def _reserve(self, handle: Handle) -> Room:
        while True:
            may_come_back = self._handles.num_leaving_room or self._mover.holds_handles  # first: it may end meanwhile
            try:
                return self._mover.reserve(self.tiers, handle)
            except TierFullError:
                if self._abandoned or (may_come_back and self._mover.wait_for_a_copy()):
                    self.reap()
                elif may_come_back:
                    return self._mover.reserve(self.tiers, handle)
                else:
                    raise

    def _get(self, handle: Handle, into: torch.UntypedStorage | None = None) -> torch.UntypedStorage:
        self._refuse_if_gone()
        self.reap()
        self._cancel_out(handle)
        storage = self._handles.forward(handle)
        if storage is not None:
            self._mover.hand_back(handle, storage)
            return storage
        if handle._state is HandleState.ARRIVING or self._start_in(handle, into):
            start_s = time.time()
            waited_s = self._mover.finish_in(handle)
            if waited_s:
                self._note_stall(handle, start_s, waited_s, is_back=True)
        storage = self._handles.take(handle)
        self.reap()  # the copy in held it as well; from now on its life is the caller's affair
        return storage

    def _finish_out(self, handle: Handle) -> None:
        if handle._state is HandleState.LEAVING:
            start_s = time.time()
            waited_s = self._mover.finish_out(handle)
            if waited_s:
                self._note_stall(handle, start_s, waited_s, is_back=False)
        self.reap()

    def _before_write(self, handle: Handle) -> None:
        if handle._state in (HandleState.LEAVING, HandleState.KEPT):
            self._mover.before_write(handle)

    def _prefetch(self, handle: Handle, into: torch.UntypedStorage | None = None) -> bool:
        self._refuse_if_gone()
        self._cancel_out(handle)
        if self._handles.want(handle):
            return True
        if handle._state is not HandleState.PARKED or handle._alive() is not None:
            return handle._state is not HandleState.RELEASED
        try:
            return self._start_in(handle, into)
        except RuntimeError:  # out of device memory; get() tries again when more is free, and raises if not
            return False

    def _start_in(self, handle: Handle, into: torch.UntypedStorage | None) -> bool:
        """Whether a copy in has begun: not of what another thread has released meanwhile."""
        self._note_change(handle.size_bytes)  # before the allocation, so that no sum of both ever shows it twice
        room = None
        try:
            storage = self._mover.allocate(handle, into)
            room = self._handles.call(handle, storage)
            if room is not None:
                self._mover.start_in(handle, storage, room)
        except BaseException:
            if into is not None:
                into.resize_(0)  # or it would pass for the bytes that are still below
            self._note_change(-handle.size_bytes)
            if room is not None:
                self._handles.refuse(handle)
            raise
        if room is None:
            self._note_change(-handle.size_bytes)
        return room is not None

    def _release(self, handle: Handle) -> None:
        self._cancel_out(handle)
        self._handles.release(handle)

    def _cancel_out(self, handle: Handle) -> None:
        """Takes the copy out back, if it has not begun: the storage is wanted, or wanted no more."""
        if handle._state is HandleState.LEAVING and self._mover.cancel_out(handle):
            self._handles.take_back(handle)

    def _abandon(self, handle: Handle) -> None:
        """Notes a handle to be released: finalisers run anywhere, even while this thread holds the lock."""
        if self._is_gone:
            self._release(handle)  # nobody comes to reap it, and its edges are still in memory
        elif not self._is_forked_copy:
            self._abandoned.append(handle)

    def _note_change(self, size_bytes: int) -> None:
        if self.device_changes is not None:
            self.device_changes.append((time.time(), size_bytes))

    def _note_stall(self, handle: Handle, start_s: float, waited_s: float, *, is_back: bool) -> None:
        self._stall_s += waited_s
        room = handle._room
        link = self._mover.link_to(self.tiers[0] if room is None else room.tier)
        if is_back:
            link = Link(link.target, link.source)
        self.events.add(lane="compute", kind="stall", label=str(link), size_bytes=handle.size_bytes, start_s=start_s)

    def _warn_of_troubles(self) -> None:
        """Says once, on the computing thread, that storages stay on the device."""
        if not self._handles.troubles or self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"a storage could not be parked and stays on the device: {self._handles.troubles[0]} Training goes on, "
            "with a higher peak. Free some space or give another directory; statistics().kept_bytes counts what "
            "stays, and this is said once.",
            TierDegradedWarning,
            stacklevel=4,
        )

    def _refuse_if_gone(self) -> None:
        if self._is_forked_copy:
            raise ForkedProcessError(
                "these parked bytes belong to the parent process; a forked child cannot fetch them. Compute in the "
                "process that parked, or start the child with multiprocessing's 'spawn' method."
            )
        if self._is_closed:
            raise ValueError(
                "this waterfall is closed, and what was parked in it is gone; close it after the last get()"
            )


_waterfalls: "weakref.WeakSet[Waterfall]" = weakref.WeakSet()


def _orphan_in_child() -> None:
    for waterfall in list(_waterfalls):
        waterfall._is_forked_copy = True
        waterfall._handles.lock = threading.RLock()


os.register_at_fork(after_in_child=_orphan_in_child)
