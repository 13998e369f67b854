"""Learning from one cycle for the next: record, plan, follow, and correct the plan by measurements.

The first cycle parks everything eligible and is recorded. The planner gets its problem, and later cycles that begin
with the same storage follow that plan. So each batch shape has its own plan. A cycle that then saves something else is
recorded anew. A plan that stalls more than predicted is made again with the bandwidths seen since. With a budget, the
peak is measured until one planned cycle keeps it.
"""

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch

from penstock.devices import backend_of, has_backend
from penstock.errors import BudgetError, OffloadDeclinedWarning, PenstockWarning
from penstock.offload._clocks import CycleMeter, DeviceClock, HostClock
from penstock.offload._cycle import Cycle, Followed
from penstock.offload._plan import OffloadPlan, keep_all, plan, refusal, smallest_peak_bytes
from penstock.offload._problem import OffloadProblem, in_flight_bytes
from penstock.offload._recording import MeasuredMemory
from penstock.offload._scope import Shapes
from penstock.offload._statistics import OffloadStatistics
from penstock.offload._verify import verify
from penstock.probe import can_record
from penstock.tiers import Budget, Footprint, TierStatistics, Waterfall, gate

_MAX_CHANGES = 5
"""Cycles that may differ from their plan. After that, planning is given up and fetches just run ahead."""
_MAX_LESSONS = 64
"""Kinds of cycles that get a plan. Cycles of further kinds park everything, and fetches just run ahead."""
_MAX_ENTERED = 64
"""Calls of the model that are measured from their beginning. The limit is for shapes that occur once and are never
fitted.
"""
_MAX_REPLANS = 3
_STALL_TOLERANCE_SHARE = 0.02
_MAX_COLD = 3
"""Cycles of one kind that are skipped because memory was mapped in them; the next one is recorded in any case."""
_DERATING = 0.7
"""Share of a measured bandwidth that is counted on after a plan has stalled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleSettings:
    """CycleSettings of the offloader that concern whole steps."""

    max_in_flight_bytes: int | None
    """Most bytes on their way out at once; ``None`` for what suits the link and the storages."""
    min_saving_share: float
    """See ``OffloadProblem``."""
    max_stall_share: float
    """See ``OffloadProblem``."""
    account: Budget
    """The account whose device bytes limit the step's peak, together with what others hold there."""
    footprint: Footprint
    """The model's footprint in that account."""
    verify: bool
    """Whether every plan is checked."""


Beginning = tuple[int, str, Shapes]
"""The beginning of a cycle: bytes and module of the first storage saved, and shapes of the model's arguments."""


@dataclass(slots=True)
class _Lesson:
    """Knowledge about cycles that begin alike, usually batches of one shape."""

    is_fitting: bool
    """Whether no cycle has yet been measured to stay within the budget."""
    problem: OffloadProblem | None = None
    plan: OffloadPlan | None = None
    signature: tuple[tuple[int, str], ...] = ()
    num_changes: int = 0
    num_replans: int = 0
    num_cold: int = 0
    """Number of cycles that were not recorded because memory was mapped in them, which later cycles do not repeat."""
    margin_bytes: int = 0
    room_bytes: int = 0
    """Bytes that others left of the account when the plan was made."""
    declined: str = ""

    @property
    def is_taught(self) -> bool:
        """Whether its next cycle will be measured."""
        return self.is_fitting and (self.is_open or self.plan is not None)

    @property
    def is_open(self) -> bool:
        """Whether another recorded cycle would teach something."""
        return self.plan is None and self.num_changes <= _MAX_CHANGES


