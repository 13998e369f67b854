"""A user's optimizer, stepped shard by shard.

The factory is called once, with all parameters. Its result is the master, whose groups a learning-rate scheduler
changes. `penstock.stepping` performs a shard's step on the shard's parameters.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from penstock.fleet._groups import Group
from penstock.fleet._packed import Packed
from penstock.stepping import State, missing_state_bytes, own_class, step_part


@dataclass(slots=True)
class OptimizerStates:
    """A job's optimizer states between its steps."""

    packed: dict[Group, Packed] = field(default_factory=dict)
    """State that is worth moving."""
    numbers: dict[str, State] = field(default_factory=dict)
    """State that is not worth moving: numbers, and tensors of one element."""
    stepped: set[str] = field(default_factory=set)
    """Parameters that were stepped in this process, so that their states are known."""


class ShardedOptimizer:
    """The master optimizer, and its steps on parts of the parameters."""

    def __init__(
        self,
        master: torch.optim.Optimizer,
        names: Mapping[int, str],
        lr_scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None,
    ):
        if not isinstance(master, torch.optim.Optimizer):
            raise TypeError(
                f"the optimizer factory must return a torch.optim.Optimizer, got {type(master).__name__}; for instance "
                "optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)"
            )
        if own_class(master) is torch.optim.LBFGS:
            raise TypeError(
                "L-BFGS looks at all parameters at once and cannot update them in parts; use AdamW: "
                "optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)"
            )
        self.master = master
        unknown = [
            parameter for group in master.param_groups for parameter in group["params"] if id(parameter) not in names
        ]
        if unknown:
            raise ValueError(
                "the optimizer holds parameters that the model does not have; use the parameters that the factory "
                "receives"
            )
        self.trained = {
            names[id(parameter)]
            for group in master.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        }
        self._initial = {
            names[id(parameter)]: dict(state) for parameter, state in master.state.items() if id(parameter) in names
        }
        """States that the factory made, each kept until its parameter's first step."""
        master.state = defaultdict(dict)
        self.scheduler = None if lr_scheduler is None else lr_scheduler(master)
        """The scheduler of the master's learning rates."""

    def state_share(self, named: Mapping[str, nn.Parameter]) -> float:
        """Return bytes of state per byte of trained parameters, as far as they are known before the first step."""
        trained_bytes = sum(parameter.nbytes for name, parameter in named.items() if name in self.trained)
        return missing_state_bytes(self.master) / max(1, trained_bytes)

    def step(self, parameters: Mapping[str, nn.Parameter], states: Mapping[str, State]) -> dict[str, State]:
        """Step ``parameters``, which have gradients, from ``states``, and return their new states, changed in place.

        An empty state is that of a first step.
        """
        begun = {name: states.get(name) or self._first(name, parameter) for name, parameter in parameters.items()}
        after = self._step(parameters, begun)
        for name in parameters:
            self._initial.pop(name, None)
        return after

    def try_step(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, State]:
        """Try the first step of ``parameters`` and return the states that it would leave.

        The master stays as it was.
        """
        return self._step(
            parameters, {name: copy.deepcopy(self._first(name, parameter)) for name, parameter in parameters.items()}
        )

    def _first(self, name: str, parameter: nn.Parameter) -> State:
        """Return the initial state on the parameter's device. Numbers, such as counts of steps, stay where they are."""
        return {
            key: value.to(parameter.device) if isinstance(value, torch.Tensor) and value.dim() else value
            for key, value in self._initial.get(name, {}).items()
        }

    def _step(self, parameters: Mapping[str, nn.Parameter], states: Mapping[str, State]) -> dict[str, State]:
        by_parameter: dict[torch.Tensor, State] = {parameters[name]: state for name, state in states.items()}
        after = step_part(self.master, parameters.values(), by_parameter)
        return {name: dict(after[parameter]) for name, parameter in parameters.items()}
