"""The optimizers of a step, and the bytes of their state, also before their first step."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from penstock.arguments import checked
from penstock.stepping import missing_state_bytes, own_class, tensors_in
from penstock.storages import storage_id

_SCALAR_BYTES = 8
"""Size up to which what an optimizer keeps does not count, such as its number of steps."""


@checked("penstock.remat.optimizer_state_bytes(optimizer)")
def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the device bytes of the state of ``optimizer``, as it is, or as it will be after its next step.

    What a step will make is known of PyTorch's own optimizers, also of one inside of another. Of others, only what
    exists counts: the tensors that can be found in the object, without parameters and gradients.
    """
    return _state_bytes([optimizer])


class Optimizers:
    """The optimizers that step on some of a step's parameters: the one that was given, and those seen to do so."""

    def __init__(self, given: torch.optim.Optimizer | None):
        self._given = given
        self.parameters: set[int] = set()
        """Identities of the step's parameters, as far as they are known."""
        self._seen: dict[int, weakref.ref[torch.optim.Optimizer] | None] = {}
        """Optimizers that have stepped, by identity; ``None`` for those of other parameters."""
        self._num_parameters = 0
        self.is_changed = False
        """Whether an optimizer has stepped for the first time since this was last set to ``False``."""
        self.around_step: Callable[..., None] | None = None  # any: a keyword says whether the step is over
        """A function to call before and after each of their steps."""
        _all.add(self)
        _register_once()

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        held = [held() for held in list(self._seen.values()) if held is not None]
        optimizers = [optimizer for optimizer in (self._given, *held) if optimizer is not None]
        return iter({id(optimizer): optimizer for optimizer in optimizers}.values())

    @property
    def are_known(self) -> bool:
        """Whether the state of the given optimizer is known: it is PyTorch's own, or it exists, or a step has ended.

        No step of somebody else's optimizer is tried.
        """
        if self._given is None:
            return True
        parts = _all_in(self._given)
        return (
            all(own_class(part) is not None for part in parts)
            or any(self._seen.get(id(part)) is not None for part in parts)
            or bool(state_storages([self._given]))
        )

    def state_bytes(self) -> int:
        """Return the bytes of their states, as they are or as the next steps will make them."""
        return _state_bytes(list(self))

    def is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer that steps is one of them; note it if it is."""
        if len(self.parameters) != self._num_parameters:  # others may be ours, now that more parameters are known
            self._num_parameters = len(self.parameters)
            self._seen = {key: held for key, held in self._seen.items() if held is not None}
        held = self._seen.get(id(optimizer))
        if held is None and id(optimizer) in self._seen:
            return False
        if held is None or held() is not optimizer:
            stepped = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
            is_ours = not self.parameters.isdisjoint(stepped)
            self._seen[id(optimizer)] = weakref.ref(optimizer) if is_ours else None
            self.is_changed |= is_ours
            return is_ours
        return True


_all: "weakref.WeakSet[Optimizers]" = weakref.WeakSet()
"""All that want to know of steps."""


@functools.cache
def _register_once() -> None:
    """Hook the steps of all optimizers, for good.

    A hook that is removed while PyTorch goes through them, as when garbage is collected, breaks the step.
    """
    register_optimizer_step_pre_hook(functools.partial(_tell, is_over=False))
    register_optimizer_step_post_hook(functools.partial(_tell, is_over=True))


def _tell(optimizer: torch.optim.Optimizer, *_: Any, is_over: bool) -> None:
    for each in () if torch.compiler.is_compiling() else list(_all):
        if each.is_ours(optimizer) and each.around_step is not None:
            each.around_step(optimizer, is_over=is_over)


def state_storages(optimizers: list[torch.optim.Optimizer]) -> dict[int, int]:
    """Return the bytes of the storages of optimizers' states beside their parameters, by identity."""
    sizes: dict[int, int] = {}
    for optimizer in optimizers:
        groups = [group for part in _all_in(optimizer) for group in getattr(part, "param_groups", ())]
        parameters = [parameter for group in groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        devices = {parameter.device for parameter in parameters}
        held = storages_of(tensor for tensor in tensors_in(vars(optimizer)) if tensor.device in devices)
        others = storages_of([*parameters, *gradients])
        sizes |= {key: size for key, size in held.items() if key not in others and size > _SCALAR_BYTES}
    return sizes


def storages_of(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of the storages of tensors, by identity. Tensors that have none of their own do not count."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        for part in (tensor._indices(), tensor._values()) if tensor.layout is torch.sparse_coo else (tensor,):
            with contextlib.suppress(RuntimeError, NotImplementedError, ValueError):  # a wrapper, or a lazy parameter
                sizes[storage_id(part)] = part.untyped_storage().nbytes()
    return sizes


def _state_bytes(optimizers: list[torch.optim.Optimizer]) -> int:
    parts = {id(part): part for optimizer in optimizers for part in _all_in(optimizer)}
    return sum(state_storages(optimizers).values()) + sum(map(missing_state_bytes, parts.values()))


def _all_in(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return an optimizer and those inside of it."""
    optimizers: dict[int, torch.optim.Optimizer] = {}
    waiting: list[Any] = [optimizer]
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, torch.optim.Optimizer) and id(thing) not in optimizers:
            optimizers[id(thing)] = thing
            for value in vars(thing).values():
                waiting += value.values() if isinstance(value, Mapping) else [value]
        elif isinstance(thing, list | tuple):
            waiting += [entry for entry in thing if isinstance(entry, torch.optim.Optimizer)]
    return list(optimizers.values())