class Learner:
    """The offloader's knowledge of the steps so far, and the plans made from it."""

    def __init__(self, settings: CycleSettings):
        self.declined = ""
        self._settings = settings
        self._lessons: dict[tuple[Beginning, bool], _Lesson] = {}
        self._lesson = _Lesson(is_fitting=False)
        self._warned_of: set[str] = set()
        self._is_on_cpu = False
        self._clock: HostClock | DeviceClock | None = None
        self._meter = CycleMeter()
        """Measures since the model was called, or since something was saved."""
        self._is_warm = False
        """Whether a cycle has run before."""
        self._slab_bytes = 0
        """Bytes of host memory that tiers had mapped when the cycle began."""
        self._num_entered = 0

    def enter(self, device: torch.device) -> None:
        """Note a call of the model. While plans are fitted, also measure what it takes before it saves anything."""
        self.abort()
        is_fitted = self._lessons and not any(lesson.is_taught for lesson in self._lessons.values())
        is_elsewhere = not has_backend(device)  # tensors saved there are not moved
        if self._settings.account.device_bytes is None or is_fitted or is_elsewhere or self._num_entered > _MAX_ENTERED:
            return
        self._num_entered += 1
        allocator = backend_of(device).allocator
        if allocator is not None or (can_record(device) and not gate.others_compute):
            self._meter.begin(allocator)

    def begin(self, waterfalls: dict[torch.device, Waterfall], beginning: Beginning, *, has_gradients: bool) -> Cycle:
        """Begin a cycle that follows the plan for cycles with this beginning, or is recorded if there is none."""
        device, waterfall = next(iter(waterfalls.items()))
        backend = backend_of(device)
        self._is_on_cpu = backend.streams is None
        self._clock = None
        self._meter.before_bytes = self._meter.peak_bytes()
        lesson = self._lesson = self._lesson_for(beginning, has_gradients)
        self._make_room_for_others(lesson)
        is_fitting = lesson.is_taught
        if is_fitting and backend.allocator is not None and self._meter.watch is None:
            self._meter.abort()
            self._meter.begin(backend.allocator)
        is_measured = is_fitting and (not self._is_on_cpu or can_record(device))
        # the tensors alive at the start cannot be looked for while other threads compute: the next cycle is recorded
        is_blind = is_measured and self._is_on_cpu and not self._meter.is_running and gate.others_compute
        if lesson.is_open and not is_blind:
            if backend.streams is None:
                self._clock = HostClock(waterfall)
            elif self._is_warm:
                self._clock = DeviceClock(backend.streams, self._meter.watch if is_fitting else None)
        if is_measured and self._is_on_cpu and not is_blind and not self._meter.is_running:
            self._meter.begin(None)
        waterfall.device_changes = [] if is_fitting else None
        self._slab_bytes = _mapped_bytes(waterfall)
        if lesson.plan is not None and lesson.problem is not None:
            waterfall.bound_in_flight(
                lesson.plan.max_in_flight_bytes
                if lesson.problem.budget_bytes is None
                else lesson.problem.max_in_flight_bytes
            )
        followed = None
        if lesson.plan is not None:
            followed = Followed(lesson.plan, lesson.signature, lesson.problem.budget_bytes if lesson.problem else None)
        return Cycle(
            followed=followed,
            window_bytes=waterfall.max_in_flight_bytes // 4,
            has_budget=self._settings.account.device_bytes is not None,
            reap=waterfall.reap,
            mark=self._clock.mark if self._clock else None,
            statistics_before=_total(waterfalls),
        )

    def finish(self, cycle: Cycle, waterfalls: dict[torch.device, Waterfall], num_steps: int) -> OffloadStatistics:
        """Learn from a finished cycle; return its statistics. Raises ``BudgetError`` for an impossible budget."""
        waterfall = next(iter(waterfalls.values()))
        lesson = self._lesson
        has_plan = lesson.plan is not None
        if isinstance(self._clock, DeviceClock):
            self._clock.finish()  # all waits of this cycle are then known, and none counts for the next one
        timeline, peak_bytes = self._meter.end(self._clock.memory if isinstance(self._clock, DeviceClock) else ())
        if peak_bytes is not None:
            peak_bytes = max(peak_bytes, self._meter.before_bytes)
        statistics = self._statistics(cycle, _total(waterfalls), num_steps, peak_bytes)
        clock, self._clock = self._clock, None
        self._is_warm = True
        if len(waterfalls) > 1:
            return statistics  # several devices: no plan, fetches run ahead on each
        if has_plan:
            self._follow_up(lesson, cycle, statistics, waterfall)
        elif isinstance(clock, DeviceClock) and lesson.num_cold < _MAX_COLD and self._has_mapped(waterfall):
            lesson.num_cold += 1  # mapping memory took time that no later cycle takes
        elif clock is not None and cycle.num_needs:
            self._learn(lesson, cycle, clock, statistics, waterfall, timeline)
        return replace(statistics, declined=lesson.declined)

    def decline(self, reason: str) -> None:
        """Stop offloading for good, and warn why."""
        self.declined = reason
        self.warn(reason)

    def abort(self) -> None:
        """End measuring a cycle that will not finish."""
        self._meter.abort()
        self._clock = None

    def _lesson_for(self, beginning: Beginning, has_gradients: bool) -> _Lesson:
        """Return what is known about cycles with this beginning; once there are too many kinds, one that never gets a
        plan.

        With a budget it matters whether gradients exist already, as in all micro-batches of a step but its first.
        """
        key = (beginning, has_gradients and self._settings.account.device_bytes is not None)
        if key not in self._lessons:
            if len(self._lessons) >= _MAX_LESSONS:
                return _Lesson(is_fitting=False, num_changes=_MAX_CHANGES + 1)
            self._lessons[key] = _Lesson(is_fitting=self._settings.account.device_bytes is not None)
        return self._lessons[key]

    def warn(self, reason: str) -> None:
        """Warn once why nothing is offloaded."""
        if "declined" not in self._warned_of:
            self._warned_of.add("declined")
            warnings.warn(f"activations are not offloaded: {reason}.", OffloadDeclinedWarning, stacklevel=5)

    def _learn(
        self,
        lesson: _Lesson,
        cycle: Cycle,
        clock: HostClock | DeviceClock,
        statistics: OffloadStatistics,
        waterfall: Waterfall,
        timeline: list[tuple[float, int]],
    ) -> None:
        times = clock.times(statistics.stall_s)
        timeline, changes = timeline or clock.memory, waterfall.device_changes
        memory = MeasuredMemory(timeline=timeline, parked_changes=changes) if timeline and changes is not None else None
        num_parked = max(1, sum(use.is_parked for use in cycle.recording.uses))
        lesson.problem = cycle.recording.problem(
            times,
            _rates(waterfall),
            memory,
            {
                "overhead_s": max(0.0, cycle.hook_s - statistics.stall_s) / num_parked,
                "max_in_flight_bytes": self._in_flight_bytes(waterfall, cycle),
                "spread_bytes": _spread_bytes(waterfall, cycle, num_parked),
                "budget_bytes": self._budget_bytes(),
                "max_stall_share": self._settings.max_stall_share,
                "min_saving_share": self._settings.min_saving_share,
            },
        )
        if base := lesson.problem.base_bytes:
            before = (held for time_s, held in timeline if time_s < times.clock_s[0])
            first_bytes = max(
                base[0], max(self._meter.before_bytes, *before, 0) - lesson.problem.storages[0].size_bytes
            )
            lesson.problem = replace(lesson.problem, base_bytes=(first_bytes, *base[1:]))
        lesson.signature = cycle.recording.signature
        self._make_plan(lesson, lesson.problem)

    def _in_flight_bytes(self, waterfall: Waterfall, cycle: Cycle) -> int:
        """Return how many bytes may be on their way out at once; a plan uses as many of them as it needs."""
        asked = self._settings.max_in_flight_bytes
        if asked is not None:
            return asked
        sizes = [use.size_bytes for use in cycle.recording.uses if use.is_parked]
        if not self._is_on_cpu and not waterfall.has_staging:
            return max(waterfall.max_in_flight_bytes, sum(sizes))  # the plan counts them in the peak
        return max(waterfall.max_in_flight_bytes, in_flight_bytes(_rates(waterfall)[0], max(sizes, default=0)))

    def _has_mapped(self, waterfall: Waterfall) -> bool:
        """Return whether memory was mapped below the device in this cycle."""
        return _mapped_bytes(waterfall) > self._slab_bytes

    def _budget_bytes(self) -> int | None:
        """Return the limit of the measured peak, which includes everything on the device, on a CPU also host memory."""
        account = self._settings.account
        if account.device_bytes is None:
            return None
        in_host = account.held_bytes("host") if self._is_on_cpu else 0
        return max(1, account.device_bytes - account.beside_bytes() + in_host)

    def _make_room_for_others(self, lesson: _Lesson) -> None:
        """Plan for less memory if others hold more of the account than before, and measure again."""
        room_bytes = self._settings.account.step_room_bytes(self._settings.footprint)
        if lesson.plan is None or lesson.problem is None or room_bytes is None:
            return
        assert lesson.problem.budget_bytes is not None
        less_bytes = lesson.room_bytes - room_bytes
        if less_bytes > 0:
            lesson.is_fitting = True
            smaller = max(1, lesson.problem.budget_bytes - less_bytes)
            self._make_plan(lesson, replace(lesson.problem, budget_bytes=smaller))

    def _make_plan(self, lesson: _Lesson, problem: OffloadProblem) -> None:
        new_plan = plan(problem)
        lesson.room_bytes = self._settings.account.step_room_bytes(self._settings.footprint) or 0
        if self._settings.verify:
            verify(problem, new_plan)
        if new_plan.declined:
            lesson.declined = new_plan.declined
            new_plan = keep_all(problem, "kept: offloading is declined")
            self.warn(lesson.declined)
        lesson.problem, lesson.plan = problem, new_plan

    def _follow_up(self, lesson: _Lesson, cycle: Cycle, statistics: OffloadStatistics, waterfall: Waterfall) -> None:
        assert lesson.plan is not None and lesson.problem is not None
        if not cycle.matched_plan():
            lesson.num_changes += 1
            lesson.plan, lesson.declined = None, ""
            lesson.is_fitting = self._settings.account.device_bytes is not None  # all else is measured again
            if not lesson.is_open:
                self._give_up()
            return
        budget_bytes = self._budget_bytes()
        if lesson.is_fitting and budget_bytes is not None and statistics.peak_bytes is not None:
            self._fit(lesson, lesson.problem, statistics.peak_bytes, budget_bytes)
        elif lesson.num_replans < _MAX_REPLANS and budget_bytes is None:
            late_s = statistics.stall_s - lesson.plan.stall_s
            if late_s > _STALL_TOLERANCE_SHARE * lesson.problem.step_s:
                lesson.num_replans += 1
                out, back = _rates(waterfall)
                slower = replace(
                    lesson.problem,
                    out_bandwidth_bytes_per_s=min(out, lesson.problem.out_bandwidth_bytes_per_s) * _DERATING,
                    in_bandwidth_bytes_per_s=min(back, lesson.problem.in_bandwidth_bytes_per_s) * _DERATING,
                )
                self._make_plan(lesson, slower)

    def _give_up(self) -> None:
        """Warn once that steps of some kind are no longer planned."""
        if "given up" not in self._warned_of:
            self._warned_of.add("given up")
            warnings.warn(
                f"{_MAX_CHANGES + 1} steps with inputs of the same shapes saved different tensors, so such steps are "
                "not planned: everything that may be offloaded is, and with a budget forward waits for every copy. "
                "Exclude modules whose saved tensors depend on values: modules=['blocks.*']",
                PenstockWarning,
                stacklevel=5,
            )

    def _fit(self, lesson: _Lesson, problem: OffloadProblem, peak_bytes: int, budget_bytes: int) -> None:
        """Plan for less memory, again and again, until a measured peak is within the budget."""
        if peak_bytes <= budget_bytes:
            lesson.is_fitting = False
            return
        assert lesson.plan is not None
        over_bytes = peak_bytes - budget_bytes
        lesson.margin_bytes = max(
            lesson.margin_bytes + over_bytes + budget_bytes // 100,
            budget_bytes - lesson.plan.peak_bytes + over_bytes,  # else the same plan may fit again: storages are large
        )
        try:
            self._make_plan(lesson, replace(problem, budget_bytes=max(1, budget_bytes - lesson.margin_bytes)))
        except BudgetError as error:
            smallest_bytes = smallest_peak_bytes(problem)
            if smallest_bytes < lesson.plan.peak_bytes and smallest_bytes + problem.spread_bytes <= budget_bytes:
                self._make_plan(lesson, replace(problem, budget_bytes=smallest_bytes))  # everything that may leave does
                return
            needed_bytes = max(peak_bytes, smallest_bytes + lesson.margin_bytes)
            text = refusal(problem, budget_bytes, needed_bytes)
            raise BudgetError(f"{text} (A step planned for it took {peak_bytes} bytes.)") from error

    def _statistics(
        self, cycle: Cycle, after: TierStatistics, num_steps: int, peak_bytes: int | None
    ) -> OffloadStatistics:
        before, followed = cycle.statistics_before, self._lesson.plan if cycle.matched_plan() else None
        return OffloadStatistics(
            num_steps=num_steps,
            saved_bytes=cycle.saved_bytes,
            parked_bytes=after.parked_bytes - before.parked_bytes,
            fetched_bytes=after.fetched_bytes - before.fetched_bytes,
            forwarded_bytes=after.forwarded_bytes - before.forwarded_bytes,
            kept_bytes=dict(cycle.kept_bytes),
            failed_bytes=after.kept_bytes - before.kept_bytes,
            stall_s=after.stall_s - before.stall_s,
            step_s=cycle.end_s - cycle.start_s,
            written_to_disk_bytes=after.written_to_disk_bytes - before.written_to_disk_bytes,
            peak_bytes=peak_bytes,
            predicted_peak_bytes=followed.peak_bytes if followed else None,
            predicted_stall_s=followed.stall_s if followed else None,
            is_planned=followed is not None,
            peak_parts=dict(followed.peak_parts) if followed else {},
        )


