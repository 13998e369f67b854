"""A plan of a step: which pages stay between two uses, and where every copy in and out is issued.

A page that is used again either stays or leaves and comes back. Staying holds its bytes; leaving takes the link: a copy
in, and a copy out if the page was changed since the last one. The planner spends memory on the intervals that save
most seconds of the link for what they hold. Then it issues every copy out right after the use before it, and every copy
in, in the order of uses, as early as there is room. All this knows positions, not times, so a plan holds whatever
the copies take. How long a step takes is simulated, and the best of a few plans is taken.

A step repeats, so a plan is a circle: what comes in for the next step is issued in this one.

Cost: 0.9 s of Python for 5,000 operators and 1,500 copies, for the six plans that are tried with their simulations. It
grows in proportion.
Guarantee: pages and everything else never take more than the budget, whatever the timing, since memory is given back
and handed out in the order of the plan.
Gaps: greedy, not optimal. The tests compare small steps with every choice of what stays. Where a page takes a third
of the memory or more, which one stays is a knapsack, and the choice may be far from the best one.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import BudgetError
from penstock.state._problem import StateProblem, StepPage
from penstock.state._schedule import Departure, StatePlan, with_waits
from penstock.state._simulate import Simulated, simulate
from penstock.units import format_bytes

_MAX_ROUNDS = 6
"""Steps that are placed before each begins anew, if none is placed as the one before."""
_TIME_SHARES, _MARGINS, _LAGS = (0.02, 0.2), (0.08, 0.03, 0.13), (20, 10, 40)
"""Settings of `StatePlanner.plan` that the search tries, one after the other, each from its first value. The best ones
differ from case to case (the waterfall of `benchmarks.state_plans`).
"""
Bytes = np.ndarray[tuple[int], np.dtype[np.int64]]
Columns = np.ndarray[tuple[int, int], np.dtype[np.int64]]
Floats = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A plan with its problem and what the simulation says of it."""

    problem: StateProblem
    """The step that is planned, with its updates where they run best."""
    plan: StatePlan
    """All of its copies."""
    simulated: Simulated
    """The time that it takes."""


def best_plan(problems: Iterable[StateProblem]) -> PlannedStep:
    """Return the fastest plan for any of the problems, which differ in where updates run.

    Raises ``BudgetError`` if none of them fits; it says what the first needs.
    """
    planners = [StatePlanner(problem) for problem in problems]
    if not planners:
        raise ValueError("give at least one problem: best_plan([problem])")
    refusals: list[BudgetError] = []
    first: list[tuple[float, StatePlanner]] = []
    for planner in planners:
        try:
            first.append((planner.fastest(is_quick=True).simulated.step_s, planner))
        except BudgetError as error:
            refusals.append(error)
    if not first:
        raise refusals[0]
    return min(first, key=lambda pair: pair[0])[1].fastest()


