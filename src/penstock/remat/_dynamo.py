"""The interface to Dynamo, which makes the graphs: settings while it traces a step, errors, and calls of its results.

`torch.compile` calls a backend only for graphs: not for what Dynamo leaves eager, and not when a call of the compiled
function begins or ends. Dynamo lets a backend have a context around each call (``backend_ctx_ctor``), but looks for it
on its own wrapper of the backend. `own_calls` makes the wrapper return ours. Other backends are unchanged.
"""

import contextlib
import contextvars
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

import torch
from torch import fx, nn

from penstock.errors import PenstockWarning
from penstock.remat import _rnn
from penstock.remat._warn import warn
from penstock.tiers import gate

TESTED = "2.11 to 2.15"
"""Versions of PyTorch with which the tests ran."""
_NEWEST = (2, 15)
_LEVELS = ("debug", "info", "warning", "error", "exception", "critical", "log")
_NO_LIMIT = 2**20
"""Limit of recompilations. Every shape may be one.

Beyond a limit Dynamo silently runs plain PyTorch.
"""
_ASKED = ("is_compiling", "is_dynamo_compiling", "is_exporting")
"""Questions that a model may ask PyTorch, and that Dynamo answers with yes."""
_UNANSWERED: Any = object()
_CONTEXT = "backend_ctx_ctor"


@contextlib.contextmanager
def tracing_a_step(*, as_eager: bool = True, has_rest: bool = False) -> Iterator[None]:
    """Let Dynamo trace whole what a plan needs whole, and guard every parameter, inside this context.

    Settings are restored afterwards. Calls of loggers are left out of a step instead of ending its graph. RNNs are
    traced, also over packed sequences (`_rnn.py`). The number of shapes is not limited. Hooks that a module gets
    later are noticed. PyTorch 2.11 skips guards of a module whose attributes are the same objects, as they are after
    ``model.double()`` and ``parameter.requires_grad_(False)``.

    ``as_eager`` tells a model that asks ``torch.compiler.is_compiling()`` that it is not being compiled. Otherwise many
    models take other paths, whose results differ in their last bits. ``has_rest`` lets code on which Dynamo fails run
    eagerly, since it is monitored; otherwise the error is raised.
    """
    import torch._dynamo.config as dynamo_config
    from torch._dynamo.variables.torch import tracing_state_functions

    names = [name for name in vars(logging.Logger) if name.partition("_")[0] in _LEVELS]
    ignored = {getattr(logging.Logger, name) for name in names} | set(dynamo_config.ignore_logging_functions)
    settings = {
        "ignore_logging_functions": _Functions(ignored),
        "skip_tensor_guards_with_matching_dict_tags": False,
        "skip_nnmodule_hook_guards": False,  # otherwise hooks that are registered after the first call never run
        "allow_rnn": True,
        "enable_dynamo_decompositions": False,  # they round differently (``addcdiv``)
        "use_numpy_random_stream": True,
        "recompile_limit": max(_NO_LIMIT, dynamo_config.recompile_limit),
        "accumulated_recompile_limit": max(_NO_LIMIT, dynamo_config.accumulated_recompile_limit),
        "suppress_errors": has_rest,
    }
    changes: dict[tuple[Any, str], Any] = {(dynamo_config, name): value for name, value in settings.items()}
    others: dict[tuple[Any, str], Any] = {
        (kind, "forward"): forward for kind, forward in _rnn.forwards(outside).items()
    }
    others[gate, "may_trace"] = True
    of_config = _config_of_thread.of_pytorch if _has_settings_per_thread() else _of_pytorch
    answers = tracing_state_functions()
    asked = [question for question in answers if getattr(question, "__name__", "") in _ASKED] if as_eager else []
    told = dict.fromkeys([*asked, torch.cuda.is_current_stream_capturing], False)
    _of_pytorch.enter(others, answers, told)
    of_config.enter(changes, {}, {})
    try:
        yield
    finally:
        of_config.leave({})
        _of_pytorch.leave(answers)


