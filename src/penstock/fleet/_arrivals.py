"""Arrival of gradients during the backward of a model that is run whole, and detection of complete groups."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from penstock.fleet._gradients import Gradients
from penstock.fleet._groups import Group
from penstock.fleet._memory import Item
from penstock.fleet._work import Work


class Arrivals:
    """The gradients of one mini-batch. ``on_device(item)`` returns an item's storages."""

    def __init__(self, work: Work, on_device: Callable[[Item], list[torch.UntypedStorage]]):
        self.gradients = Gradients(work)
        self._work, self._on_device = work, on_device
        self._open: dict[Group, set[str]] = {}
        """Groups whose gradients are arriving, and the parameters whose gradients have arrived."""
        self._collected: set[Group] = set()

    @property
    def open_groups(self) -> set[Group]:
        """Groups for which some gradients have arrived and others have not."""
        return set(self._open)

    def items(self) -> list[Item]:
        """Return the gradients of earlier batches that autograd is adding to."""
        gradients = {} if self._work.behaviour.is_pilot else self._work.training.open_step.gradients
        return [gradients[group].item for group in self._open if group in gradients]

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Register hooks on the parameters while backward runs. On exit no parameter has a gradient."""
        training = self._work.training
        with ExitStack() as stack:
            for name, parameter in training.weights.parameters.items():
                if name in training.optimizer.trained:
                    stack.callback(parameter.register_hook(self._lays_out(name)).remove)
                    stack.callback(parameter.register_post_accumulate_grad_hook(self._notes(name)).remove)
                elif parameter.requires_grad:  # the optimizer does not step it
                    stack.callback(parameter.register_post_accumulate_grad_hook(_drop_gradient).remove)
            stack.callback(self._drop)
            yield

    def collect_complete(self) -> None:
        """Collect the groups whose gradients have all arrived."""
        tensors = self._work.training.weights.tensors
        for group, names in list(self._open.items()):
            if names >= {name for name in group.layouts if tensors[name].requires_grad}:
                self._collect(group)

    def collect_all(self) -> None:
        """Collect all remaining groups. Call it after backward, when no more gradients can arrive."""
        for group in list(self._open):
            self._collect(group)
        for group, packed in self._work.training.open_step.gradients.items() if self._work.steps else ():
            if group not in self._collected:
                self.gradients.note_unchanged(packed, self._on_device(packed.item))

    def _lays_out(self, name: str) -> Callable[[torch.Tensor], None]:
        def lay_out(_: torch.Tensor) -> None:
            group = self._work.training.groups.by_name[name]
            packed = self._work.training.open_step.gradients.get(group)
            if packed is not None and group not in self._open and not self._work.behaviour.is_pilot:
                self.gradients.lay_out(group, self._on_device(packed.item))
            self._open.setdefault(group, set())

        return lay_out

    def _notes(self, name: str) -> Callable[[torch.Tensor], None]:
        def note(_: torch.Tensor) -> None:
            self._open[self._work.training.groups.by_name[name]].add(name)

        return note

    def _collect(self, group: Group) -> None:
        """Turn the group's gradients into an item, or put them back into theirs."""
        del self._open[group]
        self._collected.add(group)
        self.gradients.collect(group)
        for name in group.layouts:
            self._work.training.weights.tensors[name].grad = None

    def _drop(self) -> None:
        """Drop the gradients that were not collected: those of a pilot, or of a backward that did not finish."""
        self._open = {}
        for parameter in self._work.training.weights.parameters.values():
            parameter.grad = None


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None