@dataclass(frozen=True, slots=True)
class _Interval:
    """A page's time between two uses, in which it stays or is away."""

    page: int
    use: int
    """Number of the use before it."""
    first: int
    """Position after that use."""
    last: int
    """Position before the next use, which may lie in the next step; below ``first`` if nothing is between."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """Intervals of a page that can be kept together, and the seconds of the link that this saves."""

    intervals: Sequence[_Interval]
    saved_s: float


class StatePlanner:
    """A planner of one problem."""

    def __init__(self, problem: StateProblem):
        self._problem = problem
        self._needed = _needed(problem)
        self._intervals = [
            list(_intervals(page, index, problem.num_operators)) for index, page in enumerate(problem.pages)
        ]
        self._choices = [choice for index in range(len(problem.pages)) for choice in self._choices_of(index)]
        self._turns = self._middles()
        self._stays = self._all_kept()
        """The pages that stay after each use if everything fits; else ``None``."""
        self._known: dict[tuple[float, float, int], PlannedStep] = {}
        """Plans by their settings."""
        self._kept: dict[tuple[int, float], list[list[bool]]] = {}
        """The pages that stay after each use, by the margin in bytes and the share of time."""

    def fastest(self, *, is_quick: bool = False) -> PlannedStep:
        """Return the fastest plan found; a quick search tries one margin and one lag.

        Raises ``BudgetError`` if nothing fits.
        """
        self._refuse_small()
        margin, lag = _MARGINS[0], _LAGS[0]
        time_share = min(_TIME_SHARES, key=lambda tried: self._step_s(tried, margin, lag))
        if not is_quick:
            margin = min(_MARGINS, key=lambda tried: self._step_s(time_share, tried, lag))
            lag = min(_LAGS, key=lambda tried: self._step_s(time_share, margin, tried))
        return self._known[time_share, margin, lag]

    def _step_s(self, time_share: float, margin: float, lag: int) -> float:
        """Return the seconds of a step that is planned with these settings."""
        settings = time_share, margin, lag
        if settings not in self._known:
            plan = self.plan(time_share=time_share, margin=margin, lag=lag)
            simulated = simulate(self._problem, plan)
            self._known[settings] = PlannedStep(problem=self._problem, plan=plan, simulated=simulated)
        return self._known[settings].simulated.step_s

    def plan(self, *, time_share: float, margin: float, lag: int) -> StatePlan:
        """Return a plan.

        ``time_share`` of the price of memory is laid on time, the rest on where the order turns. ``margin`` is the part
        of the memory of pages that is left to copies in. What is copied out is given back up to ``lag`` operators
        later, so that who gets its memory finds the copy ended.
        """
        problem = self._problem
        margin_bytes = int(margin * (problem.budget_bytes - max(problem.taken_bytes, default=0)))
        return self.placed(self._stays or self._keep(margin_bytes, time_share), lag)

    def _all_kept(self) -> list[list[bool]] | None:
        """Return that all pages stay, if they fit: then nothing moves but what the host reads and writes."""
        circle = _Circle(self._needed.copy())
        kept = [[False] * len(page.uses) for page in self._problem.pages]
        for interval in itertools.chain.from_iterable(self._intervals):
            circle.add(interval.first, interval.last, self._problem.pages[interval.page].size_bytes)
            kept[interval.page][interval.use] = True
        return kept if int(circle.bytes.max(initial=0)) <= self._problem.budget_bytes else None

    def _refuse_small(self) -> None:
        """Raise ``BudgetError`` if an operator needs more than there is, with the budget that is enough."""
        problem = self._problem
        least_bytes, place = int(self._needed.max(initial=0)), int(self._needed.argmax())
        if least_bytes > problem.budget_bytes:
            names = [page.name for page in problem.pages if place in {use % problem.num_operators for use in page.uses}]
            raise BudgetError(
                f"`budget` must be at least {least_bytes} ({format_bytes(least_bytes)}), got "
                f"{format_bytes(problem.budget_bytes)}: operator {place} of the step needs {', '.join(names[:3])} at "
                f"once, beside {format_bytes(problem.taken_bytes[place])} of operators' results. Smaller micro-batches "
                "need less"
            )

    # Keeping

    def _choices_of(self, index: int) -> Iterator[_Choice]:
        page, rates = self._problem.pages[index], self._problem.rates
        in_s = page.size_bytes / rates.both_in_bytes_per_s + rates.copy_s
        out_s = page.size_bytes / rates.both_out_bytes_per_s + rates.copy_s
        for interval in self._intervals[index]:
            yield _Choice([interval], in_s)
        if not page.is_from_host:
            for group in _between_writes(page, self._intervals[index]):
                yield _Choice(group, len(group) * in_s + out_s)

    def _middles(self) -> Floats:
        """Return the bytes of the intervals that have their middle in time at each position, as a share of all.

        Forward and backward use pages in opposite orders, so most intervals have their middle where the order
        turns, and all of them are held there: that is where memory is scarce, however long they last.
        """
        seconds = np.asarray(self._problem.seconds) + 1e-9  # none takes no time, so that each has its own place
        passed_s = _passed(seconds)
        middles: Floats = np.zeros(len(seconds))
        firsts, lasts, sizes = _columns(
            3,
            (
                (interval.first, interval.last, self._problem.pages[interval.page].size_bytes)
                for interval in itertools.chain.from_iterable(self._intervals)
                # one of a whole step is held everywhere
                if interval.first <= interval.last < interval.first + len(seconds) - 2
            ),
        )
        middles_s = (_at(passed_s, firsts) + _at(passed_s, lasts + 1)) / 2 % passed_s[-1]
        np.add.at(middles, np.minimum(np.searchsorted(passed_s, middles_s), len(seconds) - 1), sizes)
        middles /= max(float(middles.sum()), 1.0)
        return middles

    def _keep(self, margin_bytes: int, time_share: float) -> list[list[bool]]:
        """Return for each page and use whether the page stays until its next use."""
        if (margin_bytes, time_share) in self._kept:
            return self._kept[margin_bytes, time_share]
        room_bytes = self._problem.budget_bytes - margin_bytes
        seconds = np.asarray(self._problem.seconds) + 1e-9
        paid = _passed(time_share * seconds / seconds.sum() + (1 - time_share) * self._turns)
        circle = _Circle(self._needed.copy())
        kept = self._kept[margin_bytes, time_share] = [[False] * len(page.uses) for page in self._problem.pages]
        for number in np.argsort(-self._values(paid), kind="stable"):
            choice = self._choices[number]
            rest = [interval for interval in choice.intervals if not kept[interval.page][interval.use]]
            size_bytes = self._problem.pages[choice.intervals[0].page].size_bytes
            if all(circle.most(interval.first, interval.last) + size_bytes <= room_bytes for interval in rest):
                for interval in rest:
                    circle.add(interval.first, interval.last, size_bytes)
                    kept[interval.page][interval.use] = True
        return kept

    def _values(self, paid: Floats) -> Floats:
        """Return for each choice the seconds of the link that it saves for what it holds, at that price of time."""
        numbers, firsts, lasts, sizes = _columns(
            4,
            (
                (number, interval.first, interval.last, self._problem.pages[interval.page].size_bytes)
                for number, choice in enumerate(self._choices)
                for interval in choice.intervals
            ),
        )
        held = np.bincount(numbers, sizes * (_at(paid, lasts + 1) - _at(paid, firsts)))
        return np.array([choice.saved_s for choice in self._choices]) / np.maximum(held, 1e-30)

    # Placing

    def placed(self, kept: Sequence[Sequence[bool]], lag: int) -> StatePlan:
        """Return the plan in which pages stay as given, and copies in are issued as early as there is room."""
        problem = self._problem
        circle = _Circle(self._needed.copy())
        for interval in itertools.chain.from_iterable(self._intervals):
            if kept[interval.page][interval.use]:
                circle.add(interval.first, interval.last, problem.pages[interval.page].size_bytes)
        departures, arrivals = self._moves(kept)
        outs: list[Departure] = []
        back_by: dict[tuple[int, int], int] = {}
        for position, latest, page, use in departures:
            size_bytes = problem.pages[page].size_bytes
            room = circle.room(position + 1, min(latest, position + 1 + lag) - 1, problem.budget_bytes - size_bytes)
            circle.add(position + 1, position + room, size_bytes)
            outs.append((position, position + 1 + room, page, use))
            back_by[page, use] = room
        ins = [(used, first + back_by.get((page, before), 0), page, use) for used, first, page, before, use in arrivals]
        issued = self._issued(circle.bytes, ins, problem.budget_bytes)
        return with_waits(
            problem,
            kept,
            [(position, used, page, use) for position, (used, _, page, use) in zip(issued, ins, strict=True)],
            outs,
        )

    def _moves(
        self, kept: Sequence[Sequence[bool]]
    ) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, int, int, int, int]]]:
        """Return the copies out that follow from what is kept, and the copies in.

        Of a copy out these are the position after which it begins, the latest one before which its memory must be
        given back, its page, and the number of the use before it. Of a copy in, the position of its use, the earliest
        one to issue it if nothing has to be copied out, its page, and the numbers of the uses before and after it.
        """
        outs: list[tuple[int, int, int, int]] = []
        ins: list[tuple[int, int, int, int, int]] = []
        size = self._problem.num_operators
        written = {update.writes: update for update in self._problem.updates}
        for index, page in enumerate(self._problem.pages):
            is_dirty = _is_dirty(page, self._intervals[index], kept[index])
            for interval in self._intervals[index]:
                if not kept[index][interval.use]:
                    then = (interval.use + 1) % len(page.uses)
                    if is_dirty[interval.use]:
                        outs.append((interval.first - 1, interval.last + 1, index, interval.use))
                    ins.append((interval.last + 1, interval.first, index, interval.use, then))
            if page.leaves:
                outs.append((page.uses[-1], page.uses[-1] + size, index, len(page.uses) - 1))
            if page.is_from_host:
                update = written[index]  # it is begun then, at the earliest
                begun = max(page.uses[-1], update.after, self._problem.pages[update.reads].uses[-1])
                ins.append((size + page.uses[0], begun + 1, index, -1, 0))
        return (
            sorted((after % size, latest - after + after % size, page, use) for after, latest, page, use in outs),
            sorted((to % size, first - to + to % size, page, use, then) for to, first, page, use, then in ins),
        )

    def _issued(self, held_bytes: Bytes, ins: Sequence[tuple[int, int, int, int]], room_bytes: int) -> list[int]:
        """Return for each copy in the position at which it is issued, below 0 in the step before.

        They run in the order of uses, so the earliest position is the best one. Steps are placed one after the other
        until one is placed as the one before; if none is, each begins anew, and its first operators wait.
        """
        size = self._problem.num_operators
        before: list[int] = []
        profile = np.concatenate([held_bytes, held_bytes])  # of the step before, and of this one
        for number in range(_MAX_ROUNDS + 1):
            is_alone = number == _MAX_ROUNDS
            issued: list[int] = []
            latest = 0 if is_alone else before[-1] - size if before else -size
            for used, first, page, _ in ins:
                size_bytes = self._problem.pages[page].size_bytes
                earliest = min(max(first, latest, -size), used)
                full = np.flatnonzero(profile[earliest + size : used + size] > room_bytes - size_bytes)
                latest = earliest + int(full[-1]) + 1 if len(full) else earliest
                profile[latest + size : used + size] += size_bytes
                issued.append(latest)
            if issued == before or is_alone:
                break
            before = issued
            first_half = held_bytes if number == _MAX_ROUNDS - 1 else profile[size:]
            profile = np.concatenate([first_half, held_bytes])
        return issued


class _Circle:
    """Bytes by position of a step that repeats."""

    def __init__(self, size_bytes: Bytes):
        self.bytes = size_bytes

    def add(self, first: int, last: int, size_bytes: int) -> None:
        """Add bytes from ``first`` to ``last``, both included."""
        for span in self._spans(first, last):
            self.bytes[span] += size_bytes

    def room(self, first: int, last: int, most_bytes: int) -> int:
        """Return for how many positions from ``first``, up to ``last``, there are at most that many bytes."""
        places = np.arange(first, last + 1) % len(self.bytes)
        full = np.flatnonzero(self.bytes[places] > most_bytes)
        return int(full[0]) if len(full) else len(places)

    def most(self, first: int, last: int) -> int:
        """Return the most bytes from ``first`` to ``last``."""
        return max((int(self.bytes[span].max()) for span in self._spans(first, last)), default=0)

    def _spans(self, first: int, last: int) -> list[slice]:
        size = len(self.bytes)
        if last < first:
            return []
        if last - first + 1 >= size:
            return [slice(0, size)]
        start, end = first % size, last % size
        return [slice(start, end + 1)] if start <= end else [slice(start, size), slice(0, end + 1)]


def _needed(problem: StateProblem) -> Bytes:
    """Return the bytes of everything that each operator needs."""
    needed: Bytes = np.array(problem.taken_bytes, dtype=np.int64)
    for page in problem.pages:
        needed[np.unique(np.asarray(page.uses) % problem.num_operators)] += page.size_bytes
    return needed


def _intervals(page: StepPage, index: int, size: int) -> Iterator[_Interval]:
    """Yield the intervals of a page: one for each use, but the last of a page that dies or that the host writes."""
    for use, (position, then) in enumerate(itertools.pairwise(page.uses)):
        yield _Interval(index, use, position + 1, then - 1)
    if not page.is_born and not page.is_from_host:
        yield _Interval(index, len(page.uses) - 1, page.uses[-1] + 1, size + page.uses[0] - 1)


def _between_writes(page: StepPage, intervals: Sequence[_Interval]) -> Iterator[list[_Interval]]:
    """Yield the intervals from each write to the next, which save a copy out only together."""
    starts = [number for number, interval in enumerate(intervals) if page.writes[interval.use]]
    if starts:
        for start, end in itertools.pairwise(starts):
            yield list(intervals[start:end])
        yield [*intervals[starts[-1] :], *([] if page.is_born else intervals[: starts[0]])]


def _is_dirty(page: StepPage, intervals: Sequence[_Interval], kept: Sequence[bool]) -> list[bool]:
    """Return for each use whether the page differs from its copy below after it."""
    answers = [False] * len(page.uses)
    dirty = False
    for _ in range(2):  # what is dirty when a step ends is so when the next begins
        for use in range(len(page.uses)):
            dirty = answers[use] = dirty or page.writes[use]
            if use < len(intervals) and not kept[use]:
                dirty = False
        if page.is_born or page.is_from_host:
            break
    return answers


def _passed(values: Floats) -> Floats:
    """Return the sum of the values before each position."""
    return np.concatenate([[0.0], np.cumsum(values)])


def _columns(num: int, rows: Iterable[tuple[int, ...]]) -> Columns:
    """Return the columns of some rows."""
    return np.array([*rows], dtype=np.int64).reshape(-1, num).T


def _at(passed: Floats, positions: Bytes) -> Floats:
    """Return the sums before positions, which may lie in other steps."""
    steps, places = np.divmod(positions, len(passed) - 1)
    sums: Floats = passed[places] + steps * passed[-1]
    return sums
