"""An independent check of a plan against its problem. It shares no code with the planner.

Three steps are run in an order that the plan's own waits allow, and every operator and copy learns what must have ended
before it begins: that is all that a replay may rely on, whatever the times are. From that alone it follows whether each
page is there, whether it is the latest version, and whether memory that is handed out again is free by then. How much
is handed out follows from the order in which the host does that.
"""

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from penstock.errors import InternalError
from penstock.state._problem import StateProblem
from penstock.state._schedule import NEVER, PageCopy, StatePlan

_NUM_STEPS = 3
_Clock = tuple[int, int, int]
"""Numbers of operators, copies in and copies out, in all steps, that have ended for certain."""


def verify(problem: StateProblem, plan: StatePlan) -> None:
    """Raise ``InternalError`` that says what is wrong, if anything is."""
    clocks = _Clocks(problem, plan)
    tenancies = list(_tenancies(problem, plan))
    for tenancy in tenancies:
        _check_tenancy(problem, clocks, tenancy)
    _check_versions(problem, plan, clocks, tenancies)
    _check_bytes(problem, tenancies)
    _check_memory(problem, plan, clocks, tenancies)


@dataclass(slots=True)
class _Tenancy:
    """A page's time on the device."""

    page: int
    begin: int
    """Position, in all steps, from which on the host counts its memory as taken."""
    arrival: int
    """Number of the copy in that begins it, in all steps; -1 if an operator does, or if it was there before."""
    is_born: bool
    """Whether an operator makes it, so that its memory is one of operators' results."""
    end: float = math.inf
    """Position, in all steps, before which its memory is given back."""
    uses: list[tuple[int, int]] = field(default_factory=list)
    """Operators, in all steps, and the number of each use."""
    departures: list[tuple[int, int]] = field(default_factory=list)
    """Copies out, in all steps, and the operator after which each begins."""


class _Clocks:
    """For each operator and copy, all that has ended for certain when it begins."""

    def __init__(self, problem: StateProblem, plan: StatePlan):
        self.size, self.num_ins, self.num_outs = problem.num_operators, len(plan.copies_in), len(plan.copies_out)
        self.operators: list[_Clock] = []
        self.ins: list[_Clock] = []
        self.outs: list[_Clock] = []
        self._problem, self._plan = problem, plan
        out_of = {(copy.page, copy.use): number for number, copy in enumerate(plan.copies_out)}
        self._left = [
            out_of.get((update.reads, len(problem.pages[update.reads].uses) - 1)) for update in problem.updates
        ]
        if None in self._left:
            raise InternalError("a page that the host reads never leaves")
        totals = (_NUM_STEPS * self.size, _NUM_STEPS * self.num_ins, _NUM_STEPS * self.num_outs)
        while (len(self.operators), len(self.ins), len(self.outs)) != totals:
            if not any([self._advance_operators(), self._advance_ins(), self._advance_outs()]):
                raise InternalError("the plan waits for itself")

    def after_operator(self, number: int) -> _Clock:
        """Return what has ended once an operator has."""
        done = self.operators[number]
        return max(done[0], number + 1), done[1], done[2]

    def after_in(self, number: int) -> _Clock:
        """Return what has ended once a copy in has."""
        done = self.ins[number]
        return done[0], max(done[1], number + 1), done[2]

    def after_out(self, number: int) -> _Clock:
        """Return what has ended once a copy out has."""
        done = self.outs[number]
        return done[0], done[1], max(done[2], number + 1)

    def update(self, step: int, number: int) -> _Clock | None:
        """Return what has ended when an update on the host begins; ``None`` if that is not known yet."""
        left, after = self._left[number], self._problem.updates[number].after
        assert left is not None
        out, operator = left + step * self.num_outs, after + step * self.size
        if out >= len(self.outs) or (after >= 0 and operator >= len(self.operators)):
            return None
        return _joined(self.after_out(out), self.after_operator(operator) if after >= 0 else (0, 0, 0))

    def _advance_operators(self) -> bool:
        plan, begun = self._plan, len(self.operators)
        while len(self.operators) < _NUM_STEPS * self.size:
            step, position = divmod(len(self.operators), self.size)
            into, out = plan.needs_in[position] + step * self.num_ins, plan.needs_out[position] + step * self.num_outs
            if into >= len(self.ins) or out >= len(self.outs):
                break
            clock = self.after_operator(len(self.operators) - 1) if self.operators else (0, 0, 0)
            clock = _joined(clock, self.after_in(into) if into >= 0 else (0, 0, 0))
            self.operators.append(_joined(clock, self.after_out(out) if out >= 0 else (0, 0, 0)))
        return len(self.operators) > begun

    def _advance_ins(self) -> bool:
        begun = len(self.ins)
        while len(self.ins) < _NUM_STEPS * self.num_ins:
            step, number = divmod(len(self.ins), self.num_ins)
            copy = self._plan.copies_in[number]
            clock = self._before(copy, step)
            update: _Clock | None = (0, 0, 0)
            if copy.update != NEVER:
                steps_before, index = divmod(copy.update, len(self._problem.updates))
                if step + steps_before >= 0:
                    update = self.update(step + steps_before, index)
            if clock is None or update is None:
                break
            clock = _joined(clock, update)
            self.ins.append(_joined(clock, self.after_in(len(self.ins) - 1) if self.ins else (0, 0, 0)))
        return len(self.ins) > begun

    def _advance_outs(self) -> bool:
        begun = len(self.outs)
        while len(self.outs) < _NUM_STEPS * self.num_outs:
            step, number = divmod(len(self.outs), self.num_outs)
            clock = self._before(self._plan.copies_out[number], step)
            if clock is None:
                break
            self.outs.append(_joined(clock, self.after_out(len(self.outs) - 1) if self.outs else (0, 0, 0)))
        return len(self.outs) > begun

    def _before(self, copy: PageCopy, step: int) -> _Clock | None:
        operator, out = copy.operator + step * self.size, copy.out + step * self.num_outs
        if operator >= len(self.operators) or out >= len(self.outs):
            return None
        clock = self.after_operator(operator) if operator >= 0 else (0, 0, 0)
        return _joined(clock, self.after_out(out) if out >= 0 else (0, 0, 0))


