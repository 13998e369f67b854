"""A GPT that trains by one of several methods, which `penstock demo` and `penstock bench` compare."""

import contextlib
import functools
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock import remat
from penstock.offload import Training, activations, training
from penstock.probe import PeakReport, peak_bytes
from penstock.testing import GPT

METHODS = ("plain", "checkpoint", "offload", "remat")
"""Methods that keep parameters, gradients and optimizer state on the device; a budget is for what comes on top."""
WHOLE = "training"
"""The method whose budget covers everything, including parameters, gradients and optimizer state."""
NUM_HEADS = 8
_RATE = 3e-4

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Sizes of the model and of its batches."""

    num_layers: int
    """Number of blocks."""
    width: int
    """Width of a block; a multiple of 8, since there are 8 heads."""
    length: int
    """Tokens per sample; a token is a byte."""
    batch: int
    """Samples per step."""


class Trainer:
    """A model with its AdamW optimizer; ``options`` are those of `offload.activations` or `offload.training`."""

    def __init__(self, method: str, size: Size, *, device: str = "cpu", **options: Any):
        torch.manual_seed(0)
        self.size, self.device, self._options = size, torch.device(device), options
        self.method = method
        self.training: Training | None = None
        if method == WHOLE:
            self.training = training(self._model, _optimizer, device=self.device, **options)
            self.model, self.optimizer = self.training.model, self.training.optimizer
        else:
            self.model = self._model()
            self.optimizer = _optimizer(self.model.parameters())
        self.offloader = activations(self.model, **options) if method == "offload" else None
        self.planned: remat.OptimizedStep | None = None
        self._generator = torch.Generator().manual_seed(0)

    def _model(self) -> GPT:
        size = self.size
        return GPT(
            num_layers=size.num_layers,
            width=size.width,
            num_heads=NUM_HEADS,
            context=size.length,
            checkpointed=self.method == "checkpoint",
        ).to(self.device)

    def plan(self, budget: int | None, *, batch: Sequence[torch.Tensor] | None = None, **given: Any) -> None:
        """Plan the whole step with `penstock.remat.optimize`."""
        state = self._generator.get_state()
        inputs = self.batch() if batch is None else batch
        self.planned = remat.optimize(self.model, inputs, budget, optimizer=self.optimizer, **given)
        self._generator.set_state(state)

    def batch(self, size: int | None = None, length: int | None = None) -> Batch:
        """Return samples of Python's standard library; every trainer gets the same sequence."""
        text, size, length = standard_library(), size or self.size.batch, length or self.size.length
        starts = torch.randint(len(text) - length - 1, (size,), generator=self._generator).tolist()
        rows = torch.stack([text[start : start + length + 1] for start in starts]).long().to(self.device)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def train(self, batch: Batch) -> float:
        """Train one step and return the loss."""
        with self.training or contextlib.nullcontext():
            self.optimizer.zero_grad(set_to_none=self.training is not None)
            loss = self.forward_and_backward(batch)
            self.optimizer.step()
        return loss

    def forward_and_backward(self, batch: Batch) -> float:
        """Run forward and backward without the optimizer's step, and return the loss."""
        step = self.model if self.planned is None else self.planned
        with self.offloader or contextlib.nullcontext():
            loss: torch.Tensor = step(*batch)
            loss.backward()
        return float(loss.detach())

    def peak(self, batch: Batch) -> PeakReport:
        """Measure the peak of forward and backward, without an optimizer step."""
        self.optimizer.zero_grad(set_to_none=False)
        return peak_bytes(lambda: self.forward_and_backward(batch), device=self.device)

    def run_tiny_step(self) -> None:
        """Allocate gradients and optimizer state without training: the learning rate is 0 for this step."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        with self.training or contextlib.nullcontext():
            self.model(*self.batch(1, 8)).backward()
            self.optimizer.step()
        for group in self.optimizer.param_groups:
            group["lr"] = _RATE

    def close(self) -> None:
        """Close the offloader and the training; parameters that are not on the device stay where they are."""
        if self.offloader is not None:
            self.offloader.close()
        if self.training is not None:
            self.training.close(discard=True)


def _optimizer(parameters: Iterator[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=_RATE)


@functools.cache
def standard_library() -> torch.Tensor:
    """Return the sources of Python's standard library as bytes, dtype ``uint8``, shape ``[length]``."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(sources), dtype=torch.uint8)
