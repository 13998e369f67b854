"""Planning of a step before it first runs: `optimize` and `max_batch`."""

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from penstock import tiers
from penstock.arguments import checked, must_be
from penstock.errors import BudgetError, CaptureError, GraphBreakWarning
from penstock.machines import Machine
from penstock.remat import _dynamo
from penstock.remat._door import Door
from penstock.remat._explain import Planned
from penstock.remat._piece import RehearsalOver
from penstock.remat._problem import Method, RematProblem
from penstock.remat._session import Session
from penstock.remat._settings import PlanSettings, Size
from penstock.remat._warn import warn
from penstock.tiers import gate, generators_held

_numbers = itertools.count()


class _TraceAgain(Exception):
    """A sign that Dynamo has traced a step on its own, without the settings that the step needs."""


class OptimizedStep:
    """The result of ``optimize``. Call it like the module or function that it was made from."""

    def __init__(self, function: Callable[..., Any], session: Session, *, must_be_one_graph: bool = False):
        self._function = function
        self._must_be_one_graph = must_be_one_graph
        self._session = session
        self._compiled: dict[Any, Callable[..., Any]] = {}  # any: shapes and constants
        self._otherwise: set[Any] = set()
        """Kinds of arguments for which the model takes its own path for tracing."""
        self._broken: Callable[..., Any] | None = None
        """The step in several graphs, if it was found not to be a single one."""
        self._codes: list[CodeType] = []
        """Code objects under which Dynamo keeps what it compiled."""
        weakref.finalize(self, _dynamo.forget, self._codes).atexit = False
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the step as planned. Arguments of another shape are planned first."""
        if self._broken is not None:
            return self._broken(*arguments, **keywords)
        key = _signature(arguments, keywords)
        if key in self._compiled:
            try:
                return self._call(key, arguments, keywords)
            except Exception as error:
                if not _dynamo.is_unsupported(error) and not isinstance(error, _TraceAgain):
                    raise  # otherwise something that a guard checks has changed
                with generators_held(), gate.tracing(), _dynamo.tracing_a_step(as_eager=key not in self._otherwise):
                    return self._call(key, arguments, keywords)
        breaks: list[Exception] = []
        for as_eager in (True, False):  # some models have a path for tracing, which has no breaks
            try:
                return self._first_call(key, arguments, keywords, as_eager=as_eager)
            except Exception as error:
                if not _dynamo.is_unsupported(error) and not isinstance(error, CaptureError):
                    raise
                breaks.append(error)
        self._break_up(breaks[0])
        return None if self._session.is_rehearsing else self(*arguments, **keywords)

    def _first_call(self, key: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], *, as_eager: bool) -> Any:
        with generators_held(), gate.tracing(), _dynamo.tracing_a_step(as_eager=as_eager):
            self._compiled[key] = torch.compile(self._with_code(), backend=self._backend, fullgraph=True, dynamic=False)
            num_planned = self._session.planner.num_planned
            try:
                return self._call(key, arguments, keywords)
            except BaseException:
                if self._session.planner.num_planned == num_planned:  # otherwise it was planned, and did not run
                    del self._compiled[key]
                raise
            finally:
                if not as_eager:
                    self._otherwise.add(key)

    def _call(self, key: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        try:
            return self._compiled[key](*arguments, **keywords)
        except Exception as error:
            cause = _dynamo.cause_of(error)
            if cause is not error and type(cause).__module__.startswith(("penstock.", "builtins")):
                raise cause from None
            raise

    def _break_up(self, error: BaseException) -> None:
        """Run the step from now on in as many graphs as Dynamo makes, with an eager rest."""
        why = _dynamo.why_unsupported(error)
        if self._must_be_one_graph:
            raise CaptureError(
                f"the step cannot be planned as one graph: {why}. Remove the break (torch.compile(step, "
                "fullgraph=True) shows where it is), or train the step with penstock.remat.compile(step, budget=...)"
            ) from error
        warn(
            f"the step is not one graph ({why}), so it is planned after its first run. In that run each graph saves as "
            "little as it can, and what cannot be compiled runs eagerly. torch.compile(step, fullgraph=True) shows "
            "the break",
            GraphBreakWarning,
        )
        self._session.is_one_graph, self._session.has_rest = False, True
        door = Door(self._session, self._function)
        compiled = torch.compile(self._with_code(), backend=self._backend)

        def run(*arguments: Any, **keywords: Any) -> Any:
            with door.call(arguments, keywords):
                return compiled(*arguments, **keywords)

        self._compiled, self._broken = {}, run

    def _with_code(self) -> Callable[..., Any]:
        fresh = _with_code_of_its_own(self._function)
        self._codes.append(fresh.__code__)
        return fresh

    @functools.cached_property
    def _backend(self) -> Callable[..., Any]:
        return _held_by_its_step(self._session)

    @property
    def plan(self) -> Planned:
        """The latest plan, with ``explain()``. Raises ``ValueError`` if nothing was planned yet."""
        if self._broken is not None:
            self._session.settle()
        if not self._session.planner.planned:
            raise ValueError(
                "nothing is planned yet: the step is not one graph, so it is planned after its first run"
                if self._broken is not None
                else "nothing is planned: no argument and no parameter of the step requires gradients"
            )
        return self._session.planner.planned[-1]

    def close(self) -> None:
        """Return its share of a shared ``Budget`` and end its lanes. The step cannot be called again."""
        self._compiled, self._broken = {}, _closed
        _dynamo.forget(self._codes)
        self._session.close()

    @property
    def plans(self) -> Sequence[Planned]:
        """The plans, one for each shape of arguments."""
        return tuple(self._session.planner.planned)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Compile and plan calls inside this context, but do not run them."""
        self._session.is_rehearsing = True
        try:
            yield
        except RehearsalOver:
            pass
        finally:
            self._session.is_rehearsing = False


