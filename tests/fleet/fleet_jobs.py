"""Small jobs, and the loop that they have to equal."""

import torch
from torch import nn

from penstock import fleet


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
    options = {"host_budget": "256MiB", "progress": None, **options}
    return fleet.run(jobs, [fleet.Device(name="cpu", threads=1)] * num_devices, budget, **options)
