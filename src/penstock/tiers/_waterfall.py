"""The waterfall: storages leave the device for the first tier that has space, and come back byte for byte.

The state changes of each handle are in `_handles.py`, under one lock. The mover moves the bytes (`_memory_mover.py` if
the device is main memory, `_stream_mover.py` for accelerators). What handles do after ``park`` is in `_traffic.py`.
These two modules keep these rules:

- The device copy is dropped only after the copy out is complete, and only by the computing thread, so that its
  allocator and its profiler see it.
- A storage that somebody still holds is returned from memory (forwarded), never read.
- If there is no space, or the copy out failed, the storage stays where it is; there is one warning and a counter.
- A failed copy in raises at ``get``; other bytes are never returned.
"""

import time
import warnings
from collections.abc import Callable, Sequence

import torch

from penstock.arguments import checked, must_be
from penstock.errors import InternalError, TierDegradedWarning, TierFullError
from penstock.tiers._events import EventLog
from penstock.tiers._handle import Handle
from penstock.tiers._handles import Handles
from penstock.tiers._mover import Mover
from penstock.tiers._room import Room
from penstock.tiers._statistics import TierStatistics
from penstock.tiers._tier import Tier
from penstock.tiers._traffic import Traffic

_PARK = "waterfall.park(tensor.untyped_storage())"
_GIVE_BACK = "waterfall.give_back(tensor.untyped_storage())"


class Waterfall:
    """A device's way to its tiers: parks storages in the first of ``tiers`` that has space. Made by ``waterfall_for``.

    ``park`` and the handles' ``get`` belong to the computing thread. Several threads may compute, one after another.
    It is wide because rooms reach their tiers through it alone.
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
        self._traffic = Traffic(self.tiers, mover, handles, events)
        self._has_warned = False

    def park(
        self,
        storage: torch.UntypedStorage,
        label: str = "",
        *,
        outdated: Handle | None = None,
        spare: Callable[[], bool] | None = None,
    ) -> Handle:
        """Begin to copy ``storage`` out and return its handle, which keeps the storage alive until the copy is done.

        ``outdated`` is a handle of the same storage from before it was changed (`Handle.keeps_room`). It is released,
        and its space in the tier is used. ``spare`` is called if the tiers are full, to release such handles; it
        returns whether there were any.
        Waits while too many bytes are being copied out. The storage must not be written to before the copy is done; if
        it is shared, check its version. If no tier has space, the handle keeps the storage (state ``KEPT``).
        """
        if not isinstance(storage, torch.UntypedStorage):
            raise must_be("storage", "a torch.UntypedStorage", storage, _PARK)
        if not isinstance(label, str):
            raise must_be("label", "text", label, _PARK)
        if outdated is not None and not isinstance(outdated, Handle):
            raise must_be("outdated", "a handle of the same storage, or None", outdated, _PARK)
        if spare is not None and not callable(spare):
            raise must_be("spare", "a function without arguments, or None", spare, _PARK)
        traffic = self._traffic
        traffic.refuse_if_gone()
        handle = Handle(traffic, storage, label)
        self._handles.add()
        traffic.note_change(handle.size_bytes)
        start_s = time.time()
        waited_s = self._mover.make_room(handle.size_bytes)
        if waited_s:
            traffic.note_stall(handle, start_s, waited_s, is_back=False)
        traffic.reap()
        room = None if outdated is None else self._handles.hand_over(outdated, handle)
        try:
            if room is None:
                if outdated is not None:
                    outdated.release()
                room = self._reserve(handle, spare)
                self._handles.give(handle, room)
        except TierFullError as error:
            self._handles.keep(handle, str(error))
        else:
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
        self._traffic.refuse_if_gone()
        handle = Handle(self._traffic, torch.UntypedStorage(0), label)
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
        room = original.record.room
        if room is None or not original.is_settled:
            raise InternalError(f"{original!r} cannot be borrowed: its copy out has not ended")
        handle = Handle(self._traffic, torch.UntypedStorage(0), original.label)
        self._handles.lend(handle, original, self._mover.borrow(handle, original, room))
        self._handles.add()
        return handle

    def give_back(self, storage: torch.UntypedStorage) -> None:
        """Let whoever gets the memory of ``storage`` wait for the work that uses it.

        Call it just before you empty a storage that ``prefetch`` or ``get`` has filled, if the waterfall was built with
        ``has_lane_memory``. One that is freed with its last tensor is noticed.
        """
        if not isinstance(storage, torch.UntypedStorage):
            raise must_be("storage", "a torch.UntypedStorage", storage, _GIVE_BACK)
        self._mover.give_back(storage)

    def hand_over(self, storage: torch.UntypedStorage) -> None:
        """Let others have a storage that ``prefetch`` or ``get`` has filled, for which nobody will call `give_back`."""
        if not isinstance(storage, torch.UntypedStorage):
            raise must_be("storage", "a torch.UntypedStorage", storage, _GIVE_BACK.replace("give_back", "hand_over"))
        self._mover.hand_over(storage)

    def reap(self) -> None:
        """Drop device copies whose copy out is complete, and free the space of garbage-collected handles."""
        self._traffic.reap()

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
                stall_s=self._traffic.stall_s + self._mover.device_stall_s(),
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
        return self._traffic.stall_s

    @property
    def device_changes(self) -> list[tuple[float, int]] | None:
        """``(time.time(), change in bytes)`` of what handles hold on the device; set it to a list to collect them."""
        return self._traffic.device_changes

    @device_changes.setter
    def device_changes(self, changes: list[tuple[float, int]] | None) -> None:
        self._traffic.device_changes = changes

    @property
    def is_quiet(self) -> bool:
        """Whether the device is not asked which copies have finished. Meanwhile no space in tiers is given back."""
        return self._traffic.is_quiet

    @is_quiet.setter
    def is_quiet(self, is_quiet: bool) -> None:
        self._traffic.is_quiet = is_quiet

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
        if not self._traffic.begin_close():
            return
        self._mover.close()
        self.reap()
        for tier in self.tiers:
            if tier not in self._not_ours:
                tier.close()
        self._traffic.is_gone = True
        self.reap()

    def _reserve(self, handle: Handle, spare: Callable[[], bool] | None) -> Room:
        while True:
            may_come_back = self._handles.num_leaving_room or self._mover.holds_handles  # asked before it can end
            try:
                return self._mover.reserve(self.tiers, handle)
            except TierFullError:
                if spare is not None and spare():
                    continue
                if self._traffic.has_abandoned or (may_come_back and self._mover.wait_for_a_copy()):
                    self.reap()
                elif may_come_back:
                    return self._mover.reserve(self.tiers, handle)
                else:
                    raise

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
