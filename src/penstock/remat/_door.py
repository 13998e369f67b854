"""Entry points for unmodified models: `compile`, and ``torch.compile(model, backend="penstock")``.

Both bring graphs to a `Session`, and put a context around every call: Dynamo's settings for planned steps, and hooks
that see what the eager rest of the step saves. `compile` makes the calls itself. The string backend finds the calls
through what ``torch.compile`` offers to backends (`_dynamo.own_calls`).
"""

import contextlib
import copy
import inspect
import pkgutil
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from penstock.arguments import checked, must_be
from penstock.remat import _dynamo
from penstock.remat._aside import Aside
from penstock.remat._explain import Planned
from penstock.remat._meter import StepMeter
from penstock.remat._rest import EagerRest, MakeOffloading, Offloading, are_hooks_off, is_refused_beside, users_hooks
from penstock.remat._session import Session
from penstock.remat._settings import PlanSettings

_OFFLOADING = "penstock.integrations:offloading_of_the_rest"
"""The function that offloads an eager rest. It is found on first use, in a package that may import several rooms."""
_WORTH_BYTES = 2**20
"""Size below which an eager rest is not worth offloading."""


class _RunningSession(threading.local):
    session: Session | None = None


_running = _RunningSession()


def modules_of(function: Any) -> tuple[nn.Module, ...]:
    """Return the modules of a function.

    They are the function itself, the object of a method, or modules in its closure, its globals and its object.
    """
    if isinstance(function, nn.Module):
        return (function,)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Module):
        return (owner,)
    return tuple({id(value): value for value in _named_in(function) if isinstance(value, nn.Module)}.values())


def _named_in(function: Any) -> list[Any]:
    """Return what a function refers to by names of its closure, its globals, and its object."""
    if isinstance(function, nn.Module):
        return []
    named = list(getattr(getattr(function, "__self__", None), "__dict__", {}).values())
    with contextlib.suppress(TypeError, ValueError):
        names = inspect.getclosurevars(inspect.unwrap(function))
        named += (*names.nonlocals.values(), *names.globals.values())
    return named


def _tensors_of(arguments: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]


class Door:
    """The context around every call of a compiled step."""

    def __init__(self, session: Session, function: Any = None):
        self.session = session
        session.beside.knows(modules_of(function))
        self._named = _named_in(function)
        self._rest = EagerRest()
        self.counts = True
        """Whether the bytes that the eager rest saves can be counted."""
        self._meter = StepMeter(session.was_measured)
        self._aside = Aside(session)
        self._offloading: Offloading | None = None
        held = weakref.ref(self)  # the session, which holds what is called, must not hold this

        def around_step(optimizer: torch.optim.Optimizer, *, is_over: bool) -> None:
            door = held()
            if door is not None:
                door.around_step(optimizer, is_over=is_over)

        session.beside.optimizers.around_step = around_step

    def around_step(self, optimizer: torch.optim.Optimizer, *, is_over: bool) -> None:
        """Note that an optimizer is about to step, or has stepped: a step of the model is over."""
        if is_over:
            self._aside.after_step(optimizer)
        else:
            self._meter.end()
            self._aside.before_step()

    @contextlib.contextmanager
    def call(self, *arguments: Any) -> Iterator[None]:
        """Enclose one call with these arguments; without any, it is a call of what ``torch.compile`` has returned."""
        session = self.session
        before, _running.session = _running.session, session
        session.num_calls += 1
        try:
            if not arguments:
                function, arguments = _dynamo.running_call()
                if not session.beside.modules and not session.pieces:
                    session.beside.knows(modules_of(function))
            session.held_by_ddp(_dynamo.held_by_ddp(session.beside.modules))
            standing = (
                *(buffer for module in session.beside.modules for buffer in module.buffers()),
                *_tensors_of(arguments),
            )
            as_eager, counts = session.settings.as_eager, self.counts and not are_hooks_off()
            if self.counts and not counts:
                session.planner.not_kept.under_transforms()
            if users_hooks() is not None:  # they see what runs eagerly, and graphs refuse them
                watching: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
            else:
                watching = self._offloading or (self._rest.counting(standing) if counts else contextlib.nullcontext())  # type: ignore[assignment]
            with _dynamo.tracing_a_step(as_eager=as_eager, has_rest=True), watching:
                if not session.is_within_a_step:
                    self._meter.end()
                    session.settle()
                    if torch.is_grad_enabled():
                        session.look(_tensors_of((arguments, self._named)))
                        if session.wants_to_be_measured and self._offloading is None:
                            session.could_be_measured(self._meter.begin(session.device))
                yield
        finally:
            error = sys.exc_info()[1]  # what torch.compile has caught, it does not pass to a context
            if self.counts and isinstance(error, RuntimeError) and is_refused_beside(error):
                self.counts = False
                error.add_note("From now on nothing is counted by hooks, so call it once more")
                session.planner.not_kept.under_transforms()
            _running.session = before
            session.rest_saved(self._rest.take_peak())
            if session.beside.rest_bytes >= _WORTH_BYTES and session.settings.has_tiers:
                self.offload_rest()

    def offload_rest(self) -> None:
        """Offload what the eager rest saves, from the next call on."""
        if self._offloading is None and self.session.beside.modules:
            make: MakeOffloading = pkgutil.resolve_name(_OFFLOADING)
            modules = self.session.beside.modules
            module = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
            self._offloading = make(module, self.session.settings.account)

    def close(self) -> None:
        """Close the step. It cannot be called again."""
        self._meter.cancel()
        self._aside.close()
        self.session.close()
        if self._offloading is not None:
            self._offloading.close()


