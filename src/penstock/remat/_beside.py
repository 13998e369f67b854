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
        parameters |= {key: size for one in step for key, size in one.statics.parameters.items()}
        others = {key: size for one in step for key, size in one.statics.others.items()}
        for one in step:
            for key, _ in one.results:
                others.pop(key, None)
        calls = sum(in_every_call(one.variant.captured) for one in step if one.variant.captured is not None)
        return sum(parameters.values()) + sum(others.values()) + calls + self.standing_bytes() + self.eager_bytes

    def standing_before(self, step: Sequence[Done]) -> int:
        """Return the bytes at the step's start: parameters, existing gradients, optimizer state, arguments."""
        calls = sum(in_every_call(one.variant.captured) for one in step if one.variant.captured is not None)
        missing = {key: size for one in step for key, size in one.statics.missing.items()}
        if self._settings.accumulates:
            known = {key for one in step for key in one.statics.parameters}
            every = {id(one): one for module in self.modules for one in module.parameters() if one.requires_grad}
            missing |= {key: one.nbytes for key, one in every.items() if key not in known and one.grad is None}
        return self.static_bytes(step) - calls - self.eager_bytes - sum(missing.values())

    def modules_bytes(self) -> dict[int, int]:
        """Return the bytes of all known parameters, and of the gradients that they have or will get."""
        factor = 2 if self._settings.accumulates else 1
        found: dict[int, int] = {}
        for module in self.modules:
            for one in module.parameters():
                has_gradient = one.requires_grad and (self.rest_bytes or one.grad is not None)
                found[id(one)] = one.nbytes * (factor if has_gradient else 1)
        return found


def in_every_call(captured: JointGraph) -> int:
    """Return the bytes that each call of a graph takes in addition to its plan."""
    return captured.changed_bytes + captured.generator_state_bytes
