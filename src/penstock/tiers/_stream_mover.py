"""Copies for a device with streams. Each tier is reached by a route of one or two hops.

- `_NearRoute`: to host memory, by one copy on a stream (`_stream_hop.py`).
- `StagedHop`: to a disk, by such a copy into staging memory and a lane thread from there.
- `DirectHop`: to a disk that the device can reach, by a lane thread alone.

The host runs ahead of the device, so a copy is only queued here. These rules keep it correct; each avoids a bug that
somebody has published (docs/design/streams.md lists them):

- A copy out waits for the work that produced its bytes: an event of the stream that is current at that moment.
- A copy in waits for the copy out of the same bytes, and for the work queued before its memory was allocated, or in
  memory of the lane's own for what used that (`_lane_memory.py`).
- The device copy of a storage is dropped when the copy out has finished, or after its stream was told to wait for it.
- Space in a tier is given back only when the last copy that touches it has finished.
- The bytes being copied out are bounded by making the computing stream wait, so that the host never has to.

``verify`` covers the way to disk and back. Checksums need the bytes in host memory, so it always uses staging memory.
"""

import contextlib
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from penstock.devices import Streams
from penstock.errors import TierFullError
from penstock.links import DEVICE, HOST, Link
from penstock.tiers._direct_hop import DirectHop
from penstock.tiers._events import EventLog
from penstock.tiers._handle import Handle
from penstock.tiers._handles import Box, Handles
from penstock.tiers._host import HostTier
from penstock.tiers._host_work import HostWork, Settling
from penstock.tiers._lane import Lane
from penstock.tiers._lane_memory import LaneMemory
from penstock.tiers._record import HandleState
from penstock.tiers._room import Room
from penstock.tiers._staged_hop import StagedHop
from penstock.tiers._stream_hop import StreamHop, Transit
from penstock.tiers._tier import Tier


class Route(Protocol):
    """The way that bytes take to one tier and back."""

    def reserve(self, tier: Tier, size_bytes: int) -> Room:
        """Reserve space in the tier, and on the way to it. Raises ``TierFullError``."""

    def borrow(self, room: Room, lender: Handle) -> Room:
        """Return a way to reach space that another device has filled."""

    def send(self, handle: Handle, storage: torch.UntypedStorage, room: Room, transit: Transit) -> None:
        """Begin the copy out, after ``transit.produced``."""

    def bring(self, handle: Handle, box: Box, room: Room, transit: Transit) -> None:
        """Begin the copy in, after ``transit.ready``."""


class _NearRoute:
    """The route to host memory and back, by one copy."""

    def __init__(self, copies: StreamHop):
        self._copies = copies

    def reserve(self, tier: Tier, size_bytes: int) -> Room:
        return Room(tier, tier.reserve(size_bytes))

    def borrow(self, room: Room, lender: Handle) -> Room:
        return Room(room.tier, room.extent, lender=room.lender or lender)

    def send(self, handle: Handle, storage: torch.UntypedStorage, room: Room, transit: Transit) -> None:
        self._copies.send(handle, storage, transit, room.tier.tensor(room.extent))

    def bring(self, handle: Handle, box: Box, room: Room, transit: Transit, after: HostWork | None = None) -> None:
        self._copies.bring(handle, box, transit, room.tier.tensor(room.extent), after=after)


