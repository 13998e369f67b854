"""The planner: which saved storages to park, and when to fetch each.

The problem: storages live from the event that packs them to the last that needs them; two serial lanes carry them out
and back. Parking lowers the peak, and costs time where the computation must wait: for room on the way out, or for a
fetch. The plan parks so that nothing waits, or, with a budget, so that the peak fits.

The method follows SSDTrain's adaptive offloading (arXiv 2408.10013), which keeps everything from the first module whose
bytes cannot be written in time. Here the storages with the shortest lives are kept first. They are the last of forward
and the first of backward, save the fewest byte-seconds, and leave the least time for their copies. The number of kept
storages is found by bisection on a simulation of both lanes. A storage that would be needed before it has left is kept
too, since its copy out would wear the disk and free nothing. Fetches are laid backwards from the times of need. Each is
as late as its lane allows with a margin for noise, and begins at the last event before that.

Cost: O(n log n) for n events. Guarantee: the plan's predicted peak and stall are those of the simulation, which
`_verify.py` checks independently. With a budget the prediction fits, or `BudgetError` names the smallest budget that
would. That is the peak with the computation waiting for every copy, so it does not depend on the speed of the disk.
Known gap: the kept set is a prefix in order of lifetime, not the best subset.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from penstock.arguments import checked
from penstock.errors import BudgetError
from penstock.offload._problem import OffloadProblem
from penstock.units import format_bytes

_FETCH_MARGIN = 1.5
"""Fetches are given this many times their transfer time, since lanes and steps are noisy."""
BESIDE = "not saved for backward: parameters, gradients, optimizer state, and what one operator works on"
"""The part of the peak that is not saved activations."""
MOVING = "parked: on its way out, or back for backward"
"""The part of the peak that is parked storages which are not yet gone, or back already."""
_IN_FLIGHT_PARTS = (4, 16, 64, 2**62)
"""Divisors of the bytes in flight, tried in order until the budget has room; with the last, nothing is in flight."""
_SMALLER = 0.7
"""The factor from one bound that is tried to the next."""
_LEAST_IN_FLIGHT_BYTES = 64 * 2**20
"""The smallest bound that is tried."""
_NO_STALL_SHARE = 0.005
"""A predicted stall below this share of the step counts as none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The copies of one parked storage in the simulation, in seconds including stalls."""

    index: int
    """Position of the storage in the problem."""
    pack_s: float
    """Time at which forward goes on after saving the storage, having waited for room on the lane."""
    out_start_s: float
    """Time at which its copy out begins."""
    out_end_s: float
    """Time at which its copy out ends and the device copy can be freed, unless it is needed before."""
    in_start_s: float
    """Time at which its copy in begins; infinite if the storage was still on the device."""
    in_end_s: float
    """Time at which its copy in ends; infinite if the storage was still on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPlan:
    """The decisions for every cycle like the recorded one. It is wide because its predictions are part of it."""

    parked: frozenset[int]
    """Positions of the storages to park."""
    reasons: tuple[str, ...]
    """Per storage, why it is parked or kept."""
    fetch_events: Mapping[int, int]
    """Per parked storage, the event at which its fetch begins."""
    peak_bytes: int
    """Predicted device peak; of the saved storages alone if the problem has no ``base_bytes``."""
    keep_all_peak_bytes: int
    """Predicted device peak if nothing were parked."""
    stall_s: float
    """Predicted seconds per cycle that the computation waits."""
    parked_bytes: int
    """Bytes parked per cycle."""
    transfers: tuple[Transfer, ...]
    """The copies in the simulation."""
    gone_events: Mapping[int, int]
    """Per parked storage, the event by which its device copy is gone; with a budget the computation waits for it."""
    max_in_flight_bytes: int
    """Most bytes on their way out at once: as in the problem, or fewer if the budget has no room for them.

    With 0 every copy out is waited for at the next event, so that the speed of the disk does not change the peak.
    """
    peak_parts: Mapping[str, int]
    """Bytes of the predicted peak by what they are: saved storages by the reason they are there, and all else."""
    held_bytes: tuple[int, ...]
    """Predicted device bytes from each event to the next; the highest is ``peak_bytes``."""
    declined: str = ""
    """The reason why offloading is not worth it; empty if it is."""


