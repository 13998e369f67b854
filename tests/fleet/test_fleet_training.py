"""Training in shards equals the plain loop to the bit."""

import functools
import re

import pytest
import torch
from fleet_jobs import batches, train, train_plainly
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from penstock import fleet
from penstock.errors import BudgetNotKeptWarning, PenstockError
from penstock.fleet import _turn
from penstock.testing import GPT


def gpt(**changes):
    return GPT(num_layers=4, width=64, num_heads=2, context=32, **changes)


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


class Adapted(nn.Module):
    """A frozen GPT with small trained layers, as in LoRA."""

    def __init__(self):
        super().__init__()
        self.gpt = gpt()
        for parameter in self.gpt.parameters():
            parameter.requires_grad_(False)
        for block in self.gpt.blocks:
            block.contract = nn.Sequential(block.contract, nn.Linear(64, 4), nn.Linear(4, 64))

    def forward(self, *batch):
        return self.gpt(*batch)


def on_pairs(model, batch):
    return model(*batch)


def job(name="job", model=gpt, data=batches, loss=on_pairs, **changes):
    optimizer = changes.pop("optimizer", lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    if "epochs" not in changes:
        changes.setdefault("steps", 4)
    return fleet.Job(name=name, model=model, data=data, loss=loss, optimizer=optimizer, **changes)


def by_kind(named_parameters):
    named_parameters = list(named_parameters)
    biases = [one for name, one in named_parameters if name.endswith("bias")]
    others = [one for name, one in named_parameters if not name.endswith("bias")]
    return torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": others, "lr": 3e-3}], lr=1e-2)


class Eager(torch.optim.Optimizer):
    """Its state is there before its first step, as that of several optimizers is; Adagrad's up to PyTorch 2.11."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one] = {"step": torch.tensor(0.0), "sum": torch.full_like(one, 0.1)}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]
                state["step"] += 1
                state["sum"].addcmul_(one.grad, one.grad)
                one.addcdiv_(one.grad, state["sum"].sqrt(), value=-group["lr"] / state["step"].item() ** 0.1)


JOBS = {
    "sgd": job(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
    "momentum": job(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)),
    "adamw": job(),
    "adagrad": job(optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=0.1)),
    "state from the beginning": job(optimizer=Eager),
    "adafactor": job(optimizer=lambda parameters: torch.optim.Adafactor(parameters, lr=0.1)),
    "groups": job(optimizer=by_kind),
    "accumulation": job(accumulate=3, steps=3),
    "clipping": job(clip_norm=0.3),
    "clipping and accumulation": job(clip_norm=0.3, accumulate=2, steps=3),
    "tied, dropout, batch norm": job(model=Mixed, seed=4),
    "all of it": job(model=Mixed, accumulate=2, clip_norm=0.5, steps=3, seed=5),
    "frozen base": job(
        model=Adapted,
        optimizer=lambda parameters: torch.optim.AdamW([one for one in parameters if one.requires_grad], lr=1e-2),
    ),
    "schedule": job(lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=9)),
    "bfloat16": job(precision="bfloat16"),
    "float16": job(precision="float16", clip_norm=1.0),
    "epochs of a shuffled loader": job(
        data=lambda: DataLoader(batches(8), batch_size=None, shuffle=True), epochs=2, model=Mixed
    ),
    "by hand": job(
        model=lambda: nn.Sequential(
            nn.Embedding(256, 16), nn.Flatten(), nn.Linear(512, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True),
            nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 256),
        ),
        data=lambda: batches(batch=8),
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1][:, 0]),
        stages=list,
    ),
}  # fmt: skip


@functools.cache
def plainly(name):
    losses, model = train_plainly(JOBS[name])
    return losses, model.state_dict()


@pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "saved"])
def test_losses_and_parameters_equal_the_plain_loop(recompute):
    """All kinds of jobs at once, on two devices, none of which holds a whole model."""
    jobs = [one.with_changes(name=name) for name, one in JOBS.items()]
    results = train(jobs, budget="2500KB", ablation=fleet.Ablation(recompute=recompute))
    for one in jobs:
        losses, expected = plainly(one.name)
        assert results[one.name].state is fleet.JobState.DONE, results[one.name].error
        assert list(results[one.name].losses) == losses, one.name
        trained = results[one.name].model().state_dict()
        for key, value in expected.items():
            assert torch.equal(trained[key], value), (one.name, key)
    for device in results.devices:
        assert device.peak_bytes <= device.budget_bytes == 2_500_000
        assert (device.recompute_s > 0) == recompute


@pytest.mark.parametrize("budget", ["900KB", "2MB", "100MB"])
def test_a_measured_peak_stays_below_the_budget(budget):
    """One large model alone is a fleet of one."""
    one = job(model=Mixed, accumulate=2)
    results = train([one], num_devices=1, budget=budget, verify=True)
    (device,) = results.devices
    assert list(results["job"].losses) == train_plainly(one)[0]
    assert 0 < device.measured_peak_bytes <= device.peak_bytes <= device.budget_bytes


class Quantized(nn.Module):
    """Convolutions that are alike but for what they need: no gradient before the cut, each of its input's after it."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = (nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3))) for _ in "ab")

    def forward(self, images):
        codes = self.encoder(images).mul(255).round().byte()
        return self.decoder(codes.float() / 255).square().mean()


class Transposed(nn.Module):
    """Norms of the same shapes, the later ones of values whose last dimension is not contiguous: these are copied."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.ModuleList(nn.LayerNorm(64) for _ in range(2)) for _ in "ab")

    def forward(self, images):
        x = images.flatten(2)[:, :, :64]
        for norm in self.first:
            x = norm(x)
        for norm in self.second:
            x = norm(x.mT.contiguous().mT.mT.mT)
        return x.square().mean()


def images():
    generator = torch.Generator().manual_seed(5)
    return [torch.rand(2, 16, 32, 32, generator=generator) for _ in range(3)]


STEPS = {
    "each batch": {},
    "accumulated": {"accumulate": 2},
    "clipped": {"clip_norm": 0.5},
    "accumulated and clipped": {"accumulate": 2, "clip_norm": 0.5},
    "scaled": {"precision": "float16"},
}


@pytest.mark.parametrize("model", [Quantized, Transposed, Mixed])
@pytest.mark.parametrize("steps", STEPS)
def test_a_budget_that_a_refusal_names_holds(model, steps):
    """Where shards look alike and are not, where two use the same parameters, and with all that AdamW makes."""
    given = {} if model is Mixed else {"data": images, "loss": lambda model, batch: model(batch)}
    one = job(model=model, steps=3, **given, **STEPS[steps])
    refused = train([one], num_devices=1, budget="1KiB")["job"].error
    smallest = int(re.search(r"must be at least (\d+) ", refused)[1])
    results = train([one], num_devices=1, budget=smallest, verify=True)
    assert results["job"].state is fleet.JobState.DONE, results["job"].error
    (device,) = results.devices
    assert list(results["job"].losses) == train_plainly(one)[0]
    assert 0 < device.measured_peak_bytes <= device.budget_bytes == smallest


def test_a_unit_that_exceeds_the_budget_is_said_where_units_are_measured(monkeypatch):
    """As where a kernel takes more in a later step than in the pilot run."""
    monkeypatch.setattr(_turn._Measured, "transient_bytes", lambda *_: 0)
    one = job(data=lambda: batches(3))
    with pytest.warns(BudgetNotKeptWarning, match=r"job 'job': \w+ of the shard .* took \d+ bytes") as said:
        results = train([one], num_devices=1, budget="600KB", verify=True)
    (device,) = results.devices
    assert len(said) == 1
    assert list(results["job"].losses) == train_plainly(one)[0]
    assert device.measured_peak_bytes > device.budget_bytes


def test_what_fits_is_never_moved():
    results = train([job()], num_devices=1, budget="100MB")
    (device,) = results.devices
    assert device.parked_bytes == device.fetched_bytes == 0


def test_what_does_not_fit_is_refused_by_name_and_size():
    results = train([job(name="large"), job(name="small", model=Tiny)], budget="300KB")
    assert results["large"].state is fleet.JobState.FAILED
    assert "needs" in results["large"].error or "takes" in results["large"].error
    assert "KiB" in results["large"].error
    assert results["small"].state is fleet.JobState.DONE


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, tokens, targets):
        return (self.weight * tokens.float() - targets.float()).square().mean()


def test_host_memory_overflows_to_disk(tmp_path):
    one = job()
    results = train([one], num_devices=1, budget="1500KB", host_budget="1MB", disk=tmp_path)
    (device,) = results.devices
    assert list(results["job"].losses) == train_plainly(one)[0]
    assert 0 < device.written_to_disk_bytes < device.parked_bytes


def test_jobs_with_one_frozen_base_keep_it_once(tmp_path):
    jobs = [JOBS["frozen base"].with_changes(name=f"{at}", seed=3) for at in range(4)]
    made = fleet.Fleet([fleet.Device(name="cpu", threads=1)], "2500KB", host_budget="64MiB", progress=None)
    counts = []

    def more():
        counts.append(len(made._engine.frozen))
        return any(row.state in ("pending", "running") for row in made.rows())

    with made:
        for one in jobs:
            made.add(one)
        results = made.wait(more)
        assert 0 < max(counts) < 4 * 4  # shards of the base, not of each job
        assert not made._engine.frozen  # given back with the last job
    assert len({results[one.name].losses for one in jobs}) == 1
    assert list(results["0"].losses) == train_plainly(jobs[0])[0]


def test_batches_of_another_shape_are_cut_where_the_first_were():
    one = job(data=lambda: [*batches(2), *batches(1, batch=3, length=24), *batches(1, batch=1)])
    results = train([one], num_devices=1, budget="3MB")
    assert results["job"].error is None
    assert list(results["job"].losses) == train_plainly(one)[0]


def test_a_validation_sees_the_model_in_evaluation():
    one = job(
        model=Mixed,
        validation=lambda: batches(3, seed=9),
        evaluate_every=2,
        metric=lambda model, batch: {"loss": (loss := model(*batch)), "twice": 2 * loss},
    )
    results = train([one], num_devices=1, budget="2MB")
    assert results["job"].error is None
    found = results["job"].validations
    assert [entry["step"] for entry in found] == [2, 4]
    _, model = train_plainly(one)
    model.eval()
    with torch.no_grad():
        expected = sum(model(*batch).item() for batch in batches(3, seed=9)) / 3
    assert found[-1]["loss"] == expected
    assert found[-1]["twice"] == pytest.approx(2 * expected)
    assert results.best("loss").name == "job"


@functools.cache
def losses_from(seed):
    return train_plainly(job(seed=seed, steps=3))[0]


@pytest.mark.parametrize("scheduler", ["sharded-lrtf", "fifo", "shortest-first", "random"])
def test_every_scheduler_trains_the_same(scheduler):
    jobs = [job(name=f"{at}", seed=at, steps=3) for at in range(4)]
    results = train(jobs, scheduler=scheduler)
    for one in jobs:
        assert list(results[one.name].losses) == losses_from(one.seed)


@pytest.mark.parametrize("ablation", [{"double_buffer": False}, {"sharp": False}], ids=["no double buffer", "no SHARP"])
def test_what_is_switched_off_changes_no_number(ablation):
    jobs = [job(name=f"{at}", seed=at, steps=3) for at in range(3)]
    results = train(jobs, ablation=fleet.Ablation(**ablation))
    for one in jobs:
        assert list(results[one.name].losses) == losses_from(one.seed)


def test_batches_may_be_views_of_one_tensor():
    whole = torch.stack([torch.stack(one) for one in batches(4)])
    one = job(data=lambda: whole, steps=4)
    results = train([one])
    assert results["job"].error is None
    assert list(results["job"].losses) == train_plainly(one)[0]


def test_three_architectures_of_hugging_face():
    transformers = pytest.importorskip("transformers")
    tokens = [{"input_ids": one[0], "labels": one[0]} for one in batches(4)]
    gpt2 = transformers.GPT2Config(
        n_layer=3, n_embd=64, n_head=2, vocab_size=256, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    bert = transformers.BertConfig(
        num_hidden_layers=3, hidden_size=64, num_attention_heads=2, intermediate_size=128, vocab_size=256
    )
    vit = transformers.ViTConfig(
        num_hidden_layers=3, hidden_size=64, num_attention_heads=2, intermediate_size=128, image_size=32, patch_size=8,
        num_labels=10, hidden_dropout_prob=0.1,
    )  # fmt: skip
    images = [
        {
            "pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(at)),
            "labels": torch.tensor([1, 2]),
        }
        for at in range(4)
    ]

    def step(model, batch):
        return model(**batch).loss

    jobs = [
        job("GPT-2", lambda: transformers.GPT2LMHeadModel(gpt2), lambda: tokens, step, steps=3),
        job(
            "GPT-2 in half",
            lambda: transformers.GPT2LMHeadModel(gpt2),
            lambda: tokens,
            step,
            steps=2,
            precision="bfloat16",
        ),
        job("BERT", lambda: transformers.BertForMaskedLM(bert), lambda: tokens, step, steps=3),
        job("ViT", lambda: transformers.ViTForImageClassification(vit), lambda: images, step, steps=3),
    ]
    results = train(jobs, budget="2MB")
    for one in jobs:
        assert results[one.name].error is None
        assert list(results[one.name].losses) == train_plainly(one)[0], one.name
    assert all(len(made.checkpoint.name) for made in results.values())


def test_measured_jobs_are_simulated_and_not_trained():
    calls = []

    def counted():
        calls.append(1)
        return gpt()

    jobs = [job(name=f"{at}", model=counted, clip_norm=1.0 if at else None, accumulate=2, steps=3) for at in range(2)]
    costs = fleet.measure(jobs, budget="2500KB", host_budget="256MiB")
    assert len(calls) == 2
    assert [(one.name, one.num_steps, one.accumulate, one.clips) for one in costs] == [
        ("0", 3, 2, False),
        ("1", 3, 2, True),
    ]
    parameters = sum(one.nbytes for one in gpt().parameters())
    for cost in costs:
        assert len(cost.shards) > 1
        assert all(one.forward_s > 0 for one in cost.shards[:-1]) and all(one.backward_s > 0 for one in cost.shards)
        assert all((one.step_s > 0) == (one.state_bytes > 0) for one in cost.shards)
        assert parameters <= sum(one.parameter_bytes for one in cost.shards) < 1.1 * parameters
        assert sum(one.state_bytes for one in cost.shards) >= 2 * parameters
    devices = tuple(fleet.DeviceCost(name=f"cpu:{at}", budget_bytes=2_500_000) for at in range(2))
    problem = fleet.FleetProblem(jobs=costs, devices=devices)
    schedule = fleet.simulate(problem)
    fleet.verify(problem, schedule)
    trained = [one.with_changes(name=f"{one.name} trained") for one in jobs]
    results = train(trained, budget="2500KB")
    units = sum(len(cost.step_units) * cost.num_steps for cost in costs)
    assert len(schedule.units) == units == sum(one.num_units for one in results.devices)


def test_what_cannot_be_measured_is_said():
    with pytest.raises(PenstockError, match="job 'large' could not be measured: .*`budget` must be at least"):
        fleet.measure([job(name="large")], budget="300KB", host_budget="64MiB")
