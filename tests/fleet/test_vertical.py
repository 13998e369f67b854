"""Accumulation shard by shard: plain PyTorch's bits, and each shard comes twice a step."""

import itertools

import pytest
import torch
from fleet_jobs import batches, train_plainly
from torch import nn

from penstock import fleet
from penstock.fleet import Ablation, JobState
from penstock.fleet import _vertical as vertical
from penstock.testing import GPT

ACCUMULATE = 4


def make_job(name="job", **changes):
    settings = {
        "model": lambda: GPT(num_layers=4, width=64, num_heads=2, context=32),
        "data": lambda: batches(8),
        "loss": lambda model, batch: model(*batch),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        "steps": 4,
        "accumulate": ACCUMULATE,
    }
    return fleet.Job(name=name, **{**settings, **changes})


def run(*jobs, budget="1MB", **options):
    options = {"host": "256MiB", "progress": None, **options}
    with fleet.Fleet([fleet.Device(name="cpu", threads=1)], budget, **options) as running:
        for job in jobs:
            running.add(job)
        results = running.wait()
    return results, running.records


def is_vertical(records, name="job"):
    """Whether the first shard's forward runs for several mini-batches in a row."""
    kinds = [(record.kind, record.shard) for record in records if record.job == name]
    rows = {len(list(same)) for key, same in itertools.groupby(kinds) if key == ("forward", 0)}
    return rows == {ACCUMULATE}


CHANGES = {
    "as it is": {},
    "clipped": {"clip_norm": 0.5},
    "bfloat16": {"precision": "bfloat16"},
    "float16, scaled": {"precision": "float16", "clip_norm": 1.0},
    "a scheduler": {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)},
    "a pass that ends in mid-step": {"data": lambda: batches(6), "steps": None, "epochs": 3},
    "shapes that change in mid-step": {"data": lambda: [*batches(2), *batches(6, length=16)]},
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", CHANGES)
def test_losses_and_weights_are_plains(name):
    job = make_job(**CHANGES[name])
    expected, _ = train_plainly(job)
    results, records = run(job)
    assert results["job"].error is None
    assert list(results["job"].losses) == expected
    assert is_vertical(records) == (name not in ("a pass that ends in mid-step", "shapes that change in mid-step"))


@pytest.mark.usefixtures("one_thread")
def test_data_that_uses_its_tensors_again():
    def data():
        buffers = [torch.empty_like(tensor) for tensor in batches(1)[0]]
        return Refilling(buffers)

    class Refilling:
        def __init__(self, buffers):
            self.buffers = buffers

        def __iter__(self):
            for batch in batches(8):
                for buffer, tensor in zip(self.buffers, batch, strict=True):
                    buffer.copy_(tensor)
                yield tuple(self.buffers)

    expected, _ = train_plainly(make_job(data=data))
    results, records = run(make_job(data=data))
    assert is_vertical(records)
    assert list(results["job"].losses) == expected


class Tied(nn.Module):
    """Its last weight is its first one, which other shards lie between."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64, bias=False)
        self.between = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)])
        self.last = nn.Linear(64, 64, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.between(self.first(x)))


class Normed(nn.Module):
    """Batch norm writes to its own buffers; ``num_seen`` is one that two shards use."""

    def __init__(self, *, shares):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)) for _ in range(6)])
        self.register_buffer("num_seen", torch.zeros(64))
        self.shares = shares

    def forward(self, x):
        for layer in self.layers:
            if self.shares:
                self.num_seen.add_(1)
                x = x + 1e-3 * self.num_seen
            x = layer(x)
        return x


class Dropping(nn.Sequential):
    def __init__(self):
        super().__init__(*[nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1)) for _ in range(6)])


MODELS = {
    "tied": (Tied, True, "180KB"),
    "batch norm": (lambda: Normed(shares=False), True, "150KB"),
    "a buffer of several shards": (lambda: Normed(shares=True), False, "700KB"),
    "dropout": (Dropping, False, "150KB"),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    """Where the order of mini-batches makes a difference they go one after the other."""
    model, goes, budget = MODELS[name]

    def data():
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(8, 64, generator=generator) for _ in range(8)]

    job = make_job(model=model, data=data, loss=lambda model, batch: model(batch).square().mean())
    expected, _ = train_plainly(job)
    results, records = run(job, budget=budget)
    assert results["job"].error is None
    assert list(results["job"].losses) == expected
    assert is_vertical(records) == goes


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("clip_norm", "budget"), [(None, "8MB"), (0.5, "7MB")])
def test_fewer_bytes_move(clip_norm, budget):
    def bytes_a_step(goes, **changes):
        job = make_job(
            model=lambda: GPT(num_layers=3, width=256, num_heads=4, context=32),
            data=lambda: batches(8, batch=1),
            steps=3,
            clip_norm=clip_norm,
            **changes,
        )
        results, records = run(job, budget=budget, ablation=Ablation(vertical=goes))
        assert is_vertical(records) == (goes and not changes)
        (device,) = results.devices
        assert device.measured_peak_bytes <= device.budget_bytes
        return device.fetched_bytes + device.parked_bytes

    shard_by_shard, one_after_the_other = bytes_a_step(True), bytes_a_step(False)
    assert shard_by_shard < 0.75 * one_after_the_other
    if clip_norm is not None:  # else one mini-batch a step is cut into fewer shards
        assert shard_by_shard < 1.15 * bytes_a_step(True, accumulate=1)


@pytest.mark.usefixtures("one_thread")
def test_several_jobs_keep_the_budget_and_resume(tmp_path):
    jobs = [make_job("a", seed=1), make_job("b", seed=2, clip_norm=0.5), make_job("c", seed=3, accumulate=1)]
    expected = {job.name: train_plainly(job)[0] for job in jobs}
    options = {"run_dir": tmp_path, "checkpoint_every": 1, "verify": True}
    with fleet.Fleet(
        [fleet.Device(name="cpu", threads=1)] * 2, "1MB", host="256MiB", progress=None, **options
    ) as running:
        for job in jobs:
            running.add(job)
        log = running._engine.upkeep.stepped

        def stepped(run):
            log(run)
            if run.training.position.step == 2 and run.job.name == "b":
                with running._engine.condition:
                    running._engine.is_stopping = True

        running._engine.upkeep.stepped = stepped
        early = running.wait()
    assert any(result.state is JobState.RUNNING for result in early.values())
    results = fleet.run(
        jobs, [fleet.Device(name="cpu", threads=1)] * 2, "1MB", host="256MiB", progress=None, resume=True,
        **options,
    )  # fmt: skip
    assert {name: list(result.losses) for name, result in results.items()} == expected
    for device in results.devices:
        assert device.measured_peak_bytes <= device.budget_bytes * 1.005


def test_without_room_below_mini_batches_go_one_after_the_other(monkeypatch):
    monkeypatch.setattr(vertical, "handed_bytes", lambda _: 2**40)
    _, records = run(make_job())
    assert not is_vertical(records)