def _has_settings_per_thread() -> bool:
    """Whether Dynamo's settings belong to a thread, as in PyTorch 2.13. In 2.11 they do not."""
    import torch._dynamo.config as dynamo_config

    return isinstance(dynamo_config._config["suppress_errors"].user_override, contextvars.ContextVar)  # type: ignore[attr-defined]


class _OfPyTorch:
    """PyTorch's attributes and answers, saved before the first change and restored after the last context ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._attributes: dict[tuple[Any, str], Any] = {}
        self._answers: dict[Any, Any] = {}

    def enter(self, changes: dict[tuple[Any, str], Any], answers: dict[Any, Any], told: dict[Any, Any]) -> None:
        """Change attributes of objects, and answers. Calls may overlap, also in several threads."""
        with self._lock:
            self._depth += 1
            for owner, name in changes.keys() - self._attributes.keys():
                self._attributes[owner, name] = getattr(owner, name)
            for asked in told.keys() - self._answers.keys():
                self._answers[asked] = answers.get(asked, _UNANSWERED)
            for (owner, name), value in changes.items():
                setattr(owner, name, value)
            answers |= told

    def leave(self, answers: dict[Any, Any]) -> None:
        """Leave. The last call restores everything."""
        with self._lock:
            self._depth -= 1
            if self._depth:
                return
            for (owner, name), value in self._attributes.items():
                setattr(owner, name, value)
            for asked, answer in self._answers.items():
                if answer is _UNANSWERED:
                    answers.pop(asked, None)
                else:
                    answers[asked] = answer
            self._attributes, self._answers = {}, {}


_of_pytorch = _OfPyTorch()


class _ConfigOfThread(threading.local):
    def __init__(self) -> None:
        self.of_pytorch = _OfPyTorch()


_config_of_thread = _ConfigOfThread()


def is_untested() -> bool:
    """Whether PyTorch is newer than the tested versions."""
    return tuple(map(int, torch.__version__.split(".")[:2])) > _NEWEST


@functools.cache
def warn_if_untested() -> None:
    """Warn once if PyTorch is newer than the tested versions."""
    if is_untested():
        warn(
            f"Penstock's plans are tested with PyTorch {TESTED}, and this is {torch.__version__}. They use private "
            "parts of PyTorch, so a step may fail to be captured; if one does, install a tested version",
            PenstockWarning,
        )


def is_tracing_a_step() -> bool:
    """Whether a graph that Dynamo makes now has the guards that a planned step needs."""
    import torch._dynamo.config as dynamo_config

    return not dynamo_config.skip_tensor_guards_with_matching_dict_tags


class _Functions(dict[Any, Any]):  # any: functions
    """A set of functions when iterated, and an empty object in JSON, in which PyTorch 2.11 logs its settings."""

    def __init__(self, functions: set[Any]):
        super().__init__()
        self._functions = functions

    def __iter__(self) -> Iterator[Any]:
        return iter(self._functions)

    def __contains__(self, function: object) -> bool:
        return function in self._functions


def own_calls() -> None:
    """Let Dynamo find our backend's context around every call of what ``torch.compile`` returns for it."""
    from torch._dynamo.repro.after_dynamo import WrapBackendDebug

    wrapper: Any = torch._TorchCompileWrapper  # type: ignore[attr-defined]
    if not isinstance(vars(wrapper).get(_CONTEXT), _ContextAttribute):
        setattr(wrapper, _CONTEXT, _ContextAttribute(_context_of_ours))
        setattr(WrapBackendDebug, _CONTEXT, _ContextAttribute(_context_of_wrapped))


class _ContextAttribute:
    """An attribute that instances may override.

    What a backend sets on itself takes precedence.
    """

    def __init__(self, find: Callable[[Any], Any]):
        self._find = find

    def __get__(self, instance: Any, _: Any = None) -> Any:
        return self if instance is None else self._find(instance)


def _context_of_wrapped(wrapper: Any) -> Any:
    return getattr(wrapper._torchdynamo_orig_backend, _CONTEXT, contextlib.nullcontext)


