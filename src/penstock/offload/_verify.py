"""An independent check of an offload plan, from its finished transfers alone.

The planner plays events forward and lays copies as it goes. This file takes the copies as given, rebuilds the clock
from the waits they imply, and counts what is on the device after every event. The tests use it, and so does the
offloader with ``verify=True``.
"""

import math
from dataclasses import dataclass, replace

from penstock.arguments import checked
from penstock.errors import InternalError
from penstock.offload._plan import OffloadPlan
from penstock.offload._problem import OffloadProblem

_SLACK_S = 1e-9


@checked("penstock.offload.verify(problem, penstock.offload.plan(problem))")
def verify(problem: OffloadProblem, plan: OffloadPlan) -> None:
    """Raise ``InternalError`` with the first rule that ``plan`` breaks."""
    _check_decisions(problem, plan)
    _check_lanes(problem, plan)
    if plan.max_in_flight_bytes > problem.max_in_flight_bytes:
        raise InternalError(f"{plan.max_in_flight_bytes} bytes in flight, more than {problem.max_in_flight_bytes}")
    _check_in_flight(problem, plan)
    clock = _CycleClock(problem, plan)
    stall_s = clock.stall_s + problem.overhead_s * len(plan.parked)
    if abs(stall_s - plan.stall_s) > _SLACK_S * max(1, problem.num_events):
        raise InternalError(f"predicted stall {plan.stall_s}, but its transfers imply {stall_s}")
    held_bytes = _held_bytes(problem, plan, clock.landed_s)
    if held_bytes != list(plan.held_bytes):
        raise InternalError(f"predicted bytes held {plan.held_bytes}, but its transfers imply {held_bytes}")
    if max(held_bytes) != plan.peak_bytes:
        raise InternalError(f"predicted peak {plan.peak_bytes}, but its transfers imply {max(held_bytes)}")
    if sum(plan.peak_parts.values()) != plan.peak_bytes:
        raise InternalError(f"predicted peak {plan.peak_bytes}, but its parts are {dict(plan.peak_parts)}")
    _check_gone(plan, clock.landed_s)
    keep_all_bytes = max(_held_bytes(problem, replace(plan, transfers=()), clock.landed_s))
    if keep_all_bytes != plan.keep_all_peak_bytes:
        raise InternalError(f"peak if all is kept {plan.keep_all_peak_bytes}, but lifetimes imply {keep_all_bytes}")
    if problem.budget_bytes is not None and plan.peak_bytes > problem.budget_bytes:
        raise InternalError(f"predicted peak {plan.peak_bytes} above the budget {problem.budget_bytes}")


@dataclass(slots=True, init=False)
class _CycleClock:
    """The step's clock with the waits that the transfers imply."""

    stall_s: float
    _now_s: float
    landed_s: list[float]
    """For each event, the time up to which departures count: after its wait for room, before its wait for a fetch."""

    def __init__(self, problem: OffloadProblem, plan: OffloadPlan):
        self.stall_s = self._now_s = before_s = 0.0
        self.landed_s = []
        packs: dict[int, list[float]] = {}
        needs: dict[int, list[float]] = {}
        leaves: dict[int, float] = {}
        """If every copy out is waited for: for each event, the time at which copies of the storages saved there end."""
        out_s = 0.0
        for transfer in plan.transfers:
            pack_event = problem.storages[transfer.index].pack_event
            packs.setdefault(pack_event, []).append(transfer.pack_s)
            if not plan.max_in_flight_bytes:
                leaves[pack_event] = max(transfer.out_end_s, leaves.get(pack_event, 0.0))
            if transfer.in_end_s < math.inf:
                needs.setdefault(problem.storages[transfer.index].need_event, []).append(transfer.in_end_s)
        for event, time_s in enumerate(problem.event_times_s):
            self._now_s += time_s - before_s
            before_s = time_s
            self._wait([out_s])
            out_s = leaves.get(event, out_s)
            self._wait(packs.get(event, []))
            self.landed_s.append(self._now_s)
            self._wait(needs.get(event, []))

    def _wait(self, moments_s: list[float]) -> None:
        for moment_s in moments_s:
            self.stall_s += max(0.0, moment_s - self._now_s)
            self._now_s = max(self._now_s, moment_s)