@dataclass(slots=True)
class CycleSimulation:
    """The outcome of parking a set of storages: peak, stall and copies."""

    peak_bytes: int = 0
    stall_s: float = 0.0
    transfers: dict[int, Transfer] = field(default_factory=dict)
    resident_bytes: list[int] = field(default_factory=list)
    """Bytes of saved storages on the device after each event."""
    gone_events: dict[int, int] = field(default_factory=dict)
    """Per storage that left, the event by which it was gone."""


@checked("penstock.offload.plan(problem)")
def plan(problem: OffloadProblem) -> OffloadPlan:
    """Return the plan for ``problem``. Raises ``BudgetError`` if its budget is below the smallest predicted peak.

    Without a budget, plans are made with the problem's bound on bytes in flight, with 0.7 of it, and so on. The one
    with the lowest peak is returned.
    """
    best = _plan(problem)
    if problem.budget_bytes is None:
        largest_bytes = max((problem.storages[index].size_bytes for index in _movable(problem)), default=0)
        bound_bytes = int(_SMALLER * problem.max_in_flight_bytes)
        while bound_bytes >= max(largest_bytes, _LEAST_IN_FLIGHT_BYTES) and _is_bound(problem, best):
            other = _plan(replace(problem, max_in_flight_bytes=bound_bytes))
            best = min(best, other, key=lambda plan: (bool(plan.declined), plan.peak_bytes, plan.stall_s))
            bound_bytes = int(_SMALLER * bound_bytes)
    return best


def _is_bound(problem: OffloadProblem, made: OffloadPlan) -> bool:
    """Whether so many bytes are on their way out at once that a smaller bound would change something."""
    ends = sorted(
        change
        for transfer in made.transfers
        for size_bytes in [problem.storages[transfer.index].size_bytes]
        for change in ((transfer.pack_s, size_bytes), (transfer.out_end_s, -size_bytes))
    )
    in_flight = most = 0
    for _, change in ends:
        in_flight += change
        most = max(most, in_flight)
    return most > _SMALLER * made.max_in_flight_bytes


def _plan(problem: OffloadProblem) -> OffloadPlan:
    movable = _movable(problem)
    movable.sort(key=lambda index: (_lifetime_s(problem, index), -index))
    problem, lay = _within_budget(problem, frozenset(movable))
    keep_all_peak_bytes = simulate(problem, frozenset(), {}).peak_bytes

    def outcome(num_kept: int, lay: _Layer) -> tuple[frozenset[int], dict[int, int], CycleSimulation]:
        parked = frozenset(movable[num_kept:])
        fetch_events = lay(problem, parked)
        return parked, fetch_events, simulate(problem, parked, fetch_events)

    if problem.budget_bytes is None:
        most_stall_s = _NO_STALL_SHARE * problem.step_s
        num_kept = _bisect(len(movable), lambda count: outcome(count, lay)[2].stall_s <= most_stall_s)
    else:
        num_kept = _most_that_fit(problem, movable, lambda count: outcome(count, lay)[2].peak_bytes)
    parked, fetch_events, simulation = outcome(num_kept, lay)
    while useless := _never_gone(simulation):
        without = parked - useless
        fetch_events_without = lay(problem, without)
        simulation_without = simulate(problem, without, fetch_events_without)
        if simulation_without.peak_bytes > simulation.peak_bytes or simulation_without.stall_s > simulation.stall_s:
            break  # the other copies moved on the lanes
        parked, fetch_events, simulation = without, fetch_events_without, simulation_without
    declined = _declined(problem, keep_all_peak_bytes, simulation, len(parked))
    return OffloadPlan(
        parked=parked,
        reasons=_reasons(problem, parked),
        fetch_events=fetch_events,
        peak_bytes=simulation.peak_bytes,
        keep_all_peak_bytes=keep_all_peak_bytes,
        stall_s=simulation.stall_s + problem.overhead_s * len(parked),
        parked_bytes=sum(problem.storages[index].size_bytes for index in parked),
        transfers=tuple(simulation.transfers[index] for index in sorted(simulation.transfers)),
        gone_events=simulation.gone_events,
        max_in_flight_bytes=problem.max_in_flight_bytes,
        peak_parts=_peak_parts(problem, simulation, _reasons(problem, parked)),
        held_bytes=_held(problem, simulation),
        declined=declined,
    )


