"""Learning from one cycle for the next: record, plan, follow, and correct the plan by measurements.

The first cycle parks everything eligible and is recorded. The planner gets its problem, and later cycles that begin
with the same storage follow that plan. So each batch shape has its own plan. A cycle that then saves something else is
recorded as one of another kind, which is told apart by the cycle before it. A plan that stalls more than predicted is
made again with the bandwidths seen since.

With a budget, the peak is measured until one planned cycle keeps it, and again in the 2nd, 4th, 8th, ... cycle from
there, since memory outside of this room may grow. A peak above the budget then opens the plan again, and so does more
memory at the start of a cycle than the plan has room for, which is looked at each time. On a CPU a measurement begins
with a search of all objects for tensors, which takes as long as a collection of garbage: 0.2 s for 200,000 objects on a
busy core. In the course of 1,000 steps that happens ten times.
"""

import enum
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

import torch

from penstock.devices import Backend, backend_of, has_backend
from penstock.errors import BudgetError, BudgetNotKeptWarning, OffloadDeclinedWarning, PenstockWarning
from penstock.offload._clocks import CycleMeter, DeviceClock, HostClock, Standing
from penstock.offload._coming import ComingState
from penstock.offload._cycle import Cycle, Followed
from penstock.offload._plan import OffloadPlan, keep_all, plan, refusal, smallest_peak_bytes
from penstock.offload._problem import OffloadProblem, in_flight_bytes
from penstock.offload._recording import MeasuredMemory, Signature
from penstock.offload._scope import Shapes
from penstock.offload._statistics import OffloadStatistics
from penstock.offload._verify import verify
from penstock.probe import can_record
from penstock.tiers import Budget, Footprint, TierStatistics, Waterfall, gate
from penstock.units import format_bytes

_MAX_CHANGES = 5
"""Cycles with one beginning that may differ from their plan. After that, such cycles get no plan."""
_MAX_LESSONS = 64
"""Kinds of cycles that get a plan. Cycles of further kinds park everything, and fetches just run ahead."""
_MAX_REPLANS = 3
_STALL_TOLERANCE_SHARE = 0.02
_MAX_COLD = 3
"""Cycles of one kind that are skipped because memory was mapped in them; the next one is recorded in any case."""
_DERATING = 0.7
"""Share of a measured bandwidth that is counted on after a plan has stalled."""


class PlanStage(enum.Enum):
    """The knowledge about cycles that begin alike, which says what the next of them does."""

    OPEN = "open"
    """Nothing: the next one is recorded, and planned if it can be."""
    FITTING = "fitting"
    """There is a plan; it is measured and made anew until one has kept the budget."""
    KEPT = "kept"
    """There is a plan, which has kept the budget if there is one. It is measured now and then."""
    OVER = "over"
    """There is a plan that moves everything and does not keep the budget, which was said. It is measured likewise."""
    CLOSED = "closed"
    """There will be no plan, since such cycles differ too much, or since there are too many kinds of cycles."""


class Finding(enum.Enum):
    """An event that may change the stage."""

    PLANNED = "a plan was made"
    HOPELESS = "no plan keeps the budget"
    WITHIN = "a cycle followed the plan within the budget"
    ABOVE = "a cycle followed the plan and took more than the budget"
    GROWN = "more stands on the device than the plan has room for"


_TRANSITIONS: dict[tuple[PlanStage, Finding], PlanStage] = {
    (PlanStage.OPEN, Finding.PLANNED): PlanStage.FITTING,
    (PlanStage.KEPT, Finding.PLANNED): PlanStage.FITTING,
    (PlanStage.OVER, Finding.PLANNED): PlanStage.FITTING,
    (PlanStage.OPEN, Finding.HOPELESS): PlanStage.OVER,
    (PlanStage.FITTING, Finding.HOPELESS): PlanStage.OVER,
    (PlanStage.KEPT, Finding.HOPELESS): PlanStage.OVER,
    (PlanStage.FITTING, Finding.WITHIN): PlanStage.KEPT,
    (PlanStage.OVER, Finding.WITHIN): PlanStage.KEPT,
    (PlanStage.KEPT, Finding.ABOVE): PlanStage.OPEN,
    (PlanStage.KEPT, Finding.GROWN): PlanStage.OPEN,
}
"""All changes of stage. Any other combination changes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleSettings:
    """Settings of the offloader that concern whole steps."""

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
    strict: bool = False
    """Whether a budget that can no longer be kept is an error."""


Beginning = tuple[int, str, Shapes]
"""The beginning of a cycle: bytes and module of the first storage saved, and shapes of the model's arguments."""
_Kind = tuple[Beginning, bool, Signature]
"""The beginning, whether gradients exist, and what the cycle before has saved if the beginning does not tell enough."""