def _rates(waterfall: Waterfall) -> tuple[float, float]:
    """Return the measured bandwidths out and in. A direction without copies is assumed to be as fast as the other."""
    out, back = waterfall.rates_bytes_per_s()
    return out or back or 1e9, back or out or 1e9


def _mapped_bytes(waterfall: Waterfall) -> int:
    """Return how much host memory tiers have mapped so far."""
    return sum(tier.reserved_bytes for tier in waterfall.tiers if tier.is_memory)


def _spread_bytes(waterfall: Waterfall, cycle: Cycle, num_parked: int) -> int:
    """Return how much more memory the edges of parked storages, which stay in memory, may take in another cycle.

    It depends on a storage's address whether its edges take one more disk block. Storages of one size often have the
    same alignment, so all of them may.
    """
    if waterfall.statistics().bounced_bytes == cycle.statistics_before.bounced_bytes:
        return 0
    block_bytes = max(tier.alignment_bytes for tier in waterfall.tiers)
    return block_bytes * num_parked


def _total(waterfalls: dict[torch.device, Waterfall]) -> TierStatistics:
    """Return the sums over all waterfalls."""
    all_of_them = [waterfall.statistics() for waterfall in waterfalls.values()]
    if len(all_of_them) == 1:
        return all_of_them[0]
    first, *others = map(asdict, all_of_them)
    add: Callable[[str], object] = lambda name: sum((other[name] for other in others), first[name])  # noqa: E731
    sums = {name: add(name) for name, value in first.items() if isinstance(value, int | float)}
    return TierStatistics(**{**first, **sums})
