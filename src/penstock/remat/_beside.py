"""Bytes of a step beside its plans: parameters, gradients, optimizer state, what runs eagerly, what others hold."""

from collections.abc import Sequence

from torch import nn

from penstock.remat._calls import Done
from penstock.remat._capture import JointGraph
from penstock.remat._optimizer import optimizer_state_bytes
from penstock.remat._settings import PlanSettings
from penstock.units import parse_bytes


class Beside:
    """The bytes of a step that no plan of its graphs has in it."""

    def __init__(self, settings: PlanSettings):
        self._settings = settings
        self.modules: tuple[nn.Module, ...] = ()
        """Known modules of the step. Their parameters count even if only the eager rest uses them."""
        self.rest_bytes = 0
        """The most bytes that the eager rest of a step has saved, in addition to the graphs."""
        self.outside_bytes = 0
        """Bytes of measured steps beyond their plans: a loss outside of the model, workspace of eager operators."""
        self.buckets_bytes = 0
        """Bytes that DDP holds in addition to the gradients."""

    @property
    def eager_bytes(self) -> int:
        """Bytes of the eager rest and of whatever else measured steps took."""
        return self.rest_bytes + self.outside_bytes

    def standing_bytes(self) -> int:
        """Return the bytes that exist between steps too: the reserve, the optimizer's state, DDP's buckets."""
        optimizer = self._settings.optimizer
        state_bytes = 0 if optimizer is None else optimizer_state_bytes(optimizer)
        return parse_bytes(self._settings.reserve) + state_bytes + self.buckets_bytes

    def static_bytes(self, step: Sequence[Done]) -> int:
        """Return the bytes that exist all the time while the graphs of a step run, each tensor once."""
        parameters = self.modules_bytes()
        parameters |= {key: size for done in step for key, size in done.statics.parameters.items()}
        others = {key: size for done in step for key, size in done.statics.others.items()}
        for done in step:
            for key, _ in done.results:
                others.pop(key, None)
        calls = sum(in_every_call(done.variant.captured) for done in step if done.variant.captured is not None)
        return sum(parameters.values()) + sum(others.values()) + calls + self.standing_bytes() + self.eager_bytes

    def standing_before(self, step: Sequence[Done]) -> int:
        """Return the bytes at the step's start: parameters, existing gradients, optimizer state, arguments."""
        calls = sum(in_every_call(done.variant.captured) for done in step if done.variant.captured is not None)
        missing = {key: size for done in step for key, size in done.statics.missing.items()}
        if self._settings.accumulates:
            known = {key for done in step for key in done.statics.parameters}
            every = {
                id(parameter): parameter
                for module in self.modules
                for parameter in module.parameters()
                if parameter.requires_grad
            }
            missing |= {
                key: parameter.nbytes for key, parameter in every.items() if key not in known and parameter.grad is None
            }
        return self.static_bytes(step) - calls - self.eager_bytes - sum(missing.values())

    def modules_bytes(self) -> dict[int, int]:
        """Return the bytes of all known parameters, and of the gradients that they have or will get."""
        factor = 2 if self._settings.accumulates else 1
        sizes: dict[int, int] = {}
        for module in self.modules:
            for parameter in module.parameters():
                has_gradient = parameter.requires_grad and (self.rest_bytes or parameter.grad is not None)
                sizes[id(parameter)] = parameter.nbytes * (factor if has_gradient else 1)
        return sizes


def in_every_call(captured: JointGraph) -> int:
    """Return the bytes that each call of a graph takes in addition to its plan."""
    return captured.changed_bytes + captured.generator_state_bytes
