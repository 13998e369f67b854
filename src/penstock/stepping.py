"""An optimizer's step on some of its parameters, namely those whose bytes are on the device.

That is exact for every optimizer whose update of a parameter depends on that parameter, its gradient, its state and its
group. These are all of PyTorch's but L-BFGS.
"""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

_TRIED_ELEMENTS = 65536
State = dict[str, Any]  # any: what optimizers keep, tensors and numbers


def refuse_whole_optimizers(optimizer: torch.optim.Optimizer, call: str) -> None:
    """Raise ``TypeError`` for an optimizer that looks at all parameters at once; ``call`` shows a call that works."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(f"L-BFGS looks at all parameters at once and cannot update them in parts; use AdamW: {call}")


def step_part(
    optimizer: torch.optim.Optimizer,
    parameters: Iterable[torch.Tensor],
    states: Mapping[torch.Tensor, State],
    *,
    groups: Sequence[Mapping[str, Any]] | None = None,
    runs_hooks: bool = True,
) -> dict[torch.Tensor, State]:
    """Run the optimizer's own ``step`` on ``parameters`` alone, from ``states``; return their states afterwards.

    ``groups`` are the settings of the optimizer's groups when the step was due, if that was earlier. The step runs on a
    view of the optimizer with these parameters in its groups and with their states; the optimizer's own state is left
    alone. States that are not empty are changed in place. The optimizer's hooks run each time, or are left to the
    caller (``runs_hooks=False``). Raises ``TypeError`` if the step changes the settings of its groups, which belong to
    all parameters.
    """
    parameters, groups = list(parameters), optimizer.param_groups if groups is None else groups
    wanted = {id(parameter) for parameter in parameters}
    part: torch.optim.Optimizer = object.__new__(type(optimizer))
    part.__dict__.update(optimizer.__dict__)
    part.__dict__.pop("step", None)  # a wrapper of a scheduler or of ours, bound to the whole optimizer
    part.param_groups = [
        {**group, "params": [parameter for parameter in group["params"] if id(parameter) in wanted]} for group in groups
    ]
    if not runs_hooks:
        part._optimizer_step_pre_hooks, part._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    part.state = defaultdict(dict)
    for parameter in parameters:
        if states.get(parameter):
            part.state[parameter] = states[parameter]
    type(part).step(part)
    for own, group in zip(part.param_groups, groups, strict=True):
        if any(key != "params" and value is not group[key] and value != group[key] for key, value in own.items()):
            raise TypeError(
                f"{type(optimizer).__name__} keeps state in its groups, which all parameters share, so it cannot "
                "update them in parts; use AdamW"
            )
    optimizer._opt_called = True  # type: ignore[attr-defined]  # or a scheduler would warn that no step came before it
    return {parameter: part.state.get(parameter, {}) for parameter in parameters}


def state_share(
    optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor], states: Mapping[torch.Tensor, State]
) -> float:
    """Return bytes of state per byte of ``parameters`` after a step from ``states``.

    The step is tried on a copy of one parameter of moderate size.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad and parameter.numel() > 1]
    if not trained:
        return 0.0
    parameter = min(trained, key=lambda candidate: (candidate.dim() < 2, abs(candidate.numel() - _TRIED_ELEMENTS)))
    begun = {parameter: copy.deepcopy(states.get(parameter, {}))}
    data, gradient = parameter.data, parameter.grad
    parameter.data, parameter.grad = data.clone(), torch.zeros_like(data)
    try:
        (state,) = step_part(optimizer, [parameter], begun, runs_hooks=False).values()
    finally:
        parameter.data, parameter.grad = data, gradient
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor) and value.numel() > 1]
    return sum(tensor.nbytes for tensor in tensors) / data.nbytes