class StreamMover:
    """Copies between a device with streams and the tiers below it.

    It is wide because it has every operation of `Mover`.
    """

    can_overwrite = True

    def __init__(
        self,
        streams: Streams,
        staging: HostTier,
        handles: Handles,
        events: EventLog,
        *,
        max_in_flight_bytes: int,
        verify: bool,
        node: int | None = None,
        has_lane_memory: bool = False,
    ):
        """``has_lane_memory``: whether copies in get memory of their own stream (`LaneMemory`)."""
        self._streams = streams
        self.max_in_flight_bytes = max_in_flight_bytes
        self._verify = verify
        self._copies = StreamHop(streams, handles, events)
        self._memory = LaneMemory(streams, self._copies.back.stream, self._copies.queue) if has_lane_memory else None
        self._near = _NearRoute(self._copies)
        self._staged = StagedHop(
            streams,
            staging,
            self._copies,
            handles,
            events,
            wait_for_a_copy=self.wait_for_a_copy,
            verify=verify,
            node=node,
        )
        self._direct = DirectHop(streams, handles, events, max_in_flight_bytes=max_in_flight_bytes, node=node)

    @property
    def in_flight_peak_bytes(self) -> int:
        return max(self._copies.peak_in_flight_bytes, self._direct.out.in_flight.peak_bytes)

    @property
    def has_staging(self) -> bool:
        return self._staged.staging.capacity_bytes > 0

    def bound_in_flight(self, size_bytes: int) -> None:
        self.max_in_flight_bytes = self._direct.out.max_in_flight_bytes = size_bytes
        if self.has_staging:
            self._staged.staging.allow(2 * size_bytes)

    def link_to(self, tier: Tier) -> Link:
        return Link(DEVICE, tier.place if self._route(tier) is self._direct else HOST)

    def make_room(self, size_bytes: int) -> float:
        most_bytes, out = self.max_in_flight_bytes - size_bytes, self._direct.out
        # In memory of the lane's own, what is copied out is waited for when it is given back.
        is_bounded = self._memory is None
        while (
            is_bounded and self._copies.has_leaving and self._copies.in_flight_bytes + out.in_flight_bytes > most_bytes
        ):
            self._copies.let_oldest_leave()
        return out.wait_for_room(self._copies.in_flight_bytes + size_bytes)

    def reserve(self, tiers: Sequence[Tier], handle: Handle) -> Room:
        reasons = []
        for tier in tiers:
            try:
                return self._route(tier).reserve(tier, _whole_blocks(handle, tier))
            except TierFullError as error:
                reasons.append(str(error))
            if tier.is_memory and tier is not tiers[-1]:
                self.poll()  # what has ended gives its space back, before a disk is taken
                with contextlib.suppress(TierFullError):
                    return self._route(tier).reserve(tier, _whole_blocks(handle, tier))
        raise TierFullError("; ".join(reasons) or "there is no tier below the device")

    @property
    def holds_handles(self) -> bool:  # lanes first, because their copies continue on the stream
        back = self._staged.back.in_flight_bytes or self._direct.back.in_flight_bytes
        return bool(back or self._copies.holds_handles)

    def wait_for_a_copy(self) -> bool:
        is_lane_busy = any(lane.in_flight_bytes for lane in self._lanes())  # lanes first, as in holds_handles
        if not self._copies.wait_for_a_copy():
            if not is_lane_busy:
                return False
            with self._staged.condition:
                self._staged.condition.wait(timeout=0.01)  # the copy may end just before this wait begins
        self.poll()
        return True

    def start_out(self, handle: Handle, storage: torch.UntypedStorage, room: Room) -> None:
        current = self._streams.current()
        transit = handle.record.transit = Transit(
            home=self._copies.back.stream if self._is_of_lane(storage) else current,
            produced=self._streams.record(current, is_timed=False),
        )
        self._route(room.tier).send(handle, storage, room, transit)

    def cancel_out(self, handle: Handle) -> bool:
        transit = handle.record.transit  # a copy on a stream cannot be canceled
        return isinstance(transit, Transit) and transit.direct is not None and self._direct.out.cancel(transit.direct)

    def hand_back(self, handle: Handle, storage: torch.UntypedStorage) -> None:
        transit, current = handle.record.transit, self._streams.current()
        # ``share`` delays the reuse of the memory (``record_stream``), so only another stream than its own gets there.
        if isinstance(transit, Transit) and transit.produced is not None and current != transit.home:
            self._streams.wait(current, transit.produced)
            self._streams.share(storage, current)

    def finish_out(self, handle: Handle) -> float:
        transit = handle.record.transit
        if isinstance(transit, Transit) and transit.direct is not None:
            return transit.direct.wait()
        while handle.record.state is HandleState.LEAVING and self._copies.has_leaving:
            self._copies.let_oldest_leave()
        return 0.0

    def let_go(self, handle: Handle) -> float:
        transit = handle.record.transit
        if isinstance(transit, Transit) and transit.direct is not None:
            return transit.direct.wait()
        self._copies.let_leave(handle, self._memory)
        return 0.0

    def give_back(self, storage: torch.UntypedStorage) -> None:
        if self._memory is not None:
            self._memory.give_back(storage.data_ptr())

    def hand_over(self, storage: torch.UntypedStorage) -> None:
        if self._memory is not None:
            self._memory.hand_over(storage)

    def before_write(self, handle: Handle) -> None:
        transit = handle.record.transit
        if isinstance(transit, Transit) and transit.direct is not None:
            transit.direct.wait()
        elif isinstance(transit, Transit) and transit.left is not None:
            self._copies.stalls.let_wait(self._streams.current(), transit.left)

    def allocate(self, handle: Handle, into: torch.UntypedStorage | None = None) -> torch.UntypedStorage:
        if into is None or not into.resizable():
            return self._streams.allocate(handle.size_bytes)
        if self._memory is None:
            return self._streams.allocate(handle.size_bytes, into=into)
        self._memory.allocate(handle.size_bytes, into)
        return into

    def start_in(
        self, handle: Handle, storage: torch.UntypedStorage, room: Room, after: HostWork | None = None
    ) -> None:
        transit, route = handle.record.transit, self._route(room.tier)
        assert isinstance(transit, Transit)
        is_near = route is self._near
        if not is_near:  # a lane's thread will ask the stream of copies in when the memory is free
            self._copies.queue.drain()
            if after is not None:
                after.wait()
        home = self._copies.back.stream if self._is_of_lane(storage) else self._streams.current()
        transit.begin_in(home, self._streams.record(home, is_timed=False))
        if is_near:
            self._near.bring(handle, [storage], room, transit, after)
        else:
            route.bring(handle, [storage], room, transit)

    def settling(self, handle: Handle) -> Settling:
        transit = handle.record.transit
        assert isinstance(transit, Transit)
        return Settling(self._streams, [event for event in (transit.left, transit.arrived) if event is not None])

    def finish_in(self, handle: Handle) -> float:
        transit = handle.record.transit
        assert isinstance(transit, Transit)
        waited_s = 0.0
        if transit.is_queued is not None and not transit.is_queued.is_set():
            start_s = time.perf_counter()
            transit.is_queued.wait()
            waited_s = time.perf_counter() - start_s
        current, storage = self._streams.current(), handle.device_storage
        if transit.arrived is not None:
            self._copies.stalls.let_wait(current, transit.arrived)
            self._copies.let_go(transit)
        if current != transit.home and storage is not None and not self._is_of_lane(storage):
            self._streams.share(storage, current)
        return waited_s

    def poll(self) -> None:
        self._copies.poll()

    def adopt(self, handle: Handle) -> None:
        handle.record.transit = Transit()

    def borrow(self, handle: Handle, original: Handle, room: Room) -> Room:
        known = original.record.transit
        assert isinstance(known, Transit)
        handle.record.transit = Transit(left=known.left)
        return self._route(room.tier).borrow(room, original)

    def rates_bytes_per_s(self) -> tuple[float | None, float | None]:
        copies, staged, direct = self._copies, self._staged, self._direct
        return (
            _slowest(copies.out.bytes_per_s(), staged.out.rate_bytes_per_s(), direct.out.rate_bytes_per_s()),
            _slowest(copies.back.bytes_per_s(), staged.back.rate_bytes_per_s(), direct.back.rate_bytes_per_s()),
        )

    def device_stall_s(self) -> float:
        return self._copies.stalls.sum_up()

    def drain(self) -> None:
        self._copies.drain()
        for lane in self._lanes():
            lane.drain()
        self._copies.drain()

    def close(self) -> None:
        self.drain()
        for lane in self._lanes():
            lane.close()
        self._staged.staging.close()

    def _is_of_lane(self, storage: torch.UntypedStorage) -> bool:
        return self._memory is not None and self._memory.has(storage)

    def _route(self, tier: Tier) -> Route:
        if tier.is_memory:
            return self._near
        return self._direct if tier.talks_to_device and not self._verify else self._staged

    def _lanes(self) -> tuple[Lane, ...]:
        return self._staged.out, self._staged.back, self._direct.out, self._direct.back


def _whole_blocks(handle: Handle, tier: Tier) -> int:
    """Return the bytes that the handle takes in ``tier``: direct transfers and staging memory need whole blocks."""
    return -(-max(1, handle.size_bytes) // tier.alignment_bytes) * tier.alignment_bytes


def _slowest(*rates: float | None) -> float | None:
    return min((rate for rate in rates if rate is not None), default=None)