@dataclass(slots=True)
class Lesson:
    """Knowledge about cycles that begin alike, usually batches of one shape.

    It is wide because it is the whole record of a plan: how it was made, and how it fared.
    """

    stage: PlanStage = PlanStage.OPEN
    problem: OffloadProblem | None = None
    plan: OffloadPlan | None = None
    signature: Signature = ()
    num_finished: int = 0
    """Number of cycles since the stage was last `OPEN`."""
    num_replans: int = 0
    num_cold: int = 0
    """Number of cycles that were not recorded because memory was mapped in them, which later cycles do not repeat."""
    margin_bytes: int = 0
    slack_bytes: int = 0
    """Bytes by which the last measured cycle stayed below the budget."""
    standing: Standing = field(default_factory=lambda: Standing(0, 0))
    """Memory on the device when that cycle began."""
    room_bytes: int = 0
    """Bytes that others left of the account when the plan was made."""
    declined: str = ""
    successor: "Lesson | None" = None
    """Lesson of the cycle that came next, the last time."""

    def happens(self, finding: Finding) -> bool:
        """Apply the table of transitions; return whether the stage changed."""
        after = _TRANSITIONS.get((self.stage, finding))
        if after is None:
            return False
        self.stage = after
        if after is PlanStage.OPEN:
            self.plan, self.declined, self.margin_bytes, self.num_finished = None, "", 0, 0
        return True

    @property
    def is_due(self) -> bool:
        """Whether the next cycle is measured, if there is a budget."""
        number = self.num_finished + 1
        return self.stage in (PlanStage.OPEN, PlanStage.FITTING) or not number & number - 1


