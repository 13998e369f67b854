"""Planning a step when it is first compiled, and running it as planned: `optimize` and the `torch.compile` backend."""

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from penstock import tiers
from penstock.directio import BLOCK_BYTES
from penstock.errors import BudgetError, CaptureError
from penstock.probe import bandwidths
from penstock.remat import _capture, _swap
from penstock.remat._debug import checked
from penstock.remat._emit import SLOTS, emit
from penstock.remat._explain import Planned
from penstock.remat._in_place import add_in_place
from penstock.remat._optimizer import optimizer_state_bytes
from penstock.remat._plan import Method, RematPlan, plan
from penstock.remat._problem import RematProblem
from penstock.remat._profile import measure
from penstock.remat._trial import Trial
from penstock.remat._verify import verify
from penstock.tiers import Charges, Footprint, gate, generators_held
from penstock.units import parse_bytes

Size = int | str
_BESIDE_COMPUTING = 0.5
"""Share of the probe's rate that a CPU's lanes reach beside a step that uses all its cores; 0.45 to 0.65 measured."""
_numbers = itertools.count()
_PLAN = "penstock_plan"
"""In the ``meta`` of an emitted module: the number of its plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a step is planned for."""

    budget: Size | float | tiers.Budget | None
    """Bytes, text such as ``"6GiB"``, a share of the peak without a plan (a ``float``), or a ``Budget`` with tiers."""
    optimizer: torch.optim.Optimizer | None = None
    """Its state is counted, also before its first step."""
    reserve: Size = 0
    """Further bytes that the process holds on the device beside this step."""
    disk: tiers.DiskSpec = None
    """Where to swap to."""
    host: Size | None = None
    """Bytes of pinned host memory to swap to (CUDA)."""
    accumulates: bool = True
    """Whether gradients exist when backward makes new ones; ``False`` with ``zero_grad(set_to_none=True)``."""
    adds_gradients: bool = True
    """Whether backward adds each gradient to the one that exists where it is made; else it returns all at its end."""
    method: Method = "hybrid"
    """What a plan may use."""
    profile: RematProblem | None = None
    """A problem of the same step, whose times and workspaces are taken instead of measuring."""
    compiler: Literal["eager", "inductor"] = "eager"
    """What runs the planned graphs: node by node, or Inductor where that keeps within the budget."""
    verify: bool = False
    """Compare the storages that are resident with the plan's after every operator, and checksums of swaps (slow)."""

    def __post_init__(self) -> None:
        if self.compiler not in ("eager", "inductor"):
            raise ValueError(f"compiler is 'eager' or 'inductor', not {self.compiler!r}")
        if self.verify and self.compiler != "eager":
            raise ValueError("verify=True looks at one operator after the other, which needs compiler='eager'")

    def account(self) -> tiers.Budget:
        """The budget as one account."""
        if isinstance(self.budget, tiers.Budget):
            return self.budget
        size = None if isinstance(self.budget, float) or self.budget is None else self.budget
        return tiers.Budget(device=size, host=self.host, disk=self.disk)


