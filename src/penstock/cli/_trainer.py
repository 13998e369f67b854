"""A GPT that trains by one of four methods: what `penstock demo` and `penstock bench` compare."""

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
"""Those that keep a budget on what comes on top of parameters, gradients and optimizer state."""
WHOLE = "training"
"""The one that keeps a budget on everything."""
NUM_HEADS = 8
_RATE = 3e-4

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of the model and of what it is trained on."""

    num_layers: int
    """Blocks."""
    width: int
    """Of a block; a multiple of 8, since there are 8 heads."""
    length: int
    """Tokens of a sample, which are bytes."""
    batch: int
    """Samples of a step."""


class Trainer:
    """The model with its optimizer, AdamW; ``options`` are those of `offload.activations` or `offload.training`."""

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
        """Plans the whole step, as `penstock.remat.optimize` does."""
        state = self._generator.get_state()
        inputs = self.batch() if batch is None else batch
        self.planned = remat.optimize(self.model, inputs, budget, optimizer=self.optimizer, **given)
        self._generator.set_state(state)

    def batch(self, size: int | None = None, length: int | None = None) -> Batch:
        """Samples of Python's own standard library, the same for every trainer."""
        text, size, length = standard_library(), size or self.size.batch, length or self.size.length
        starts = torch.randint(len(text) - length - 1, (size,), generator=self._generator).tolist()
        rows = torch.stack([text[start : start + length + 1] for start in starts]).long().to(self.device)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def train(self, batch: Batch) -> float:
        """One step; returns the loss."""
        with self.training or contextlib.nullcontext():
            self.optimizer.zero_grad(set_to_none=self.training is not None)
            loss = self.forward_and_backward(batch)
            self.optimizer.step()
        return loss

    def forward_and_backward(self, batch: Batch) -> float:
        """Without the optimizer's step."""
        step = self.model if self.planned is None else self.planned
        with self.offloader or contextlib.nullcontext():
            loss: torch.Tensor = step(*batch)
            loss.backward()
        return float(loss.detach())

    def peak(self, batch: Batch) -> PeakReport:
        """Of forward and backward; nothing is trained."""
        self.optimizer.zero_grad(set_to_none=False)
        return peak_bytes(lambda: self.forward_and_backward(batch), device=self.device)

    def run_tiny_step(self) -> None:
        """Allocates gradients and optimizer state without training: the learning rate is 0 for it."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        with self.training or contextlib.nullcontext():
            self.model(*self.batch(1, 8)).backward()
            self.optimizer.step()
        for group in self.optimizer.param_groups:
            group["lr"] = _RATE

    def close(self) -> None:
        """Gives back what was parked; parameters that are elsewhere stay there."""
        if self.offloader is not None:
            self.offloader.close()
        if self.training is not None:
            self.training.close(discard=True)


def _optimizer(parameters: Iterator[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=_RATE)


@functools.cache
def standard_library() -> torch.Tensor:
    """Its sources, as bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(sources), dtype=torch.uint8)