def _joined(left: _Clock, right: _Clock) -> _Clock:
    return max(left[0], right[0]), max(left[1], right[1]), max(left[2], right[2])


def _tenancies(problem: StateProblem, plan: StatePlan) -> Iterator[_Tenancy]:
    """Yield the tenancies of three steps, from what the plan copies and gives back."""
    size = problem.num_operators
    brought: dict[tuple[int, int], tuple[int, int]] = {}
    for number, copy in enumerate(plan.copies_in):
        used = problem.pages[copy.page].uses[copy.use] % size
        is_next = plan.needs_in[used] < number  # then it was issued for the step after its own
        begin, arrival = copy.position - size * is_next, number - len(plan.copies_in) * is_next
        brought[copy.page, copy.use] = begin, arrival
    left = {(copy.page, copy.use): number for number, copy in enumerate(plan.copies_out)}
    back_at = {(give.page, give.use): give.position for give in plan.give_backs}
    for index, page in enumerate(problem.pages):
        tenancy: _Tenancy | None = None
        for step in range(_NUM_STEPS):
            for use, position in enumerate(page.uses):
                operator = step * size + position
                at_step = operator // size
                is_birth = page.is_born and use == 0
                if tenancy is None:
                    begin, arrival = brought.get((index, use), (-size, -len(plan.copies_in) - 1))
                    begin, arrival = begin + at_step * size, arrival + at_step * len(plan.copies_in)
                    if is_birth:
                        begin, arrival = operator, -1
                    elif (index, use) not in brought and step > 0:
                        raise InternalError(f"{page.name} is not there at its use {use}")
                    tenancy = _Tenancy(index, begin, max(arrival, -1), is_birth)
                elif is_birth or (index, use) in brought:
                    raise InternalError(f"{page.name} comes at its use {use} although it is there")
                if operator < _NUM_STEPS * size:
                    tenancy.uses.append((operator, use))
                    if (index, use) in left:
                        out = left[index, use] + at_step * len(plan.copies_out)
                        tenancy.departures.append((out, operator))
                if (index, use) in back_at:
                    place = back_at[index, use]
                    tenancy.end = (at_step + (place <= operator % size)) * size + place
                    if tenancy.uses:
                        yield tenancy
                    tenancy = None
        if tenancy is not None and tenancy.uses:
            yield tenancy


def _check_tenancy(problem: StateProblem, clocks: _Clocks, tenancy: _Tenancy) -> None:
    """A page is there before its first use, and changes under no copy out."""
    page = problem.pages[tenancy.page]
    if tenancy.end <= tenancy.uses[-1][0]:
        raise InternalError(f"{page.name} is given back before operator {tenancy.uses[-1][0]}")
    for operator, use in tenancy.uses:
        if clocks.operators[operator][1] <= tenancy.arrival:
            raise InternalError(f"operator {operator} may begin before {page.name} is there")
        for out, begins in tenancy.departures:
            if operator > begins and page.writes[use] and clocks.operators[operator][2] <= out:
                raise InternalError(f"operator {operator} may write to {page.name} while it is copied out")
    for out, begins in tenancy.departures:
        if clocks.outs[out][0] <= begins:
            raise InternalError(f"a copy out of {page.name} may begin before operator {begins} has ended")


