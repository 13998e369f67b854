"""The waterfall: storages leave the device for the first tier that has room, and come back byte for byte.

The state of each handle changes here, under one lock; how bytes move is the mover's business (`_memory_mover.py` where
the device is main memory, `_stream_mover.py` for CUDA). Rules kept here:

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
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.arguments import checked
from penstock.errors import ForkedProcessError, InternalError, TierDegradedWarning, TierFullError
from penstock.probe import ledger
from penstock.tiers._events import EventLog
from penstock.tiers._handle import Handle, HandleState
from penstock.tiers._statistics import TierStatistics
from penstock.tiers._tier import Extent, Tier


class Mover(Protocol):
    """How bytes move between one device and the tiers. Called by the computing thread, never under the lock."""

    out_lane: str
    """Name of the lane out of the device, for events."""
    in_lane: str
    """Name of the lane into the device, for events."""

    @property
    def in_flight_peak_bytes(self) -> int:
        """The most bytes that were on their way out at once."""

    def make_room(self, size_bytes: int) -> float:
        """Waits until ``size_bytes`` more may be on their way out; returns the seconds the computation waited."""

    def reserve(self, tiers: Sequence[Tier], handle: Handle) -> tuple[Tier, Extent]:
        """Room for the handle in the first tier that has it; sets ``handle._edges``. Raises ``TierFullError``."""

    @property
    def holds_handles(self) -> bool:
        """Whether it holds handles for copies that go on after ``park`` or ``get``; they may be nobody's by now."""

    def wait_for_a_copy(self) -> bool:
        """Waits for a copy whose end may give room back; ``False`` when there is none to wait for."""

    def start_out(self, handle: Handle) -> None:
        """Begins the copy out; its end is told to ``Waterfall._left``."""

    def cancel_out(self, handle: Handle) -> bool:
        """Takes a copy out back, if it has not begun."""

    def hand_back(self, handle: Handle, storage: torch.UntypedStorage) -> None:
        """Lets the computation use ``storage``, which has not left, on a stream other than the one that parked it."""

    def finish_out(self, handle: Handle) -> float:
        """Waits for the copy out, or lets the device wait; returns the seconds the computation waited."""

    def start_in(self, handle: Handle) -> None:
        """Allocates and begins the copy in. Raises ``RuntimeError`` where the device has no memory."""

    def finish_in(self, handle: Handle) -> float:
        """Lets the computation wait for the copy in; returns the seconds it waited. Sets ``handle._error``."""

    def rates_bytes_per_s(self) -> tuple[float | None, float | None]:
        """What the way out and the way in carried while busy; ``None`` before anything went that way."""

    def forget(self, handle: Handle) -> None:
        """Gives back what the mover itself holds for the handle, whose room is being given back."""

    def poll(self) -> None:
        """Notices finished copies."""

    def borrow(self, handle: Handle, original: Handle) -> None:
        """Prepares ``handle`` to be fetched from the room of ``original``, another mover's."""

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

    def __init__(self, tiers: Sequence[Tier], mover: Mover, events: EventLog):
        self.tiers = tuple(tiers)
        self.events = events
        self._mover = mover
        self._lock = threading.RLock()  # a finaliser may release a handle of a closed waterfall
        self._abandoned: deque[Handle] = deque()
        self._leftovers: deque[tuple[Handle | None, list[torch.UntypedStorage]]] = deque()
        self.device_changes: list[tuple[float, int]] | None = None
        """Set to a list to collect ``(seconds of time.time(), change in bytes)`` of what handles hold on the device."""
        self._troubles: deque[str] = deque()
        self._has_warned = False
        self._is_forked_copy = self._is_closed = self._is_gone = False
        self._counts = {
            "parked_bytes": 0,
            "fetched_bytes": 0,
            "forwarded_bytes": 0,
            "kept_bytes": 0,
            "bounced_bytes": 0,
            "written_to_disk_bytes": 0,
            "num_live_handles": 0,
            "num_failed_writes": 0,
        }
        self._num_leaving_room = 0  # handles that need their room no more, but for the copies that still touch it
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
        with self._lock:
            self._counts["num_live_handles"] += 1
        self._note_change(handle.size_bytes)
        start_s = time.time()
        waited_s = self._mover.make_room(handle.size_bytes)
        if waited_s:
            self._note_stall(handle, self._mover.out_lane, start_s, waited_s)
        self.reap()
        try:
            handle._tier, handle._extent = self._reserve(handle)
        except TierFullError as error:
            self._keep(handle, str(error))
        else:
            edge_bytes = sum(map(len, handle._edges))
            ledger.charge(edge_bytes)
            self._counts["bounced_bytes"] += edge_bytes
            handle._num_moving = 1
            try:
                self._mover.start_out(handle)
            except RuntimeError as error:  # nothing has begun: no thread or no event to be had
                handle._num_moving = 0
                self._give_back_room(handle)
                self._keep(handle, str(error))
        self._warn_of_troubles()
        return handle

    @checked("waterfall.borrow(handle)")
    def borrow(self, original: Handle) -> Handle:
        """A handle on this device to bytes that another waterfall of the same tiers parked; nothing is copied.

        The room is that of ``original``, which the new handle keeps alive. Raises ``InternalError`` unless ``original``
        ``is_settled``.
        """
        if not original.is_settled:
            raise InternalError(f"{original!r} cannot be borrowed: its copy out has not ended")
        handle = Handle(self, torch.UntypedStorage(0), original.label)
        handle._origin = original._origin or original
        handle.size_bytes, handle.data_pointer = original.size_bytes, original.data_pointer
        handle.address_remainder = original.address_remainder
        handle._tier, handle._extent, handle._edges = original._tier, original._extent, original._edges
        handle._storage, handle._state = None, HandleState.PARKED
        self._mover.borrow(handle, original)
        with self._lock:
            self._counts["num_live_handles"] += 1
        return handle

    def reap(self) -> None:
        """Drops device copies whose copy out is complete, and gives back the room of abandoned handles."""
        self._mover.poll()
        while self._abandoned:
            self._release(self._abandoned.popleft())
        while self._leftovers:
            gone, box = self._leftovers.popleft()
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
        with self._lock:
            return TierStatistics(
                **self._counts,
                stall_s=self._stall_s + self._mover.device_stall_s(),
                in_flight_peak_bytes=self._mover.in_flight_peak_bytes,
                held_bytes={tier.name: tier.used_bytes for tier in self.tiers},
                reserved_bytes={tier.name: tier.reserved_bytes for tier in self.tiers},
            )

    def counts(self) -> dict[str, int]:
        """The sums alone, from any thread."""
        with self._lock:
            return dict(self._counts)

    @property
    def stall_s(self) -> float:
        """Seconds the computation has waited for copies, as far as the host knows."""
        return self._stall_s

    def rates_bytes_per_s(self) -> tuple[float | None, float | None]:
        """Bandwidth out of and into the device while copies were under way; ``None`` before there were any."""
        return self._mover.rates_bytes_per_s()

    def close(self) -> None:
        """Waits for the copies, ends the lanes and closes the tiers. What is parked can no longer be fetched."""
        if self._is_forked_copy or self._is_closed:
            return
        self._is_closed = True
        self._mover.close()
        self.reap()
        for tier in self.tiers:
            tier.close()
        self._is_gone = True
        self.reap()

    def _reserve(self, handle: Handle) -> tuple[Tier, Extent]:
        while True:
            may_come_back = self._num_leaving_room or self._mover.holds_handles  # asked first: it may end meanwhile
            try:
                return self._mover.reserve(self.tiers, handle)
            except TierFullError:
                if self._abandoned or (may_come_back and self._mover.wait_for_a_copy()):
                    self.reap()
                elif may_come_back:
                    return self._mover.reserve(self.tiers, handle)
                else:
                    raise

    def _get(self, handle: Handle) -> torch.UntypedStorage:
        self._refuse_if_gone()
        self.reap()
        storage = self._on_device(handle)
        if storage is not None:
            self._mover.hand_back(handle, storage)
            return storage
        if handle._state is HandleState.PARKED:
            self._start_in(handle)
        start_s = time.time()
        waited_s = self._mover.finish_in(handle)
        if waited_s:
            self._note_stall(handle, self._mover.in_lane, start_s, waited_s)
        with self._lock:
            storage, handle._storage = handle._storage, None
            handle._state = HandleState.PARKED
            if handle._error is not None:
                error, handle._error = handle._error, None
                try:
                    raise error
                finally:
                    del error  # else its traceback keeps this frame, and the frame the handle and its room
            assert storage is not None
            handle._weak = StorageWeakRef(storage)
            self._counts["fetched_bytes"] += handle.size_bytes
        self.reap()  # the copy in held it as well; from now on its life is the caller's affair
        return storage

    def _finish_out(self, handle: Handle) -> None:
        if handle._state is HandleState.LEAVING:
            start_s = time.time()
            waited_s = self._mover.finish_out(handle)
            if waited_s:
                self._note_stall(handle, self._mover.out_lane, start_s, waited_s)
        self.reap()

    def _prefetch(self, handle: Handle) -> bool:
        self._refuse_if_gone()
        self._cancel_out(handle)
        with self._lock:
            if handle._state is HandleState.LEAVING:
                handle._is_wanted = True  # the end of its copy out will leave it where it is
                return True
        if handle._state is not HandleState.PARKED or handle._alive() is not None:
            return handle._state is not HandleState.RELEASED
        try:
            self._start_in(handle)
        except RuntimeError:  # out of device memory; get() tries again when more is free, and raises if not
            return False
        return True

    def _start_in(self, handle: Handle) -> None:
        self._begun(handle)
        self._note_change(handle.size_bytes)  # before the allocation, so that no sum of both ever shows it twice
        try:
            self._mover.start_in(handle)
        except BaseException:
            with self._lock:
                if handle._state is HandleState.ARRIVING:
                    handle._state, handle._storage = HandleState.PARKED, None
            self._note_change(-handle.size_bytes)
            self._landed(handle)
            raise

    def _release(self, handle: Handle) -> None:
        self._cancel_out(handle)
        with self._lock:
            if handle._state is HandleState.RELEASED:
                return
            needed_room = handle._state is not HandleState.KEPT
            handle._state = HandleState.RELEASED
            self._counts["num_live_handles"] -= 1
            is_moving = handle._num_moving > 0
            self._num_leaving_room += is_moving and needed_room
        if not is_moving:
            self._give_back(handle)

    def _abandon(self, handle: Handle) -> None:
        """Notes a handle to be released: finalisers run anywhere, even while this thread holds the lock."""
        if self._is_gone:
            self._release(handle)  # nobody comes to reap it, and its edges are still in memory
        elif not self._is_forked_copy:
            self._abandoned.append(handle)

    def _on_device(self, handle: Handle) -> torch.UntypedStorage | None:
        """The storage without a copy, where it has not left or somebody still holds it."""
        self._cancel_out(handle)
        with self._lock:
            if handle._state is HandleState.RELEASED:
                raise ValueError(f"{handle!r} was released; get() comes before release()")
            if handle._state is HandleState.ARRIVING:
                return None
            storage = handle._storage if handle._storage is not None else handle._alive()
            if storage is not None:
                handle._was_forwarded = True
                self._counts["forwarded_bytes"] += handle.size_bytes
            return storage

    def _cancel_out(self, handle: Handle) -> None:
        """Takes the copy out back, if it has not begun: the storage is wanted, or wanted no more."""
        if handle._state is HandleState.LEAVING and self._mover.cancel_out(handle):
            handle._num_moving = 0
            handle._state = HandleState.KEPT
            self._give_back_room(handle)

    def _left(self, handle: Handle, box: list[torch.UntypedStorage], error: Exception | None) -> None:
        """The copy out has ended. May run on a lane thread, which must not be the one to drop what is in ``box``."""
        has_moved = box[0].nbytes() != handle.size_bytes or box[0].data_ptr() != handle.data_pointer
        with self._lock:
            if handle._state is HandleState.LEAVING:
                self._settle(handle, error, has_moved)
            self._leftovers.append((handle, box))  # last: what the computing thread drops must be the last reference
        self._landed(handle)

    def _settle(self, handle: Handle, error: Exception | None, has_moved: bool) -> None:
        """Parked, or kept: wanted again, or the copy failed, or somebody freed the storage under it. Holds the lock."""
        if error is None and not has_moved and not handle._is_wanted:
            handle._state, handle._storage = HandleState.PARKED, None
            self._counts["parked_bytes"] += handle.size_bytes
            if handle._tier is not None and handle._tier.is_disk:
                self._counts["written_to_disk_bytes"] += handle.size_bytes
            return
        handle._state = HandleState.KEPT
        self._num_leaving_room += 1
        if handle._is_wanted:
            return
        self._counts["kept_bytes"] += handle.size_bytes
        if error is not None:
            self._counts["num_failed_writes"] += 1
            self._troubles.append(str(error))

    def _write_failed(self, handle: Handle, error: Exception) -> None:
        """A later hop failed; the bytes are whole in the tier before it."""
        with self._lock:
            handle._missed_its_tier = True
            self._counts["num_failed_writes"] += 1
            self._troubles.append(str(error))

    def _arrived(self, handle: Handle, box: list[torch.UntypedStorage]) -> None:
        """The copy in has ended, well or not. May run on a lane thread, as above."""
        with self._lock:
            self._leftovers.append((None, box))
        self._landed(handle)

    def _begun(self, handle: Handle) -> None:
        """One more copy touches the handle's room, which stays until it has ``_landed``."""
        with self._lock:
            handle._num_moving += 1

    def _landed(self, handle: Handle) -> None:
        """One of the copies that touch the handle's room has ended. After the last, room that nobody needs goes."""
        with self._lock:
            handle._num_moving -= 1
            state = handle._state
            is_leaving_room = not handle._num_moving and state in (HandleState.RELEASED, HandleState.KEPT)
            self._num_leaving_room -= is_leaving_room
        if not is_leaving_room:
            return
        if state is HandleState.RELEASED:
            self._give_back(handle)
        else:
            self._give_back_room(handle)

    def _keep(self, handle: Handle, trouble: str) -> None:
        with self._lock:
            handle._state = HandleState.KEPT
            self._counts["kept_bytes"] += handle.size_bytes
            self._troubles.append(trouble)

    def _give_back(self, handle: Handle) -> None:
        """Everything that a released handle holds."""
        self._give_back_room(handle)
        if handle._storage is not None:
            self._leftovers.append((None, [handle._storage]))
            handle._storage = None

    def _give_back_room(self, handle: Handle) -> None:
        with self._lock:
            tier, extent = handle._tier, handle._extent
            handle._tier = handle._extent = None
            edge_bytes, handle._edges = sum(map(len, handle._edges)), (b"", b"")
        self._mover.forget(handle)
        if handle._origin is not None:
            handle._origin = None
            return
        ledger.charge(-edge_bytes)
        if tier is not None and extent is not None:
            tier.release(extent)

    def _note_change(self, size_bytes: int) -> None:
        if self.device_changes is not None:
            self.device_changes.append((time.time(), size_bytes))

    def _note_stall(self, handle: Handle, lane: str, start_s: float, waited_s: float) -> None:
        self._stall_s += waited_s
        self.events.add(lane="compute", kind="stall", label=lane, size_bytes=handle.size_bytes, start_s=start_s)

    def _warn_of_troubles(self) -> None:
        """Says once, on the computing thread, that storages stay on the device."""
        if not self._troubles or self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"a storage could not be parked and stays on the device: {self._troubles[0]} Training goes on, with a "
            "higher peak. Free some space or give another directory; statistics().kept_bytes counts what stays, and "
            "this is said once.",
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
        waterfall._lock = threading.RLock()


os.register_at_fork(after_in_child=_orphan_in_child)
