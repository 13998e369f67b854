"""Models in which Dynamo finds breaks, and steps of them that are measured."""

import gc
import threading

import numpy as np
import pytest
import torch
from torch import nn

from penstock import probe, remat

MIB = 2**20


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x):
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


class Net(nn.Module):
    """Blocks in a loop that Dynamo takes up, or gives up, or leaves."""

    def __init__(self, kind="plain", width=64, num_blocks=4):
        super().__init__()
        self.kind, self.lock = kind, threading.Lock()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 1)
        if kind == "disabled":
            self.blocks[1].forward = torch.compiler.disable(self.blocks[1].forward)
        if kind == "lstm":
            self.rnn = nn.LSTM(width, width, batch_first=True)
        if kind == "gru":
            self.rnn = nn.GRU(width, width // 2, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)

    def forward(self, x):
        if self.kind == "top":
            print(end="")
        if self.kind in ("lstm", "gru"):
            x, _ = self.rnn(x)
        if self.kind == "lock":
            with self.lock:
                for block in self.blocks:
                    x = block(x)
            return self.loss(x)
        for block in self.blocks:
            x = block(x)
            if self.kind == "print":
                print(end="")
            if self.kind == "exit" and x.abs().mean() < 1e-6:
                break
        return self.loss(x)

    def loss(self, x):
        return self.head(x).square().mean()


def make(kind, **options):
    torch.manual_seed(0)
    model = Net(kind, **options)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def batch(rows=32, width=64, length=32):
    return torch.randn(rows, length, width, generator=torch.Generator().manual_seed(rows))


def train(step, model, batches):
    """Per step the loss, the gradients, and the true peak: what stood before it and what it took."""
    seen = []
    for number, x in enumerate(batches):
        for parameter in model.parameters():
            parameter.grad.zero_()
        torch.manual_seed(number)
        gc.collect()

        def whole():
            loss = step(x)  # noqa: B023  # called at once
            loss.backward()
            return loss.detach()

        report = probe.peak_bytes(whole, device="cpu")
        standing = sum(2 * parameter.nbytes for parameter in model.parameters()) + x.nbytes
        gradients = [parameter.grad.numpy().copy() for parameter in model.parameters()]  # tensors would count
        seen.append((report.result, gradients, report.activation_bytes + standing))
    return seen


def assert_same(left, right):
    for expected, actual in zip(left, right, strict=True):
        assert torch.equal(expected[0], actual[0])
        assert all(map(np.array_equal, expected[1], actual[1]))


def through(door, model, budget, **options):
    if door == "own":
        return remat.compile(model, budget=budget)
    return torch.compile(model, backend="penstock", options={"budget": budget}, **options)


DOORS = pytest.mark.parametrize("door", ["own", "string"])
