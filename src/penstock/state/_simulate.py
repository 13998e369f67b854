"""How long a planned step takes: the device, both lanes and the host run side by side, each in the order of the plan.

A copy is slower while the other direction is busy, and an update on the host while copies use its memory. So time goes
from one start or end of anything to the next. The host's own time for issuing is left out: a replay asks nothing, so
the host is ahead (in a trial, 5 to 60 us for each operator gave the same steps). Operators of which only the first
waits and only the last is waited for are one piece of work.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import InternalError
from penstock.state._problem import Rates, StateProblem
from penstock.state._schedule import NEVER, StatePlan

_NUM_STEPS = 4
_COUNTED = 2
"""The step that counts, from 0. The first ones fill the device, and pages for the one after it come meanwhile."""
_LEAST_HOST_SHARE = 0.2
"""Part of the host memory's rate that updates keep while copies run."""
_IN, _OUT, _UPDATE = range(3)
_IDLE = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Seconds that a planned step takes."""

    step_s: float
    """Seconds from the end of a step to the end of the next one."""
    in_s: float
    """Seconds of it in which a copy to the device runs."""
    out_s: float
    """Seconds of it in which a copy from the device runs."""
    update_s: float
    """Seconds of it in which the host updates."""


def simulate(problem: StateProblem, plan: StatePlan, seconds: Sequence[float] | None = None) -> Simulated:
    """Return how long a step takes that follows the plan. ``seconds`` are the operators' if others than planned."""
    return _Simulation(problem, plan, seconds or problem.seconds).run()


class _Flows:
    """The copy in, the copy out and the update that run now. What is left of each shrinks at a rate that may change."""

    def __init__(self, rates: Rates):
        self.ends_s = [_IDLE, _IDLE, _IDLE]
        """When each will have ended, if nothing else begins or ends."""
        self.busy_s = [0.0, 0.0, 0.0]
        """Seconds in which each kind ran, until the last change."""
        self._rates = rates
        self._left_bytes = [0.0, 0.0, 0.0]
        self._bytes_per_s = [1.0, 1.0, 1.0]
        self._changed_s = 0.0

    def end(self, kind: int, now_s: float) -> None:
        """End one of them. The others are told by the next `change`, at the same time."""
        self.busy_s[kind] += now_s - self._changed_s
        self.ends_s[kind] = _IDLE

    def change(self, now_s: float, begun: Sequence[tuple[int, float]]) -> None:
        """Begin some with that many bytes, beside those that run."""
        passed_s, self._changed_s = now_s - self._changed_s, now_s
        for kind in (_IN, _OUT, _UPDATE):
            if self.ends_s[kind] != _IDLE:
                self.busy_s[kind] += passed_s
                self._left_bytes[kind] -= passed_s * self._bytes_per_s[kind]
        for kind, size_bytes in begun:
            self.ends_s[kind], self._left_bytes[kind] = now_s, size_bytes
        is_in, is_out = self.ends_s[_IN] != _IDLE, self.ends_s[_OUT] != _IDLE
        rates, speeds = self._rates, self._bytes_per_s
        speeds[_IN] = rates.both_in_bytes_per_s if is_out else rates.in_bytes_per_s
        speeds[_OUT] = rates.both_out_bytes_per_s if is_in else rates.out_bytes_per_s
        copied = is_in * speeds[_IN] + is_out * speeds[_OUT]
        whole = rates.host_bytes_per_s or _IDLE
        speeds[_UPDATE] = max(whole - copied, _LEAST_HOST_SHARE * whole)
        for kind in (_IN, _OUT, _UPDATE):
            if self.ends_s[kind] != _IDLE:
                self.ends_s[kind] = now_s + max(self._left_bytes[kind], 0.0) / speeds[kind]


