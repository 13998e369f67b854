"""Bytes of a step beside its plans: parameters, gradients, optimizer state, what runs eagerly, what others hold."""

import gc
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from penstock.probe import held_bytes
from penstock.remat._calls import Done
from penstock.remat._capture import JointGraph
from penstock.remat._optimizer import Optimizers, state_storages, storages_of
from penstock.remat._settings import PlanSettings
from penstock.remat._share import Share
from penstock.units import parse_bytes


class Beside:
    """The bytes of a step that no plan of its graphs has in it."""

    def __init__(self, settings: PlanSettings, share: Share):
        self._settings, self._share = settings, share
        self.modules: tuple[nn.Module, ...] = ()
        """Known modules of the step. Their parameters count even if only the eager rest uses them."""
        self.rest_bytes = 0
        """The most bytes that the eager rest of a step has saved, in addition to the graphs."""
        self.outside_bytes = 0
        """Bytes of measured steps beyond their plans: a loss outside of the model, workspace of eager operators."""
        self.buckets_bytes = 0
        """Bytes that DDP holds in addition to the gradients."""
        self.optimizers = Optimizers(settings.optimizer)
        self._found_bytes = (0, 0)
        """Bytes that the process has on the device besides (other models, data), the most in the last two rounds."""

    @property
    def eager_bytes(self) -> int:
        """Bytes of the eager rest and of whatever else measured steps took."""
        return self.rest_bytes + self.outside_bytes

    def knows(self, modules: tuple[nn.Module, ...]) -> None:
        """Note the modules of the step."""
        self.modules = modules
        self.optimizers.parameters |= self.modules_bytes().keys()

    def look(self, device: torch.device, arguments: Iterable[torch.Tensor], *, is_new_round: bool) -> None:
        """Find what the process has on the device besides this step, between two steps.

        ``arguments`` are those of the next call. What holds itself in circles is collected before it counts. Calls of a
        round may see different things: a GAN's critic is called with and without the generator's activations.
        """
        own = [*arguments]
        for module in self.modules:
            own += [*module.parameters(), *module.buffers()]
        own += [tensor.grad for tensor in own if tensor.is_leaf and tensor.grad is not None]
        known = storages_of(tensor for tensor in own if tensor.device == device)
        known |= state_storages(list(self.optimizers))
        known_bytes, (before, most) = sum(known.values()), self._found_bytes
        found_bytes = held_bytes(device) - known_bytes
        if found_bytes > max(before, most):
            gc.collect()
            found_bytes = held_bytes(device) - known_bytes
        self._found_bytes = (most, found_bytes) if is_new_round else (before, max(most, found_bytes))

    @property
    def found_bytes(self) -> int:
        """Bytes found beyond the reserve and beyond what the account knows of."""
        return max(0, max(self._found_bytes) - self._share.others_bytes() - parse_bytes(self._settings.reserve))

    def standing_bytes(self) -> int:
        """Return the bytes that exist between steps too: other things, the optimizers' states, DDP's buckets."""
        reserve_bytes = parse_bytes(self._settings.reserve) + self.found_bytes
        return reserve_bytes + self.optimizers.state_bytes() + self.buckets_bytes

    def static_bytes(self, step: Sequence[Done]) -> int:
        """Return the bytes that exist all the time while the graphs of a step run, each tensor once."""
        parameters = self.modules_bytes()
        parameters |= {key: size for done in step for key, size in done.statics.parameters.items()}
        others = {key: size for done in step for key, size in done.statics.others.items()}
        self.optimizers.parameters |= parameters.keys()
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
