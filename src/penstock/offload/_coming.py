"""State that a model's optimizers will make in their first step, which no measurement before that step has seen."""

import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from penstock.living import living
from penstock.stepping import missing_state_bytes, own_class, tensors_in
from penstock.tiers import version_of


class ComingState:
    """The optimizers of a model, and what their steps will make.

    Nobody is told of an optimizer, so they are looked for among all objects. Hooks on ``step`` would not do instead:
    Dynamo takes them off when it is first used.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        """How often the parameters of each had been changed when it was found."""

    def look(self) -> None:
        """Look for optimizers. Takes as long as a collection of garbage."""
        own = {id(parameter) for parameter in self._model.parameters()}
        for optimizer in living(torch.optim.Optimizer):
            if optimizer not in self._known:
                parameters = _parameters(optimizer)
                if not own.isdisjoint(map(id, parameters)):
                    self._known[optimizer] = num_changes(parameters)

    def size_bytes(self) -> int | None:
        """Return the bytes that their steps will make; ``None`` before the first one of a class of which nothing is
        known.

        An optimizer has stepped once it has state, or once its parameters have changed. From then on only parameters
        that have gradients and no state yet count, such as those of layers that were frozen.
        """
        total: int | None = 0
        for optimizer, before in list(self._known.items()):
            has_state = next(tensors_in(getattr(optimizer, "state", None)), None) is not None
            has_stepped = has_state or num_changes(_parameters(optimizer)) != before
            if own_class(optimizer) is None:
                total = total if has_stepped else None
            elif total is not None and (has_state or not has_stepped or own_class(optimizer) is not torch.optim.LBFGS):
                # L-BFGS makes more until its history is full. In its first step, nobody sees what it has made so far.
                is_growing = own_class(optimizer) is torch.optim.LBFGS
                total += missing_state_bytes(optimizer, only_with_gradients=has_stepped and not is_growing)
        return total


def num_changes(parameters: Iterable[torch.Tensor]) -> int:
    """Return how often the parameters have been changed in place. Lazy ones have not been made yet."""
    return sum(version_of(parameter) for parameter in parameters if not is_lazy(parameter))


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]]
