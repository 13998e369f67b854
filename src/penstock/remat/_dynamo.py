"""Dynamo, which brings the graphs: its settings while it traces a step, its errors, and the calls of what it compiled.

A backend of `torch.compile` is called for graphs alone: not for what Dynamo leaves eager, and not when a call of the
compiled function begins or ends. Dynamo lets a backend have a context around each call (``backend_ctx_ctor``), but
looks for it on its own wrapper of the backend, through which `own_calls` lets it see ours. Others stay as they are.
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
from penstock.remat import _packed
from penstock.remat._warn import warn
from penstock.tiers import gate

TESTED = "2.11 to 2.15"
"""Versions of PyTorch that the tests were run with."""
_NEWEST = (2, 15)
_LEVELS = ("debug", "info", "warning", "error", "exception", "critical", "log")
_NO_LIMIT = 2**20
"""Of recompilations: every shape may be one, and beyond a limit Dynamo runs plain PyTorch without a word."""
_ASKED = ("is_compiling", "is_dynamo_compiling", "is_exporting")
"""What a model may ask PyTorch, and Dynamo answers with yes."""
_UNANSWERED: Any = object()
_CONTEXT = "backend_ctx_ctor"


@contextlib.contextmanager
def tracing_a_step(*, as_eager: bool = True, has_rest: bool = False) -> Iterator[None]:
    """Inside, Dynamo traces what a plan needs whole, and guards every parameter. Settings are as before afterwards.

    Calls of loggers are left out of a step instead of ending its graph; RNNs are taken up, over packed sequences too
    (`_packed.py`); no number of shapes is too many; hooks that a module gets later are noticed. PyTorch 2.11 skips
    guards of a module whose attributes are the same objects, as they are after ``model.double()`` and
    ``parameter.requires_grad_(False)``.

    ``as_eager`` tells a model that asks ``torch.compiler.is_compiling()`` that nobody compiles: else many take other
    paths, whose results differ in their last bits. ``has_rest``: what Dynamo fails on may run eagerly, since somebody
    looks at it; else its error is raised.
    """
    import torch._dynamo.config as dynamo_config
    from torch._dynamo.variables.torch import tracing_state_functions

    names = [one for one in vars(logging.Logger) if one.partition("_")[0] in _LEVELS]
    ignored = {getattr(logging.Logger, one) for one in names} | set(dynamo_config.ignore_logging_functions)
    settings = {
        "ignore_logging_functions": _Functions(ignored),
        "skip_tensor_guards_with_matching_dict_tags": False,
        "skip_nnmodule_hook_guards": False,
        "allow_rnn": True,
        "enable_dynamo_decompositions": False,
        "use_numpy_random_stream": True,
        "recompile_limit": max(_NO_LIMIT, dynamo_config.recompile_limit),
        "accumulated_recompile_limit": max(_NO_LIMIT, dynamo_config.accumulated_recompile_limit),
        "suppress_errors": has_rest,
    }
    changes: dict[tuple[Any, str], Any] = {(dynamo_config, name): value for name, value in settings.items()}
    others: dict[tuple[Any, str], Any] = {(kind, "forward"): one for kind, one in _packed.forwards(outside).items()}
    others[gate, "may_trace"] = True
    of_config = _of_thread.of_pytorch if _has_settings_per_thread() else _of_pytorch
    answers = tracing_state_functions()
    asked = [one for one in answers if getattr(one, "__name__", "") in _ASKED] if as_eager else []
    told = dict.fromkeys([*asked, torch.cuda.is_current_stream_capturing], False)
    _of_pytorch.enter(others, answers, told)
    of_config.enter(changes, {}, {})
    try:
        yield
    finally:
        of_config.leave({})
        _of_pytorch.leave(answers)


def _has_settings_per_thread() -> bool:
    """Whether Dynamo's settings are a thread's own, as they are in PyTorch 2.13 and are not in 2.11."""
    import torch._dynamo.config as dynamo_config

    return isinstance(dynamo_config._config["suppress_errors"].user_override, contextvars.ContextVar)  # type: ignore[attr-defined]


class _OfPyTorch:
    """PyTorch's attributes and answers as they were before the first who changed them, and are after the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._attributes: dict[tuple[Any, str], Any] = {}
        self._answers: dict[Any, Any] = {}

    def enter(self, changes: dict[tuple[Any, str], Any], answers: dict[Any, Any], told: dict[Any, Any]) -> None:
        """Changes attributes of objects, and answers; calls may overlap, in several threads too."""
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
        """The last one puts everything back."""
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


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.of_pytorch = _OfPyTorch()


_of_thread = _OfThread()


def is_untested() -> bool:
    """Whether PyTorch is newer than what was tested."""
    return tuple(map(int, torch.__version__.split(".")[:2])) > _NEWEST


@functools.cache
def warn_if_untested() -> None:
    """Says so once if PyTorch is newer than what was tested."""
    if is_untested():
        warn(
            f"Penstock's plans are tested with PyTorch {TESTED}, and this is {torch.__version__}. They use private "
            "parts of PyTorch, so a step may fail to be captured; if one does, install a tested version",
            PenstockWarning,
        )


