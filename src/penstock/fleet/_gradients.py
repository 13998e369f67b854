"""Gradients of a mini-batch, from autograd to the optimizer or to the host."""

from collections.abc import Sequence

import torch

from penstock.fleet._groups import Group
from penstock.fleet._job import CannotBeCut
from penstock.fleet._packed import Packed
from penstock.fleet._stepper import Stepper
from penstock.fleet._work import Work


class Gradients:
    """The gradients that one mini-batch adds to its step. Groups collect them one by one, as they are complete."""

    def __init__(self, work: Work):
        self._work = work
        self._stepper = Stepper(work.training, work.memory)

    def seed(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the gradient of ``loss`` with which backward begins. Raise ``ValueError`` if it cannot be a loss."""
        if loss.numel() != 1 or not loss.requires_grad:
            raise ValueError(
                f"the loss must be a scalar that requires a gradient, got a tensor of shape {tuple(loss.shape)} with "
                f"requires_grad={loss.requires_grad}; for instance loss=lambda model, batch: "
                "torch.nn.functional.cross_entropy(model(batch[0]), batch[1])"
            )
        training, seed = self._work.training, torch.ones_like(loss)
        if training.open_step.scale is not None:
            seed = seed * training.open_step.scale.value
        return seed / training.job.accumulate if training.job.accumulate > 1 else seed

    def lay_out(self, group: Group, storages: Sequence[torch.UntypedStorage]) -> None:
        """Give the group's parameters the gradients of earlier batches, so that autograd adds to them.

        Those of a weight that travels in half precision are added later, by `collect`.
        """
        training = self._work.training
        weights = training.weights
        for name, tensor in training.open_step.gradients[group].views(list(storages)).items():
            if weights.current(name) is weights.tensors[name]:
                weights.tensors[name].grad = tensor

    def collect(self, group: Group) -> None:
        """Measure, step or keep the group's gradients, which are complete."""
        work, gradients = self._work, self._complete(group)
        if work.behaviour.is_pilot and gradients:  # to find their bytes
            self._stepper.measure(gradients)
            Packed.of("", gradients)
        if work.behaviour.is_pilot or not gradients:
            return
        if work.steps:
            self._stepper.measure(gradients)
        if work.steps and not work.steps_apart:
            self._stepper.step(group, gradients)
            return
        self._keep(group, gradients)
        if work.steps and not work.waits_for_all and work.hosted is not None:
            work.hosted.give(group, None)

    def note_unchanged(self, packed: Packed, storages: Sequence[torch.UntypedStorage]) -> None:
        """Divide gradients to which this mini-batch adds nothing by the loss scale, and note their norms."""
        self._stepper.measure(packed.views(list(storages)))
        self._work.memory.changed(packed.item)

    def begin_on_host(self) -> None:
        """Give the host what it steps, once all gradients are known."""
        work, hosted, open_step = self._work, self._work.hosted, self._work.training.open_step
        if hosted is None:
            return
        hosted.complete()
        if not work.steps or not work.waits_for_all or not open_step.is_finite or not open_step.gradients:
            return
        factor = self._stepper.clip_factor()
        for shard in reversed(range(len(work.groups))):
            for group in work.owned(shard):
                if group in open_step.gradients:
                    hosted.give(group, factor)

    def step(self, shard: int) -> None:
        """Run the optimizer's unit of ``shard``, once all gradients are known."""
        work, training, open_step = self._work, self._work.training, self._work.training.open_step
        here = [group for group in work.owned(shard) if group in open_step.gradients]
        if not open_step.is_finite:
            for group in here:
                work.memory.discard(open_step.gradients.pop(group).item)
            return
        with work.bound(here, to_step=True):
            for group in here:
                packed = open_step.gradients[group]
                gradients = packed.views(work.memory.get(packed.item))
                for name, gradient in gradients.items():
                    parameter = training.weights.tensors[name]
                    parameter.grad = gradient.to(parameter.dtype)  # the host was to take it in half precision
                if training.job.clip_norm is not None:
                    self._stepper.clip(gradients)
                self._stepper.step(group, gradients)

    def _complete(self, group: Group) -> dict[str, torch.Tensor]:
        """Return the group's gradients, including those of earlier batches."""
        weights, gradients = self._work.training.weights, dict[str, torch.Tensor]()
        for name in group.layouts:
            leaf = weights.current(name)
            gradient = leaf.grad if leaf is weights.tensors[name] else self._widened(group, name, leaf)
            if gradient is not None:
                if gradient.layout is not torch.strided:
                    raise CannotBeCut(f"the gradient of {name} is sparse")
                gradients[name] = gradient
        return gradients

    def _widened(self, group: Group, name: str, leaf: torch.Tensor) -> torch.Tensor | None:
        """Take the gradient of a weight in half precision, added to those of earlier batches.

        It is cast if others will be added to it, or if the loss scale will divide it.
        """
        training, gradient = self._work.training, leaf.grad
        earlier = training.open_step.gradients.get(group)
        leaf.grad = None
        if earlier is not None and name in earlier.places:
            total = earlier.views(self._work.memory.get(earlier.item))[name]
            return total if gradient is None else total.add_(gradient)
        if gradient is not None and (training.job.accumulate > 1 or training.open_step.scale is not None):
            return gradient.to(training.weights.tensors[name].dtype)
        return gradient

    def _keep(self, group: Group, gradients: dict[str, torch.Tensor]) -> None:
        """Keep the group's gradients for later mini-batches, or for the optimizer's own units."""
        training, memory, kept = self._work.training, self._work.memory, self._work.training.open_step.gradients
        if group in kept and gradients.keys() == kept[group].places.keys():  # autograd has added to them in place
            memory.changed(kept[group].item)
            return
        if group in kept:  # a parameter got its first gradient
            memory.discard(kept.pop(group).item)
        # As autograd made them, and not added to zeros, which would turn -0.0 into 0.0.
        for name in gradients:
            training.weights.tensors[name].grad = None
        kept[group] = Packed.of(f"{training.job.name}: gradients of shard {group.owner}", gradients)
        memory.add(kept[group].item)
