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
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from penstock.devices import has_backend, is_accelerator
from penstock.errors import GraphBreakWarning
from penstock.probe import PeakReport
from penstock.remat import _dynamo
from penstock.remat._beside import Beside, in_every_call
from penstock.remat._calls import Done, Statics
from penstock.remat._describe import describe
from penstock.remat._explain import NOTHING_PLANNED, Planned
from penstock.remat._halves import Emitter
from penstock.remat._measured import is_due, is_first_due
from penstock.remat._piece import Call, GraphPiece, PlannedHalves, RehearsalOver, Variant
from penstock.remat._plan import RematPlan
from penstock.remat._planner import Planner, Step
from penstock.remat._problem import RematProblem
from penstock.remat._profile import Costs, ModelledCosts
from penstock.remat._rest import refuse_hooks
from penstock.remat._settings import PlanSettings
from penstock.remat._share import Share
from penstock.remat._warn import warn
from penstock.tiers import gate

_WORTH_MEASURING = 0.05
"""Share of the budget below which an eager rest that cannot be measured causes no warning."""
_TOLERANCE = 100
"""Divisor of the budget: a step beside the model that exceeds it by at most that part causes no warning."""
_MAX_CALLS = 1024
"""Limit of calls per step. A caller who keeps results whose backward never comes makes one endless step."""