class Learner:
    """The offloader's knowledge of the steps so far, and the plans made from it.

    It is wide because a plan is made, followed, measured and made anew from one record of the cycle under way.
    """

    def __init__(self, settings: CycleSettings, coming: ComingState):
        self.declined = ""
        self._settings = settings
        self._coming = coming
        self._lessons: dict[_Kind, Lesson] = {}
        self.num_changes: Counter[tuple[Beginning, bool]] = Counter()
        """For each beginning, the cycles that differed from their plan."""
        self._signature_before: Signature = ()
        """Storages that the cycle before has saved."""
        self._others = Lesson(stage=PlanStage.CLOSED)
        """All kinds of cycles for which there is no lesson of their own."""
        self._lesson = self._others
        self._kind: _Kind = (0, "", ()), False, ()
        self._said: set[str] = set()
        self._has_kept = False
        """Whether a cycle has followed its plan within the budget."""
        self._clock: HostClock | DeviceClock | None = None
        self._meter = CycleMeter()
        """Measures since the context was entered, or since something was saved."""
        self._before_bytes = 0
        """The most device bytes in this context since the cycle before, until something was saved."""
        self._coming_bytes: int | None = 0
        """State that did not exist when the cycle began; ``None`` if it is not known how much it will be."""
        self._is_on_cpu = False
        """Whether main memory is the device."""
        self._is_warm = False
        """Whether a cycle has run before."""
        self._standing = Standing(0, 0)
        """Memory on the device when the cycle began."""
        self._slab_bytes = 0
        """Bytes of host memory that tiers had mapped when the cycle began."""

    def enter(self, device: torch.device) -> None:
        """Note that a context begins. If a cycle is to be measured, what comes before it saves anything counts, too."""
        self.abort()
        expected = self._lesson.successor
        is_due = expected is None or expected.is_due
        if self._settings.account.device_bytes is not None and is_due and has_backend(device):
            self._measure(backend_of(device))  # tensors saved elsewhere are not moved

    def begin(self, waterfalls: dict[torch.device, Waterfall], beginning: Beginning, *, has_gradients: bool) -> Cycle:
        """Begin a cycle that follows the plan for cycles with this beginning, or is recorded if there is none."""
        device, waterfall = next(iter(waterfalls.items()))
        backend = backend_of(device)
        self._is_on_cpu = backend.streams is None
        self._clock = None
        self._before_bytes = max(self._before_bytes, self._meter.peak_bytes())
        lesson = self._lesson.successor = self._lesson_for(beginning, has_gradients)
        self._lesson = lesson
        self._make_room_for_others(lesson)
        has_budget = self._settings.account.device_bytes is not None
        if has_budget:
            if lesson.stage is PlanStage.KEPT and lesson.standing.has_grown(backend, lesson.slack_bytes):
                lesson.happens(Finding.GROWN)
            self._standing = Standing.on(backend)
        is_recorded = lesson.stage is PlanStage.OPEN
        if has_budget and lesson.is_due:
            self._coming_bytes = self._find_coming(is_recorded=is_recorded)
            is_recorded = is_recorded and self._coming_bytes is not None
        is_measured = has_budget and lesson.is_due and (is_recorded or lesson.stage is not PlanStage.OPEN)
        if is_measured:
            self._measure(backend)
        if is_recorded and is_measured and not self._meter.is_running and can_record(device):
            is_recorded = False  # other threads compute, which keeps it from being measured: the next one is recorded
        if is_recorded and backend.streams is None:
            self._clock = HostClock(waterfall)
        elif is_recorded and backend.streams is not None and self._is_warm:
            self._clock = DeviceClock(backend.streams, self._meter.watch if is_measured else None)
        waterfall.device_changes = [] if is_measured else None
        self._slab_bytes = _mapped_bytes(waterfall)
        followed = None
        if lesson.plan is not None and lesson.problem is not None:
            budget_bytes = lesson.problem.budget_bytes
            bound = lesson.plan if budget_bytes is None else lesson.problem
            waterfall.bound_in_flight(bound.max_in_flight_bytes)
            followed = Followed(lesson.plan, lesson.signature, budget_bytes)
        return Cycle(
            followed=followed,
            window_bytes=waterfall.max_in_flight_bytes // 4,
            has_budget=has_budget,
            reap=waterfall.reap,
            park=waterfall.park,
            mark=self._clock.mark if self._clock else None,
            statistics_before=_total(waterfalls),
        )

    def finish(self, cycle: Cycle, waterfalls: dict[torch.device, Waterfall], num_steps: int) -> OffloadStatistics:
        """Learn from a finished cycle; return its statistics. Raises ``BudgetError`` for an impossible budget."""
        waterfall = next(iter(waterfalls.values()))
        lesson, clock = self._lesson, self._clock
        self._clock = None
        if isinstance(clock, DeviceClock):
            clock.finish()  # all waits of this cycle are then known, and none counts for the next one
        after_bytes = self._meter.peak_bytes() if isinstance(clock, DeviceClock) else 0
        timeline, peak_bytes = self._meter.end(clock.memory if isinstance(clock, DeviceClock) else ())
        if peak_bytes is not None:
            peak_bytes = max(peak_bytes, self._before_bytes)
        statistics = self._statistics(cycle, _total(waterfalls), num_steps, peak_bytes)
        if peak_bytes is not None:
            lesson.standing = self._standing
            if timeline:
                before = [held for time_s, held in timeline if time_s <= cycle.start_s]
                lesson.standing.held_bytes = (before or [timeline[0][1]])[-1]
        self._is_warm, self._signature_before = True, cycle.recording.signature
        lesson.num_finished += 1
        if len(waterfalls) == 1:  # with several devices there is no plan, and fetches run ahead on each
            if lesson.plan is not None:
                self._follow_up(lesson, cycle, statistics, waterfall)
            elif clock is None:
                self._look_at_the_peak(lesson, peak_bytes)
            elif (
                isinstance(clock, DeviceClock)
                and lesson.num_cold < _MAX_COLD
                and _mapped_bytes(waterfall) > self._slab_bytes
            ):
                lesson.num_cold += 1  # mapping memory took time that no later cycle takes
            else:
                self._learn(lesson, cycle, clock, statistics, waterfall, timeline)
            statistics = replace(statistics, declined=lesson.declined)
        self._before_bytes = max((held for time_s, held in timeline if time_s > cycle.end_s), default=after_bytes)
        return statistics

    def decline(self, reason: str) -> None:
        """Stop offloading for good, and warn why."""
        self.declined = reason
        self.warn(reason)

    def abort(self) -> None:
        """End measuring a cycle that will not finish."""
        self._meter.abort()
        self._clock, self._before_bytes = None, 0

    def warn(self, reason: str) -> None:
        """Warn once why nothing is offloaded."""
        self._say(f"activations are not offloaded: {reason}.", OffloadDeclinedWarning)

    def _say(self, text: str, kind: type[PenstockWarning]) -> None:
        """Warn once in each way."""
        if kind.__name__ not in self._said:
            self._said.add(kind.__name__)
            warnings.warn(text, kind, stacklevel=6)

    def _lesson_for(self, beginning: Beginning, has_gradients: bool) -> Lesson:
        """Return what is known about cycles with this beginning; once there are too many kinds, one that never gets a
        plan.

        With a budget it matters whether gradients exist already, as in all micro-batches of a step but its first. Where
        cycles that began alike have differed, as the two halves of a GAN's step, the cycle before tells them apart.
        """
        start = (beginning, has_gradients and self._settings.account.device_bytes is not None)
        num_changes = self.num_changes[start]
        kind = (*start, self._signature_before if num_changes else ())
        if num_changes > _MAX_CHANGES or (kind not in self._lessons and len(self._lessons) >= _MAX_LESSONS):
            if num_changes:
                self._say(
                    f"{num_changes} steps with inputs of the same shapes saved different tensors, so such steps are "
                    "not planned: everything that may be offloaded is, and with a budget forward waits for every copy. "
                    "Exclude modules whose saved tensors depend on values: modules=['blocks.*']",
                    PenstockWarning,
                )
            return self._others
        self._kind = kind
        return self._lessons.setdefault(kind, Lesson())

    def _measure(self, backend: Backend) -> None:
        """Begin to measure, if that has not begun and if it can be done now."""
        is_quiet = backend.allocator is not None or (can_record(backend.device) and not gate.others_compute)
        if is_quiet and not self._meter.is_running:
            self._meter.begin(backend.allocator)

    def _find_coming(self, *, is_recorded: bool) -> int | None:
        """Return the bytes of state that optimizers have not made yet; before a plan is made, look for them."""
        coming_bytes = self._coming.size_bytes()
        if is_recorded and coming_bytes == 0 and not gate.others_compute:
            self._coming.look()
            coming_bytes = self._coming.size_bytes()
        return coming_bytes

    def _learn(
        self,
        lesson: Lesson,
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
            first_bytes = max(base[0], max(self._before_bytes, *before, 0) - lesson.problem.storages[0].size_bytes)
            # an optimizer that steps inside of the context makes its state behind the last event
            still_bytes = self._coming.size_bytes() or 0
            coming_bytes = max(self._coming_bytes or 0, still_bytes)
            base = (*(size + coming_bytes for size in (first_bytes, *base[1:-1])), base[-1] + still_bytes)
            lesson.problem = replace(lesson.problem, base_bytes=base)
        lesson.signature = cycle.recording.signature
        try:
            self._make_plan(lesson, lesson.problem)
        except BudgetError as error:
            self._leanest(lesson, lesson.problem, error)

    def _in_flight_bytes(self, waterfall: Waterfall, cycle: Cycle) -> int:
        """Return how many bytes may be on their way out at once; a plan uses as many of them as it needs."""
        asked = self._settings.max_in_flight_bytes
        if asked is not None:
            return asked
        sizes = [use.size_bytes for use in cycle.recording.uses if use.is_parked]
        if not self._is_on_cpu and not waterfall.has_staging:
            return max(waterfall.max_in_flight_bytes, sum(sizes))  # the plan counts them in the peak
        return max(waterfall.max_in_flight_bytes, in_flight_bytes(_rates(waterfall)[0], max(sizes, default=0)))

    def _budget_bytes(self) -> int | None:
        """Return the limit of the measured peak, which includes everything on the device, on a CPU also host memory."""
        account = self._settings.account
        if account.device_bytes is None:
            return None
        in_host = account.held_bytes("host") if self._is_on_cpu else 0
        return max(1, account.device_bytes - account.beside_bytes() + in_host)

    def _make_room_for_others(self, lesson: Lesson) -> None:
        """Plan for less memory if others hold more of the account than before, and measure again."""
        room_bytes = self._settings.account.step_room_bytes(self._settings.footprint)
        if lesson.plan is None or lesson.problem is None or room_bytes is None:
            return
        assert lesson.problem.budget_bytes is not None
        less_bytes = lesson.room_bytes - room_bytes
        if less_bytes > 0:
            smaller = replace(lesson.problem, budget_bytes=max(1, lesson.problem.budget_bytes - less_bytes))
            try:
                self._make_plan(lesson, smaller)
            except BudgetError as error:
                self._leanest(lesson, smaller, error)

    def _make_plan(self, lesson: Lesson, problem: OffloadProblem, finding: Finding = Finding.PLANNED) -> None:
        new_plan = plan(problem)
        lesson.room_bytes = self._settings.account.step_room_bytes(self._settings.footprint) or 0
        if self._settings.verify:
            verify(problem, new_plan)
        if new_plan.declined:
            lesson.declined = new_plan.declined
            new_plan = keep_all(problem, "kept: offloading is declined")
            self.warn(lesson.declined)
        lesson.problem, lesson.plan = problem, new_plan
        lesson.happens(finding)

    def _leanest(self, lesson: Lesson, problem: OffloadProblem, error: BudgetError) -> None:
        """Go on with the smallest peak there is, since no plan keeps the budget, and say so.

        Before any cycle has kept the budget, and if the user is strict, it is an error.
        """
        self._exceed(str(error), error)
        self._make_plan(lesson, replace(problem, budget_bytes=smallest_peak_bytes(problem)), Finding.HOPELESS)

    def _exceed(self, text: str, error: BudgetError | None = None) -> None:
        """Say that the budget is not kept any more."""
        if self._settings.strict or (error is not None and not self._has_kept):
            raise error or BudgetError(text)
        self._say(
            f"{text} Training goes on above the budget, with everything parked that may be; strict=True makes this an "
            "error.",
            BudgetNotKeptWarning,
        )

    def _follow_up(self, lesson: Lesson, cycle: Cycle, statistics: OffloadStatistics, waterfall: Waterfall) -> None:
        assert lesson.plan is not None and lesson.problem is not None
        if not cycle.matched_plan():
            self.num_changes[self._kind[:2]] += 1
            del self._lessons[self._kind]
        elif lesson.problem.budget_bytes is not None:
            self._look_at_the_peak(lesson, statistics.peak_bytes)
        else:
            lesson.happens(Finding.WITHIN)
            late_s = statistics.stall_s - lesson.plan.stall_s
            if lesson.num_replans < _MAX_REPLANS and late_s > _STALL_TOLERANCE_SHARE * lesson.problem.step_s:
                lesson.num_replans += 1
                out, back = _rates(waterfall)
                slower = replace(
                    lesson.problem,
                    out_bandwidth_bytes_per_s=min(out, lesson.problem.out_bandwidth_bytes_per_s) * _DERATING,
                    in_bandwidth_bytes_per_s=min(back, lesson.problem.in_bandwidth_bytes_per_s) * _DERATING,
                )
                self._make_plan(lesson, slower)

    def _look_at_the_peak(self, lesson: Lesson, measured_bytes: int | None) -> None:
        """Compare a peak, where it was measured, with the budget."""
        budget_bytes = self._budget_bytes()
        if measured_bytes is None or budget_bytes is None:
            return
        peak_bytes = measured_bytes + (self._coming.size_bytes() or 0)
        if peak_bytes <= budget_bytes:
            lesson.slack_bytes = budget_bytes - peak_bytes
            if not self._coming_bytes:  # else it is not known yet whether the state fits in beside
                self._has_kept |= lesson.plan is not None
                lesson.happens(Finding.WITHIN)
        elif lesson.stage is PlanStage.FITTING and lesson.problem is not None:
            self._fit(lesson, lesson.problem, peak_bytes, budget_bytes)
        elif lesson.stage is PlanStage.CLOSED:
            self._exceed(
                f"a step took {peak_bytes} bytes ({format_bytes(peak_bytes)}), above the budget of "
                f"{format_bytes(budget_bytes)}."
            )
        else:
            lesson.happens(Finding.ABOVE)

    def _fit(self, lesson: Lesson, problem: OffloadProblem, peak_bytes: int, budget_bytes: int) -> None:
        """Plan for less memory, again and again, until a measured peak is within the budget."""
        assert lesson.plan is not None
        over_bytes = peak_bytes - budget_bytes
        lesson.margin_bytes = max(
            lesson.margin_bytes + over_bytes + budget_bytes // 100,
            budget_bytes - lesson.plan.peak_bytes + over_bytes,  # else the same plan may fit again: storages are large
        )
        try:
            self._make_plan(lesson, replace(problem, budget_bytes=max(1, budget_bytes - lesson.margin_bytes)))
        except BudgetError:
            smallest_bytes = smallest_peak_bytes(problem)
            if smallest_bytes < lesson.plan.peak_bytes and smallest_bytes + problem.spread_bytes <= budget_bytes:
                self._make_plan(lesson, replace(problem, budget_bytes=smallest_bytes))  # everything that may leave does
                return
            needed_bytes = max(peak_bytes, smallest_bytes + lesson.margin_bytes)
            text = refusal(problem, budget_bytes, needed_bytes)
            self._leanest(lesson, problem, BudgetError(f"{text} (A step planned for it took {peak_bytes} bytes.)"))

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
