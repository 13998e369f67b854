"""The plans of a step's graphs: which is known, which is made, and what runs as lean as it can meanwhile."""

import threading
from collections.abc import Sequence
from dataclasses import replace

from penstock.errors import BudgetError
from penstock.remat._beside import Beside
from penstock.remat._calls import Done, Statics, links_of, saved_bytes_of
from penstock.remat._explain import Planned
from penstock.remat._measured import Measured
from penstock.remat._not_kept import NotKept
from penstock.remat._piece import Call, Variant
from penstock.remat._plan import RematPlan, leanest_plan, lowest_plan, plan, plan_of
from penstock.remat._problem import RematProblem
from penstock.remat._sequences import Known, Sequences, joined
from penstock.remat._settings import PlanSettings
from penstock.remat._share import WITHOUT_LIMIT, Share
from penstock.remat._together import merged, plans_of
from penstock.remat._verify import verify

_MAX_PLANNED = 256
_WORTH_PLANNING = 20
"""Divisor of the budget: a lean step is planned again once at least that part of it has become free."""
_TOLERANCE = 200
"""Divisor of the budget: a step that exceeds it by at most that part counts as keeping it."""


class Step(threading.local):
    """The current step of a thread."""

    def __init__(self) -> None:
        self.live: dict[int, Call] = {}
        """Calls whose backward may come."""
        self.calls: list[Done] = []
        """Calls of the step, in order."""
        self.following: Known | None = None
        """The sequence that the step follows."""
        self.is_new = False
        """Whether the step has left every known sequence."""

    @property
    def waiting(self) -> list[Done]:
        """The calls whose backward may come."""
        return [done for done in self.calls if id(done.call) in self.live]

    def end(self) -> tuple[list[Done], bool]:
        """Begin another step. Return the calls of this one, and whether it had left every known sequence."""
        ended = self.calls, self.is_new
        self.calls, self.following, self.is_new = [], None, False
        return ended


