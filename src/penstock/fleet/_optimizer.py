"""A user's optimizer, stepped shard by shard.

The factory is called once, with all parameters, and what it made is the master: its groups are what a learning-rate
scheduler changes. A shard's step is that of `penstock.stepping` on the shard's parameters.
"""

import copy
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import nn

from penstock.stepping import State, refuse_whole_optimizers, state_share, step_part


class ShardedOptimizer:
    """The master and its steps on parts of the parameters."""

    def __init__(self, master: torch.optim.Optimizer, names: Mapping[int, str]):
        if not isinstance(master, torch.optim.Optimizer):
            raise TypeError(
                f"the optimizer factory returned {type(master).__name__}; for instance "
                "optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)"
            )
        refuse_whole_optimizers(master, "optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)")
        self.master = master
        unknown = [one for group in master.param_groups for one in group["params"] if id(one) not in names]
        if unknown:
            raise ValueError("the optimizer holds parameters that the model does not have; use those it is given")
        self.trained = {names[id(one)] for group in master.param_groups for one in group["params"] if one.requires_grad}
        self._initial = {names[id(one)]: dict(state) for one, state in master.state.items() if id(one) in names}
        """What the factory made of states, each until its parameter's first step."""
        master.state = defaultdict(dict)

    def state_share(self, named: Mapping[str, nn.Parameter]) -> float:
        """Bytes of state per byte of parameters, tried on a copy of one of middling size."""
        trained = {name: one for name, one in named.items() if name in self.trained}
        states: dict[torch.Tensor, State] = {one: self._first(name, one) for name, one in trained.items()}
        return state_share(self.master, trained.values(), states)

    def step(self, parameters: Mapping[str, nn.Parameter], states: Mapping[str, State]) -> dict[str, State]:
        """Steps ``parameters``, which have gradients, from ``states``; returns their new states, changed in place.

        An empty state is that of a first step.
        """
        begun = {name: states.get(name) or self._first(name, one) for name, one in parameters.items()}
        found = self._step(parameters, begun)
        for name in parameters:
            self._initial.pop(name, None)
        return found

    def try_step(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, State]:
        """Their first step, which remains to be made; returns the states that it would leave."""
        return self._step(parameters, {name: copy.deepcopy(self._first(name, one)) for name, one in parameters.items()})

    def _first(self, name: str, parameter: nn.Parameter) -> State:
        """What the state begins with, where the parameter is; numbers, as counts of steps are, stay where they are."""
        return {
            key: value.to(parameter.device) if isinstance(value, torch.Tensor) and value.dim() else value
            for key, value in self._initial.get(name, {}).items()
        }

    def _step(self, parameters: Mapping[str, nn.Parameter], states: Mapping[str, State]) -> dict[str, State]:
        by_parameter: dict[torch.Tensor, State] = {parameters[name]: state for name, state in states.items()}
        found = step_part(self.master, parameters.values(), by_parameter)
        return {name: dict(found[parameter]) for name, parameter in parameters.items()}
