"""Steps that follow a plan: what leaves, what comes and what is given back is known before the step begins.

Each operator has a place in the order of its step, and the plan has for each place what is to be done before it.
Nothing is asked of the device: memory is given back and handed out in the order of the plan, and whoever gets it waits
for what used it (`LaneMemory`). Where a step does otherwise than planned, the plan is left, and the rest of the step is
decided operator by operator. A page's state says what has been begun, so any place is as good as another for that.
"""

import contextlib
import copy
import itertools
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import BudgetError
from penstock.state._copies import Copies
from penstock.state._course import Course
from penstock.state._order import StepOrder
from penstock.state._order_problem import OrderedProblem, problem_of
from penstock.state._order_split import weights_for_host
from penstock.state._page import Page, PageState
from penstock.state._plan import PlannedStep, best_plan
from penstock.state._problem import Rates
from penstock.state._recalled import Recalled, StepCache
from penstock.state._register import Register
from penstock.state._turns import StepTurn, joined

Orders = tuple[StepOrder, ...]
_MOST_OPERATORS = 80_000
"""The longest turn that is planned. One of 5,600 operators takes 1.2 s of a thread, one of 22,300 6 s."""
_NEAR = 16
"""Divisor of a budget that gives the difference up to which the updates on the host are taken from an earlier run."""
_COPY_S = 8e-6
"""Seconds that a device takes for each copy beside its bytes."""
_UNKNOWN_BYTES_PER_S = 5e9
"""The rate of a link on which nothing was copied yet, and of a host that has updated nothing."""


@dataclass(slots=True)
class _Actions:
    """Everything to be done at one place of a step, by key of page."""

    dead: list[int] = field(default_factory=list)
    """Pages that do not exist any more if the step is as it was."""
    given_back: list[int] = field(default_factory=list)
    fetched: list[int] = field(default_factory=list)
    leaving: list[int] = field(default_factory=list)
    """Pages whose copies out begin after the operator."""


@dataclass(frozen=True, slots=True)
class Script:
    """A plan, as actions by place of one step. Steps that come in turns have a plan together, and a script each."""

    order: StepOrder
    """The step that it is for."""
    ordered: OrderedProblem
    """The problem that was planned, of all steps of the turn."""
    planned: PlannedStep
    """Its plan."""
    actions: list[_Actions]
    """The actions before and after each operator."""
    start: frozenset[int]
    """Keys of the pages that are on the device, or on their way, when the step begins."""
    wanted: tuple[int, ...]
    """Keys of the pages among them that are used before they are given back."""
    left_alone: frozenset[int]
    """Keys of pages that stay as long as they exist."""
    step_s: float
    """Seconds that the step takes by the plan, on average over the turn."""


def scripts_of(orders: Orders, turn: StepTurn, ordered: OrderedProblem, planned: PlannedStep) -> list[Script]:
    """Return the scripts of the steps of a turn, whose ``orders`` may have been measured again since."""
    actions = _actions(ordered, planned, len(turn.order.needs))
    named = [
        _Actions(
            *([turn.keys[key] for key in keys] for keys in (each.dead, each.given_back, each.fetched, each.leaving))
        )
        for each in actions
    ]
    starts = turn.starts
    held = _held_at(starts[:-1], ordered, planned, actions)
    left_alone = frozenset(turn.keys[key] for keys in ordered.dead.values() for key in keys)
    return [
        Script(
            order=order,
            ordered=ordered,
            planned=planned,
            actions=named[start:end],
            start=frozenset(turn.keys[key] for key in held[start]),
            wanted=tuple([turn.keys[key] for key in _wanted(held[start], start, ordered, actions)]),
            left_alone=left_alone,
            step_s=planned.simulated.step_s / len(orders),
        )
        for order, start, end in zip(orders, starts, starts[1:], strict=False)
    ]


def _actions(ordered: OrderedProblem, planned: PlannedStep, size: int) -> list[_Actions]:
    """Return what is done at each place of a turn, by its own keys of pages."""
    plan, keys = planned.plan, ordered.keys
    actions = [_Actions() for _ in range(size)]
    for give in plan.give_backs:
        place = actions[give.position]
        (place.dead if give.dies else place.given_back).append(keys[give.page])
    for arriving in plan.copies_in:
        actions[arriving.position].fetched.append(keys[arriving.page])
    for leaving in plan.copies_out:
        actions[leaving.position].leaving.append(keys[leaving.page])
    for position, emptied in ordered.emptied.items():
        actions[position].given_back += emptied
    for position, dead in (*ordered.dead.items(), *ordered.gone.items()):
        actions[position].dead += dead
    return actions