@dataclass(slots=True, weakref_slot=True)
class Compiler:
    """Plans each graph that Dynamo brings, and keeps what it planned."""

    settings: Settings
    planned: list[Planned] = field(default_factory=list)
    """One per shape of the arguments, in the order in which they were met."""
    tiers: _swap.Tiers | None = None
    """Where swaps go, once a plan has some."""
    trials: dict[int, Trial] = field(default_factory=dict)
    """Per plan, where Inductor is to compile it."""
    charges: Charges | None = None
    """What the step takes of an account that others share."""
    footprint: Footprint = field(default_factory=Footprint)
    """The same, for all that was planned."""
    options: object = None
    """By whose identity this is found again, which therefore is nobody else's."""
    is_rehearsing: bool = False
    """Whether forward stops before its first operator: only the plan is wanted."""

    def __call__(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """The backend's call for one graph."""
        reason = _capture.break_after(module).strip()
        if reason:
            raise CaptureError(
                "the step breaks into several graphs, which cannot share one budget: "
                f"{reason} Compile a function without the break, or find it with torch.compile(fullgraph=True)."
            )
        if any(isinstance(one, torch.SymInt) for one in inputs):
            raise CaptureError(
                "sizes of the arguments are symbolic, and bytes cannot be planned for. Compile with dynamic=False: "
                "torch.compile(model, backend='penstock', dynamic=False, options={'budget': '6GiB'})"
            )
        split = functools.partial(self.split, inputs)
        with generators_held(), gate.tracing():
            made = _capture.backend(split, self._forward, self._backward, _without_gradients)
            return made(module, inputs)  # type: ignore[no-any-return]

    def split(
        self, inputs: Sequence[Any], joint: fx.GraphModule, num_forward_outputs: int
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Profiles and plans the joint graph of a step on ``inputs``, and emits what is planned."""
        _capture.tag_backward(joint.graph)
        if self.settings.accumulates and self.settings.adds_gradients:
            _capture.accumulate_early(joint.graph, num_forward_outputs, inputs)
        if self.settings.compiler == "eager":  # Inductor wants functional graphs, and does this itself
            add_in_place(joint.graph)
        captured = _capture.read(joint.graph, num_forward_outputs)
        problem = self._problem(captured)
        parameters = self._parameter_bytes(inputs)
        budget_bytes = self._budget_bytes(problem, parameters)
        made = plan(problem, budget_bytes, method=self.settings.method)
        verify(problem, made)
        self._take(problem, made, parameters)
        if made.gone_slots and self.tiers is None:
            self.tiers = _swap.Tiers(_device_of(captured), self.settings.account(), verify=self.settings.verify)
        forward, backward = emit(captured, problem, made, joint, self.tiers.number if self.tiers else None)
        number = len(self.planned)
        forward.meta[_PLAN] = backward.meta[_PLAN] = number  # autograd compiles backward when it is first needed
        self.planned.append(Planned(problem=problem, plan=made, budget_bytes=budget_bytes))
        if self.settings.compiler == "inductor":
            in_step_bytes = captured.changed_bytes + captured.generator_state_bytes
            allowed_bytes = budget_bytes - problem.static_bytes + in_step_bytes
            self.trials[number] = Trial(forward, backward, num_forward_outputs, allowed_bytes, problem)
        return forward, backward

    def _problem(self, captured: _capture.Captured) -> RematProblem:
        settings = self.settings
        known = None if settings.profile is None else _capture.costs_of(captured, settings.profile)
        durations_s, workspaces = known or measure(captured)
        static_bytes = captured.static_inputs_bytes + captured.changed_bytes + captured.generator_state_bytes
        static_bytes += parse_bytes(settings.reserve)
        if settings.accumulates:
            static_bytes += captured.gradient_bytes
        if settings.optimizer is not None:
            static_bytes += optimizer_state_bytes(settings.optimizer)
        device = _device_of(captured)
        out, back = _lane_rates(device, settings.account())
        return _capture.problem_of(
            captured,
            durations_s,
            workspaces,
            static_bytes=static_bytes,
            out_bandwidth_bytes_per_s=out,
            in_bandwidth_bytes_per_s=back,
            swap_page_bytes=BLOCK_BYTES if device.type == "cpu" else 0,
        )

    def _parameter_bytes(self, inputs: Sequence[Any]) -> dict[int, int]:
        """With their gradients, where these are held between steps."""
        factor = 2 if self.settings.accumulates else 1
        return {
            id(one): one.nbytes * (factor if one.requires_grad else 1)
            for one in inputs
            if isinstance(one, nn.Parameter)
        }

    def _take(self, problem: RematProblem, made: RematPlan, parameters: dict[int, int]) -> None:
        """Enters what the step takes beside what other rooms hold; plans of one step share what stands between them."""
        if not isinstance(self.settings.budget, tiers.Budget):
            return
        if self.charges is None:
            self.charges = Charges(self.settings.budget, "remat")
            weakref.finalize(self, self.charges.give_back)
        before = self.footprint
        together = Footprint(
            tensors={**before.tensors, **parameters},
            held_bytes=max(before.held_bytes, problem.static_bytes - sum(parameters.values())),
            step_bytes=max(before.step_bytes, made.peak_bytes - problem.static_bytes),
        )
        self.charges.enter(together)
        self.footprint = together

    def _budget_bytes(self, problem: RematProblem, parameters: dict[int, int]) -> int:
        budget = self.settings.budget
        if isinstance(budget, float):
            if not 0 < budget <= 1:
                raise ValueError(f"a budget as a share is above 0 and at most 1, such as 0.5, not {budget}")
            keep_all = plan(problem, 2**62).keep_all_peak_bytes
            return int(budget * keep_all)
        own = replace(self.footprint, tensors={**self.footprint.tensors, **parameters})
        if self.charges is not None:  # what stands there of plans for other shapes is this step's own
            self.charges.enter(own, force=True)
        room_bytes = self.settings.account().step_room_bytes(own)
        return 2**62 if room_bytes is None else max(0, room_bytes)

    def _backward(self, module: fx.GraphModule) -> _capture.Runner:
        return self._runner(module, is_backward=True)

    def _runner(self, module: fx.GraphModule, *, is_backward: bool) -> _capture.Runner:
        number = module.meta[_PLAN]
        if self.settings.verify:
            planned = self.planned[number]
            return _at_the_gate(checked(module, module.meta[SLOTS], planned.problem, planned.plan))
        plain = _capture.boxed(module)
        trial = self.trials.get(number)
        return _at_the_gate(plain if trial is None else trial.runner(plain, is_backward=is_backward))

    def _forward(self, module: fx.GraphModule) -> _capture.Runner:
        run = self._runner(module, is_backward=False)

        def runner(arguments: list[Any]) -> Any:
            if self.is_rehearsing:
                arguments.clear()
                raise _RehearsalOver
            return run(arguments)

        return _capture.make_boxed_func_flag(runner)

    def close(self) -> None:
        """Gives back what was taken of the account, and ends the lanes of swaps."""
        if self.charges is not None:
            self.charges.give_back()
        if self.tiers is not None:
            self.tiers.close()

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """What is called inside is compiled and planned, but not run."""
        self.is_rehearsing = True
        try:
            yield
        except _RehearsalOver:
            pass
        finally:
            self.is_rehearsing = False


def _at_the_gate(run: _capture.Runner) -> _capture.Runner:
    """Not while another thread traces, which changes what operators do."""

    def runner(arguments: list[Any]) -> Any:
        with gate.computing():
            return run(arguments)

    return _capture.make_boxed_func_flag(runner)


def _without_gradients(module: fx.GraphModule) -> _capture.Runner:
    return _at_the_gate(_capture.boxed(module))


class _TraceAgain(Exception):
    """Dynamo has traced a step of its own accord, without the settings that it needs."""


class _RehearsalOver(Exception):
    """Forward has been compiled and would run now."""


class OptimizedStep:
    """What ``optimize`` returns: call it like the module or function it was made from."""

    def __init__(self, function: Callable[..., Any], compiler: Compiler):
        self._function = function
        self._compiler = compiler
        self._compiled: dict[Any, Callable[..., Any]] = {}  # any: shapes and constants
        self._codes: list[CodeType] = []
        """Under which Dynamo keeps what it compiled."""
        weakref.finalize(self, _forget, self._codes).atexit = False
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Runs the step as planned; arguments of another shape are planned first."""
        key = _signature(arguments, keywords)
        if key in self._compiled:
            try:
                return self._call(key, arguments, keywords)
            except (torch._dynamo.exc.Unsupported, _TraceAgain):  # what a guard looks at has changed
                with generators_held(), gate.tracing(), _capture.tracing_a_step():
                    return self._call(key, arguments, keywords)
        with generators_held(), gate.tracing(), _capture.tracing_a_step():
            fresh = _with_code_of_its_own(self._function)
            self._codes.append(fresh.__code__)
            backend = _held_by_its_step(self._compiler)
            self._compiled[key] = torch.compile(fresh, backend=backend, fullgraph=True, dynamic=False)
            num_planned = len(self._compiler.planned)
            try:
                return self._call(key, arguments, keywords)
            except BaseException:
                if len(self._compiler.planned) == num_planned:  # else it was planned, and did not run
                    del self._compiled[key]
                raise

    def _call(self, key: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        try:
            return self._compiled[key](*arguments, **keywords)
        except Exception as error:
            cause = _capture.cause_of(error)
            if cause is not error and type(cause).__module__.startswith(("penstock.", "builtins")):
                raise cause from None
            raise

    @property
    def plan(self) -> Planned:
        """What was planned last, with ``explain()``. Raises ``ValueError`` before anything was."""
        if not self._compiler.planned:
            raise ValueError("nothing is planned: no argument and no parameter of the step requires gradients")
        return self._compiler.planned[-1]

    def close(self) -> None:
        """Gives back what it took of a shared ``Budget``, and ends its lanes. The step cannot be called again."""
        self._compiled = {}
        _forget(self._codes)
        self._function = _closed
        self._compiler.close()

    @property
    def plans(self) -> Sequence[Planned]:
        """What was planned for each shape of arguments."""
        return tuple(self._compiler.planned)


def optimize(
    step: nn.Module | Callable[..., Any],
    example_inputs: Sequence[Any],
    budget: Size | float | tiers.Budget | None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    reserve: Size = 0,
    disk: tiers.DiskSpec = None,
    host: Size | None = None,
    accumulates: bool = True,
    adds_gradients: bool = True,
    method: Method = "hybrid",
    profile: RematProblem | None = None,
    compiler: Literal["eager", "inductor"] = "eager",
    verify: bool = False,
) -> OptimizedStep:
    """``step``, planned so that the device's true peak stays within ``budget``; the plan is made before it first runs.

    Put the loss inside: a function that returns a scalar is planned whole, with backward beginning where forward ends.

    Args:
        step: a module, or a function that uses modules and returns tensors.
        example_inputs: the positional arguments of a step; what is planned holds for their shapes, and others are
            planned when they come.
        budget: bytes of the device at the true peak, parameters, gradients and optimizer state included, as an ``int``
            or text such as ``"6GiB"``; a ``float`` is a share of the peak without a plan; ``None`` only reports. Or a
            ``penstock.tiers.Budget``, which carries ``host`` and ``disk`` too.
        optimizer: its state is counted, also before its first step.
        reserve: further bytes that the process holds on the device.
        disk: directory on an SSD to swap to, or several.
        host: bytes of pinned host memory to swap to (CUDA).
        accumulates: whether gradients exist when backward makes new ones, as with gradient accumulation or
            ``zero_grad(set_to_none=False)``.
        adds_gradients: ``False`` returns new gradients together at the end of backward, beside those that exist. Needed
            only for hooks on ``AccumulateGrad`` nodes, which cannot be seen; hooks on tensors, and process groups, are.
        method: ``"recompute"`` or ``"swap"`` leave the other out.
        profile: a ``problem`` of the same step, from another plan or ``RematProblem.load``; its times are taken instead
            of measuring. A step with other operators is measured.
        compiler: ``"eager"`` runs the planned graphs node by node, with the results of plain PyTorch to the bit;
            ``"inductor"`` compiles what lies between swaps and random operators. It fuses, so its results are equal
            within rounding, and a step is tried and measured first: one that leaves the budget runs node by node.
        verify: compare the storages that are resident with the plan's after every operator, and a checksum of what was
            swapped on its way back (slow).

    Raises ``BudgetError`` for a budget that cannot be met, naming the smallest that can, and ``CaptureError`` or
    PyTorch's own error, which names the line, for a step that is not one graph. Method: Libra (Wang, NTHU 2024).
    """
    planner = Compiler(
        Settings(
            budget=budget,
            optimizer=optimizer,
            reserve=reserve,
            disk=disk,
            host=host,
            accumulates=accumulates,
            adds_gradients=adds_gradients,
            method=method,
            profile=profile,
            compiler=compiler,
            verify=verify,
        )
    )
    optimized = OptimizedStep(step, planner)
    with planner.rehearsal():
        optimized(*example_inputs)
    return optimized


def _closed(*_: Any, **__: Any) -> Any:
    raise ValueError("this step is closed; make a new one: penstock.remat.optimize(step, example_inputs, budget)")


def max_batch(
    make: Callable[[int], tuple[nn.Module | Callable[..., Any], Sequence[Any]]],
    budget: Size | tiers.Budget,
    *,
    start: int = 1,
    **options: Any,
) -> int:
    """The largest batch whose plan fits ``budget``; 0 if not even ``start`` does.

    ``make(batch)`` returns a step and its example inputs for a batch of that size, as ``optimize`` takes them;
    ``options`` are those of ``optimize``. Nothing is trained: sizes are doubled from ``start``, then bisected, each one
    captured and planned. Raises what ``optimize`` raises, but for ``BudgetError``.
    """
    if isinstance(budget, tiers.Budget):  # trials stand on nobody's account
        budget = tiers.Budget(device=budget.room_bytes("device"), host=budget.host_bytes, disk=budget.disk_bytes)

    def fits(batch: int) -> bool:
        step, inputs = make(batch)
        try:
            optimize(step, inputs, budget, **options)
        except BudgetError:
            return False
        return True

    if not fits(start):
        return 0
    low, high = start, 2 * start
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class Backend:
    """A backend for ``torch.compile`` that can be closed: ``torch.compile(model, backend=Backend(budget="6GiB"))``.

    Options are those of ``optimize``. Graphs of several shapes share one place in an account. PyTorch keeps backends
    until ``torch.compiler.reset()``, so close one that holds an account, a disk or an optimizer.
    """

    def __init__(self, **options: Any):
        self._compiler: Compiler | None = Compiler(_settings(options))

    def __call__(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """What PyTorch calls for each graph."""
        if self._compiler is None:
            raise ValueError("this backend is closed; make a new one: penstock.remat.Backend(budget='6GiB')")
        return self._compiler(module, inputs)

    def close(self) -> None:
        """Gives back what it took of a shared ``Budget``, and ends its lanes. What it compiled cannot run again."""
        if self._compiler is not None:
            self._compiler.close()
            self._compiler = None


def compile_backend(module: fx.GraphModule, inputs: list[Any], *, options: dict[str, Any] | None = None) -> Any:
    """``torch.compile(model, backend="penstock", options={"budget": "6GiB"})``; options as those of ``optimize``."""
    parameters = frozenset(id(one) for one in inputs if isinstance(one, nn.Parameter))
    compiler = _of_options.get((id(options), parameters))
    if compiler is None:
        compiler = Compiler(_settings(options or {}), options=options)
        _of_options[id(options), parameters] = compiler
    return compiler(module, inputs)


_of_options: "weakref.WeakValueDictionary[tuple[int, frozenset[int]], Compiler]" = weakref.WeakValueDictionary()
"""Of graphs that differ in their shapes alone, which take one place in an account."""


def _settings(options: dict[str, Any]) -> Settings:
    if "budget" not in options:
        raise ValueError("say how many bytes: torch.compile(model, backend='penstock', options={'budget': '6GiB'})")
    unknown = set(options) - set(Settings.__dataclass_fields__)
    if unknown:
        raise ValueError(f"unknown options {sorted(unknown)}; there are {sorted(Settings.__dataclass_fields__)}")
    return Settings(**options)


def _signature(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:  # any: nested, hashable
    """What a plan holds for: shapes, dtypes and devices of the arguments, and whether gradients are wanted."""

    def part(one: Any) -> Any:
        if isinstance(one, torch.Tensor):
            return tuple(one.shape), one.stride(), one.dtype, one.device, one.requires_grad
        return one if isinstance(one, int | float | str | bool | None) else type(one)

    leaves, spec = pytree.tree_flatten((arguments, keywords))
    return tuple(map(part, leaves)), str(spec), torch.is_grad_enabled()


def _forget(codes: list[CodeType]) -> None:
    """Drops what Dynamo compiled for ``codes``: each holds it, and it holds them."""
    from torch._dynamo.eval_frame import remove_from_cache

    while codes:
        remove_from_cache(codes.pop())


def _held_by_its_step(compiler: Compiler) -> Callable[..., Any]:
    """The compiler as a backend: PyTorch keeps backends, and with a compiler whatever it holds."""
    found = weakref.ref(compiler)

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        held = found()
        assert held is not None  # whoever calls the step has it
        if not _capture.is_tracing_a_step():
            raise _TraceAgain
        return held(module, inputs)

    return backend


def _with_code_of_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """A call of ``function`` in a new code object: Dynamo limits recompilations per code object."""

    def step(*arguments: Any, **keywords: Any) -> Any:
        return function(*arguments, **keywords)

    step.__code__ = step.__code__.replace(co_name=f"step_{next(_numbers)}")
    return step


def _device_of(captured: _capture.Captured) -> torch.device:
    tensors = [tensor for node in captured.primals for tensor in _capture.tensors_of(node)]
    return max((tensor.device for tensor in tensors), key=lambda one: one.type == "cuda", default=torch.device("cpu"))


def _lane_rates(device: torch.device, account: tiers.Budget) -> tuple[float, float]:
    """What the lanes of the waterfall carry, out and back, in bytes per second; zeros without a tier."""
    has_host = account.host_bytes is not None and device.type == "cuda"
    if not account.disk_bytes and not has_host:
        return 0.0, 0.0
    directory = next(iter(account.disk_bytes), ".")
    known = {lane.lane: lane.bandwidth_bytes_per_s for lane in bandwidths(directory)}
    if device.type == "cpu":
        return _BESIDE_COMPUTING * known["device->disk"], _BESIDE_COMPUTING * known["disk->device"]
    out, back = [known["device->host"]], [known["host->device"]]
    if account.disk_bytes and not has_host:
        out.append(known.get("device->disk", known["host->disk"]))
        back.append(known.get("disk->device", known["disk->host"]))
    return min(out), min(back)
