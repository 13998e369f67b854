"""A user's optimizer, stepped shard by shard.

The factory is called once, with all parameters. Its result is the master, whose groups a learning-rate scheduler
changes. `penstock.stepping` performs a shard's step on the shard's parameters.
"""

import copy
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import nn

from penstock.stepping import State, refuse_whole_optimizers, state_share, step_part


class ShardedOptimizer:
    """The master optimizer, and its steps on parts of the parameters."""

    def __init__(self, master: torch.optim.Optimizer, names: Mapping[int, str]):
        if not isinstance(master, torch.optim.Optimizer):
            raise TypeError(
                f"the optimizer factory must return a torch.optim.Optimizer, got {type(master).__name__}; for instance "
                "optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)"
            )
        refuse_whole_optimizers(master, "optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)")
        self.master = master
        unknown = [one for group in master.param_groups for one in group["params"] if id(one) not in names]
        if unknown:
            raise ValueError(
                "the optimizer holds parameters that the model does not have; use the parameters that the factory "
                "receives"
            )
        self.trained = {names[id(one)] for group in master.param_groups for one in group["params"] if one.requires_grad}
        self._initial = {names[id(one)]: dict(state) for one, state in master.state.items() if id(one) in names}
        """States that the factory made, each kept until its parameter's first step."""
        master.state = defaultdict(dict)

    def state_share(self, named: Mapping[str, nn.Parameter]) -> float:
        """Return bytes of state per byte of parameters, measured on a copy of a medium-sized parameter."""
        trained = {name: one for name, one in named.items() if name in self.trained}
        states: dict[torch.Tensor, State] = {one: self._first(name, one) for name, one in trained.items()}
        return state_share(self.master, trained.values(), states)

    def step(self, parameters: Mapping[str, nn.Parameter], states: Mapping[str, State]) -> dict[str, State]:
        """Step ``parameters``, which have gradients, from ``states``, and return their new states, changed in place.

        An empty state is that of a first step.
        """
        begun = {name: states.get(name) or self._first(name, one) for name, one in parameters.items()}
        found = self._step(parameters, begun)
        for name in parameters:
            self._initial.pop(name, None)
        return found

    def try_step(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, State]:
        """Try the first step of ``parameters`` and return the states that it would leave.

        The master stays as it was.
        """
        return self._step(parameters, {name: copy.deepcopy(self._first(name, one)) for name, one in parameters.items()})

    def _first(self, name: str, parameter: nn.Parameter) -> State:
        """Return the initial state on the parameter's device. Numbers, such as counts of steps, stay where they are."""
        return {
            key: value.to(parameter.device) if isinstance(value, torch.Tensor) and value.dim() else value
            for key, value in self._initial.get(name, {}).items()
        }

    def _step(self, parameters: Mapping[str, nn.Parameter], states: Mapping[str, State]) -> dict[str, State]:
        by_parameter: dict[torch.Tensor, State] = {parameters[name]: state for name, state in states.items()}
        found = step_part(self.master, parameters.values(), by_parameter)
        return {name: dict(found[parameter]) for name, parameter in parameters.items()}