_OWN = ("_orig_mod", "_step", "training", "_is_full_backward_hook")
"""Attributes of a `CompiledModule` itself. All others are its module's."""


class CompiledModule(nn.Module):
    """The result of ``compile`` for a module.

    You call and train it like the module, and its attributes are the module's.

    In ``state_dict`` names have the prefix ``_orig_mod.``, as with ``torch.compile``.
    """

    def __init__(self, module: nn.Module, session: Session):
        super().__init__()
        self._orig_mod = module
        self._step = CompiledFunction(module, session)
        self.training = module.training  # train() would change frozen parts

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the module as planned."""
        return self._step(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_modules"]["_orig_mod"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN or "_orig_mod" not in self.__dict__.get("_modules", ()):
            super().__setattr__(name, value)
        else:
            setattr(self._orig_mod, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompiledModule":
        return compile(copy.deepcopy(self._orig_mod, memo), **self._step.door.session.settings.as_options())  # type: ignore[return-value]

    def __reduce__(self) -> Any:
        return _compiled_again, (self._orig_mod, self._step.door.session.settings.as_options())

    @property
    def plans(self) -> Sequence[Planned]:
        """The plans, one for each kind of step so far."""
        return self._step.plans

    @checked("step.explain(20)", most=0)
    def explain(self, most: int | None = 5) -> str:
        """Return every plan as text, with ``most`` storages of each."""
        return self._step.explain(most)

    def close(self) -> None:
        """Return its share of a ``Budget`` and stop its copy threads. Only the module given to it can run again."""
        self._step.close()


def _compiled_again(module: nn.Module, options: dict[str, Any]) -> Any:
    """Unpickle a `CompiledModule`: compile it with the same options, with nothing planned."""
    return compile(module, **options)


class CompiledFunction:
    """The result of ``compile`` for a function."""

    def __init__(self, function: Callable[..., Any], session: Session):
        self.door = Door(session, function)
        held = weakref.ref(session)

        def backend(graph: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
            alive = held()
            assert alive is not None  # the caller of the step holds the session
            return alive.take(graph)

        own = set(vars(function)) if isinstance(function, nn.Module) else None
        whole = function
        if isinstance(function, torch.jit.ScriptModule):  # which PyTorch compiles only as a part of something

            def whole(*arguments: Any, **keywords: Any) -> Any:
                return function(*arguments, **keywords)

        self._compiled: Callable[..., Any] = torch.compile(whole, backend=backend)
        if own is not None:  # what PyTorch and Lightning note on the module prevents pickling
            for name in vars(function).keys() - own:
                del vars(function)[name]

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the function as planned."""
        counted = self.door.counts
        try:
            with self.door.call(arguments, keywords):
                return self._compiled(*arguments, **keywords)
        except RuntimeError:
            if self.door.counts or not counted:
                raise
        with self.door.call(arguments, keywords):  # the error came from torch.func, which now has nothing to refuse
            return self._compiled(*arguments, **keywords)

    @property
    def plans(self) -> Sequence[Planned]:
        """The plans, one for each kind of step so far."""
        return self.door.session.plans()

    @checked("step.explain(20)", most=0)
    def explain(self, most: int | None = 5) -> str:
        """Return every plan as text, with ``most`` storages of each."""
        return self.door.session.explain(most)

    def close(self) -> None:
        """Return its share of a ``Budget`` and stop its copy threads. It cannot be called again."""
        self.door.close()


