"""A model of which no graph stands for all batches, and the loop that it has to equal."""

import random

import numpy as np
import torch
from fleet_jobs import train_plainly
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock import fleet


class Branching(nn.Module):
    """What strangers' models do: experts, layers left out, weights that a parent reads, buffers replaced."""

    def __init__(self, width=48):
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.position = nn.Parameter(torch.randn(32, width) * 0.1)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)  # its out_proj is never called
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.never = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(width))
        self.head = nn.Linear(width, 64, bias=False)
        self.head.weight = self.embed.weight
        self.dropout = nn.Dropout(0.2)
        self.num_calls = 0
        self.lengths = []

    def forward(self, tokens):
        self.num_calls += 1
        self.lengths.append(tokens.shape[1])
        self.seen += 1
        x = self.embed(tokens) + self.position[: tokens.shape[1]].data + self.position[: tokens.shape[1]]
        x = torch.relu(self.frozen(x))
        if self.training and random.random() < 0.5:  # a layer left out
            x = x + self.attention(x, x, x, need_weights=False)[0]
        if np.random.rand() < 0.5 and self.training:
            x = x * 1.1
        chosen = int(x.detach().float().abs().sum() * 1000) % 2  # the third expert has nothing to do
        x = x + checkpoint(self._expert, chosen, x, use_reentrant=False)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        if len(self.lengths) + self.num_calls > 12:  # a schedule that the model keeps itself
            x = x * 0.5
        x = self.norm(x.transpose(1, 2)).transpose(1, 2) - self.mean
        if torch.isnan(x).any():
            raise ValueError("no number")
        return self.head(self.dropout(x))

    def _expert(self, number, x):
        return self.dropout(nn.functional.gelu(self.experts[number](x)))


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def batches(lengths=(16,) * 5, batch=8):
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randint(64, (batch, length), generator=generator) for _ in range(2)) for length in lengths]


def make_job(name="whole", **options):
    return fleet.Job(
        **{
            "name": name,
            "model": Branching,
            "data": batches,
            "loss": loss,
            "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
            "epochs": 2,
        }
        | options
    )


def plainly(job):
    random.seed(job.seed)
    np.random.seed(job.seed)
    return train_plainly(job)


def assert_as_plain(job, result):
    assert result.error is None, result.error
    losses, model = plainly(job)
    assert list(result.losses) == losses
    trained = result.model().state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, trained[name]), name
