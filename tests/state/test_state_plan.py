"""Plans of a step: checked by the verifier, replayed in random order, and compared with all choices on small steps."""

import functools
import itertools
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from penstock.errors import BudgetError, InternalError
from penstock.state._plan import StatePlanner, best_plan
from penstock.state._problem import HostUpdate, Rates, StateProblem, StepPage
from penstock.state._schedule import NEVER
from penstock.state._simulate import simulate
from penstock.state._verify import verify

MIB = 2**20
RATES = Rates(
    in_bytes_per_s=54e9,
    out_bytes_per_s=54e9,
    both_in_bytes_per_s=48e9,
    both_out_bytes_per_s=44e9,
    host_bytes_per_s=122e9,
)
many = settings(deadline=None, max_examples=200, database=None)


@st.composite
def problems(draw, most_operators=24, most_pages=8):
    """Any step: pages that stand, that are born and die in this step or the next, that the host reads and writes."""
    size = draw(st.integers(2, most_operators))
    pages, updates = [], []
    for number in range(draw(st.integers(1, most_pages))):
        kind = draw(st.sampled_from(["stands", "stands", "born", "host"]))
        positions = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4, unique=True).map(sorted))
        size_bytes = draw(st.integers(1, 16)) * MIB
        writes = tuple(draw(st.booleans()) for _ in positions)
        if kind == "stands":
            pages.append(StepPage(name=f"stands {number}", size_bytes=size_bytes, uses=tuple(positions), writes=writes))
        elif kind == "born":
            shift = draw(st.integers(0, len(positions) - 1))  # these of its uses are in the next step
            uses = (*positions[shift:], *(position + size for position in positions[:shift]))
            pages.append(
                StepPage(
                    name=f"born {number}", size_bytes=size_bytes, uses=uses, writes=(True, *writes[1:]), is_born=True
                )
            )
        elif positions[-1] < size - 1:
            cast = StepPage(
                name=f"cast {number}",
                size_bytes=size_bytes,
                uses=tuple(positions),
                writes=(False,) * len(positions),
                is_from_host=True,
            )
            gradient = StepPage(
                name=f"gradient {number}",
                size_bytes=size_bytes,
                uses=(draw(st.integers(positions[-1] + 1, size - 1)),),
                writes=(True,),
                is_born=True,
                leaves=True,
            )
            updates.append(
                HostUpdate(
                    reads=len(pages) + 1,
                    writes=len(pages),
                    size_bytes=7 * size_bytes,
                    after=draw(st.sampled_from([-1, size - 1])),
                )
            )
            pages += [cast, gradient]
    assume(pages)
    needed = [0] * size
    for page in pages:
        for position in {use % size for use in page.uses}:
            needed[position] += page.size_bytes
    pool = tuple(draw(st.integers(0, 8)) * MIB for _ in range(size))
    room = draw(st.sampled_from([1.0, 1.2, 1.6, 3.0]))
    return StateProblem(
        seconds=tuple(draw(st.sampled_from([0.0, 1e-5, 1e-4, 2e-3])) for _ in range(size)),
        pool_bytes=pool,
        pages=tuple(pages),
        updates=tuple(updates),
        budget_bytes=max(pool) + int(room * max(needed)),
        rates=RATES,
        is_one_memory=draw(st.booleans()),
    )


settings_of_plans = st.fixed_dictionaries(
    {
        "time_share": st.sampled_from([0.0, 0.02, 1.0]),
        "margin": st.sampled_from([0.0, 0.1, 0.5]),
        "lag": st.sampled_from([0, 1, 5, 40]),
    }
)


@many
@given(problems(), settings_of_plans)
def test_plans_are_correct(problem, options):
    plan = StatePlanner(problem).plan(**options)
    verify(problem, plan)


@many
@given(problems(), settings_of_plans, st.randoms(use_true_random=False))
def test_pages_hold_what_was_written_last_whatever_the_times(problem, options, random):
    plan = StatePlanner(problem).plan(**options)
    Replay(problem, plan, random).run()


