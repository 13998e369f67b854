"""What models write to in forward: buffers, as often as the plain loop does; anything else is refused by name."""

import pytest
import torch
from fleet_jobs import batches, train, train_plainly
from torch import nn
from torch.nn import functional

from penstock import fleet


class Counting(nn.Module):
    """Its output depends on how often it ran."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(64))

    def forward(self, x):
        self.calls += 1
        self.seen.lerp_(x.detach().mean((0, 1)), 0.5)
        return self.linear(x) * (1 + 0.1 * self.calls) + self.seen


class Model(nn.Module):
    def __init__(self, make, num_blocks=4):
        super().__init__()
        self.token = nn.Embedding(256, 64)
        self.blocks = nn.Sequential(*(make() for _ in range(num_blocks)))
        self.head = nn.Linear(64, 256)

    def forward(self, tokens):
        return self.head(self.blocks(self.token(tokens)))


def spectral():
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64)), nn.Tanh())


def make_job(make, stages=None, **changes):
    return fleet.Job(
        name="job",
        model=lambda: Model(make),
        data=changes.pop("data", batches),
        loss=changes.pop(
            "loss", lambda model, batch: functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
        ),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        steps=5,
        stages=stages,
        **changes,
    )


def assert_equals_the_plain_loop(job, **options):
    results = train([job], num_devices=1, budget="800KB", **options)
    assert results["job"].error is None
    assert list(results["job"].losses) == train_plainly(job)[0]
    return results


def stages_of(model):
    return [model.token, *model.blocks, model.head]


@pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "saved"])
@pytest.mark.parametrize("make", [Counting, spectral], ids=["counter", "spectral norm"])
@pytest.mark.parametrize("stages", [None, stages_of], ids=["traced", "by hand"])
def test_running_forward_again_begins_with_the_buffers_that_forward_found(make, stages, recompute):
    job = make_job(make, stages)
    results = train([job], num_devices=1, budget="800KB", ablation=fleet.Ablation(recompute=recompute))
    losses, model = train_plainly(job)
    assert results["job"].error is None
    assert list(results["job"].losses) == losses
    assert (results.devices[0].recompute_s > 0) == recompute
    trained = results["job"].model().state_dict()
    assert all(torch.equal(trained[key], value) for key, value in model.state_dict().items())


class Clipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        return self.linear(x)


def test_a_parameter_that_forward_writes_to_is_refused_by_name():
    results = train([make_job(Clipping, stages_of)], num_devices=1, budget="800KB")
    assert "writes to the parameter blocks.0.linear.weight in place" in results["job"].error


def test_a_batch_that_the_loss_writes_to_is_refused():
    def loss(model, batch):
        tokens, targets = batch
        return functional.cross_entropy(model(tokens.clamp_(1)).flatten(0, 1), targets.flatten())

    results = train([make_job(spectral, stages_of, loss=loss)], num_devices=1, budget="800KB")
    assert "in place" in results["job"].error and "clone()" in results["job"].error


class InPlace(nn.Module):
    def forward(self, x):
        return x.mul_(0.5).add_(x.sign())


@pytest.mark.parametrize("between", [(), (nn.Identity,)], ids=["straight", "behind a view"])
def test_a_stage_that_writes_to_its_input_is_not_cut_off_from_it(between):
    def make():
        return nn.Sequential(nn.Linear(64, 64), *(make() for make in between), InPlace())

    def stages(model):
        return [model.token, *(part for block in model.blocks for part in block), model.head]

    job = make_job(make, stages)
    assert_equals_the_plain_loop(job, ablation=fleet.Ablation(recompute=True))


class Branching(nn.Module):
    """Short batches take another path."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(256, 64)
        self.short, self.long = nn.Linear(64, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 256)

    def forward(self, tokens):
        x = self.token(tokens)
        return self.head(x + (self.short(x) if tokens.shape[1] < 32 else self.long(x)))


class Ending(Branching):
    """Short batches end with the embedding, tied."""

    def forward(self, tokens):
        x = self.token(tokens)
        return self.long(x) @ self.token.weight.T if tokens.shape[1] < 32 else self.head(self.short(self.long(x)))


@pytest.mark.parametrize("model", [Branching, Ending])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_what_only_an_earlier_batch_of_the_step_used_is_stepped_too(model, clip_norm):
    job = make_job(
        spectral,
        data=lambda: [pair for long in batches(4) for pair in (long, *batches(1, length=16))],
        accumulate=2,
        clip_norm=clip_norm,
    ).with_changes(model=model)
    assert_equals_the_plain_loop(job)


class Centred(nn.Module):
    """What the first block reads, the last one writes."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(256, 64)
        self.register_buffer("centre", torch.zeros(64))
        self.linear = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 256)

    def forward(self, tokens):
        x = self.token(tokens)
        for index, linear in enumerate(self.linear):
            x = linear((x - self.centre).relu() if index == 0 else x)
        self.centre.lerp_(x.detach().mean((0, 1)), 0.5)
        return self.head(x)


def test_running_forward_again_reads_what_a_later_shard_wrote_since_as_it_was():
    job = make_job(None).with_changes(model=Centred)
    assert_equals_the_plain_loop(job, ablation=fleet.Ablation(recompute=True))


class First(Branching):
    """Long batches begin with the layer that short ones end with."""

    def forward(self, tokens):
        x = self.token(tokens)
        if tokens.shape[1] >= 32:
            x = self.long(x)
        return self.head(self.long(self.short(x)))


def test_a_batch_that_uses_parameters_in_another_order_is_refused_or_right():
    job = make_job(
        spectral, data=lambda: [pair for long in batches(4) for pair in (long, *batches(1, length=16))], accumulate=2
    ).with_changes(model=First)
    results = train([job], num_devices=1, budget="800KB")
    error = results["job"].error
    assert (error and "cannot be cut into the same shards" in error) or (
        list(results["job"].losses) == train_plainly(job)[0]
    )


def test_stages_are_evaluated_in_evaluation():
    def make():
        return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(32), nn.Dropout(0.5))

    job = make_job(make, stages_of, validation=lambda: batches(3, seed=9), evaluate_every=5)
    results = train([job], num_devices=1, budget="800KB")
    losses, model = train_plainly(job)
    assert list(results["job"].losses) == losses
    model.eval()
    with torch.no_grad():
        expected = sum(job.loss(model, batch).item() for batch in batches(3, seed=9)) / 3
    assert results["job"].validations[-1]["loss"] == expected


class Shared(nn.Module):
    """Regions without gradients in every block read one value."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(256, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 256)

    def forward(self, tokens):
        x = self.token(tokens)
        mask = (tokens % 2).unsqueeze(-1).float()
        for block in self.blocks:
            with torch.no_grad():
                scale = mask * 0.5 + 1.0
            x = block(x) * scale
        return self.head(x)


def test_regions_that_only_read_do_not_forbid_cuts():
    job = make_job(None).with_changes(model=Shared)
    results = assert_equals_the_plain_loop(job)
    (device,) = results.devices
    assert device.num_units > 5 * 3  # more than one shard
