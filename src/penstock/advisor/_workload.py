"""A user's training step: how it is called, which state it must leave unchanged, and how it looks as code."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from penstock.devices import random_forked

Batch = Any  # what the user's data yields: tensors, and tuples, lists and dicts of them
Loss = Callable[[Any, Batch], torch.Tensor]
"""A function of the model and a batch that returns a scalar: ``lambda model, batch: model(**batch).loss``."""


class Workload:
    """A model, a batch and a loss."""

    def __init__(self, model: nn.Module, batch: Batch, loss: Loss | None, optimizer: torch.optim.Optimizer | None):
        self.model, self.optimizer = model, optimizer
        self.batch = dict(batch) if isinstance(batch, Mapping) else batch  # PyTorch sees no tree in a BatchEncoding
        self._loss = loss
        self.evaluates = not any(module.training for module in model.modules())
        """Whether the model is in evaluation mode, as ``from_pretrained`` leaves it. It is tried in training mode."""
        self._has_loss_attribute = False
        places = {tensor.device for tensor in [*model.parameters(), *_tensors(self.batch)]}
        if len({place.type for place in places}) > 1:
            raise ValueError(
                f"the model and the batch must be on one device, got {sorted(map(str, places))}: "
                "penstock.advise(model.to(device), batch.to(device), budget)"
            )
        self.device = next(iter(places), torch.device("cpu"))
        self._check()

    def loss_of(self, batch: Batch) -> torch.Tensor:
        """Return the loss of a batch, a scalar."""
        return self.call(self.model, batch)

    def call(self, model: Any, batch: Batch) -> torch.Tensor:  # any: the module, or what stands for it
        """Return the loss of a batch, computed by ``model``."""
        if self._loss is not None:
            return self._loss(model, batch)
        if isinstance(batch, Mapping):
            result = model(**batch)
        else:
            result = model(*batch) if isinstance(batch, tuple | list) else model(batch)
        return result.loss if self._has_loss_attribute else result  # type: ignore[no-any-return]

    @property
    def expression(self) -> str:
        """Python code that computes the loss of ``batch``."""
        if self._loss is not None:
            return "loss(model, batch)"
        stars = "**" if isinstance(self.batch, Mapping) else "*" if isinstance(self.batch, tuple | list) else ""
        return f"model({stars}batch){'.loss' if self._has_loss_attribute else ''}"

    def step(self) -> None:
        """Run forward and backward."""
        self.loss_of(self.batch).backward()  # type: ignore[no-untyped-call]

    @property
    def preparation(self) -> str:
        """Python code that comes before the training loop."""
        return "model.train()\n" if self.evaluates else ""

    @property
    def input_bytes(self) -> int:
        """Bytes of parameters, buffers and the batch."""
        return self.batch_bytes + sum(tensor.nbytes for tensor in [*self.model.parameters(), *self.model.buffers()])

    @property
    def batch_bytes(self) -> int:
        """Bytes of the batch."""
        return sum(tensor.nbytes for tensor in _tensors(self.batch))

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that exist now."""
        return sum(parameter.grad.nbytes for parameter in self.model.parameters() if parameter.grad is not None)

    @property
    def set_aside_bytes(self) -> int:
        """Bytes that ``left_as_found`` holds and training does not: earlier gradients, and copies of buffers."""
        return self.gradient_bytes + sum(buffer.nbytes for buffer in self.model.buffers())

    def drop_gradients(self) -> None:
        """Drop all gradients, so that only those of the option under trial take memory."""
        for parameter in self.model.parameters():
            parameter.grad = None

    @contextlib.contextmanager
    def left_as_found(self) -> Iterator[None]:
        """Restore gradients, buffers, modes and random numbers after the block."""
        gradients = [(parameter, parameter.grad) for parameter in self.model.parameters()]
        buffers = [(buffer, buffer.detach().clone()) for buffer in self.model.buffers()]
        modes = [(module, module.training) for module in self.model.modules()]
        self.drop_gradients()
        if self.evaluates:
            self.model.train()
        try:
            with random_forked([self.device]):
                yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            for module, was_training in modes:
                module.training = was_training

    def _check(self) -> None:
        """Call the model once without gradients, to see what it returns."""
        with self.left_as_found(), torch.no_grad():
            result = self.loss_of(self.batch)
        if not isinstance(result, torch.Tensor) and isinstance(getattr(result, "loss", None), torch.Tensor):
            self._has_loss_attribute = True
            result = result.loss
        if not isinstance(result, torch.Tensor) or result.numel() != 1:
            is_tensor = isinstance(result, torch.Tensor)
            shape = f"a tensor of shape {list(result.shape)}" if is_tensor else type(result).__name__
            raise ValueError(
                f"the model must return a scalar loss, got {shape}; give a function that computes it: penstock.advise("
                "model, batch, budget, loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]))"
            )


def _tensors(batch: Batch) -> Sequence[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