class Session:
    """The steps of what Dynamo has made graphs of: their calls, and when they are planned.

    It is wide because the doors and the graphs set switches here and report to it; the work is done by its parts:
    `Beside`, `Planner`, `Emitter` and the thread's `Step`.
    """

    def __init__(self, settings: PlanSettings, *, is_one_graph: bool = False, options: object = None):
        self.settings = settings
        self.options = options
        """Options, as the user gave them to ``torch.compile``."""
        self.is_one_graph = is_one_graph
        """Whether every graph is a step of its own, so that the first call can be planned."""
        self.has_rest = not is_one_graph
        """Whether code that cannot be captured may run eagerly."""
        self.is_rehearsing = False
        """Whether forward stops before its first operator, because only the plan is wanted."""
        self.pieces: list[GraphPiece] = []
        self.num_calls = 0
        """Number of calls of what was compiled, so far."""
        self.has_warned_of_pieces = False
        self._share = Share(settings)
        self.beside = Beside(settings, self._share)
        self.planner = Planner(settings, self.beside, self._share)
        self.emitter = Emitter(settings)
        self._costs = Costs() if settings.machine is None else ModelledCosts(settings.machine)
        self._lock = threading.RLock()
        self._step = Step()
        self._stood_bytes = 0
        """Bytes that stood beside the graphs when the step began that is being measured."""
        self._waiting: dict[int, dict[int, Call]] = {}
        """For each call whose backward may come, the live calls of its thread."""

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
        piece = GraphPiece(self, module, _dynamo.break_after(module))
        self.pieces.append(piece)
        held = weakref.ref(piece)

        def run(*arguments: Any) -> Any:
            alive = held()
            if alive is None or not alive.owner.pieces:  # closed, though a cycle of references may keep it alive
                raise ValueError(
                    "this compiled step was closed with close(). Compile it again: "
                    "penstock.remat.compile(model, budget='6GiB')"
                )
            refuse_hooks()  # here, since a context of torch.compile that raises leaves its settings behind
            return alive(*arguments)

        return _dynamo.outside(run)

    def close(self) -> None:
        """Return its share of the account, and end the lanes of swaps."""
        self.pieces = []
        self.planner.sequences.forget()
        self._step.calls, self._step.following = [], None
        self._share.give_back()
        self.emitter.close()

    # What its graphs ask for

    def describe(self, variant: Variant) -> RematProblem:
        """Return the problem of a captured graph alone, with measured operators."""
        return describe(variant, self.settings, self._costs)

    def emitted(self, variant: Variant, plan: RematPlan) -> PlannedHalves:
        """Return both halves of a variant by a plan for it."""
        captured, problem, allowed_bytes = variant.captured, variant.problem, 0
        assert captured is not None and problem is not None
        if self.settings.compiler == "inductor":
            room_bytes = self._share.budget_bytes(problem, {})
            static_bytes = problem.static_bytes + self.beside.standing_bytes()
            allowed_bytes = room_bytes - static_bytes + in_every_call(captured)
        return self.emitter.halves(variant, plan, allowed_bytes)

    def begin(self, variant: Variant, arguments: Sequence[Any]) -> Call:
        """Begin a call of ``variant``. Raise `RehearsalOver` if only its plan is wanted."""
        with self._lock:
            step = self._step
            if len(step.calls) >= _MAX_CALLS:
                step.live.clear()
            self.settle()
            if not step.calls:
                self._share.begin_step(self.device)
            statics = Statics(arguments, accumulates=self.settings.accumulates)
            plan = self.planner.plan_for(step, variant, statics, is_one_graph=self.is_one_graph)
            call = Call(variant.emitted(plan), plan, self._over)
            if self.is_rehearsing:
                raise RehearsalOver
            step.live[id(call)] = call
            self._waiting[id(call)] = step.live
            step.calls.append(Done(variant, statics, call))
            self._mark_calls()
            return call

    def left_eager(self, why: str) -> None:
        """Report a graph that cannot be captured. What it saves counts like that of the eager rest."""
        warn(
            f"part of the step runs eagerly, since it cannot be captured: {why}. What it saves counts in the budget",
            GraphBreakWarning,
        )

    def _mark_calls(self) -> None:
        """Let autograd add gradients of calls that share their step with other calls or an eager rest."""
        if len(self._step.calls) > 1 or self.beside.rest_bytes:
            for done in self._step.calls:
                if done.call is not None:
                    done.call.is_alone = False

    def _over(self, call: Call) -> None:
        step = self._step
        waiting = self._waiting.pop(id(call), None)
        if waiting is not None:
            waiting.pop(id(call), None)
        if call.is_failed:
            step.calls = [done for done in step.calls if done.call is not call]
        if call.had_backward:
            done = next((done for done in step.calls if done.call is call), None)
            if done is not None and done.variant.is_scaled:
                # on other devices the host's clock does not measure operators
                self.planner.correct(step, done, is_timed=self.device.type == "cpu")

    # What doors report

    def settle(self) -> None:
        """Learn from the last step, if it is over."""
        with self._lock:
            if not self._step.live:
                calls, is_new = self._step.end()
                if calls:
                    self.planner.learn(calls, is_new=is_new)
                if self.beside.optimizers.is_changed:
                    self.beside.optimizers.is_changed = False
                    self.planner.settle()

    def look(self, arguments: Iterable[torch.Tensor]) -> None:
        """Look at what the process holds beside the step, of which ``arguments`` are those of the next call."""
        with self._lock:
            # while a step is traced nothing is held, and while other threads compute they cannot be looked at
            may_look = has_backend(self.device) and (is_accelerator(self.device) or not gate.others_compute)
            if may_look and is_due(self.num_calls) and not self._waiting and self.has_budget:
                self.beside.look(self.device, arguments, is_new_round=is_first_due(self.num_calls))
                self.planner.settle()

    def rest_saved(self, size_bytes: int) -> None:
        """Note what the eager rest of a call has saved. A new maximum leaves less for the graphs."""
        with self._lock:
            step, beside = self._step, self.beside
            if size_bytes and not beside.rest_bytes:
                beside.rest_bytes = 1
                self._mark_calls()
            if size_bytes <= beside.rest_bytes:
                return
            beside.rest_bytes = size_bytes
            self.planner.sequences.forget()
            step.is_new = bool(step.calls)
            if not self.planner.planned and self._share.device_bytes is not None:
                self._ran_eagerly(beside.standing_before([]) + size_bytes)
            if step.calls:
                last = step.calls.pop()
                self.planner.must_fit(step, last.variant, last.plan, last.statics)
                step.calls.append(last)

    def held_by_ddp(self, size_bytes: int) -> None:
        """Note the bytes of DDP, which is detected when its forward calls a step."""
        with self._lock:
            if size_bytes > self.beside.buckets_bytes:
                self.beside.buckets_bytes = size_bytes
                self.planner.sequences.forget()

    @property
    def device(self) -> torch.device:
        """The device of the step."""
        known = [device for piece in self.pieces for device in piece.devices()]
        known = known or [tensor.device for module in self.beside.modules for tensor in module.parameters()]
        return max(known, key=is_accelerator, default=torch.device("cpu"))

    @property
    def wants_to_be_measured(self) -> bool:
        """Whether steps were planned, or cannot be, and the peak of some is not known yet."""
        is_known = bool(self.planner.sequences) or (not self.planner.planned and self.beside.rest_bytes > 0)
        return self.has_budget and is_known and self.planner.measured.goes_on(self.num_calls)

    @property
    def has_budget(self) -> bool:
        """Whether the budget is a number of bytes."""
        return self._share.device_bytes is not None

    @property
    def is_within_a_step(self) -> bool:
        """Whether calls of this thread wait for backward."""
        return bool(self._step.live)

    def could_be_measured(self, answer: bool) -> None:
        """Note whether a measurement could begin. If it never can, warn the user."""
        self._stood_bytes = self.beside.standing_bytes() if answer else 0
        rest_bytes = self.beside.rest_bytes
        is_worth_it = rest_bytes > _WORTH_MEASURING * (self._share.device_bytes or 0)
        if not answer and self.planner.measured.missed() and is_worth_it:
            self.planner.not_kept.profiled(rest_bytes)

    def was_measured(self, report: PeakReport) -> None:
        """Note what a step took."""
        with self._lock:
            self.planner.measured.tried()
            stood_bytes = self._stood_bytes - self.beside.standing_bytes()  # what came since was not there
            taken_bytes = report.activation_bytes + stood_bytes
            if not self.planner.planned and not self.planner.sequences:
                self._ran_eagerly(taken_bytes + self.beside.standing_before([]))
            self.planner.was_measured(self._step, taken_bytes)

    def ran_aside(self, peak_bytes: int) -> None:
        """Note the bytes of a step that trained the model without calling it."""
        budget_bytes = self._share.device_bytes or 0
        if peak_bytes > budget_bytes + budget_bytes // _TOLERANCE:
            self.planner.not_kept.aside(peak_bytes, budget_bytes)

    def _ran_eagerly(self, peak_bytes: int) -> None:
        """Note the bytes of a step of which nothing was compiled."""
        budget_bytes = self._share.device_bytes or 0
        if peak_bytes > budget_bytes:
            self.planner.not_kept.eagerly(peak_bytes, budget_bytes)

    def plans(self) -> list[Planned]:
        """Return the latest plan for each kind of step so far."""
        self.settle()
        return list({planned.shapes: planned for planned in self.planner.planned}.values())

    def explain(self, most: int | None) -> str:
        """Return every plan as text, with ``most`` storages of each."""
        return "\n\n".join(planned.explain(most) for planned in self.plans()) or NOTHING_PLANNED
