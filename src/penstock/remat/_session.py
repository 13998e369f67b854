"""One budget over all graphs of a step: which plan each of their calls follows.

A step begins when a graph is called while nothing of an earlier call waits for backward. The graphs that it calls until
then, in order, are its sequence. In an unknown sequence every graph saves as little for backward as it can, or what it
saves in a known sequence of larger graphs. Once the step has ended, its graphs are planned together (`_together.py`),
and the next such step follows that plan. A step that leaves its sequence is learned as a new one. A single graph that
is known to be the whole step is planned before it first runs.

If the budget still cannot be kept: `BudgetNotKeptWarning`, or the `BudgetError` itself with ``strict=True``.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from penstock import tiers
from penstock.devices import is_accelerator
from penstock.directio import BLOCK_BYTES
from penstock.errors import BudgetError, GraphBreakWarning
from penstock.remat import _aot, _capture, _dynamo, _swap
from penstock.remat._calls import Done, Statics, links_of, saved_bytes_of
from penstock.remat._debug import checked
from penstock.remat._emit import SLOTS, emit
from penstock.remat._explain import NOTHING_PLANNED, Planned
from penstock.remat._lanes import lane_rates
from penstock.remat._not_kept import NotKept
from penstock.remat._optimizer import optimizer_state_bytes
from penstock.remat._piece import Call, Piece, RehearsalOver, Variant
from penstock.remat._plan import RematPlan, leanest_plan, lowest_plan, plan, plan_of
from penstock.remat._problem import Decision, RematProblem
from penstock.remat._profile import Costs, ModelledCosts
from penstock.remat._sequences import Known, Sequences, joined
from penstock.remat._settings import Settings
from penstock.remat._together import merged, plans_of
from penstock.remat._trial import Trial
from penstock.remat._verify import verify
from penstock.remat._warn import warn
from penstock.tiers import Charges, Footprint
from penstock.units import parse_bytes

_MAX_MEASURED = 4
"""Limit of measured steps per sequence. Measuring ends earlier when a step keeps the budget."""
_TOLERANCE = 200
"""Divisor of the budget: a step that exceeds it by at most that part counts as keeping it."""
_WORTH_MEASURING = 0.05
"""Share of the budget below which an eager rest that cannot be measured causes no warning."""
_MAX_TRIED, _MAX_MISSED = 16, 3
_MAX_PLANNED = 256
_MAX_CALLS = 1024
"""Limit of calls per step. A caller who keeps results whose backward never comes makes one endless step."""


class _Halves:
    """Forward and backward of a graph by one plan."""

    def __init__(self, plan: RematPlan, forward: _aot.Runner, backward: _aot.Runner):
        self.plan, self.forward, self.backward = plan, forward, backward


class _OfThread(threading.local):
    """The current step of a thread."""

    def __init__(self) -> None:
        self.live: dict[int, Call] = {}
        """Calls whose backward may come."""
        self.step: list[Done] = []
        """Calls of the step, in order."""
        self.following: Known | None = None
        """The sequence that the step follows."""
        self.is_new = False
        """Whether the step has left every known sequence."""


class Session:
    """A planner of the graphs that Dynamo makes, with their plans."""

    def __init__(self, settings: Settings, *, is_one_graph: bool = False, options: object = None):
        self.settings = settings
        self.options = options
        """Options, as the user gave them to ``torch.compile``."""
        self.is_one_graph = is_one_graph
        """Whether every graph is a step of its own, so that the first call can be planned."""
        self.planned: list[Planned] = []
        """Plans in the order in which they were made; only the latest, if there are very many."""
        self.num_planned = 0
        self.has_rest = not is_one_graph
        """Whether code that cannot be captured may run eagerly."""
        self.is_rehearsing = False
        """Whether forward stops before its first operator, because only the plan is wanted."""
        self.tiers: _swap.Tiers | None = None
        """The tiers of swaps, once a plan has some."""
        self.charges: Charges | None = None
        """The step's share of an account that others also use."""
        self.trials: list[Trial] = []
        """Trials of plans that Inductor has to compile."""
        self.pieces: list[Piece] = []
        self.num_calls = 0
        """Number of calls of what was compiled, so far."""
        self.has_warned_of_pieces = False
        self.modules: tuple[nn.Module, ...] = ()
        """Known modules of the step. Their parameters count even if only the eager rest uses them."""
        self.rest_bytes = 0
        """The most bytes that the eager rest of a step has saved, in addition to the graphs."""
        self.outside_bytes = 0
        """Bytes of measured steps beyond their plans: a loss outside of the model, workspace of eager operators."""
        self.buckets_bytes = 0
        """Bytes that DDP holds in addition to the gradients."""
        self._footprint = Footprint()
        self._costs = Costs() if settings.machine is None else ModelledCosts(settings.machine)
        self._lock = threading.RLock()
        self._mine = _OfThread()
        self._waiting: dict[int, dict[int, Call]] = {}
        """For each call whose backward may come, the live calls of its thread."""
        self._sequences = Sequences()
        self._whole_steps: set[tuple[int, ...]] = set()
        """Sequences of graphs that were whole steps, as hashes that do not depend on sizes."""
        self.not_kept = NotKept(strict=settings.strict)
        self._tries_left, self._num_missed = _MAX_TRIED, 0
        """Number of steps that may still be measured, and number that could not be."""
        self._num_measured: dict[tuple[int, ...], int] = {}
        """How often steps of each sequence were measured, until one kept the budget."""
        self._largest_bytes = 0
        """The largest peak of a step without a plan so far. A budget may be a share of it."""

    @property
    def adds_gradients(self) -> bool:
        """Whether backward adds gradients to their leaves itself."""
        return self.settings.accumulates and self.settings.adds_gradients

    @property
    def is_functional(self) -> bool:
        """Whether graphs must be functional. Inductor needs that, and sums in place itself."""
        return self.settings.compiler != "eager"

    def take(self, module: fx.GraphModule) -> Callable[..., Any]:
        """Take a graph of Dynamo's, and return its runner. PyTorch keeps the runner forever, so it holds nothing."""
        _dynamo.warn_if_untested()
        piece = Piece(self, module, _dynamo.break_after(module))
        self.pieces.append(piece)
        held = weakref.ref(piece)

        def run(*arguments: Any) -> Any:
            found = held()
            if found is None:
                raise ValueError(
                    "this compiled step was closed with close(). Compile it again: "
                    "penstock.remat.compile(model, budget='6GiB')"
                )
            return found(*arguments)

        return _dynamo.outside(run)

    def close(self) -> None:
        """Return its share of the account, and end the lanes of swaps."""
        self.pieces = []
        self._sequences.forget()
        self._mine.step, self._mine.following = [], None
        if self.charges is not None:
            self.charges.give_back()
        if self.tiers is not None:
            self.tiers.close()

    def describe(self, variant: Variant) -> RematProblem:
        """Return the problem of a captured graph alone, with measured operators."""
        captured = variant.captured
        assert captured is not None
        settings = self.settings
        known = None if settings.profile is None else _capture.costs_of(captured, settings.profile)
        if known is None:
            durations_s, workspaces, variant.is_scaled = self._costs.measure(captured)
        else:
            durations_s, workspaces = known
        static_bytes = captured.static_inputs_bytes + self._in_every_call(captured) + self._standing_bytes()
        if settings.accumulates:
            static_bytes += captured.gradient_bytes
        device = captured.device
        out, back = lane_rates(device, settings.account(), settings.machine)
        return _capture.problem_of(
            captured,
            durations_s,
            workspaces,
            static_bytes=static_bytes,
            out_bandwidth_bytes_per_s=out,
            in_bandwidth_bytes_per_s=back,
            swap_page_bytes=BLOCK_BYTES if device.type == "cpu" and settings.machine is None else 0,
        )

    def emitted(self, variant: Variant, made: RematPlan) -> _Halves:
        """Return both halves of a variant by a plan for it."""
        captured, joint, problem = variant.captured, variant.joint, variant.problem
        assert captured is not None and joint is not None and problem is not None
        if made.gone_slots and self.tiers is None:
            self.tiers = _swap.Tiers(captured.device, self.settings.account(), verify=self.settings.verify)
        forward, backward = emit(captured, problem, made, joint, self.tiers.number if self.tiers else None)
        if self.settings.verify:
            runners = [checked(one, one.meta[SLOTS], problem, made) for one in (forward, backward)]
            return _Halves(made, *runners)
        runners = [_aot.boxed(forward), _aot.boxed(backward)]
        if self.settings.compiler == "inductor":
            in_step_bytes = self._in_every_call(captured)
            allowed_bytes = self._budget_of(problem, {}) - problem.static_bytes + in_step_bytes
            trial = Trial(forward, backward, captured.num_forward_outputs, allowed_bytes, problem)
            self.trials.append(trial)
            runners = [trial.runner(one, is_backward=bool(at)) for at, one in enumerate(runners)]
        return _Halves(made, *runners)

    def begin(self, variant: Variant, arguments: Sequence[Any]) -> Call:
        """Begin a call of ``variant``. Raise `RehearsalOver` if only its plan is wanted."""
        with self._lock:
            if len(self._mine.step) >= _MAX_CALLS:
                self._mine.live.clear()
            if not self._mine.live:
                self._end_step()
            statics = Statics(arguments, accumulates=self.settings.accumulates)
            made = self._plan_for(variant, statics)
            call = Call(variant.emitted(made), made, self._over)
            if self.is_rehearsing:
                raise RehearsalOver
            self._mine.live[id(call)] = call
            self._waiting[id(call)] = self._mine.live
            self._mine.step.append(Done(variant, statics, call))
            self._mark_calls()
            return call

    def settle(self) -> None:
        """Learn from the last step, if it is over."""
        with self._lock:
            if not self._mine.live:
                self._end_step()

    def left_eager(self, why: str) -> None:
        """Report a graph that cannot be captured. What it saves counts like that of the eager rest."""
        warn(
            f"part of the step runs eagerly, since it cannot be captured: {why}. What it saves counts in the budget",
            GraphBreakWarning,
        )

    def _mark_calls(self) -> None:
        """Let autograd add gradients of calls that share their step with other calls or an eager rest."""
        if len(self._mine.step) > 1 or self.rest_bytes:
            for one in self._mine.step:
                if one.call is not None:
                    one.call.is_alone = False

    def rest_saved(self, size_bytes: int) -> None:
        """Note what the eager rest of a call has saved. A new maximum leaves less for the graphs."""
        with self._lock:
            if size_bytes and not self.rest_bytes:
                self.rest_bytes = 1
                self._mark_calls()
            if size_bytes <= self.rest_bytes:
                return
            self.rest_bytes = size_bytes
            self._sequences.forget()
            self._mine.is_new = bool(self._mine.step)
            if not self.pieces and self._has_bytes:
                self._ran_eagerly(self._standing_before([]) + size_bytes)
            if self._mine.step:
                last = self._mine.step[-1]
                del self._mine.step[-1]
                self._must_fit(last.variant, last.plan, last.statics)
                self._mine.step.append(last)

    def held_by_ddp(self, size_bytes: int) -> None:
        """Note the bytes of DDP, which is detected when its forward calls a step."""
        with self._lock:
            if size_bytes > self.buckets_bytes:
                self.buckets_bytes = size_bytes
                self._sequences.forget()

    @property
    def device(self) -> torch.device:
        """The device of the step."""
        known = [one for piece in self.pieces for one in piece.devices()]
        return max(known, key=is_accelerator, default=torch.device("cpu"))

    @property
    def wants_to_be_measured(self) -> bool:
        """Whether steps were planned, or cannot be, and the peak of some is not known yet."""
        is_known = bool(self._sequences) if self.pieces else self.rest_bytes > 0
        return self._has_bytes and is_known and self._tries_left > 0

    @property
    def _has_bytes(self) -> bool:
        """Whether the budget is a number of bytes."""
        return not isinstance(self.settings.budget, float) and self.settings.account().device_bytes is not None

    def could_be_measured(self, answer: bool) -> None:
        """Note whether a measurement could begin. If it never can, warn the user."""
        self._num_missed += not answer
        budget_bytes = self.settings.account().device_bytes or 0
        if self._num_missed == _MAX_MISSED and self.rest_bytes > _WORTH_MEASURING * budget_bytes:
            self.not_kept.profiled(self.rest_bytes)

    def was_measured(self, taken_bytes: int) -> None:
        """Note the bytes that a step took beyond those at its start. An excess leaves less for the graphs."""
        with self._lock:
            planned = None if self._mine.following is None else self._mine.following.planned
            had_backward = all(one.call is not None and one.call.had_backward for one in self._mine.step)
            self._tries_left -= 1
            if not self.pieces:
                self._ran_eagerly(taken_bytes + self._standing_before([]))
            if planned is None or not planned.has_budget or not had_backward or not self._mine.step:
                return
            key = tuple(id(one.variant) for one in self._mine.step)
            self._num_measured[key] = self._num_measured.get(key, 0) + 1
            peak_bytes = taken_bytes + self._standing_before(self._mine.step)
            excess_bytes = peak_bytes - planned.budget_bytes
            if excess_bytes <= planned.budget_bytes // _TOLERANCE:
                self._num_measured[key] = _MAX_MEASURED
                if all(self._num_measured.get(one, 0) >= _MAX_MEASURED for one in self._sequences):
                    self._tries_left = 0
            elif self._num_measured[key] < _MAX_MEASURED:
                self.outside_bytes += peak_bytes - planned.peak_bytes + excess_bytes // 8
                self._sequences.forget()
                self._mine.is_new = True
            elif excess_bytes > planned.budget_bytes // 100:
                self.not_kept.measured(peak_bytes, planned.budget_bytes)

    def _ran_eagerly(self, peak_bytes: int) -> None:
        """Note the bytes of a step of which nothing was compiled."""
        budget_bytes = self.settings.account().device_bytes or 0
        if peak_bytes > budget_bytes:
            self.not_kept.eagerly(peak_bytes, budget_bytes)

    def _standing_before(self, step: Sequence[Done]) -> int:
        """Return the bytes at the step's start: parameters, existing gradients, optimizer state, arguments."""
        calls = sum(self._in_every_call(one.variant.captured) for one in step if one.variant.captured is not None)
        missing = {key: size for one in step for key, size in one.statics.missing.items()}
        if self.settings.accumulates:
            known = {key for one in step for key in one.statics.parameters}
            every = {id(one): one for module in self.modules for one in module.parameters() if one.requires_grad}
            missing |= {key: one.nbytes for key, one in every.items() if key not in known and one.grad is None}
        return self._static_bytes(step) - calls - self.rest_bytes - self.outside_bytes - sum(missing.values())

    def _over(self, call: Call) -> None:
        waiting = self._waiting.pop(id(call), None)
        if waiting is not None:
            waiting.pop(id(call), None)
        if call.is_failed:
            self._mine.step = [one for one in self._mine.step if one.call is not call]
        if call.had_backward:
            done = next((one for one in self._mine.step if one.call is call), None)
            if done is not None and done.variant.is_scaled:
                self._correct(done)

    def _correct(self, done: Done) -> None:
        """Correct times that were scaled from other sizes, by a second step, since the first one warms up."""
        variant, problem = done.variant, done.variant.problem
        variant.num_calls += 1
        if variant.num_calls < 2 or problem is None or done.call is None or self.device.type != "cpu":
            return  # on other devices the host's clock does not measure operators
        made = done.plan
        factor = done.call.seconds / max(made.step_s + made.extra_s, 1e-9)
        variant.problem, variant.is_scaled = problem.scaled(durations=factor), False
        for at, planned in enumerate(self.planned):
            if planned.plan is made:
                times = {name: getattr(made, name) * factor for name in ("step_s", "extra_s", "stall_s")}
                problem = planned.problem.scaled(durations=factor)
                self.planned[at] = replace(planned, problem=problem, plan=replace(made, **times))
        if made.gone_slots:  # a lane may now hide more or less
            self._sequences.forget(variant)
            self._mine.is_new = True

    def _plan_for(self, variant: Variant, statics: Statics) -> RematPlan:
        at = len(self._mine.step)
        following = self._mine.following
        if following is None or at >= len(following.variants) or following.variants[at] is not variant:
            following = self._mine.following = self._known(variant)
        if following is None and not at and self._is_a_step(variant):
            try:
                following = self._mine.following = self._planned_alone(variant, statics)
            except BudgetError:
                if not self.outside_bytes:  # otherwise it runs as lean as it can, and the user is warned
                    raise
        if following is None:
            self._mine.is_new = True
            return self._as_larger(variant, statics) or self._leanest(variant, statics)
        if following.planned is None:
            self._must_fit(variant, following.plans[at], statics)
        return following.plans[at]

    def _is_a_step(self, variant: Variant) -> bool:
        """Whether a graph that is called first is its whole step, as it was for other kinds of arguments."""
        does = variant.piece.does
        return self.is_one_graph or {one for one in self._whole_steps if one[0] == does} == {(does,)}

    def _known(self, variant: Variant) -> Known | None:
        """Return the longest sequence that begins like this step, with the same plans."""
        return self._sequences.longest(*self._so_far(variant))

    def _so_far(self, variant: Variant) -> tuple[list[Variant], list[RematPlan]]:
        """Return the graphs that the step has called, ``variant`` last, and the plans that it followed before."""
        return [*(one.variant for one in self._mine.step), variant], [one.plan for one in self._mine.step]

    def _as_larger(self, variant: Variant, statics: Statics) -> RematPlan | None:
        """Return the graph's plan in a sequence of larger graphs, if the step may continue like it."""
        problem = variant.problem
        assert problem is not None
        budget_bytes = self._budget_of(problem, statics.parameters)
        for known in self._sequences.of_larger(*self._so_far(variant)):
            if known.planned is None or known.planned.budget_bytes <= budget_bytes:
                made = plan_of(problem, known.plans[len(self._mine.step)].decisions)
                self._take(problem, made, statics.parameters)
                if known.planned is None:
                    self._must_fit(variant, made, statics)
                return made
        return None

    def _leanest(self, variant: Variant, statics: Statics) -> RematPlan:
        """Return the plan that leaves the fewest bytes. Raise ``BudgetError`` if the graph does not fit even alone."""
        problem = variant.problem
        assert problem is not None
        if isinstance(self.settings.budget, float):
            budget_bytes = room_bytes = 2**62
        else:
            budget_bytes = self._budget_of(problem, statics.parameters)
            room_bytes = budget_bytes - self._beside_bytes(variant, statics)
        if variant.leanest is None or variant.leanest.peak_bytes > room_bytes:
            variant.leanest = leanest_plan(problem, room_bytes, method=self.settings.method)
            if variant.leanest.peak_bytes > budget_bytes:  # raises, and says what needs it, if it cannot fit alone
                plan(problem, budget_bytes, method=self.settings.method)
        self._must_fit(variant, variant.leanest, statics)
        self._take(problem, variant.leanest, statics.parameters)
        return variant.leanest

    def _beside_bytes(self, variant: Variant, statics: Statics) -> int:
        """Return the bytes that the step holds in addition to a graph's own, if the graph is called now."""
        problem = variant.problem
        assert problem is not None
        waiting = [one for one in self._mine.step if id(one.call) in self._mine.live]
        saved_bytes = sum(saved_bytes_of(one) for one in waiting)
        return self._static_bytes([*waiting, Done(variant, statics)]) + saved_bytes - problem.static_bytes

    def _must_fit(self, variant: Variant, made: RematPlan, statics: Statics) -> None:
        """Report a graph that does not fit together with what earlier graphs of the step have saved."""
        problem = variant.problem
        assert problem is not None
        if isinstance(self.settings.budget, float):
            return
        peak_bytes = made.peak_bytes + self._beside_bytes(variant, statics)
        budget_bytes = self._budget_of(problem, statics.parameters)
        if peak_bytes > budget_bytes:
            say = self.not_kept.first if self._mine.is_new else self.not_kept.lowest
            say(peak_bytes, budget_bytes)

    def _end_step(self) -> None:
        """Plan the graphs that the last step called, if the sequence is new."""
        step, is_new = self._mine.step, self._mine.is_new
        self._mine.step, self._mine.following, self._mine.is_new = [], None, False
        if not step:
            return
        self._whole_steps.add(tuple(one.variant.piece.does for one in step))
        if is_new and not self._sequences.has([one.variant for one in step]):
            try:
                self._planned_together(step)
            except BudgetError as error:
                self._as_low_as_it_goes(step)
                breaks = [one.variant.piece.break_reason for one in step]
                self.not_kept.together(error, breaks, self.rest_bytes + self.outside_bytes)

    def plans(self) -> list[Planned]:
        """Return the latest plan for each kind of step so far."""
        self.settle()
        return list({one.shapes: one for one in self.planned}.values())

    def explain(self, most: int | None) -> str:
        """Return every plan as text, with ``most`` storages of each."""
        return "\n\n".join(one.explain(most) for one in self.plans()) or NOTHING_PLANNED

    def _planned_alone(self, variant: Variant, statics: Statics) -> Known:
        """Plan a graph that is a whole step."""
        problem, captured = variant.problem, variant.captured
        assert problem is not None and captured is not None
        elsewhere = {key: size for key, size in self._modules_bytes().items() if key not in statics.parameters}
        unchanged_bytes = max(0, statics.gradient_bytes - captured.gradient_bytes)  # the graph adds nothing to these
        beside_bytes = self.rest_bytes + self.outside_bytes + unchanged_bytes + sum(elsewhere.values())
        if beside_bytes:
            problem = replace(problem, static_bytes=problem.static_bytes + beside_bytes)
        made = self._planned(problem, statics.parameters, [variant])
        return self._remember([variant], (made.plan,), made)

    def _planned_together(self, step: Sequence[Done]) -> Known:
        """Plan the graphs of a step that has run."""
        if len(step) == 1:
            return self._planned_alone(step[0].variant, step[0].statics)
        problems = [one.variant.problem for one in step if one.variant.problem is not None]
        problem = merged(problems, links_of(step), self._static_bytes(step))
        parameters = {key: size for one in step for key, size in one.statics.parameters.items()}
        variants = [one.variant for one in step]
        made = self._planned(problem, parameters, variants)
        self._say_if_above(problem, made.budget_bytes, step)
        return self._remember(variants, plans_of(problems, made.plan), made)

    def _say_if_above(self, problem: RematProblem, budget_bytes: int, step: Sequence[Done]) -> None:
        """Report it if a step took more than the budget. That is known only after it has run."""
        is_whole = all(one.call and one.call.had_backward and not one.plan.gone_slots for one in step)
        if is_whole and not isinstance(self.settings.budget, float):
            peak_bytes = plan_of(problem, joined([one.plan for one in step])).peak_bytes
            if peak_bytes > budget_bytes:
                self.not_kept.perhaps_first(peak_bytes, budget_bytes)

    def _as_low_as_it_goes(self, step: Sequence[Done]) -> None:
        """Let steps like one that has run and does not fit take as little as they can."""
        problems = [one.variant.problem for one in step if one.variant.problem is not None]
        problem = merged(problems, links_of(step), self._static_bytes(step))
        made = lowest_plan(problem, method=self.settings.method)
        self._remember([one.variant for one in step], plans_of(problems, made), None)

    def _planned(self, problem: RematProblem, parameters: dict[int, int], variants: Sequence[Variant]) -> Planned:
        budget_bytes = self._budget_of(problem, parameters)
        like = next(
            (one.planned.plan.decisions for one in self._sequences.alike(variants) if one.planned is not None), None
        )
        made = plan(problem, budget_bytes, method=self.settings.method, like=like)
        verify(problem, made)
        self._take(problem, made, parameters)
        self.num_planned += 1
        del self.planned[:-_MAX_PLANNED]
        shapes = tuple(one.shapes for one in variants)
        self.planned.append(Planned(problem=problem, plan=made, budget_bytes=budget_bytes, shapes=shapes))
        return self.planned[-1]

    def _remember(self, variants: Sequence[Variant], plans: tuple[RematPlan, ...], planned: Planned | None) -> Known:
        if planned is not None:
            self._tries_left = min(_MAX_TRIED, self._tries_left + _MAX_MEASURED)
        made = Known(tuple(variants), plans, planned)
        for forgotten in self._sequences.remember(made):
            self._num_measured.pop(forgotten, None)
        return made

    def _static_bytes(self, step: Sequence[Done]) -> int:
        """Return the bytes that exist all the time while the graphs of a step run, each tensor once."""
        parameters = self._modules_bytes()
        parameters |= {key: size for one in step for key, size in one.statics.parameters.items()}
        others = {key: size for one in step for key, size in one.statics.others.items()}
        for one in step:
            for key, _ in one.results:
                others.pop(key, None)
        calls = sum(self._in_every_call(one.variant.captured) for one in step if one.variant.captured is not None)
        beside_bytes = calls + self._standing_bytes() + self.rest_bytes + self.outside_bytes
        return sum(parameters.values()) + sum(others.values()) + beside_bytes

    def _modules_bytes(self) -> dict[int, int]:
        """Return the bytes of all known parameters, and of the gradients that they have or will get."""
        factor = 2 if self.settings.accumulates else 1
        found: dict[int, int] = {}
        for module in self.modules:
            for one in module.parameters():
                has_gradient = one.requires_grad and (self.rest_bytes or one.grad is not None)
                found[id(one)] = one.nbytes * (factor if has_gradient else 1)
        return found

    @property
    def is_fresh(self) -> bool:
        """Whether nothing was compiled yet."""
        return not self.pieces

    def _in_every_call(self, captured: _capture.Captured) -> int:
        return captured.changed_bytes + captured.generator_state_bytes

    def _standing_bytes(self) -> int:
        optimizer = self.settings.optimizer
        state_bytes = 0 if optimizer is None else optimizer_state_bytes(optimizer)
        return parse_bytes(self.settings.reserve) + state_bytes + self.buckets_bytes

    def _take(self, problem: RematProblem, made: RematPlan, parameters: dict[int, int]) -> None:
        """Charge the account with what the step takes. Plans of one step share what exists between them."""
        if not isinstance(self.settings.budget, tiers.Budget):
            return
        if self.charges is None:
            self.charges = Charges(self.settings.budget, "remat")
            weakref.finalize(self, self.charges.give_back)
        before = self._footprint
        together = Footprint(
            tensors={**before.tensors, **parameters},
            held_bytes=max(before.held_bytes, problem.static_bytes - sum(parameters.values())),
            step_bytes=max(before.step_bytes, made.peak_bytes - problem.static_bytes),
        )
        self.charges.enter(together)
        self._footprint = together

    def _budget_of(self, problem: RematProblem, parameters: dict[int, int]) -> int:
        budget = self.settings.budget
        if isinstance(budget, float):
            keep_all = plan_of(problem, [Decision.KEEP] * len(problem.storages)).peak_bytes
            self._largest_bytes = max(self._largest_bytes, keep_all)
            return int(budget * self._largest_bytes)
        own = replace(self._footprint, tensors={**self._footprint.tensors, **parameters})
        if self.charges is not None:  # the account's charges for plans of other shapes are this step's own
            self.charges.enter(own, force=True)
        room_bytes = self.settings.account().step_room_bytes(own)
        return 2**62 if room_bytes is None else max(0, room_bytes)