class Planner:
    """The plans of one step's graphs, within its share of the budget.

    It is wide because a graph alone, graphs together and graphs of an unknown step are planned in different ways.
    """

    def __init__(self, settings: PlanSettings, beside: Beside, share: Share):
        self.planned: list[Planned] = []
        """Plans in the order in which they were made; only the latest, if there are very many."""
        self.num_planned = 0
        self.sequences = Sequences()
        self.measured = Measured()
        self.not_kept = NotKept(strict=settings.strict)
        self._settings, self._beside, self._share = settings, beside, share
        self._whole_steps: set[tuple[int, ...]] = set()
        """Sequences of graphs that were whole steps, as hashes that do not depend on sizes."""

    # What a call follows

    def plan_for(self, step: Step, variant: Variant, statics: Statics, *, is_one_graph: bool) -> RematPlan:
        """Return the plan that the step's next call follows. Raise ``BudgetError`` if it cannot fit."""
        position = len(step.calls)
        following = step.following
        if following is None or position >= len(following.variants) or following.variants[position] is not variant:
            following = step.following = self.sequences.longest(*_so_far(step, variant))
        if following is None and not position and (is_one_graph or self._is_a_step(variant)):
            try:
                following = step.following = self._planned_alone(variant, statics)
            except BudgetError:
                problem = self._alone(variant, statics)
                if not self._is_excused(variant, problem, self._share.budget_bytes(problem, statics.parameters)):
                    raise
                following = step.following = self._as_low_as_it_goes([variant], problem)
        if following is None:
            step.is_new = True
            return self._as_larger(step, variant, statics) or self._leanest(step, variant, statics)
        if following.planned is None:
            self.must_fit(step, variant, following.plans[position], statics)
        return following.plans[position]

    def must_fit(self, step: Step, variant: Variant, graph_plan: RematPlan, statics: Statics) -> None:
        """Report a graph that does not fit together with what earlier graphs of the step have saved."""
        problem = variant.problem
        assert problem is not None
        if self._share.is_relative:
            return
        peak_bytes = graph_plan.peak_bytes + self._beside_bytes(step, variant, statics)
        budget_bytes = self._share.budget_bytes(problem, statics.parameters)
        if peak_bytes > budget_bytes:
            say = self.not_kept.first if step.is_new else self.not_kept.lowest
            say(peak_bytes, budget_bytes)

    def _is_excused(self, variant: Variant, problem: RematProblem, budget_bytes: int) -> bool:
        """Whether a graph that does not fit runs as lean as it can, and the user is warned, instead of an error.

        That is so once training runs, and if it does not fit because of something that is not its own.
        """
        not_own_bytes = self._beside.outside_bytes + self._beside.found_bytes
        lowest_bytes = lowest_plan(problem, method=self._settings.method).peak_bytes
        return variant.has_run or lowest_bytes - not_own_bytes <= budget_bytes

    def _is_a_step(self, variant: Variant) -> bool:
        """Whether a graph that is called first is its whole step, as it was for other kinds of arguments."""
        does = variant.piece.does
        return {hashes for hashes in self._whole_steps if hashes[0] == does} == {(does,)}

    def _as_larger(self, step: Step, variant: Variant, statics: Statics) -> RematPlan | None:
        """Return the graph's plan in a sequence of larger graphs, if the step may continue like it."""
        problem = variant.problem
        assert problem is not None
        budget_bytes = self._share.budget_bytes(problem, statics.parameters)
        for known in self.sequences.of_larger(*_so_far(step, variant)):
            if known.planned is None or known.planned.budget_bytes <= budget_bytes:
                graph_plan = plan_of(problem, known.plans[len(step.calls)].decisions)
                self._charge(
                    problem.static_bytes + self._beside.standing_bytes(), graph_plan, problem, statics.parameters
                )
                if known.planned is None:
                    self.must_fit(step, variant, graph_plan, statics)
                return graph_plan
        return None

    def _leanest(self, step: Step, variant: Variant, statics: Statics) -> RematPlan:
        """Return the plan that leaves the fewest bytes. Raise ``BudgetError`` if the graph does not fit even alone."""
        problem = variant.problem
        assert problem is not None
        whole = replace(problem, static_bytes=problem.static_bytes + self._beside.standing_bytes())
        if self._share.is_relative:
            budget_bytes = room_bytes = WITHOUT_LIMIT
        else:
            budget_bytes = self._share.budget_bytes(problem, statics.parameters)
            room_bytes = budget_bytes - self._beside_bytes(step, variant, statics)
        if variant.leanest is None or variant.leanest.peak_bytes > room_bytes:
            variant.leanest = leanest_plan(problem, room_bytes, method=self._settings.method)
            if variant.leanest.peak_bytes > room_bytes:
                lowest = lowest_plan(problem, method=self._settings.method)
                variant.leanest = lowest if lowest.peak_bytes <= room_bytes else variant.leanest
            if variant.leanest.peak_bytes + whole.static_bytes - problem.static_bytes > budget_bytes:
                try:  # raises, and says what needs it, if it cannot fit alone
                    plan(whole, budget_bytes, method=self._settings.method)
                except BudgetError:
                    if not self._is_excused(variant, whole, budget_bytes):
                        raise
        self.must_fit(step, variant, variant.leanest, statics)
        self._charge(whole.static_bytes, variant.leanest, problem, statics.parameters)
        return variant.leanest

    def _beside_bytes(self, step: Step, variant: Variant, statics: Statics) -> int:
        """Return the bytes that the step holds in addition to a graph's own, if the graph is called now."""
        problem, waiting = variant.problem, step.waiting
        assert problem is not None
        saved_bytes = sum(saved_bytes_of(done) for done in waiting)
        return self._beside.static_bytes([*waiting, Done(variant, statics)]) + saved_bytes - problem.static_bytes

    # What a step teaches

    def settle(self) -> None:
        """Forget plans that no longer fit, since more stands beside them, or that are leaner than they need be."""
        standing_bytes, limit_bytes = self._beside.standing_bytes(), self._share.device_bytes
        for known in self.sequences.all():
            planned = known.planned
            if known.is_provisional and self._beside.optimizers.are_known:
                self.sequences.forget()
            if limit_bytes is None or known.limit_bytes is None:
                continue
            grown_bytes = standing_bytes - known.standing_bytes + known.limit_bytes - limit_bytes
            over_bytes = 0 if planned is None else planned.peak_bytes + grown_bytes - planned.budget_bytes
            is_lean = planned is None or planned.plan.extra_s > 0
            if over_bytes > limit_bytes // _TOLERANCE or (is_lean and -grown_bytes > limit_bytes // _WORTH_PLANNING):
                self.sequences.forget()

    def learn(self, step: Sequence[Done], *, is_new: bool) -> None:
        """Plan the graphs that a step has called, if the sequence is new."""
        self._whole_steps.add(tuple(done.variant.piece.does for done in step))
        for done in step:
            done.variant.has_run = True
        if is_new and not self.sequences.has([done.variant for done in step]):
            try:
                self._planned_together(step)
            except BudgetError as error:
                self._as_low_as_it_goes([done.variant for done in step], self._together(step))
                breaks = [done.variant.piece.break_reason for done in step]
                self.not_kept.together(error, breaks, self._beside.eager_bytes)

    def was_measured(self, step: Step, taken_bytes: int) -> None:
        """Note the bytes that a step took beyond those at its start. An excess leaves less for the graphs."""
        planned = None if step.following is None else step.following.planned
        if planned is None or not planned.has_budget or not step.calls:
            return
        key = tuple(id(done.variant) for done in step.calls)
        peak_bytes = taken_bytes + self._beside.standing_before(step.calls)
        excess_bytes = peak_bytes - planned.budget_bytes
        if excess_bytes <= planned.budget_bytes // _TOLERANCE:
            if all(done.call is not None and done.call.had_backward for done in step.calls):
                self.measured.keeps(key, self.sequences)
            return
        if self.measured.exceeds(key):
            self._beside.outside_bytes += peak_bytes - planned.peak_bytes + excess_bytes // 8
            self.sequences.forget()
            step.is_new = True
        elif excess_bytes > planned.budget_bytes // 100:
            self.not_kept.measured(peak_bytes, planned.budget_bytes)

    def correct(self, step: Step, done: Done, *, is_timed: bool) -> None:
        """Correct times that were scaled from other sizes, by a second step, since the first one warms up."""
        variant, problem = done.variant, done.variant.problem
        variant.num_calls += 1
        if variant.num_calls < 2 or problem is None or done.call is None or not is_timed:
            return
        graph_plan = done.plan
        factor = done.call.seconds / max(graph_plan.step_s + graph_plan.extra_s, 1e-9)
        variant.problem, variant.is_scaled = problem.scaled(durations=factor), False
        for index, planned in enumerate(self.planned):
            if planned.plan is graph_plan:
                times = {name: getattr(graph_plan, name) * factor for name in ("step_s", "extra_s", "stall_s")}
                problem = planned.problem.scaled(durations=factor)
                self.planned[index] = replace(planned, problem=problem, plan=replace(graph_plan, **times))
        if graph_plan.gone_slots:  # a lane may now hide more or less
            self.sequences.forget(variant)
            step.is_new = True

    # Plans

    def _planned_alone(self, variant: Variant, statics: Statics) -> Known:
        """Plan a graph that is a whole step."""
        planned = self._plan(self._alone(variant, statics), statics.parameters, [variant])
        return self._remember([variant], (planned.plan,), planned)

    def _alone(self, variant: Variant, statics: Statics) -> RematProblem:
        """Return the problem of a graph that is a whole step, with all that stands beside it."""
        problem, captured = variant.problem, variant.captured
        assert problem is not None and captured is not None
        elsewhere = {key: size for key, size in self._beside.modules_bytes().items() if key not in statics.parameters}
        unchanged_bytes = max(0, statics.gradient_bytes - captured.gradient_bytes)  # the graph adds nothing to these
        beside_bytes = self._beside.eager_bytes + unchanged_bytes + sum(elsewhere.values())
        return replace(problem, static_bytes=problem.static_bytes + self._beside.standing_bytes() + beside_bytes)

    def _planned_together(self, step: Sequence[Done]) -> Known:
        """Plan the graphs of a step that has run."""
        if len(step) == 1:
            return self._planned_alone(step[0].variant, step[0].statics)
        problem = self._together(step)
        parameters = {key: size for done in step for key, size in done.statics.parameters.items()}
        variants = [done.variant for done in step]
        planned = self._plan(problem, parameters, variants)
        self._say_if_above(problem, planned.budget_bytes, step)
        problems = [variant.problem for variant in variants if variant.problem is not None]
        return self._remember(variants, plans_of(problems, planned.plan), planned)

    def _together(self, step: Sequence[Done]) -> RematProblem:
        """Return the problem of the graphs of a step that has run, with all that stands beside them."""
        problems = [done.variant.problem for done in step if done.variant.problem is not None]
        return merged(problems, links_of(step), self._beside.static_bytes(step))

    def _say_if_above(self, problem: RematProblem, budget_bytes: int, step: Sequence[Done]) -> None:
        """Report it if a step took more than the budget. That is known only after it has run."""
        is_whole = all(done.call and done.call.had_backward and not done.plan.gone_slots for done in step)
        if is_whole and not self._share.is_relative:
            peak_bytes = plan_of(problem, joined([done.plan for done in step])).peak_bytes
            if peak_bytes > budget_bytes:
                self.not_kept.perhaps_first(peak_bytes, budget_bytes)

    def _as_low_as_it_goes(self, variants: list[Variant], problem: RematProblem) -> Known:
        """Let steps like one that does not fit take as little as they can."""
        step_plan = lowest_plan(problem, method=self._settings.method)
        problems = [variant.problem for variant in variants if variant.problem is not None]
        return self._remember(variants, plans_of(problems, step_plan), None)

    def _plan(self, problem: RematProblem, parameters: dict[int, int], variants: Sequence[Variant]) -> Planned:
        budget_bytes = self._share.budget_bytes(problem, parameters)
        like = next(
            (known.planned.plan.decisions for known in self.sequences.alike(variants) if known.planned is not None),
            None,
        )
        step_plan = lowest_plan(problem, method=self._settings.method) if self._is_provisional else None
        if step_plan is None or step_plan.peak_bytes > budget_bytes:
            step_plan = plan(problem, budget_bytes, method=self._settings.method, like=like)
        verify(problem, step_plan)
        self._charge(problem.static_bytes, step_plan, problem, parameters)
        self.num_planned += 1
        del self.planned[:-_MAX_PLANNED]
        shapes = tuple(variant.arguments.shapes for variant in variants)
        self.planned.append(Planned(problem=problem, plan=step_plan, budget_bytes=budget_bytes, shapes=shapes))
        return self.planned[-1]

    @property
    def _is_provisional(self) -> bool:
        """Whether a plan takes as little as it can, because the state of an optimizer is not known yet."""
        return self._share.device_bytes is not None and not self._beside.optimizers.are_known

    def _charge(
        self, static_bytes: int, step_plan: RematPlan, problem: RematProblem, parameters: dict[int, int]
    ) -> None:
        """Charge the account with a step, without what was found beside it, since that is not the step's."""
        if self._share.is_charged:
            step_bytes = step_plan.peak_bytes - problem.static_bytes
            self._share.take(static_bytes - self._beside.found_bytes, step_bytes, parameters)

    def _remember(self, variants: Sequence[Variant], plans: tuple[RematPlan, ...], planned: Planned | None) -> Known:
        known = Known(
            tuple(variants), plans, planned, self._beside.standing_bytes(), self._share.device_bytes,
            is_provisional=self._is_provisional,
        )  # fmt: skip
        self.measured.planned(self.sequences.remember(known), is_new=planned is not None)
        return known


def _so_far(step: Step, variant: Variant) -> tuple[list[Variant], list[RematPlan]]:
    """Return the graphs that the step has called, ``variant`` last, and the plans that it followed before."""
    return [*(done.variant for done in step.calls), variant], [done.plan for done in step.calls]