def _within_budget(problem: OffloadProblem, parked: Set[int]) -> tuple[OffloadProblem, "_Layer"]:
    """Return the problem with as many bytes in flight as the budget has room for, and the way to lay fetches.

    Where room is short the computation waits for copies out, and finally also for every fetch. Otherwise the smallest
    budget would depend on the speed of the disk.
    """
    if problem.budget_bytes is None:
        return problem, lay_fetches
    most = min(problem.max_in_flight_bytes, sum(problem.storages[index].size_bytes for index in parked))
    bounds = [problem.max_in_flight_bytes, *(most // part for part in _IN_FLIGHT_PARTS)]
    for lay in (lay_fetches, _fetch_at_need):
        for bound_bytes in bounds:
            less = replace(problem, max_in_flight_bytes=min(bound_bytes, problem.max_in_flight_bytes))
            if simulate(less, parked, lay(less, parked)).peak_bytes <= problem.budget_bytes:
                return less, lay
    return replace(problem, max_in_flight_bytes=0), _fetch_at_need


def smallest_peak_bytes(problem: OffloadProblem) -> int:
    """Return the predicted peak if everything movable is parked, every copy is waited for, and nothing is fetched
    early.
    """
    parked, problem = _movable(problem), replace(problem, max_in_flight_bytes=0)
    return simulate(problem, frozenset(parked), _fetch_at_need(problem, frozenset(parked))).peak_bytes


def refusal(problem: OffloadProblem, budget_bytes: int, needed_bytes: int) -> str:
    """Return the message for a budget of ``budget_bytes`` where this cycle needed ``needed_bytes``."""
    needed_bytes += problem.spread_bytes
    return (
        f"the budget of {format_bytes(budget_bytes)} cannot be met: this step needs at least {needed_bytes} bytes "
        f"({format_bytes(needed_bytes)}) even with all {len(_movable(problem))} movable storages parked, because up to "
        f"{format_bytes(max(problem.base_bytes, default=0))} of the device are in use in addition to saved activations "
        "(parameters, gradients, optimizer state, and what one operator works on). Give a larger budget or a smaller "
        "batch."
    )


def keep_all(problem: OffloadProblem, reason: str) -> OffloadPlan:
    """Return the plan that parks nothing, with ``reason`` for each storage that could be."""
    simulation = simulate(problem, frozenset(), {})
    reasons = tuple(storage.must_keep or reason for storage in problem.storages)
    return OffloadPlan(
        parked=frozenset(),
        reasons=reasons,
        fetch_events={},
        peak_bytes=simulation.peak_bytes,
        keep_all_peak_bytes=simulation.peak_bytes,
        stall_s=0.0,
        parked_bytes=0,
        transfers=(),
        gone_events={},
        max_in_flight_bytes=problem.max_in_flight_bytes,
        peak_parts=_peak_parts(problem, simulation, reasons),
        held_bytes=_held(problem, simulation),
    )


def lay_fetches(problem: OffloadProblem, parked: Set[int]) -> dict[int, int]:
    """Return, per parked storage, the event at which its fetch begins: as late as the lane allows, with the margin."""
    fetch_events: dict[int, int] = {}
    lane_free_s = math.inf
    event = problem.num_events - 1
    for index in sorted(parked, key=lambda index: -problem.storages[index].need_event):
        storage = problem.storages[index]
        needed_s = min(problem.event_times_s[storage.need_event], lane_free_s)
        start_s = needed_s - _FETCH_MARGIN * storage.size_bytes / problem.in_bandwidth_bytes_per_s
        event = min(event, storage.need_event)
        while event > 0 and problem.event_times_s[event] > start_s:
            event -= 1
        fetch_events[index] = min(max(event, storage.pack_event + 1), storage.need_event)
        lane_free_s = start_s  # it begins at an event before that, and so ends earlier, too
    return fetch_events


_Layer = Callable[[OffloadProblem, Set[int]], dict[int, int]]


def _fetch_at_need(problem: OffloadProblem, parked: Set[int]) -> dict[int, int]:
    return {index: problem.storages[index].need_event for index in parked}


def simulate(problem: OffloadProblem, parked: Set[int], fetch_events: Mapping[int, int]) -> CycleSimulation:
    """Simulate the recorded cycle with ``parked`` parked and fetches begun at ``fetch_events``."""
    return _CyclePlayer(problem, parked, fetch_events).play()


class _CyclePlayer:
    """The state of a simulated cycle. It is wide because two lanes and the device advance together."""

    def __init__(self, problem: OffloadProblem, parked: Set[int], fetch_events: Mapping[int, int]):
        self.problem = problem
        self.parked = parked
        self.result = CycleSimulation()
        self.now_s = 0.0
        self.event = 0
        self.out_free_s = self.in_free_s = 0.0
        self.resident_bytes = 0
        self.leaving: deque[int] = deque()
        self.leaving_bytes = 0
        self.out: dict[int, tuple[float, float]] = {}
        self.back: dict[int, tuple[float, float]] = {}
        self.packed_s: dict[int, float] = {}
        self.packs, self.needs, self.frees = _by_event(problem)
        self.fetches: dict[int, list[int]] = {}
        for index in sorted(fetch_events, key=lambda index: problem.storages[index].need_event):
            self.fetches.setdefault(fetch_events[index], []).append(index)

    def play(self) -> CycleSimulation:
        before_s = 0.0
        base = _base(self.problem)
        for event, time_s in enumerate(self.problem.event_times_s):
            self.now_s += time_s - before_s
            before_s = time_s
            self.event = event
            if not self.problem.max_in_flight_bytes:
                self._wait_until(self.out_free_s)
            self._land()
            for index in self.frees.get(event, ()):
                self.resident_bytes -= self.problem.storages[index].size_bytes
            for index in self.packs.get(event, ()):
                self._pack(index)
            for index in self.fetches.get(event, ()):
                self._fetch(index)
            for index in self.needs.get(event, ()):
                self._need(index)
            self.result.resident_bytes.append(self.resident_bytes)
            self.result.peak_bytes = max(self.result.peak_bytes, self.resident_bytes + base[event])
        for index, (start_s, end_s) in self.out.items():
            in_start_s, in_end_s = self.back.get(index, (math.inf, math.inf))
            self.result.transfers[index] = Transfer(
                index=index,
                pack_s=self.packed_s[index],
                out_start_s=start_s,
                out_end_s=end_s,
                in_start_s=in_start_s,
                in_end_s=in_end_s,
            )
        return self.result

    def _land(self) -> None:
        """Free the storages whose copies out have ended by now."""
        while self.leaving and self.out[self.leaving[0]][1] <= self.now_s:
            index = self.leaving.popleft()
            size_bytes = self.problem.storages[index].size_bytes
            self.leaving_bytes -= size_bytes
            self.resident_bytes -= size_bytes
            self.result.gone_events[index] = self.event

    def _pack(self, index: int) -> None:
        size_bytes = self.problem.storages[index].size_bytes
        self.resident_bytes += size_bytes
        if index not in self.parked:
            return
        while self.leaving and self.leaving_bytes + size_bytes > self.problem.max_in_flight_bytes:
            self._wait_until(self.out[self.leaving[0]][1])
            self._land()
        start_s = max(self.now_s, self.out_free_s)
        self.out_free_s = start_s + size_bytes / self.problem.out_bandwidth_bytes_per_s
        self.out[index] = (start_s, self.out_free_s)
        self.packed_s[index] = self.now_s
        self.leaving.append(index)
        self.leaving_bytes += size_bytes

    def _fetch(self, index: int) -> None:
        if index in self.leaving:  # it is still on the device, stays there, and no longer counts as in flight
            self.leaving.remove(index)
            self.leaving_bytes -= self.problem.storages[index].size_bytes
        if index not in self.result.gone_events or index in self.back:
            return
        size_bytes = self.problem.storages[index].size_bytes
        start_s = max(self.now_s, self.in_free_s)
        self.in_free_s = start_s + size_bytes / self.problem.in_bandwidth_bytes_per_s
        self.back[index] = (start_s, self.in_free_s)
        self.resident_bytes += size_bytes

    def _need(self, index: int) -> None:
        if index in self.parked:
            self._fetch(index)
            if index in self.back:
                self._wait_until(self.back[index][1])

    def _wait_until(self, time_s: float) -> None:
        self.result.stall_s += max(0.0, time_s - self.now_s)
        self.now_s = max(self.now_s, time_s)


def _base(problem: OffloadProblem) -> tuple[int, ...]:
    return tuple(problem.base_bytes) or (0,) * problem.num_events


def _held(problem: OffloadProblem, simulation: CycleSimulation) -> tuple[int, ...]:
    return tuple(map(sum, zip(simulation.resident_bytes, _base(problem), strict=True)))


def _peak_parts(problem: OffloadProblem, simulation: CycleSimulation, reasons: Sequence[str]) -> dict[str, int]:
    """Return the parts of the peak, the largest first."""
    held, base = _held(problem, simulation), _base(problem)
    event = max(range(len(held)), key=held.__getitem__, default=0)
    parts = {BESIDE: base[event]} if problem.base_bytes else {}
    for storage, reason in zip(problem.storages, reasons, strict=True):
        if reason != "parked" and storage.pack_event <= event < storage.free_event:
            parts[reason] = parts.get(reason, 0) + storage.size_bytes
    moving_bytes = (held[event] if held else 0) - sum(parts.values())
    if moving_bytes:
        parts[MOVING] = moving_bytes
    return dict(sorted(parts.items(), key=lambda part: -part[1]))


def _by_event(problem: OffloadProblem) -> tuple[dict[int, list[int]], dict[int, list[int]], dict[int, list[int]]]:
    packs: dict[int, list[int]] = {}
    needs: dict[int, list[int]] = {}
    frees: dict[int, list[int]] = {}
    for index, storage in enumerate(problem.storages):
        packs.setdefault(storage.pack_event, []).append(index)
        needs.setdefault(storage.need_event, []).append(index)
        frees.setdefault(storage.free_event, []).append(index)
    return packs, needs, frees


def _lifetime_s(problem: OffloadProblem, index: int) -> float:
    storage = problem.storages[index]
    return problem.event_times_s[storage.need_event] - problem.event_times_s[storage.pack_event]


def _movable(problem: OffloadProblem) -> list[int]:
    return [index for index, storage in enumerate(problem.storages) if not storage.must_keep]


def _never_gone(simulation: CycleSimulation) -> set[int]:
    """Return the storages that are needed before they have left, so that parking them gains nothing."""
    return {index for index, transfer in simulation.transfers.items() if transfer.in_start_s == math.inf}


def _bisect(most: int, holds: Callable[[int], bool]) -> int:
    """Return the smallest count in ``0..most`` for which ``holds``, which is false below it and true from there on."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _most_that_fit(problem: OffloadProblem, movable: list[int], peak_if_kept: Callable[[int], int]) -> int:
    """Return how many storages may be kept within the budget, so that no more than necessary move."""
    assert problem.budget_bytes is not None
    budget_bytes = problem.budget_bytes
    if peak_if_kept(0) > budget_bytes:
        raise BudgetError(refusal(problem, budget_bytes, smallest_peak_bytes(problem)))
    most = len(movable)
    return most - _bisect(most, lambda num_parked: peak_if_kept(most - num_parked) <= budget_bytes)


def _declined(problem: OffloadProblem, keep_all_bytes: int, simulation: CycleSimulation, num_parked: int) -> str:
    """Return why offloading is not worth it, or an empty text.

    It is worth it if saving >= floor x peak, and stall + overhead <= share x step. A budget overrides both.
    """
    if problem.budget_bytes is not None:
        return ""
    saving_bytes = keep_all_bytes - simulation.peak_bytes
    if saving_bytes < problem.min_saving_share * keep_all_bytes:
        return (
            f"it would save {format_bytes(max(saving_bytes, 0))} of a peak of {format_bytes(keep_all_bytes)}, less "
            f"than min_saving={problem.min_saving_share:.0%} of it{_what_stays(problem)}"
        )
    lost_s = simulation.stall_s + problem.overhead_s * num_parked
    if problem.max_stall_share < 1 and lost_s > problem.max_stall_share * problem.step_s:
        return (
            f"it would cost {lost_s:.3f} s of a step of {problem.step_s:.3f} s, more than "
            f"max_stall={problem.max_stall_share:.0%} of it; budget= offloads regardless of the time"
        )
    return ""


def _what_stays(problem: OffloadProblem) -> str:
    """Return the reason that keeps the most bytes from being parked, for a message; empty if all may be parked."""
    kept: dict[str, int] = {}
    for storage in problem.storages:
        if storage.must_keep:
            kept[storage.must_keep] = kept.get(storage.must_keep, 0) + storage.size_bytes
    if not kept:
        return ""
    reason, size_bytes = max(kept.items(), key=lambda part: part[1])
    advice = "; min_size=0 parks them too" if reason == "kept: small" else ""
    all_bytes = sum(storage.size_bytes for storage in problem.storages)
    return f"; of {format_bytes(all_bytes)} saved, {format_bytes(size_bytes)} are {reason}{advice}"


def _reasons(problem: OffloadProblem, parked: Set[int]) -> tuple[str, ...]:
    free = "kept: its copies could not be hidden"
    if problem.budget_bytes is not None:
        free = "kept: the budget has room"
    return tuple(
        "parked" if index in parked else storage.must_keep or free for index, storage in enumerate(problem.storages)
    )