def _check_decisions(problem: OffloadProblem, plan: OffloadPlan) -> None:
    if len(plan.reasons) != len(problem.storages):
        raise InternalError("not every storage has a reason")
    if set(plan.fetch_events) != set(plan.parked):
        raise InternalError("fetches and parked storages differ")
    if sorted(transfer.index for transfer in plan.transfers) != sorted(plan.parked):
        raise InternalError("transfers and parked storages differ")
    if plan.parked_bytes != sum(problem.storages[index].size_bytes for index in plan.parked):
        raise InternalError(f"{plan.parked_bytes} parked bytes are not the sum of the parked storages")
    for index in plan.parked:
        storage = problem.storages[index]
        if storage.must_keep:
            raise InternalError(f"storage {index} is parked but must be kept: {storage.must_keep}")
        if not storage.pack_event < plan.fetch_events[index] <= storage.need_event:
            raise InternalError(
                f"storage {index} is fetched at event {plan.fetch_events[index]}, outside of its lifetime"
            )


def _check_lanes(problem: OffloadProblem, plan: OffloadPlan) -> None:
    fetched = [transfer for transfer in plan.transfers if transfer.in_start_s < math.inf]
    for transfer in plan.transfers:
        if transfer.out_start_s < transfer.pack_s - _SLACK_S:
            raise InternalError(f"storage {transfer.index} leaves before it is saved")
    for transfer in fetched:
        if transfer.in_start_s < transfer.out_end_s - _SLACK_S:
            raise InternalError(f"storage {transfer.index} is read back before it was written")
    out = [(transfer.out_start_s, transfer.out_end_s, transfer.index) for transfer in plan.transfers]
    back = [(transfer.in_start_s, transfer.in_end_s, transfer.index) for transfer in fetched]
    _check_lane(problem, out, problem.out_bandwidth_bytes_per_s)
    _check_lane(problem, back, problem.in_bandwidth_bytes_per_s)


def _check_lane(problem: OffloadProblem, copies: list[tuple[float, float, int]], bandwidth_bytes_per_s: float) -> None:
    done_s = 0.0
    for start_s, end_s, index in sorted(copies):
        if start_s < done_s - _SLACK_S:
            raise InternalError(f"storage {index} moves at {start_s} while its lane is busy until {done_s}")
        shortest_s = problem.storages[index].size_bytes / bandwidth_bytes_per_s
        if end_s - start_s < shortest_s * (1 - 1e-6) - _SLACK_S:
            raise InternalError(f"storage {index} moves in {end_s - start_s} s, faster than its lane: {shortest_s} s")
        done_s = max(done_s, end_s)


def _check_in_flight(problem: OffloadProblem, plan: OffloadPlan) -> None:
    """Raise ``InternalError`` if more bytes are leaving after a pack than the bound allows, except for a single
    storage.
    """
    moved = [transfer for transfer in plan.transfers if transfer.in_start_s < math.inf]
    for transfer in moved:
        leaving = [
            problem.storages[other.index].size_bytes
            for other in moved
            if other.index <= transfer.index and other.out_end_s > transfer.pack_s + _SLACK_S
        ]
        if len(leaving) > 1 and sum(leaving) > plan.max_in_flight_bytes:
            raise InternalError(f"{sum(leaving)} bytes are on their way out when storage {transfer.index} joins them")


def _check_gone(plan: OffloadPlan, landed_s: list[float]) -> None:
    """Raise ``InternalError`` unless each storage counts as gone from the first event after its copy out."""
    left = {transfer.index: transfer.out_end_s for transfer in plan.transfers if transfer.in_start_s < math.inf}
    if not set(left) <= set(plan.gone_events):
        raise InternalError("a storage that never left is fetched")
    for index, end_s in left.items():
        event = plan.gone_events[index]
        if end_s > landed_s[event] + _SLACK_S or (event and end_s < landed_s[event - 1] - _SLACK_S):
            raise InternalError(f"storage {index} counts as gone at event {event}, but leaves at {end_s} s")


def _held_bytes(problem: OffloadProblem, plan: OffloadPlan, landed_s: list[float]) -> list[int]:
    """Return the bytes after each event: storages that live, without those that left and are not being fetched."""
    base = problem.base_bytes or (0,) * problem.num_events
    transfers = {transfer.index: transfer for transfer in plan.transfers if transfer.in_start_s < math.inf}
    held = []
    for event in range(problem.num_events):
        resident = base[event]
        for index, storage in enumerate(problem.storages):
            if storage.pack_event <= event < storage.free_event:
                transfer = transfers.get(index)
                has_left = transfer is not None and transfer.out_end_s <= landed_s[event]
                if not has_left or event >= plan.fetch_events[index]:
                    resident += storage.size_bytes
        held.append(resident)
    return held