def _check_versions(problem: StateProblem, plan: StatePlan, clocks: _Clocks, tenancies: list[_Tenancy]) -> None:
    """Every page comes in as it was written last."""
    of_page: dict[int, list[_Tenancy]] = {}
    for tenancy in tenancies:
        of_page.setdefault(tenancy.page, []).append(tenancy)
    for index, those in of_page.items():
        page = problem.pages[index]
        version, below, out_below = 0, 0, -1
        those.sort(key=lambda tenancy: tenancy.uses[0][0])
        for number, tenancy in enumerate(those):
            if number and tenancy.begin < those[number - 1].end:
                raise InternalError(f"{page.name} comes in before it is given back")
            if page.is_born and tenancy.uses[0][1] == 0:
                version, below, out_below = 1, 0, -1
            elif tenancy.arrival >= 0:
                if page.is_from_host:
                    _check_update(problem, plan, clocks, index, tenancy)
                elif below != version and number > 0:
                    raise InternalError(f"{page.name} comes in with bytes of before its last change")
                elif clocks.ins[tenancy.arrival][2] <= out_below:
                    raise InternalError(f"{page.name} may come in before it has left")
            departures = {operator: out for out, operator in tenancy.departures}
            for operator, use in tenancy.uses:
                version += page.writes[use]
                if operator in departures:
                    below, out_below = version, departures[operator]
            if number + 1 < len(those) and below != version and not (page.is_born or page.is_from_host):
                raise InternalError(f"{page.name} is given back without a copy of its last change")
            if page.leaves and tenancy.uses[-1][1] == len(page.uses) - 1 and below != version:
                raise InternalError(f"{page.name} dies before the host has it")


def _check_update(problem: StateProblem, plan: StatePlan, clocks: _Clocks, index: int, tenancy: _Tenancy) -> None:
    """A page that the host writes comes in after its update, which begins after the last read of the version before."""
    page, size = problem.pages[index], problem.num_operators
    step = tenancy.uses[0][0] // size
    if step == 0 or tenancy.uses[0][1] > 0:  # a later one in its step has the version of the first
        return
    number = next(number for number, update in enumerate(problem.updates) if update.writes == index)
    issued, place = divmod(tenancy.arrival, clocks.num_ins)
    steps_before, waits_for = divmod(plan.copies_in[place].update, len(problem.updates))
    if (issued + steps_before, waits_for) != (step - 1, number):
        raise InternalError(f"{page.name} may come in before the host has written it")
    begun = clocks.update(step - 1, number)
    if begun is None or begun[0] <= (step - 1) * size + page.uses[-1]:
        raise InternalError(f"the host may write {page.name} while it is still read")


def _check_bytes(problem: StateProblem, tenancies: list[_Tenancy]) -> None:
    """Memory that is handed out never exceeds the budget, in the order in which the host does that."""
    size = problem.num_operators
    held = np.zeros(_NUM_STEPS * size + 1, dtype=np.int64)
    for tenancy in tenancies:
        size_bytes = problem.pages[tenancy.page].size_bytes
        held[min(max(tenancy.begin, 0), _NUM_STEPS * size)] += size_bytes
        if tenancy.end < len(held):
            held[int(tenancy.end)] -= size_bytes
    total = np.cumsum(held)[:-1] + np.tile(np.asarray(problem.taken_bytes, dtype=np.int64), _NUM_STEPS)
    over = np.flatnonzero(total > problem.budget_bytes)
    if len(over):
        place = int(over[0])
        raise InternalError(f"{total[place]} bytes are taken at operator {place}, of {problem.budget_bytes}")


def _check_memory(problem: StateProblem, plan: StatePlan, clocks: _Clocks, tenancies: list[_Tenancy]) -> None:
    """Memory that is handed out again is free by then for certain."""
    ended = [tenancy for tenancy in tenancies if tenancy.end < _NUM_STEPS * problem.num_operators]
    of_lane = _Ended([tenancy for tenancy in ended if problem.is_one_memory or not tenancy.is_born])
    for number, clock in enumerate(clocks.ins):
        step, index = divmod(number, clocks.num_ins)
        copy = plan.copies_in[index]
        position = step * problem.num_operators + copy.position
        operator, out = of_lane.before(position)
        if problem.is_one_memory:  # it may be that of a result that the operator before has just given back
            operator = max(operator, position - 1)
        if clock[0] <= operator or clock[2] <= out:
            name = problem.pages[copy.page].name
            raise InternalError(f"{name} may come in while its memory is still in use or being copied out")
    of_operators = _Ended([tenancy for tenancy in ended if problem.is_one_memory or tenancy.is_born])
    for number, clock in enumerate(clocks.operators):
        if clock[2] <= of_operators.before(number)[1]:
            raise InternalError(f"the results of operator {number} may lie where a page is still being copied out")


class _Ended:
    """Tenancies by their end."""

    def __init__(self, tenancies: list[_Tenancy]):
        tenancies = sorted(tenancies, key=lambda tenancy: tenancy.end)
        self._ends = [tenancy.end for tenancy in tenancies]
        self._operators = np.maximum.accumulate([tenancy.uses[-1][0] for tenancy in tenancies] or [-1])
        self._outs = np.maximum.accumulate(
            [max((out for out, _ in tenancy.departures), default=-1) for tenancy in tenancies] or [-1]
        )

    def before(self, position: int) -> tuple[int, int]:
        """Return the last operator and the last copy out of those given back up to a position; -1 if none."""
        number = bisect.bisect_right(self._ends, position) - 1
        return (-1, -1) if number < 0 else (int(self._operators[number]), int(self._outs[number]))
