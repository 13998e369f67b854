"""Which optimizers may step on some of their parameters at a time, and the step on some.

A step in parts, or put off, is exact if the update of a parameter depends on that parameter, its gradient, its state
and its group alone, and if ``step`` does nothing else. No trial proves that: an optimizer may do something new at its
fifth step, as Lookahead does. So it is known of PyTorch's own classes with their own ``step``, whose source was read,
and believed of classes that the user declares ``separable``, after a check. All others run their own ``step``, once,
whole, at its time.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from penstock.storages import storage_id

ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
"""PyTorch's optimizers that update each element by itself, so that a parameter may be updated in slices."""
BY_PARAMETER: tuple[type[torch.optim.Optimizer], ...] = (*ELEMENTWISE, torch.optim.Adafactor, torch.optim.Muon)
"""PyTorch's optimizers that update each parameter by itself."""
_TRIED_ELEMENTS = 2**16
"""Elements of the stand-ins on which `refuse_inseparable` tries a step."""
_TRIED_STEPS = 3
State = dict[str, Any]  # any: what optimizers keep, tensors and numbers


def is_own(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether it is an optimizer of PyTorch's with the ``step`` that PyTorch gave it.

    A learning-rate scheduler's wrapper of ``step`` is PyTorch's. Any other patch, of the instance or of the class, is
    somebody else's, and so is a subclass, unless all it has is a constructor.
    """
    return own_class(optimizer) is not None


def own_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer] | None:
    """Return the class of PyTorch's whose ``step`` an optimizer runs; ``None`` for an optimizer of somebody else's."""
    kind: Any = type(optimizer)
    while kind.__module__.partition(".")[0] != "torch" and len(kind.__bases__) == 1:
        if set(vars(kind)) - {"__init__", "__module__", "__doc__", "__qualname__", "__firstlineno__"} - _HARMLESS:
            return None
        (kind,) = kind.__bases__
    if getattr(torch.optim, kind.__name__, None) is not kind or set(vars(optimizer)) & set(vars(kind)) - {"step"}:
        return None
    step: Any = vars(optimizer).get("step", type(optimizer).step)
    while step is not None:
        step = getattr(step, "__func__", step)
        if _module_of(step) not in ("torch.optim", "torch.utils", "penstock.state"):
            return None
        step = getattr(step, "__wrapped__", None)
    return kind  # type: ignore[no-any-return]


_HARMLESS = {"__static_attributes__", "__annotations__", "__slotnames__", "step"}
"""Names that a class has besides its constructor. PyTorch puts ``step`` into each class whose instances it makes."""


def _module_of(step: Any) -> str:  # any: a function, or whatever somebody has put in its place
    """Return the first two names of the module in which a function was written, whatever it says of itself."""
    return ".".join(getattr(step, "__globals__", {}).get("__name__", "").split(".")[:2])


def why_whole(optimizer: torch.optim.Optimizer, *, separable: bool = False) -> str:
    """Return why an optimizer must step on all its parameters at once; ``""`` if it may step on some at a time.

    ``separable``: the user's word that a class of somebody else's may, too.
    """
    name, kind = type(optimizer).__name__, own_class(optimizer)
    if kind is None:
        return "" if separable else f"{name} is not PyTorch's own, so its step may look at all parameters at once"
    if kind is torch.optim.LBFGS:
        return "L-BFGS looks at all parameters at once"
    if kind not in BY_PARAMETER:
        return f"{name} takes sparse gradients, which do not leave the device"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} with differentiable=True is part of autograd's graph"
    return ""


def refuse_inseparable(optimizer: torch.optim.Optimizer, call: str) -> None:
    """Raise ``TypeError`` for an optimizer whose steps together and apart differ, although it is said to be separable.

    It steps on stand-ins, two for each dtype and number of dimensions among its parameters: together, and one after the
    other. Parameters and states must then be equal to the bit, and nothing else may have changed. ``call`` shows how to
    make the training without the declaration.
    """
    name = type(optimizer).__name__
    inner = next((key for key, value in vars(optimizer).items() if isinstance(value, torch.optim.Optimizer)), None)
    if inner is not None:
        raise TypeError(f"{name} has another optimizer inside ({inner}), so separable=True does not hold: {call}")
    for group in optimizer.param_groups:
        kinds = {(parameter.dtype, parameter.dim()) for parameter in group["params"] if not is_lazy(parameter)}
        for dtype, num_dims in sorted(kinds, key=str):
            reason = _difference(optimizer, group, dtype, num_dims)
            if reason:
                raise TypeError(
                    f"separable=True does not hold for {name}: {reason}. Leave it out, and its own step runs whole: "
                    f"{call}"
                )


def _difference(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dtype: torch.dtype, num_dims: int) -> str:
    """Return what differs between steps on two stand-ins together and apart; ``""`` if nothing does."""
    generator = torch.Generator().manual_seed(0)
    side = round(_TRIED_ELEMENTS ** (1 / max(1, num_dims)))
    shape = (side,) * num_dims
    draws = [torch.randn((2, *shape), generator=generator, device="cpu").to(dtype) for _ in range(1 + _TRIED_STEPS)]
    random_before = torch.random.get_rng_state()
    outcomes = []
    for are_together in (True, False):
        stand_ins = [nn.Parameter(value.clone()) for value in draws[0]]
        states: dict[torch.Tensor, State] = {}
        for draw in draws[1:]:
            for stand_in, gradient in zip(stand_ins, draw, strict=True):
                stand_in.grad = gradient.clone()
            for part in [stand_ins] if are_together else [[stand_in] for stand_in in stand_ins]:
                view = _view_of(
                    optimizer, [{**group, "params": part}], {own: states[own] for own in part if own in states}
                )
                view.__dict__.update(_copied(optimizer))
                _step(view)
                before = _copied(optimizer)
                changed = [key for key, value in _copied(view).items() if not _equal(value, before.get(key))]
                if changed:
                    return f"its step changes {', '.join(changed)} on the optimizer itself"
                if set(view.state) - set(part):
                    return "its state has keys that are no parameters"
                if not _equal({**view.param_groups[0], "params": 0}, {**group, "params": 0}):
                    return "its step changes the settings of a group"
                states |= view.state
        outcomes.append([(stand_in.data, states.get(stand_in)) for stand_in in stand_ins])
    if not torch.equal(random_before, torch.random.get_rng_state()):
        torch.random.set_rng_state(random_before)
        return "its step draws random numbers"
    return "" if _equal(*outcomes) else "two parameters were updated to other values together than apart"


def _copied(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return copies of an optimizer's attributes, except those that name its parameters or that PyTorch uses."""
    kept = {}
    for key, value in vars(optimizer).items():
        if key not in ("state", "param_groups", "step", "_opt_called") and "hook" not in key:
            try:
                kept[key] = copy.deepcopy(value)
            except Exception:  # something that cannot be copied is compared with itself
                kept[key] = value
    return kept


def _equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal, tensors to the bit."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if hasattr(one, "__dict__") and not callable(one):
        return _equal(vars(one), vars(other))
    return callable(one) or bool(one == other)


def step_part(
    optimizer: torch.optim.Optimizer,
    parameters: Iterable[torch.Tensor],
    states: Mapping[torch.Tensor, State],
    *,
    groups: Sequence[Mapping[str, Any]] | None = None,
) -> dict[torch.Tensor, State]:
    """Run the optimizer's own ``step`` on ``parameters`` alone, from ``states``; return their states afterwards.

    Only for optimizers of which `why_whole` says nothing. ``groups`` are the settings of the optimizer's groups when
    the step was due, if that was earlier. The step runs on a view of the optimizer with these parameters in its groups
    and with their states; the optimizer's own state is left alone. States that are not empty are changed in place.
    Hooks are the caller's, who runs them once for all parts. Raises ``TypeError`` if the step changes the settings of
    its groups, which belong to all parameters, or makes states under other keys than parameters.
    """
    parameters, groups = list(parameters), optimizer.param_groups if groups is None else groups
    wanted = {id(parameter) for parameter in parameters}
    part = _view_of(
        optimizer,
        [{**group, "params": [own for own in group["params"] if id(own) in wanted]} for group in groups],
        {parameter: states[parameter] for parameter in parameters if states.get(parameter)},
    )
    _step(part)
    strange: list[Any] = [key for key in part.state if not isinstance(key, torch.Tensor) or id(key) not in wanted]
    for own, group in zip(part.param_groups, groups, strict=True):
        strange += [key for key, value in own.items() if key != "params" and not _equal(value, group[key])]
    if strange:
        raise TypeError(
            f"{type(optimizer).__name__} keeps {strange[0]!r} for all parameters, so it cannot update them in parts; "
            "leave out separable=True"
        )
    optimizer._opt_called = True  # type: ignore[attr-defined]  # or a scheduler would warn that no step came before it
    return {parameter: part.state.get(parameter, {}) for parameter in parameters}


def _step(optimizer: torch.optim.Optimizer) -> None:
    """Run the ``step`` of the optimizer's class without hooks and without PyTorch's record of it."""
    step: Any = type(optimizer).step
    (step.__wrapped__ if hasattr(step, "hooked") else step)(optimizer)


def _view_of(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], states: Mapping[torch.Tensor, State]
) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and attributes with other groups and states."""
    view: torch.optim.Optimizer = object.__new__(type(optimizer))
    view.__dict__.update(optimizer.__dict__)
    view.__dict__.pop("step", None)  # a wrapper of a scheduler or of ours, bound to the whole optimizer
    view.param_groups = groups
    view.state = defaultdict(dict, states)
    return view


def tensors_in(value: Any, _seen: set[int] | None = None) -> Iterator[torch.Tensor]:  # any: what optimizers keep
    """Yield the tensors in a value: in lists, tuples, sets, mappings, and attributes of objects, each once."""
    seen = set() if _seen is None else _seen
    if id(value) in seen or isinstance(value, type | Callable):  # type: ignore[arg-type]
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in list(value.values()):
            yield from tensors_in(entry, seen)
    elif isinstance(value, list | tuple | set | frozenset):
        for entry in list(value):
            yield from tensors_in(entry, seen)
    elif hasattr(value, "__dict__"):
        yield from tensors_in(vars(value), seen)


def state_bytes(optimizer: torch.optim.Optimizer, *, separable: bool = False) -> int:
    """Return the bytes of the optimizer's state: what it has, and what its next step will make.

    The latter is known of PyTorch's own classes and of those declared ``separable``, from a step on small stand-ins;
    tensors of a stand-in's shape are scaled to their parameter's size. Of others, only what exists counts.
    """
    sizes: dict[int, int] = {}
    for tensor in tensors_in(optimizer.state):
        if tensor.numel() > 1:
            sizes[_identity(tensor)] = tensor.nbytes
    return sum(sizes.values()) + missing_state_bytes(optimizer, separable=separable)


def missing_state_bytes(
    optimizer: torch.optim.Optimizer, *, separable: bool = False, only_with_gradients: bool = False
) -> int:
    """Return the bytes of state that the optimizer's next step will make, as far as they are known.

    ``only_with_gradients``: for parameters that have gradients now, since a step leaves out the others.
    """
    kind, total = own_class(optimizer), 0
    shapes: dict[tuple[int, int, torch.dtype], list[tuple[tuple[int | None, ...], int]]] = {}
    if kind is None and not separable:
        return 0
    for number, group in enumerate(optimizer.param_groups):
        trained = [
            own
            for own in group["params"]
            if own.requires_grad and not is_lazy(own) and not (only_with_gradients and own.grad is None)
        ]
        if kind is torch.optim.LBFGS:  # per iteration a direction and a difference of gradients, up to its history
            own: State = next(iter(optimizer.state.values()), {})
            num_new = min(group["max_iter"], group["history_size"] - len(own.get("old_dirs") or ()))
            total += (2 * num_new + (0 if "d" in own else 3)) * sum(parameter.nbytes for parameter in trained)
            continue
        for parameter in trained:
            if optimizer.state.get(parameter):
                continue
            if kind is torch.optim.SparseAdam:
                total += 2 * parameter.nbytes
                continue
            key = (number, parameter.dim(), parameter.dtype)
            if key not in shapes:
                shapes[key] = _tensors_made(optimizer, group, parameter.dim(), parameter.dtype)
            for sides, itemsize in shapes[key]:
                shape = [own if side is None else side for own, side in zip(parameter.shape, sides, strict=True)]
                total += itemsize * math.prod(shape)
    return total


def _tensors_made(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], num_dims: int, dtype: torch.dtype
) -> list[tuple[tuple[int | None, ...], int]]:
    """Return what a first step makes for a parameter: of each tensor the sides, ``None`` for a side of the parameter's,
    and the bytes of an element. Tensors of one element or of other dimensions do not count.
    """
    stand_in = nn.Parameter(torch.zeros(tuple(range(3, 3 + num_dims)), dtype=dtype, device="cpu"))
    stand_in.grad = torch.zeros_like(stand_in)
    settings = {"fused": None, "capturable": False} if "fused" in group else {}
    view = _view_of(optimizer, [{**group, **settings, "params": [stand_in]}], {})
    (state,) = step_part(view, [stand_in], {}).values()
    return [
        (
            tuple(None if side == own else side for side, own in zip(value.shape, stand_in.shape, strict=True)),
            value.element_size(),
        )
        for value in tensors_in(state)
        if value.dim() == num_dims and value.numel() > 1
    ]


def _identity(tensor: torch.Tensor) -> int:
    try:
        return storage_id(tensor)
    except (RuntimeError, NotImplementedError):  # a sparse tensor
        return id(tensor)
