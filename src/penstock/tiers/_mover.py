"""The interface between a waterfall and the code that moves bytes for one kind of device."""

from collections.abc import Sequence
from typing import Protocol

import torch

from penstock.links import Link
from penstock.tiers._handle import Handle
from penstock.tiers._host_work import HostWork, Settling
from penstock.tiers._room import Room
from penstock.tiers._tier import Tier


class Mover(Protocol):
    """The interface of the code that moves bytes between one device and its tiers.

    The computing thread calls it, never under the lock. It reports the ends of copies to the `Handles` of its
    waterfall. It is wide because a waterfall needs each of these operations from every kind of device.
    """

    max_in_flight_bytes: int
    """Bound on the bytes being copied out. Changed by ``bound_in_flight``."""

    can_overwrite: bool
    """Whether a copy out may go where an outdated copy of the same storage is."""

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

    def let_go(self, handle: Handle) -> float:
        """Let the copy out go on by itself: whoever gets the storage's memory waits for it. Return the seconds that the
        computation waited, where that is the computation itself.
        """

    def give_back(self, storage: torch.UntypedStorage) -> None:
        """Let whoever gets the storage's memory, which is about to be freed, wait for the work that uses it."""

    def hand_over(self, storage: torch.UntypedStorage) -> None:
        """Let others have the storage, who free its memory without giving it back."""

    def before_write(self, handle: Handle) -> None:
        """Make later work of the device wait until the copy out has read the storage."""

    def allocate(self, handle: Handle, into: torch.UntypedStorage | None = None) -> torch.UntypedStorage:
        """Allocate device memory for a copy in. Raises ``RuntimeError`` if there is none."""

    def start_in(
        self, handle: Handle, storage: torch.UntypedStorage, room: Room, after: HostWork | None = None
    ) -> None:
        """Begin the copy into ``storage`` once ``after`` has ended. Raises ``RuntimeError`` if it cannot begin."""

    def settling(self, handle: Handle) -> Settling:
        """Return the copies that touch the handle's bytes in host memory now."""

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