def _held_at(
    starts: Sequence[int], ordered: OrderedProblem, planned: PlannedStep, actions: Sequence[_Actions]
) -> dict[int, tuple[int, ...]]:
    """Return the pages that are on the device, or on their way, when the operators at ``starts`` come."""
    pages, keys = ordered.problem.pages, ordered.keys
    moved = {give.page for give in planned.plan.give_backs}
    held = dict.fromkeys(keys[page] for page in range(len(keys)) if page not in moved)
    born: dict[int, list[int]] = {}
    for page, key in zip(pages, keys, strict=True):
        if page.is_born:
            born.setdefault(page.uses[0] % len(actions), []).append(key)
    here: dict[int, tuple[int, ...]] = {}
    for _ in range(2):  # the first time from what never leaves, the second from what a turn leaves behind
        for position, each in enumerate(actions):
            if position in starts:
                here[position] = tuple(held)
            for key in (*each.dead, *each.given_back):
                held.pop(key, None)
            held.update(dict.fromkeys((*each.fetched, *born.get(position, ()))))
    return here


def _wanted(held: Collection[int], start: int, ordered: OrderedProblem, actions: Sequence[_Actions]) -> Iterator[int]:
    """Yield the pages that are used after ``start`` before they are given back."""
    size, pages = len(actions), dict(zip(ordered.keys, ordered.problem.pages, strict=True))
    first_given: dict[int, int] = {}
    for position, here in enumerate(actions):
        for key in (*here.dead, *here.given_back):
            first_given[key] = min(first_given.get(key, size), (position - start) % size)
    for key in held:
        if min((use - start) % size for use in pages[key].uses) < first_given.get(key, size):
            yield key


