"""Small jobs, and the loop that they have to equal."""

import torch
from torch import nn
from torch.nn import functional

from penstock import fleet
from penstock.testing import GPT


def batches(count=6, batch=2, length=32, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(256, (batch, length), generator=generator) for _ in range(2)) for _ in range(count)]


def train_plainly(job):
    """The losses of the loop in ``Job``'s description, with all that a job can ask for."""
    torch.manual_seed(job.seed)
    model = job.model()
    model.train()
    optimizer = job.make_optimizer(list(model.named_parameters()))
    scheduler = job.lr_scheduler(optimizer) if job.lr_scheduler else None
    scaler = torch.amp.GradScaler("cpu", enabled=job.precision == "float16")
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(job.precision, torch.bfloat16)
    data, losses, parts = job.data(), [], []
    for _ in range(job.epochs or 1000):
        for batch in data:
            with torch.autocast("cpu", dtype, enabled=job.precision != "float32"):
                loss = job.loss(model, batch)
            scaler.scale(loss / job.accumulate if job.accumulate > 1 else loss).backward()
            parts.append(loss.item() / job.accumulate)
            if len(parts) == job.accumulate:
                scaler.unscale_(optimizer)
                if job.clip_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                losses.append(sum(parts))
                parts = []
                if scheduler is not None:
                    scheduler.step()
            if len(losses) == job.steps:
                return losses, model
    return losses, model


def train(jobs, *, num_devices=2, budget="3MB", **options):
    options = {"host": "256MiB", "progress": None, **options}
    return fleet.run(jobs, [fleet.Device(name="cpu", threads=1)] * num_devices, budget, **options)


def gpt_job(name="job", **changes):
    """A GPT of three layers that trains for eight steps."""
    settings = {
        "model": lambda: GPT(num_layers=3, width=64, num_heads=2, context=32),
        "data": batches,
        "loss": lambda model, batch: model(*batch),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        "steps": 8,
    }
    return fleet.Job(name=name, **{**settings, **changes})


STEPS = {"long": 9, "short": 2, "middle": 5}
"""Steps of layered jobs, by name; others have 3."""


def layered_job(name, **changes):
    """Four equal layers that take no time to train."""
    return fleet.Job(
        name=name,
        model=lambda: nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]),
        data=lambda: [torch.ones(4, 64)] * 4,
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        **{"steps": STEPS.get(name, 3), **changes},
    )


def gpt(**changes):
    return GPT(num_layers=4, width=64, num_heads=2, context=32, **changes)


def on_pairs(model, batch):
    return model(*batch)


class Mixed(nn.Module):
    """Tied weights, dropout, batch norm, a skip connection over everything, and a value used twice further on."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(256, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 192), nn.GELU(), nn.Dropout(0.1), nn.Linear(192, 64), nn.BatchNorm1d(32))
            for _ in range(5)
        )
        self.head = nn.Linear(64, 256, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens, targets):
        first = x = self.token(tokens)
        for block in self.blocks:
            x = x + block(x)
        return functional.cross_entropy(self.head(x + 0.5 * first + first.tanh()).flatten(0, 1), targets.flatten())


def make_job(name="job", model=gpt, data=batches, loss=on_pairs, **changes):
    optimizer = changes.pop("optimizer", lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    if "epochs" not in changes:
        changes.setdefault("steps", 4)
    return fleet.Job(name=name, model=model, data=data, loss=loss, optimizer=optimizer, **changes)