@checked("penstock.remat.optimize(step, [batch], budget='6GiB')")
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
    machine: Machine | None = None,
    compiler: Literal["eager", "inductor"] = "eager",
    verify: bool = False,
    strict: bool = False,
    fullgraph: bool = False,
) -> OptimizedStep:
    """Return ``step`` with a plan that keeps the device's true peak within ``budget``.

    It is planned before it first runs.

    Put the loss inside: a function that returns a scalar is planned whole, with backward beginning where forward ends.

    Args:
        step: a module, or a function that uses modules and returns tensors.
        example_inputs: the positional arguments of a step. The plan holds for their shapes; other shapes are planned
            when they first come.
        budget: bytes of the device at the true peak, including parameters, gradients and optimizer state, as an ``int``
            or text such as ``"6GiB"``; a ``float`` is a share of the peak without a plan; ``None`` only reports. Or a
            ``penstock.tiers.Budget``, which carries ``host`` and ``disk`` too.
        optimizer: its state is counted, also before its first step.
        reserve: further bytes that the process holds on the device.
        disk: directory on an SSD to swap to, or several.
        host: bytes of pinned host memory to swap to (CUDA).
        accumulates: whether gradients exist when backward makes new ones, as with gradient accumulation or
            ``zero_grad(set_to_none=False)``.
        adds_gradients: ``False`` returns new gradients together at the end of backward, in addition to existing
            ones. Needed only for hooks on ``AccumulateGrad`` nodes, which cannot be detected; hooks on tensors, and
            process groups, are detected.
        method: ``"recompute"`` or ``"swap"`` leaves out the other.
        profile: a ``problem`` of the same step, from another plan or ``RematProblem.load``, whose times are used
            instead of measuring. A step with other operators is measured.
        machine: a machine that is not here (``penstock.machines``), whose times and swap rates are used instead of
            measuring. Operators have no workspaces then: use it to see what the machine would do, not to train.
        compiler: ``"eager"`` runs the planned graphs node by node, with results bit-identical to plain PyTorch's;
            ``"inductor"`` compiles what lies between swaps and random operators. It fuses, so its results are equal
            within rounding. A step is tried and measured first: one that exceeds the budget runs node by node.
        verify: compare the resident storages with the plan's after every operator, and a checksum of swapped bytes on
            their way back (slow).
        strict: raise ``BudgetError`` instead of warning if a step that is not one graph cannot keep the budget.
        fullgraph: raise ``CaptureError`` for a step that is not one graph.

    Raises ``BudgetError``, which names the smallest budget that works, if the budget is too small, and ``TypeError`` if
    ``example_inputs`` is not a sequence. A step is not one graph if Python reads values of its tensors or PyTorch
    cannot trace a part. It then warns (``GraphBreakWarning``) and runs as with ``compile``: it is planned once it has
    run.

    Method: Libra (Wang, NTHU 2024).
    """
    if isinstance(step, type):
        example = "penstock.remat.optimize(step, [batch], budget='6GiB')"
        raise must_be("step", "a module or a function", step, example)
    session = Session(
        PlanSettings(
            budget=budget,
            optimizer=optimizer,
            reserve=reserve,
            disk=disk,
            host=host,
            accumulates=accumulates,
            adds_gradients=adds_gradients,
            method=method,
            profile=profile,
            machine=machine,
            compiler=compiler,
            verify=verify,
            strict=strict,
        ),
        is_one_graph=True,
    )
    optimized = OptimizedStep(step, session, must_be_one_graph=fullgraph)
    with optimized.rehearsal():
        optimized(*example_inputs)
    return optimized