@checked("penstock.remat.compile(model, budget='6GiB')")
def compile(  # noqa: A001
    model: nn.Module | Callable[..., Any], **options: Any
) -> CompiledModule | CompiledFunction:
    """Return ``model`` in a form that runs within a byte budget, for any shapes and any graph breaks.

    A step that is one graph is planned before it runs. A step of several graphs is planned once it has run; in its
    first step each graph saves as little as it can. What PyTorch cannot compile runs eagerly. The tensors that it saves
    count in the same budget, and are offloaded if ``disk`` or ``host`` is given. Results and gradients are
    bit-identical to eager PyTorch's, with the exceptions listed in docs/rooms/remat.md. Steps without gradients run
    unchanged.

    >>> import torch, penstock
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
    >>> model = penstock.remat.compile(model, budget="8MiB")
    >>> for rows in (512, 512, 300):
    ...     model(torch.randn(rows, 64)).sum().backward()

    ``options`` are those of ``optimize``: ``budget`` (bytes at the true peak of the step, with parameters, gradients
    and, if ``optimizer`` is given, its state), ``optimizer``, ``disk``, ``host``, ``reserve`` and others. If a budget
    cannot be kept, ``strict=True`` raises a ``BudgetError``; otherwise you get a ``BudgetNotKeptWarning``. With
    ``as_eager=False`` the model may ask PyTorch whether it is compiled. Raises ``ValueError`` for unknown options.
    Calling the result raises ``BudgetError`` if a single graph cannot fit.
    """
    if isinstance(model, CompiledModule | CompiledFunction):
        raise ValueError(
            "`model` must not be the result of penstock.remat.compile; close that, and compile the original model: "
            "penstock.remat.compile(model, budget='6GiB')"
        )
    if isinstance(model, type):
        raise must_be("model", "a module or a function", model, "penstock.remat.compile(model, budget='6GiB')")
    session = Session(PlanSettings.of_options(options))
    return CompiledModule(model, session) if isinstance(model, nn.Module) else CompiledFunction(model, session)


class Backend:
    """A backend for ``torch.compile`` that you can close: ``torch.compile(model, backend=Backend(budget="6GiB"))``.

    Options are those of ``optimize``. PyTorch keeps backends until ``torch.compiler.reset()``, so close one that holds
    an account, a disk or an optimizer.
    """

    def __init__(self, **options: Any):
        self._door: Door | None = Door(Session(PlanSettings.of_options(options)))
        _dynamo.own_calls()

    @checked("torch.compile(model, backend=penstock.remat.Backend(budget='6GiB'))")
    def __call__(self, module: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        """Take a graph. PyTorch calls it for each graph."""
        return self._open().session.take(module)

    def context_of(self, _: dict[str, Any]) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Return the context around each call of the compiled function.

        Once this is closed, the context does nothing: the graphs raise the error. If the context raised it,
        ``torch.compile`` would not take back what it had set before, such as ``dynamic=False``.
        """
        return lambda: contextlib.nullcontext() if self._door is None else self._door.call()

    def __deepcopy__(self, _: dict[int, Any]) -> "Backend":
        """Return itself. Lightning notes a copy of the arguments of every ``torch.compile``."""
        return self

    @property
    def plans(self) -> Sequence[Planned]:
        """The plans, one for each kind of step so far."""
        return self._open().session.plans()

    @checked("step.explain(20)", most=0)
    def explain(self, most: int | None = 5) -> str:
        """Return every plan as text, with ``most`` storages of each."""
        return self._open().session.explain(most)

    def close(self) -> None:
        """Return its share of a ``Budget`` and stop its copy threads. What it compiled cannot run again."""
        if self._door is not None:
            self._door.close()
            self._door = None

    def _open(self) -> Door:
        if self._door is None:
            raise ValueError("this backend is closed; make a new one: penstock.remat.Backend(budget='6GiB')")
        return self._door


class _Options(dict[str, Any]):
    """Options of one call of ``torch.compile``, which are equal to no others.

    Dynamo shares what equal backends compiled.
    """

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


class _NamedBackend:
    """The backend that ``torch.compile(backend="penstock")`` finds under that name."""

    __name__ = "penstock"

    def __init__(self) -> None:
        self._without_calls: dict[int, tuple[Any, Session]] = {}
        """Sessions by the identity of their options, for calls in which PyTorch did not ask for a context."""

    @checked("torch.compile(model, backend='penstock', options={'budget': '6GiB'})")
    def __call__(
        self, module: fx.GraphModule, _: list[Any], *, options: dict[str, Any] | None = None, **_others: Any
    ) -> Callable[..., Any]:
        """Take a graph. PyTorch calls it for each graph; options are those of ``optimize``."""
        session = _running.session
        if session is None or session.options is not options:
            if id(options) not in self._without_calls:
                fresh = Session(PlanSettings.of_options(options or {}), options=options)
                self._without_calls[id(options)] = (options, fresh)
            session = self._without_calls[id(options)][1]
        return session.take(module)

    def context_of(self, keywords: dict[str, Any]) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Return the context around each call of what one ``torch.compile`` returned."""
        options = keywords["options"] = _Options(keywords.get("options") or {})
        return Door(Session(PlanSettings.of_options(options), options=options), _dynamo.function_to_compile()).call


compile_backend = _NamedBackend()
"""The backend of ``torch.compile(model, backend="penstock", options={"budget": "6GiB"})``.

Options are those of ``optimize``.
"""
