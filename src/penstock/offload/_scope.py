"""The stack of running modules, and the storages that belong to the model itself."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from penstock.devices import has_backend
from penstock.offload._functional import is_wrapped
from penstock.storages import id_of, storage_id
from penstock.tiers import gate

_CAST_SAMPLE = 64
Shapes = tuple[tuple[int, ...], ...]


class ModuleScope:
    """The stack of running modules of one model, kept by hooks, and the storages of its parameters and buffers.

    Hooks return at once while PyTorch compiles or may compile, so that they never become part of a graph. Modules
    inside a compiled one are not hooked, and neither are scripted ones, which take no hooks: what they save counts as
    that of the module around them. Each thread that computes has its own stack.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._local = threading.local()
        self._own: set[int] = set()
        self._weights: dict[tuple[int, ...], list[torch.Tensor]] = {}
        self._casts: dict[tuple[str, tuple[int, ...]], bool] = {}
        self.given: Shapes = ()
        """Shapes of the tensors in the last call of the model that autograd recorded."""
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        if not isinstance(model, torch.jit.ScriptModule):
            self._hooks.append(model.register_forward_pre_hook(_GivenHook(self), with_kwargs=True))
        for name, module in eager_modules(model):
            self._hooks.append(module.register_forward_pre_hook(_Hook(name, self._enter)))
            self._hooks.append(module.register_forward_hook(_Hook(name, self._leave), always_call=True))

    @property
    def current(self) -> str:
        """Qualified name of the innermost running module; ``""`` outside of all modules."""
        stack = self._stack()
        return stack[-1] if stack else ""

    def refresh(self) -> None:
        """Record the storages of all parameters and buffers anew, since models move and are sharded between steps."""
        self._stack().clear()
        self._own.clear()
        self._weights.clear()
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            self._note(tensor)

    def owns(self, storage: torch.UntypedStorage) -> bool:
        """Return whether ``storage`` belongs to a parameter or a buffer."""
        return id_of(storage) in self._own

    def is_weight_cast(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is autocast's cached cast of a parameter, or its transpose, by a few values."""
        for candidate in (tensor, tensor.mT) if tensor.dim() >= 2 else (tensor,):
            for weight in self._weights.get(tuple(candidate.shape), ()):
                if weight.dtype != tensor.dtype and weight.device == tensor.device and self._is_cast(candidate, weight):
                    return True
        return False

    def _is_cast(self, tensor: torch.Tensor, weight: torch.Tensor) -> bool:
        if tensor.device.type == "cpu":
            return _starts_alike(tensor, weight)
        case = (self.current, tuple(tensor.shape))  # comparing on a GPU waits for it, so only once per module
        if case not in self._casts:
            self._casts[case] = _starts_alike(tensor, weight)
        return self._casts[case]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _stack(self) -> list[str]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        return self._local.stack  # type: ignore[no-any-return]

    def _note(self, tensor: torch.Tensor) -> None:
        for part in plain_parts(tensor):
            self._own.add(storage_id(part))
            if part.is_floating_point() and part.dim() >= 2:
                self._weights.setdefault(tuple(part.shape), []).append(part.detach())

    def _enter(self, name: str, module: nn.Module) -> None:
        self._stack().append(name)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:  # FSDP puts the gathered parameters here just before
                self._note_late(tensor)

    def _note_late(self, tensor: torch.Tensor) -> None:
        for part in plain_parts(tensor):
            if storage_id(part) not in self._own:
                self._note(part)

    def _leave(self, name: str, _: nn.Module) -> None:
        stack = self._stack()
        if name in stack:  # modules above it were not left if a planned step was called elsewhere
            del stack[len(stack) - 1 - stack[::-1].index(name) :]


class _Hook:
    """A hook on one module. In a pickle of the model it does nothing, since the offloader is not pickled."""

    def __init__(self, name: str, call: Callable[[str, nn.Module], None]):
        self._name, self._call = name, call

    def __call__(self, module: nn.Module, *_: object) -> None:
        if not torch.compiler.is_compiling() and not _is_traced_as_eager():
            self._call(self._name, module)

    def __reduce__(self) -> tuple[Callable[..., "_Hook"], tuple[object, ...]]:
        return _Hook, ("", _nothing)


class _GivenHook:
    """A hook that records the shapes of the model's arguments. In a pickle of the model it does nothing."""

    def __init__(self, scope: ModuleScope | None):
        self._scope = scope

    def __call__(self, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:  # any: arguments
        if self._scope is None or torch.compiler.is_compiling() or _is_traced_as_eager():
            return
        if torch.is_grad_enabled():
            self._scope.given = tuple(_shapes_in((*given, *named.values())))

    def __reduce__(self) -> tuple[type["_GivenHook"], tuple[None]]:
        return _GivenHook, (None,)


def _nothing(_: str, __: nn.Module) -> None:
    """Do nothing, in a model that was unpickled."""


def _shapes_in(things: Iterable[Any]) -> Iterator[tuple[int, ...]]:  # any: arguments of a model
    for thing in things:
        if isinstance(thing, torch.Tensor):
            yield tuple(thing.shape) if thing.layout is not torch.strided or not thing.is_nested else (thing.numel(),)
        elif isinstance(thing, Mapping):
            yield from _shapes_in(thing.values())
        elif isinstance(thing, list | tuple):
            yield from _shapes_in(thing)


def _is_traced_as_eager() -> bool:
    """Return whether a planned step is traced as if it were eager, so that PyTorch says that nothing is compiled."""
    return gate.may_trace


# This is what torch.compiler.assume_constant_result does, without importing Dynamo. Otherwise Dynamo guards on a value
# that is true only during tracing, and every call of a planned step is traced again.
_is_traced_as_eager._dynamo_marked_constant = True  # type: ignore[attr-defined]


def eager_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the model's modules and their names, without those inside a compiled one."""
    compiled: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(prefix) for prefix in compiled):
            continue
        if is_compiled(module):
            compiled.append(f"{name}." if name else "")
            if not _is_wrapper(module):
                continue  # module.compile(): its own hooks run inside the graph
        if not isinstance(module, torch.jit.ScriptModule):
            yield name, module


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``module`` is a result of ``torch.compile``, or was compiled in place."""
    return _is_wrapper(module) or getattr(module, "_compiled_call_impl", None) is not None


def _is_wrapper(module: nn.Module) -> bool:
    """Whether ``torch.compile`` wrapped it. Accelerate sets the same attribute on models with compiled regions."""
    return "_orig_mod" in module._modules


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the strided tensors that hold the bytes of ``tensor``: itself, or the parts of a wrapper such as DTensor.

    Empty for tensors without bytes of their own (fake, meta, sparse).
    """
    if type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        has_bytes = tensor.layout is torch.strided and has_backend(tensor.device) and not is_wrapped(tensor)
        return [tensor] if has_bytes else []
    if not hasattr(tensor, "__tensor_flatten__"):
        return []
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in plain_parts(getattr(tensor, name))]


def _starts_alike(tensor: torch.Tensor, weight: torch.Tensor) -> bool:
    first = (0,) * (tensor.dim() - 1)
    sample = weight[first][:_CAST_SAMPLE].to(tensor.dtype)
    return torch.equal(tensor.detach()[first][:_CAST_SAMPLE], sample)