def is_tracing_a_step() -> bool:
    """Whether a graph that Dynamo makes now is guarded as a planned step has to be."""
    import torch._dynamo.config as dynamo_config

    return not dynamo_config.skip_tensor_guards_with_matching_dict_tags


class _Functions(dict[Any, Any]):  # any: functions
    """Functions for whoever iterates, and an empty object in JSON, as which PyTorch 2.11 logs its settings."""

    def __init__(self, functions: set[Any]):
        super().__init__()
        self._functions = functions

    def __iter__(self) -> Iterator[Any]:
        return iter(self._functions)

    def __contains__(self, function: object) -> bool:
        return function in self._functions


def own_calls() -> None:
    """Lets Dynamo find the context of our backend, around every call of what ``torch.compile`` returns for it."""
    from torch._dynamo.repro.after_dynamo import WrapBackendDebug

    wrapper: Any = torch._TorchCompileWrapper  # type: ignore[attr-defined]
    if not isinstance(vars(wrapper).get(_CONTEXT), _Context):
        setattr(wrapper, _CONTEXT, _Context(_context_of_ours))
        setattr(WrapBackendDebug, _CONTEXT, _Context(_context_of_wrapped))


class _Context:
    """An attribute that instances may still have of their own: what a backend sets on itself comes first."""

    def __init__(self, find: Callable[[Any], Any]):
        self._find = find

    def __get__(self, instance: Any, _: Any = None) -> Any:
        return self if instance is None else self._find(instance)


def _context_of_wrapped(wrapper: Any) -> Any:
    return getattr(wrapper._torchdynamo_orig_backend, _CONTEXT, contextlib.nullcontext)


def _context_of_ours(wrapper: Any) -> Any:
    """``torch.compile``'s wrapper has the backend and what it is to be called with."""
    find = getattr(wrapper.compiler_fn, "context_of", None)
    return contextlib.nullcontext if find is None else find(wrapper.kwargs)


def compiled_function() -> Any:
    """Inside of the context around a call: what is called, as the user gave it to ``torch.compile``; else ``None``."""
    frame = sys._getframe(1)
    for _ in range(12):
        if frame.f_code.co_name == "compile_wrapper" and "fn" in frame.f_locals:
            return frame.f_locals["fn"]
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def held_by_ddp(modules: Sequence[nn.Module]) -> int:
    """Bytes of the buckets in which DDP reduces gradients, if one of ``modules`` is it, or it calls them."""
    ddp = nn.parallel.DistributedDataParallel
    active = ddp._get_active_ddp_module()
    found = {id(one): one for one in (active, *modules) if isinstance(one, ddp) and not one.gradient_as_bucket_view}
    return sum(two.nbytes for one in found.values() for two in one.parameters() if two.requires_grad)


def compiling_alone() -> contextlib.AbstractContextManager[Any]:
    """Inside, Dynamo compiles nothing in other threads: tracing puts functions of its own in place of PyTorch's."""
    from torch._dynamo import convert_frame

    return convert_frame.compile_lock


def outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, into which Dynamo does not look when it is called from compiled code."""
    import torch._dynamo

    return torch._dynamo.disable(function, reason="planned by Penstock")  # type: ignore[no-any-return, no-untyped-call]


def break_after(module: fx.GraphModule) -> str:
    """Why, and where, Dynamo ended this graph before the function ended; empty if it did not."""
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
    """Where Dynamo could not go on, and why, on one line."""
    stack = getattr(error, "real_stack", None) or getattr(error, "user_stack", None)
    return f"{_place(stack)}{_first_line(error)}"


def is_unsupported(error: BaseException) -> bool:
    """Whether Dynamo says by ``error`` that a function is not one graph."""
    from torch._dynamo import exc
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    kinds = exc.Unsupported, exc.UserError, exc.SkipFrame, exc.UnspecializeRestartAnalysis, GuardOnDataDependentSymNode
    return isinstance(error, kinds)


def cause_of(error: BaseException) -> BaseException:
    """What was raised inside a backend, without Dynamo's wrapping."""
    inner = getattr(error, "inner_exception", None)
    return error if inner is None else cause_of(inner)


def forget(codes: list[CodeType]) -> None:
    """Drops what Dynamo compiled for ``codes``: each holds it, and it holds them."""
    from torch._dynamo.eval_frame import remove_from_cache

    while codes:
        remove_from_cache(codes.pop())


def is_number(node: fx.Node) -> bool:
    """Whether an input of a graph stands for a number of the caller's: a size, or a float, which comes as a tensor."""
    value = node.meta.get("example_value")
    if isinstance(value, int | float | torch.SymInt | torch.SymFloat):
        return True
    if not getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False):
        return False  # else an array of NumPy's, or a float of which nothing but the number is read
    return bool(node.users) and all(one.op == "call_method" and one.target == "item" for one in node.users)