class _Simulation:
    """A run of some steps. It is wide because every kind of work has its own queue, and conditions to begin."""

    def __init__(self, problem: StateProblem, plan: StatePlan, seconds: Sequence[float]):
        self._problem, self._plan = problem, plan
        self._pieces = _pieces(problem, plan, seconds)
        """For each position at which a piece of work begins, its seconds and its number of operators."""
        self._size, self._num_ins, self._num_outs = len(seconds), len(plan.copies_in), len(plan.copies_out)
        pages, rates = problem.pages, problem.rates
        overhead_in, overhead_out = rates.copy_s * rates.both_in_bytes_per_s, rates.copy_s * rates.both_out_bytes_per_s
        self._in_bytes = [pages[copy.page].size_bytes + overhead_in for copy in plan.copies_in]
        self._out_bytes = [pages[copy.page].size_bytes + overhead_out for copy in plan.copies_out]
        left = {(copy.page, copy.use): number for number, copy in enumerate(plan.copies_out)}
        self._left = [left[update.reads, len(pages[update.reads].uses) - 1] for update in problem.updates]
        """For each update the copy out that it waits for."""
        self._deadlines = [pages[update.writes].uses[0] if update.writes >= 0 else -1 for update in problem.updates]
        self._num_done = [0, 0, 0]
        """Numbers of copies in, of copies out and of operators that have ended, in all steps."""
        self._is_updated = [[False] * len(problem.updates) for _ in range(_NUM_STEPS)]
        self._waiting: list[tuple[int, int, int]] = []
        """Updates of the steps so far that have not begun: when they are needed, their step and their number."""

    def run(self) -> Simulated:
        """Run all steps, and return what the one that counts took."""
        flows, done, size = _Flows(self._problem.rates), self._num_done, self._size
        now_s, operator_ends_s, num_computed, updating, has_ended = 0.0, _IDLE, 0, (0, 0), False
        marks: list[tuple[float, list[float]]] = []
        while len(marks) <= _COUNTED:
            if operator_ends_s == _IDLE and self._can_compute():
                if done[2] % size == 0:
                    self._begin_step(done[2] // size)
                seconds, num_computed = self._pieces[done[2] % size]
                operator_ends_s = now_s + seconds
            begun: list[tuple[int, float]] = []
            if flows.ends_s[_IN] == _IDLE and self._can_copy_in():
                begun.append((_IN, self._in_bytes[done[_IN] % self._num_ins]))
            if flows.ends_s[_OUT] == _IDLE and self._can_copy_out():
                begun.append((_OUT, self._out_bytes[done[_OUT] % self._num_outs]))
            if flows.ends_s[_UPDATE] == _IDLE and (ready := self._ready_update()):
                updating = ready
                begun.append((_UPDATE, self._problem.updates[updating[1]].size_bytes))
            if begun or has_ended:
                flows.change(now_s, begun)
            now_s = min(operator_ends_s, *flows.ends_s)
            if now_s == _IDLE:
                raise InternalError("the plan waits for itself")
            if operator_ends_s <= now_s:
                operator_ends_s = _IDLE
                done[2] += num_computed
                if done[2] % size == 0:
                    flows.change(now_s, ())
                    marks.append((now_s, [*flows.busy_s]))
            ended = [kind for kind in (_IN, _OUT, _UPDATE) if flows.ends_s[kind] <= now_s]
            has_ended = bool(ended)
            for kind in ended:
                flows.end(kind, now_s)
                if kind == _UPDATE:
                    self._is_updated[updating[0]][updating[1]] = True
                else:
                    done[kind] += 1
        (before_s, busy_before), (after_s, busy_after) = marks[_COUNTED - 1 : _COUNTED + 1]
        in_s, out_s, update_s = (after - before for before, after in zip(busy_before, busy_after, strict=True))
        return Simulated(step_s=after_s - before_s, in_s=in_s, out_s=out_s, update_s=update_s)

    def _begin_step(self, step: int) -> None:
        for number, position in enumerate(self._deadlines):
            self._waiting.append((step * self._size + position, step, number))
        self._waiting.sort()

    def _can_compute(self) -> bool:
        (num_in, num_out, number), plan = self._num_done, self._plan
        step, position = divmod(number, self._size)
        return (
            plan.needs_in[position] + step * self._num_ins < num_in
            and plan.needs_out[position] + step * self._num_outs < num_out
        )

    def _can_copy_in(self) -> bool:
        num_in, num_out, num_operators = self._num_done
        if num_in >= _NUM_STEPS * self._num_ins:
            return False
        step, number = divmod(num_in, self._num_ins)
        copy = self._plan.copies_in[number]
        return (
            copy.operator + step * self._size < num_operators
            and copy.out + step * self._num_outs < num_out
            and self._is_written(copy.update, step)
        )

    def _is_written(self, update: int, step: int) -> bool:
        if update == NEVER:
            return True
        steps_before, number = divmod(update, len(self._problem.updates))
        return step + steps_before < 0 or self._is_updated[step + steps_before][number]

    def _can_copy_out(self) -> bool:
        _, num_out, num_operators = self._num_done
        if num_out >= _NUM_STEPS * self._num_outs:
            return False
        step, number = divmod(num_out, self._num_outs)
        return self._plan.copies_out[number].operator + step * self._size < num_operators

    def _ready_update(self) -> tuple[int, int] | None:
        """Return step and number of the update that is needed first, of those that can begin."""
        _, num_out, num_operators = self._num_done
        for place, (_, step, number) in enumerate(self._waiting):
            after = self._problem.updates[number].after
            if self._left[number] + step * self._num_outs < num_out and after + step * self._size < num_operators:
                del self._waiting[place]
                return step, number
        return None


def _pieces(problem: StateProblem, plan: StatePlan, seconds: Sequence[float]) -> dict[int, tuple[float, int]]:
    """Return the operators of a step in pieces: only the first of each waits, and only the last is waited for."""
    size = len(seconds)
    waited_for = {copy.operator % size for copy in (*plan.copies_in, *plan.copies_out) if copy.operator != NEVER}
    starts = [0, *(place + 1 for place in waited_for), *(update.after % size + 1 for update in problem.updates), size]
    for needs in (plan.needs_in, plan.needs_out):
        latest = NEVER
        for position, need in enumerate(needs):
            if need > latest:  # else it was waited for before
                latest = need
                starts.append(position)
    pairs = itertools.pairwise(sorted(set(starts)))
    return {start: (sum(seconds[start:end]), end - start) for start, end in pairs}