class Replay:
    """Four steps on numbers in place of bytes, in any order that the plan's waits allow.

    The host is ahead of all of it: it has handed out every MiB in the order of the plan, whichever was free. Operators
    write to their results, and to everything else that could be a result of theirs.
    """

    NUM_STEPS = 4

    def __init__(self, problem, plan, random):
        self.problem, self.plan, self.random = problem, plan, random
        self.size, self.num_ins, self.num_outs = problem.num_operators, len(plan.copies_in), len(plan.copies_out)
        self.bytes = {}
        """What is in each MiB: a page and its version."""
        self.below = dict.fromkeys(range(len(problem.pages)), 0)
        """The version of each page in host memory."""
        self.version = dict(self.below)
        """The version that was written last, wherever it is."""
        self.changes = itertools.count(1)
        self.num_operators = self.num_in = self.num_out = 0
        self.updated = set()
        self.left = {(copy.page, copy.use): number for number, copy in enumerate(plan.copies_out)}
        brought = {(copy.page, copy.use): copy.position for copy in plan.copies_in}
        self.came_before = {
            (page, use)
            for (page, use), position in brought.items()
            if position > problem.pages[page].uses[use] % self.size
        }
        """Uses whose copies in are issued in the step before."""
        self.hand_out(brought)

    def hand_out(self, brought):
        """Give every page its memory in all steps: for each operator, copy in and copy out."""
        plan, size = self.plan, self.size
        self.of_operator, self.of_in, self.of_out, self.results = [], [], [], []
        new, now, pools, self.most = itertools.count(), {}, ([], []), 0

        def take(index, pool):
            assert index not in now, f"{self.problem.pages[index].name} is there already"
            free = pools[pool and not self.problem.is_one_memory]
            self.random.shuffle(free)
            spans = [free.pop() if free else next(new) for _ in range(self.problem.pages[index].size_bytes // MIB)]
            now[index] = (free, spans)

        for index, page in enumerate(self.problem.pages):  # what is there when the first step begins
            if not page.is_born and ((index, 0) not in brought or (index, 0) in self.came_before):
                take(index, 0)
                self.bytes.update(dict.fromkeys(now[index][1], (index, 0)))
        for number in range(self.NUM_STEPS * size):
            position = number % size
            for give in plan.give_backs:
                if give.position == position and give.page in now:
                    free, spans = now.pop(give.page)
                    free += spans
            for copy in plan.copies_in:
                if copy.position == position:
                    take(copy.page, 0)
                    self.of_in.append(now[copy.page][1])
            for index, page in enumerate(self.problem.pages):
                if page.is_born and page.uses[0] == position:
                    take(index, 1)
            held = sum(self.problem.pages[index].size_bytes for index in now)
            assert held + self.problem.taken_bytes[position] <= self.problem.budget_bytes
            self.of_operator.append({index: spans for index, (_, spans) in now.items()})
            self.results.append([*pools[1 - self.problem.is_one_memory]])
            for copy in plan.copies_out:
                if copy.position == position:
                    self.of_out.append(now[copy.page][1] if copy.page in now else None)

    def run(self):
        while self.num_operators < self.NUM_STEPS * self.size:
            possible = self.possible()
            assert possible, "the plan waits for itself"
            self.random.choice(possible)()

    def possible(self):
        """What may run now."""
        actions = []
        if self.num_operators < self.NUM_STEPS * self.size and self.may_compute():
            actions.append(self.compute)
        if self.num_in < self.NUM_STEPS * self.num_ins and self.may_copy_in():
            actions.append(self.copy_in)
        if self.num_out < self.NUM_STEPS * self.num_outs and self.may_copy_out():
            actions.append(self.copy_out)
        for step, number in itertools.product(range(self.NUM_STEPS), range(len(self.problem.updates))):
            if (step, number) not in self.updated and self.may_update(step, number):
                actions.append(functools.partial(self.update, step, number))
        return actions

    def check(self, index, spans):
        found = {self.bytes[span] for span in spans}
        assert found == {(index, self.version[index])}, self.problem.pages[index].name

    def write(self, index, spans):
        self.version[index] = next(self.changes)
        self.bytes.update(dict.fromkeys(spans, (index, self.version[index])))

    def may_compute(self):
        step, position = divmod(self.num_operators, self.size)
        return (
            self.plan.needs_in[position] + step * self.num_ins < self.num_in
            and self.plan.needs_out[position] + step * self.num_outs < self.num_out
        )

    def compute(self):
        position = self.num_operators % self.size
        self.bytes.update(dict.fromkeys(self.results[self.num_operators], "a result"))
        spans = self.of_operator[self.num_operators]
        for index, page in enumerate(self.problem.pages):
            for use, used in enumerate(page.uses):
                if (
                    used % self.size != position or used > self.num_operators
                ):  # of another one, or born before the start
                    continue
                if page.is_born and use == 0:
                    self.write(index, spans[index])
                    continue
                self.check(index, spans[index])
                if page.writes[use]:
                    self.write(index, spans[index])
        self.num_operators += 1

    def may_copy_in(self):
        step, number = divmod(self.num_in, self.num_ins)
        copy = self.plan.copies_in[number]
        if copy.update != NEVER:
            steps_before, update = divmod(copy.update, len(self.problem.updates))
            if step + steps_before >= 0 and (step + steps_before, update) not in self.updated:
                return False
        return copy.operator + step * self.size < self.num_operators and copy.out + step * self.num_outs < self.num_out

    def copy_in(self):
        copy, spans = self.plan.copies_in[self.num_in % self.num_ins], self.of_in[self.num_in]
        while self.random.random() < 0.5:  # it has begun and changed its memory, and others run before it ends
            self.bytes.update(dict.fromkeys(spans, "half of a copy"))
            others = [action for action in self.possible() if action != self.copy_in]
            if not others:
                break
            self.random.choice(others)()
        self.bytes.update(dict.fromkeys(spans, (copy.page, self.below[copy.page])))
        self.num_in += 1

    def may_copy_out(self):
        step, number = divmod(self.num_out, self.num_outs)
        return self.plan.copies_out[number].operator + step * self.size < self.num_operators

    def copy_out(self):
        step, number = divmod(self.num_out, self.num_outs)
        copy = self.plan.copies_out[number]
        if (
            step > 0
            or not self.problem.pages[copy.page].is_born
            or self.problem.pages[copy.page].uses[copy.use] < self.size
        ):
            self.check(copy.page, self.of_out[self.num_out])
            self.below[copy.page] = self.version[copy.page]
        self.num_out += 1

    def may_update(self, step, number):
        update = self.problem.updates[number]
        out = self.left[update.reads, len(self.problem.pages[update.reads].uses) - 1]
        return out + step * self.num_outs < self.num_out and update.after + step * self.size < self.num_operators

    def update(self, step, number):
        self.updated.add((step, number))
        page = self.problem.updates[number].writes
        self.version[page] = self.below[page] = next(self.changes)


@many
@given(problems(), settings_of_plans, st.data())
def test_the_verifier_finds_what_is_left_out(problem, options, data):
    """A wait that another one implies may go: what passes all the same must hold in replays."""
    plan = StatePlanner(problem).plan(**options)
    assume(plan.copies_in or plan.copies_out)
    broken = data.draw(st.sampled_from(list(breakages(plan))))
    try:
        verify(problem, broken)
    except InternalError:
        return
    for _ in range(20):
        Replay(problem, broken, data.draw(st.randoms(use_true_random=False))).run()


def breakages(plan):
    for number, copy in enumerate(plan.copies_in):
        for change in ({"operator": NEVER}, {"out": NEVER}, {"update": NEVER}):
            copies = list(plan.copies_in)
            copies[number] = replace(copy, **change)
            yield replace(plan, copies_in=tuple(copies))
    for name in ("needs_in", "needs_out"):
        for position, needed in enumerate(getattr(plan, name)):
            if needed != NEVER:
                changed = list(getattr(plan, name))
                changed[position] = NEVER
                yield replace(plan, **{name: tuple(changed)})
    for number, copy in enumerate(plan.copies_out):
        copies = list(plan.copies_out)
        copies[number] = replace(copy, operator=copy.operator - 1)
        yield replace(plan, copies_out=tuple(copies))


def test_what_can_be_left_out_and_is_needed_is_found():
    problem = worked_example()
    plan = StatePlanner(problem).plan(time_share=0.02, margin=0.1, lag=2)
    verify(problem, plan)
    found = 0
    every = list(breakages(plan))
    for broken in every:
        try:
            verify(problem, broken)
        except InternalError:
            found += 1
    assert found >= 0.4 * len(every), (found, len(every))


def worked_example(num_layers=6, size_bytes=8 * MIB, share=0.5):
    """Layers that are used forwards and backwards, and updated in backward, with one slice of state each."""
    size = 3 * num_layers
    pages = []
    for layer in range(num_layers):
        backward = num_layers + 2 * (num_layers - 1 - layer)
        pages.append(
            StepPage(
                name=f"weight {layer}",
                size_bytes=size_bytes,
                uses=(layer, backward, backward + 1),
                writes=(False, False, True),
            )
        )
        pages.append(StepPage(name=f"state {layer}", size_bytes=2 * size_bytes, uses=(backward + 1,), writes=(True,)))
    return StateProblem(
        seconds=(1e-3,) * size,
        pool_bytes=(MIB,) * size,
        pages=tuple(pages),
        rates=RATES,
        budget_bytes=MIB + int(share * 3 * num_layers * size_bytes),
    )


def test_a_step_that_fits_moves_nothing():
    problem = worked_example(share=1.0)
    best = best_plan([problem])
    assert not best.plan.copies_in
    assert not best.plan.copies_out
    assert best.simulated.step_s == pytest.approx(sum(problem.seconds))


def test_a_smaller_budget_never_moves_less():
    moved = []
    for share in (1.0, 0.8, 0.6, 0.5, 0.4):
        problem = worked_example(share=share)
        plan = best_plan([problem]).plan
        moved.append(plan.in_bytes(problem) + plan.out_bytes(problem))
    assert moved == sorted(moved)


def test_what_one_operator_needs_is_refused_with_what_it_takes():
    problem = worked_example(share=0.05)
    with pytest.raises(BudgetError, match="`budget` must be at least") as refused:
        best_plan([problem])
    least = int(str(refused.value).split("at least ")[1].split(" ")[0])
    enough = replace(problem, budget_bytes=least)
    verify(enough, best_plan([enough]).plan)
    with pytest.raises(BudgetError):
        best_plan([replace(problem, budget_bytes=MIB + 3 * 8 * MIB - 1)])  # the pool, a weight and its state


def test_copies_are_slower_while_both_directions_are_busy():
    rates = Rates(in_bytes_per_s=1e9, out_bytes_per_s=1e9, both_in_bytes_per_s=1e9, both_out_bytes_per_s=1e9)
    problem = replace(worked_example(num_layers=12), rates=rates)
    slow = replace(problem, rates=replace(rates, both_in_bytes_per_s=1e8, both_out_bytes_per_s=1e8))
    plan = StatePlanner(problem).plan(time_share=0.02, margin=0.13, lag=3)
    assert 9 < simulate(slow, plan).step_s / simulate(problem, plan).step_s < 10


def test_a_plan_holds_whatever_the_operators_take():
    problem = worked_example()
    plan = best_plan([problem]).plan
    for seconds in ([1e-9] * 18, [1.0] * 18, [10.0**-number for number in range(18)]):
        assert simulate(problem, plan, seconds).step_s >= sum(seconds) * (1 - 1e-9)


@settings(deadline=None, max_examples=60, database=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(problems(most_operators=8, most_pages=3))
def test_steps_are_nearly_as_short_as_with_the_best_choice_of_what_intervals(problem):
    planner = StatePlanner(problem)
    choices = [[(index, interval.use) for interval in intervals] for index, intervals in enumerate(planner._intervals)]
    every = list(itertools.chain.from_iterable(choices))
    assume(len(every) <= 8)
    room_bytes = problem.budget_bytes - max(problem.taken_bytes)
    assume(3 * max(page.size_bytes for page in problem.pages) <= room_bytes)  # else it is a knapsack
    shortest = None
    for kept in itertools.product([False, True], repeat=len(every)):
        flags = [[False] * len(page.uses) for page in problem.pages]
        for (index, use), is_kept in zip(every, kept, strict=True):
            flags[index][use] = is_kept
        for lag in (0, 2):
            try:
                plan = planner.placed(flags, lag)
                verify(problem, plan)
            except InternalError:  # too much is kept
                continue
            step_s = simulate(problem, plan).step_s
            shortest = step_s if shortest is None else min(shortest, step_s)
    try:
        found = best_plan([problem])
    except BudgetError:
        return
    verify(problem, found.plan)
    assert shortest is not None
    assert found.simulated.step_s <= 1.5 * shortest + 1e-4