def _context_of_ours(wrapper: Any) -> Any:
    """Return the context of the backend in ``torch.compile``'s wrapper, which also has the backend's arguments."""
    find = getattr(wrapper.compiler_fn, "context_of", None)
    return contextlib.nullcontext if find is None else find(wrapper.kwargs)


def running_call() -> tuple[Any, Any]:
    """Return the function that is being called, as the user gave it to ``torch.compile``, and its arguments.

    Works inside the context around a call; elsewhere both are ``None``.
    """
    names = _names_of_caller("compile_wrapper", "fn")
    return names.get("fn"), (names.get("args"), names.get("kwargs"))


def function_to_compile() -> Any:
    """Return what was given to ``torch.compile``, inside of that call; else ``None``."""
    return _names_of_caller("compile", "model").get("model")


def _names_of_caller(function: str, name: str) -> dict[str, Any]:
    """Return the local names of the next caller that is called so and has such a name."""
    frame: Any = sys._getframe(2)
    for _ in range(12):
        if frame is None:
            break
        if frame.f_code.co_name == function and name in frame.f_locals:
            return dict(frame.f_locals)
        frame = frame.f_back
    return {}


def held_by_ddp(modules: Sequence[nn.Module]) -> int:
    """Return the bytes of DDP's buckets for reducing gradients, if one of ``modules`` is DDP or DDP calls them."""
    ddp = nn.parallel.DistributedDataParallel
    active = ddp._get_active_ddp_module()
    wrappers = {
        id(module): module
        for module in (active, *modules)
        if isinstance(module, ddp) and not module.gradient_as_bucket_view
    }
    return sum(
        parameter.nbytes
        for wrapper in wrappers.values()
        for parameter in wrapper.parameters()
        if parameter.requires_grad
    )


def compiling_alone() -> contextlib.AbstractContextManager[Any]:
    """Keep Dynamo from compiling in other threads inside this context.

    Tracing temporarily replaces functions of PyTorch.
    """
    from torch._dynamo import convert_frame

    return convert_frame.compile_lock


def outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` in a form that Dynamo does not trace into when compiled code calls it."""
    import torch._dynamo

    return torch._dynamo.disable(function, reason="planned by Penstock")  # type: ignore[no-any-return, no-untyped-call]


def break_after(module: fx.GraphModule) -> str:
    """Return why and where Dynamo ended this graph before the end of the function; empty if it did not."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return ""
    return f"{_place(reason.user_stack)}{_first_line(reason.reason)}"


def _place(stack: Any) -> str:
    frames = list(stack or ())
    return f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""


def _first_line(text: object) -> str:
    return next((line.strip() for line in str(text).splitlines() if line.strip()), "")


def why_unsupported(error: BaseException) -> str:
    """Return where Dynamo could not continue, and why, on one line."""
    stack = getattr(error, "real_stack", None) or getattr(error, "user_stack", None)
    return f"{_place(stack)}{_first_line(error)}"


def is_unsupported(error: BaseException) -> bool:
    """Whether ``error`` means that a function is not one graph."""
    from torch._dynamo import exc
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    kinds = exc.Unsupported, exc.UserError, exc.SkipFrame, exc.UnspecializeRestartAnalysis, GuardOnDataDependentSymNode
    return isinstance(error, kinds)


def cause_of(error: BaseException) -> BaseException:
    """Return the error raised inside a backend, without Dynamo's wrapping."""
    inner = getattr(error, "inner_exception", None)
    return error if inner is None else cause_of(inner)


def forget(codes: list[CodeType]) -> None:
    """Drop what Dynamo compiled for ``codes``.

    The two refer to each other.
    """
    from torch._dynamo.eval_frame import remove_from_cache

    while codes:
        remove_from_cache(codes.pop())


def is_number(node: fx.Node) -> bool:
    """Whether an input of a graph represents a number of the caller's: a size, or a float, which comes as a tensor."""
    value = node.meta.get("example_value")
    if isinstance(value, int | float | torch.SymInt | torch.SymFloat):
        return True
    if not getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False):
        return False  # otherwise an array of NumPy, or a float of which only the value is read
    return bool(node.users) and all(user.op == "call_method" and user.target == "item" for user in node.users)
