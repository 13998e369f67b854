"""The waterfall: storages leave the device for the first tier that has space, and come back byte for byte.

The state changes of each handle are in `_handles.py`, under one lock. The mover moves the bytes (`_memory_mover.py` if
the device is main memory, `_stream_mover.py` for accelerators). This module keeps these rules:

- The device copy is dropped only after the copy out is complete, and only by the computing thread, so that its
  allocator and its profiler see it.
- A storage that somebody still holds is returned from memory (forwarded), never read.
- If there is no space, or the copy out failed, the storage stays where it is; there is one warning and a counter.
- A failed copy in raises at ``get``; other bytes are never returned.
"""

import threading
import time
import warnings
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch

from penstock.arguments import checked
from penstock.errors import ForkedProcessError, InternalError, TierDegradedWarning, TierFullError
from penstock.forks import renewed_in_child
from penstock.links import Link
from penstock.tiers._events import EventLog
from penstock.tiers._handle import Handle, HandleState
from penstock.tiers._handles import Handles
from penstock.tiers._room import Room
from penstock.tiers._statistics import TierStatistics
from penstock.tiers._tier import Tier


class Mover(Protocol):
    """The interface of the code that moves bytes between one device and its tiers.

    The computing thread calls it, never under the lock. It reports the ends of copies to the `Handles` of its
    waterfall.
    """

    max_in_flight_bytes: int
    """Bound on the bytes being copied out. Changed by ``bound_in_flight``."""

    @property
    def has_staging(self) -> bool:
        """Whether bytes being copied out take the same amount of host memory."""

    def bound_in_flight(self, size_bytes: int) -> None:
        """Set the bound on the bytes being copied out at once."""

    def link_to(self, tier: Tier) -> Link:
        """Return the first link from the device on the way to ``tier``, for events."""

    @property
    def in_flight_peak_bytes(self) -> int:
        """The most bytes that were being copied out at once."""

    def make_room(self, size_bytes: int) -> float:
        """Wait until ``size_bytes`` more may be copied out; return the seconds that the computation waited."""

    def reserve(self, tiers: Sequence[Tier], handle: Handle) -> Room:
        """Reserve space for the handle in the first tier that has it. Raises ``TierFullError``."""

    @property
    def holds_handles(self) -> bool:
        """Whether copies after ``park`` or ``get`` still hold handles, which nobody else may hold by now."""

    def wait_for_a_copy(self) -> bool:
        """Wait for a copy whose end may free space; return ``False`` if there is none."""

    def start_out(self, handle: Handle, storage: torch.UntypedStorage, room: Room) -> None:
        """Begin the copy out. Raises ``RuntimeError`` if it cannot begin."""

    def cancel_out(self, handle: Handle) -> bool:
        """Cancel a copy out that has not begun; return whether it was canceled."""

    def hand_back(self, handle: Handle, storage: torch.UntypedStorage) -> None:
        """Let the computation use ``storage``, which has not left, on another stream than the one that parked it."""

    def finish_out(self, handle: Handle) -> float:
        """Wait for the copy out, or make the device wait; return the seconds that the computation waited."""

    def before_write(self, handle: Handle) -> None:
        """Make later work of the device wait until the copy out has read the storage."""

    def allocate(self, handle: Handle, into: torch.UntypedStorage | None = None) -> torch.UntypedStorage:
        """Allocate device memory for a copy in. Raises ``RuntimeError`` if there is none."""

    def start_in(self, handle: Handle, storage: torch.UntypedStorage, room: Room) -> None:
        """Begin the copy into ``storage``. Raises ``RuntimeError`` if it cannot begin."""

    def finish_in(self, handle: Handle) -> float:
        """Make the computation wait for the copy in; return the seconds that it waited."""

    def rates_bytes_per_s(self) -> tuple[float | None, float | None]:
        """Return the rates out and in while copies were under way; ``None`` before the first copy in that direction."""

    def poll(self) -> None:
        """Notice finished copies."""

    def adopt(self, handle: Handle) -> None:
        """Set up a handle whose bytes are in host memory without a copy out."""

    def borrow(self, handle: Handle, original: Handle, room: Room) -> Room:
        """Return a way for ``handle`` to reach ``room``, the space of ``original``, which another mover has filled."""

    def device_stall_s(self) -> float:
        """Return the seconds that the device's own queue waited.

        They do not include what ``make_room`` and ``finish_in`` report.
        """

    def drain(self) -> None:
        """Wait for all copies."""

    def close(self) -> None:
        """Drain and end the lanes."""