def _closed(*_: Any, **__: Any) -> Any:
    raise ValueError("this step is closed; make a new one: penstock.remat.optimize(step, example_inputs, budget)")


@checked("penstock.remat.max_batch(lambda size: (step, [batch[:size]]), '6GiB')", start=1)
def max_batch(
    make: Callable[[int], tuple[nn.Module | Callable[..., Any], Sequence[Any]]],
    budget: Size | tiers.Budget,
    *,
    start: int = 1,
    **options: Any,
) -> int:
    """Return the largest batch whose plan fits ``budget``; 0 if not even ``start`` does.

    ``make(batch)`` returns a step and its example inputs for a batch of that size, as ``optimize`` takes them.
    ``options`` are those of ``optimize``. Nothing is trained: sizes are doubled from ``start``, then bisected, and each
    one is captured and planned. Raises what ``optimize`` raises, except ``BudgetError``.
    """
    if isinstance(budget, tiers.Budget):  # trials are charged to no account
        budget = budget.alone(device=budget.room_bytes("device"), host=budget.host_bytes)

    def fits(batch: int) -> bool:
        step, inputs = make(batch)
        try:
            optimize(step, inputs, budget, fullgraph=True, **options)
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


def _signature(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:  # any: nested, hashable
    """Return the key of a plan: shapes, dtypes and devices of the arguments, and whether gradients are enabled."""

    def part(argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            return tuple(argument.shape), argument.stride(), argument.dtype, argument.device, argument.requires_grad
        return argument if isinstance(argument, int | float | str | bool | None) else type(argument)

    leaves, spec = pytree.tree_flatten((arguments, keywords))
    return tuple(map(part, leaves)), str(spec), torch.is_grad_enabled()


def _held_by_its_step(session: Session) -> Callable[..., Any]:
    """Return a backend that refers weakly to the session: PyTorch keeps backends, and with them what they hold."""
    weak = weakref.ref(session)

    def backend(module: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        held = weak()
        assert held is not None  # the caller of the step holds it
        if not _dynamo.is_tracing_a_step():
            raise _TraceAgain
        return held.take(module)

    return backend


def _with_code_of_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call of ``function`` in a new code object, because Dynamo limits recompilations per code object."""

    def step(*arguments: Any, **keywords: Any) -> Any:
        return function(*arguments, **keywords)

    step.__code__ = step.__code__.replace(co_name=f"step_{next(_numbers)}")
    return step