class Replay:
    """The plans of the kinds of step seen so far, and the step that follows one of them.

    It is wide because a plan is made, followed, left and counted here.
    """

    def __init__(self, register: Register, copies: Copies, course: Course, *, is_one_memory: bool):
        self._register, self._copies, self._course = register, copies, course
        self._is_one_memory = is_one_memory
        self.host_bytes_per_s: float | None = None
        """The rate at which updates on the host read and wrote its memory, beside copies; ``None`` before the first."""
        self._scripts: dict[Orders, list[Script]] = {}
        """Scripts by the kinds of step of a turn. There are none where no plan keeps the budget."""
        self._planned_for: dict[Orders, list[list[int]]] = {}
        """The bytes outside of pages that each turn was planned for last."""
        self._cache: StepCache | None = None
        """The file for later runs of the same training."""
        self._rates_before: Rates | None = None
        """The rates of an earlier run, until this one has its own."""
        self._hosted: frozenset[int] | None = None
        """Keys of the weights that the host updates as planned; ``None`` if no plan has said."""
        self._thread: threading.Thread | None = None
        self._script: Script | None = None
        """The plan that the step under way follows."""
        self._done = -1
        """Place of the last operator before which everything was done."""
        self._was_planned = False
        """Whether the step before followed a plan to its end."""
        self.wants_split = False
        """Whether the next plan of a step with updates says which of them are the host's."""
        self.split: frozenset[int] | None = None
        """Keys of the weights that the host should update, once they are planned."""
        self.num_steps = 0
        """Number of steps that followed a plan from the beginning to the end."""
        self.num_left = 0
        """Number of steps that did otherwise than their plan."""

    @property
    def is_on(self) -> bool:
        """Whether the step under way follows a plan so far."""
        return self._script is not None

    def script_of(self, order: StepOrder | None) -> Script | None:
        """Return the latest plan of a kind of step, if there is one."""
        scripts = itertools.chain.from_iterable(reversed(self._scripts.values()))
        return next((script for script in scripts if script.order is order), None)

    @property
    def predicted_step_s(self) -> float | None:
        """Seconds that the last step takes by its plan; ``None`` if it has none."""
        script = self.script_of(self._course.last)
        return None if script is None else script.step_s

    # Planning

    def recall(self, cache: StepCache) -> None:
        """Plan the steps of an earlier run, if the cache has them, and store those of this one."""
        self._cache, recalled = cache, cache.recall()
        if recalled is None or (recalled.hosted is not None and not self._is_near(recalled.budget_bytes)):
            return
        self._register.restore(recalled.places)
        grown_bytes = max(0, self._course.others_bytes - recalled.others_bytes)
        for order in recalled.orders:
            order.others_bytes = [size_bytes + grown_bytes for size_bytes in order.others_bytes]
        self._course.recall(recalled.orders)
        self._rates_before, self._hosted = recalled.rates, recalled.hosted
        if recalled.hosted is not None:
            self.host_bytes_per_s, self.split = recalled.rates.host_bytes_per_s, recalled.hosted
        self.prepare()

    def _is_near(self, budget_bytes: int) -> bool:
        """Whether the host would have about as many updates with that budget."""
        return abs(self._course.budget_bytes - budget_bytes) * _NEAR < budget_bytes

    def prepare(self, *, is_waited_for: bool = False) -> None:
        """Plan the kinds of step that come in turns, beside what follows, if they are measured and have no plan yet."""
        orders = _rotated(self._course.turn)
        if not orders or not all(map(self._course.has_details, orders)):
            return
        if not self._is_new(orders) or (self._thread is not None and self._thread.is_alive()):
            return
        known = set(self._course.orders)
        self._planned_for = {kinds: sizes for kinds, sizes in self._planned_for.items() if known.issuperset(kinds)}
        self._planned_for[orders] = [order.others_bytes for order in orders]
        self._scripts = {
            kinds: scripts for kinds, scripts in self._scripts.items() if _rotated(kinds) in self._planned_for
        }
        thread = threading.Thread(
            # of orders as they are now: the next measurement replaces what they consist of
            target=self._plan,
            args=(orders, [*map(copy.copy, orders)], self._rates(), self._register.places()),
            name="penstock planning",
            daemon=True,
        )
        with contextlib.suppress(RuntimeError):  # no memory for a stack: steps go on without a plan
            thread.start()
            self._thread = thread
            if is_waited_for:
                thread.join()

    def _is_new(self, orders: Orders) -> bool:
        """Whether a turn was not planned yet, or for less memory outside of pages than it takes."""
        before = self._planned_for.get(orders)
        if before is None:
            return True
        changed = [(order.others_bytes, then) for order, then in zip(orders, before, strict=True)]
        changed = [(now, then) for now, then in changed if now is not then]
        if self._is_one_memory:
            return any(size > known for now, then in changed for size, known in zip(now, then, strict=True))
        return any(max(now) > max(then) for now, then in changed)

    def _plan(
        self, orders: Orders, measured: list[StepOrder], rates: Rates, places: dict[Any, list[int]]
    ) -> None:  # any: a text, a number
        """Plan a turn, in a thread: training goes on meanwhile, and does so also if this fails."""
        for order in measured if self.wants_split else ():
            if order.details is not None and order.details.updates_on_device:
                self.wants_split = False
                self.split = weights_for_host(order, self._course.even_bytes, rates)
                self._hosted = self.split
                if self.split:
                    return  # the next steps are others
                break
        if sum(len(order.needs) for order in orders) > _MOST_OPERATORS:
            return
        for place, turned in enumerate(_turns(orders)):
            turn = joined(measured[place:] + measured[:place])
            if turn is None:
                return
            ordered = problem_of(turn.order, self._course.even_bytes, rates, is_one_memory=self._is_one_memory)
            if ordered is not None:
                others = {kinds: scripts for kinds, scripts in self._scripts.items() if _rotated(kinds) != orders}
                with contextlib.suppress(BudgetError):  # the online path may find a way, or says what is missing
                    others[turned] = scripts_of(turned, turn, ordered, best_plan([ordered.problem]))
                self._scripts = others
                if turned in others and self._cache is not None:
                    known = Recalled(
                        orders=tuple(measured[place:] + measured[:place]),
                        places=places,
                        rates=rates,
                        hosted=self._hosted,
                        others_bytes=self._course.others_bytes,
                        budget_bytes=self._course.budget_bytes,
                    )
                    self._cache.store(known)
                return

    def _rates(self) -> Rates:
        out, into = self._copies.waterfall.rates_bytes_per_s()
        before = self._rates_before
        in_bytes_per_s = max(into or (before.in_bytes_per_s if before else _UNKNOWN_BYTES_PER_S), 1.0)
        out_bytes_per_s = max(out or (before.out_bytes_per_s if before else _UNKNOWN_BYTES_PER_S), 1.0)
        return Rates(
            in_bytes_per_s=in_bytes_per_s,
            out_bytes_per_s=out_bytes_per_s,
            both_in_bytes_per_s=in_bytes_per_s,
            both_out_bytes_per_s=out_bytes_per_s,
            host_bytes_per_s=self.host_bytes_per_s or _UNKNOWN_BYTES_PER_S,
            # Where the host computes, it does not run ahead, and small pages are dear to move.
            copy_s=max(_COPY_S, self._copies.begin_s if self._is_one_memory else 0.0),
        )

    # A step

    def begin_step(self) -> None:
        """Begin a step, which follows a plan if there is one for the kind of step that is expected."""
        self._script, self._done = script, _ = self._expected(), -1
        if script is not None:
            self._bridge(script)
            self._copies.waterfall.is_quiet = True

    def _expected(self) -> Script | None:
        """Return the plan of the step that is expected: of all places in turns, the one that most steps have led to."""
        best, most = None, -1
        for orders, scripts in self._scripts.items():  # planning replaces it
            for place, script in enumerate(scripts):
                if script.order is self._course.order:
                    before = itertools.cycle((*reversed(orders[:place]), *reversed(orders[place:])))
                    pairs = zip(before, reversed(self._course.past), strict=False)
                    num_steps = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] is pair[1], pairs))
                    if num_steps > most:
                        best, most = script, num_steps
        # A plan goes on from the step before. From another one's end it moved a tenth more than no plan does.
        return None if self._is_one_memory and not most else best

    def _bridge(self, script: Script) -> None:
        """Bring about what the plan begins with, if the step before did not."""
        copies, register = self._copies, self._register
        if not self._was_planned:  # a copy out that was taken back has its storage until somebody asks the device
            copies.waterfall.drain()
        for other in register:
            is_left_alone = other.key in script.start or other.key in script.left_alone or other in register.pinned
            if other.held_bytes() and not is_left_alone:
                self._give_back(other)
        limit = self._course.limit(0)
        for key in script.wanted:
            page = register.with_key(key)
            if page is not None and not page.held_bytes() and copies.held_bytes + page.size_bytes <= limit:
                copies.prefetch(page)

    def need(
        self,
        position: int,
        pages: Sequence[Page],
        written: Collection[Page],
        *,
        is_overwritten: bool,
        is_noted: bool,
    ) -> bool:
        """Do what the plan has for the operator at that place, whose pages these are.

        Returns ``False`` if the plan was left, so that the rest is decided operator by operator.
        """
        script = self._script
        if script is None:
            return False
        if script.order is not self._course.order or self._register.pinned:
            return self.leave()
        if not is_noted and not all(page.held_bytes() for page in pages):
            position = min(position + 1, len(script.actions) - 1)  # a view, by which the next operator begins
        if position > self._done and not self._act(script, position):
            return self.leave()
        for page in pages:
            if page.is_here:
                continue
            is_read = not (is_overwritten and page in written)
            if (
                page.state is not PageState.COMING
                and is_read
                and not (page.narrow is not None and page.narrow.is_held())
            ):
                return self.leave()
        return True

    def _act(self, script: Script, position: int) -> bool:
        copies, register = self._copies, self._register
        for place in range(max(self._done, 0), position):
            self._let_leave(script.actions[place].leaving)
        self._done = position
        actions = script.actions[position]
        for key in actions.dead:
            copies.drop_dead(key)
        for key in actions.given_back:
            page = register.with_key(key)
            if page is None:
                copies.drop_dead(key)
            elif page.is_here:
                self._give_back(page)
        for key in actions.fetched:
            page = register.with_key(key)
            if page is not None and not page.held_bytes() and not copies.prefetch(page):
                return False
        limit = self._course.limit(position)
        if copies.held_bytes > limit:  # somebody keeps what was dead, or a copy out that was taken back still reads it
            copies.waterfall.drain()
            copies.sweep()
        return copies.held_bytes <= limit

    def _give_back(self, page: Page) -> None:
        self._copies.leave(page)
        if page.is_here:
            self._copies.give_back(page)

    def _let_leave(self, keys: Sequence[int]) -> None:
        for key in keys:
            page = self._register.with_key(key)
            if page is not None and page.is_here:
                self._copies.leave(page)

    def leave(self) -> bool:
        """Leave the plan for the rest of the step; return ``False``."""
        self._script = None
        self.num_left += 1
        self._copies.waterfall.is_quiet = False
        self._course.rank_again()
        return False

    def end_step(self, *, is_whole: bool) -> None:
        """End a step."""
        script, self._script = self._script, None
        self._copies.waterfall.is_quiet = self._was_planned = False
        self._copies.waterfall.reap()  # once a step: what has ended gives its space back
        if script is None:
            return
        if not is_whole or self._done != len(script.actions) - 1:
            self.num_left += 1
            return
        self._let_leave(script.actions[self._done].leaving)
        self._was_planned = True
        self.num_steps += 1


def _rotated(orders: Orders) -> Orders:
    """Return the same turn from whichever step it is told."""
    return min(_turns(orders), key=lambda turn: [*map(id, turn)], default=())


def _turns(orders: Orders) -> list[Orders]:
    """Return the same turn, told from each of its steps."""
    return [orders[place:] + orders[:place] for place in range(len(orders))]