class Waterfall:
    """A device's way to its tiers: parks storages in the first of ``tiers`` that has space. Made by ``waterfall_for``.

    ``park`` and the handles' ``get`` belong to the computing thread. Several threads may compute, one after another.
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
        """``(time.time(), change in bytes)`` of what handles hold on the device; set it to a list to collect them."""
        self._has_warned = False
        self._is_forked_copy = self._is_closed = self._is_gone = False
        self._stall_s = 0.0
        self._all.add(self)

    @checked("waterfall.park(tensor.untyped_storage())")
    def park(self, storage: torch.UntypedStorage, label: str = "") -> Handle:
        """Begin to copy ``storage`` out and return its handle, which keeps the storage alive until the copy is done.

        Waits while too many bytes are being copied out. The storage must not be written to before the copy is done; if
        it is shared, check its version. If no tier has space, the handle keeps the storage (state ``KEPT``).
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
            except RuntimeError as error:  # nothing has begun: no thread or no event was available
                self._handles.keep(handle, str(error))
        self._warn_of_troubles()
        return handle

    @checked("waterfall.reserve(4096)", size_bytes=1)
    def reserve(self, size_bytes: int, label: str = "") -> Handle | None:
        """Return a settled handle to new bytes in host memory, or ``None`` if there is no room.

        Their values are undefined: write to ``handle.host_tensor()``. For main memory as the device the answer is
        ``None``, since only disks are below it.
        """
        self._refuse_if_gone()
        handle = Handle(self, torch.UntypedStorage(0), label)
        handle.size_bytes = size_bytes
        self._handles.add()
        self.reap()
        try:
            room = self._mover.reserve([tier for tier in self.tiers if tier.is_memory], handle)
        except TierFullError:
            self._handles.release(handle)
            return None
        self._mover.adopt(handle)
        self._handles.lend(handle, handle, room)
        return handle

    @checked("waterfall.borrow(handle)")
    def borrow(self, original: Handle) -> Handle:
        """Return a handle on this device to bytes that another waterfall of the same tiers parked. Nothing is copied.

        The new handle uses the space of ``original`` and keeps it alive. Raises ``InternalError`` unless ``original``
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
        """Drop device copies whose copy out is complete, and free the space of garbage-collected handles."""
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
        """Wait for all copies under way and drop what they free."""
        self._mover.drain()
        self.reap()
        self._warn_of_troubles()

    def statistics(self) -> TierStatistics:
        """Return the sums since the waterfall was made."""
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
        """Return only the counters; safe to call from any thread."""
        with self._handles.lock:
            return dict(self._handles.counts)

    @property
    def stall_s(self) -> float:
        """Seconds that the computation has waited for copies, as far as the host knows."""
        return self._stall_s

    @property
    def max_in_flight_bytes(self) -> int:
        """The most bytes that may be copied out at once; above it the computation waits."""
        return self._mover.max_in_flight_bytes

    @property
    def has_staging(self) -> bool:
        """Whether bytes being copied out take the same amount of host memory, which then limits them."""
        return self._mover.has_staging

    @checked("waterfall.bound_in_flight(2**27)", size_bytes=0)
    def bound_in_flight(self, size_bytes: int) -> None:
        """Set the bound on the bytes being copied out at once, and let staging memory grow with it."""
        if size_bytes != self._mover.max_in_flight_bytes:
            self._mover.bound_in_flight(size_bytes)

    def rates_bytes_per_s(self) -> tuple[float | None, float | None]:
        """Return the bandwidth out of and into the device while copies were under way; ``None`` before the first."""
        return self._mover.rates_bytes_per_s()

    def close(self) -> None:
        """Wait for the copies, end the lanes and close the tiers, except your own.

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
            may_come_back = self._handles.num_leaving_room or self._mover.holds_handles  # asked before it can end
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
        self.reap()  # the copy in held it as well; from now on only the caller holds it
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
        """Begin a copy in and return whether it began; it does not if another thread has released the handle."""
        self._note_change(handle.size_bytes)  # before the allocation, so that sums never count it twice
        room = None
        try:
            storage = self._mover.allocate(handle, into)
            room = self._handles.call(handle, storage)
            if room is not None:
                self._mover.start_in(handle, storage, room)
        except BaseException:
            if into is not None:
                into.resize_(0)  # otherwise it would be taken for the bytes that are still in the tier
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
        """Cancel the copy out if it has not begun, because the storage is wanted or no longer needed."""
        if handle._state is HandleState.LEAVING and self._mover.cancel_out(handle):
            self._handles.take_back(handle)

    def _abandon(self, handle: Handle) -> None:
        """Note a handle for release later: finalizers run anywhere, even while this thread holds the lock."""
        if self._is_gone:
            self._release(handle)  # nobody calls reap() any more, and its edges are still in memory
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
        """Warn once, on the computing thread, that storages stay on the device."""
        if not self._handles.troubles or self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"a storage could not be parked and stays on the device: {self._handles.troubles[0]} Training goes on, "
            "with a higher peak. Free some space or give another directory; statistics().kept_bytes counts the "
            "bytes that stay. This warning is shown once.",
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
                "this waterfall is closed, and the bytes parked in it are gone; close it after the last get()"
            )

    def _orphan(self) -> None:
        """Refuse further work, in a forked child."""
        self._is_forked_copy = True
        self._handles.lock = threading.RLock()

    _all = renewed_in_child(_orphan)
