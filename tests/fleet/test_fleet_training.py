"""Training in shards equals the plain loop to the bit."""

import functools

import pytest
import torch
from fleet_jobs import Mixed, batches, gpt, make_job, train, train_plainly
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from penstock import fleet


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


def by_kind(named_parameters):
    named_parameters = list(named_parameters)
    biases = [parameter for name, parameter in named_parameters if name.endswith("bias")]
    others = [parameter for name, parameter in named_parameters if not name.endswith("bias")]
    return torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": others, "lr": 3e-3}], lr=1e-2)


JOBS = {
    "sgd": make_job(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
    "momentum": make_job(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)),
    "adamw": make_job(),
    "adagrad": make_job(optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=0.1)),
    "adafactor": make_job(optimizer=lambda parameters: torch.optim.Adafactor(parameters, lr=0.1)),
    "groups": make_job(optimizer=by_kind),
    "accumulation": make_job(accumulate=3, steps=3),
    "clipping": make_job(clip_norm=0.3),
    "clipping and accumulation": make_job(clip_norm=0.3, accumulate=2, steps=3),
    "tied, dropout, batch norm": make_job(model=Mixed, seed=4),
    "all of it": make_job(model=Mixed, accumulate=2, clip_norm=0.5, steps=3, seed=5),
    "frozen base": make_job(
        model=Adapted,
        optimizer=lambda parameters: torch.optim.AdamW(
            [parameter for parameter in parameters if parameter.requires_grad], lr=1e-2
        ),
    ),
    "schedule": make_job(
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=9)
    ),
    "bfloat16": make_job(precision="bfloat16"),
    "float16": make_job(precision="float16", clip_norm=1.0),
    "epochs of a shuffled loader": make_job(
        data=lambda: DataLoader(batches(8), batch_size=None, shuffle=True), epochs=2, model=Mixed
    ),
    "by hand": make_job(
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
    jobs = [job.with_changes(name=name) for name, job in JOBS.items()]
    results = train(jobs, budget="2500KB", ablation=fleet.Ablation(recompute=recompute))
    for job in jobs:
        losses, expected = plainly(job.name)
        assert results[job.name].state is fleet.JobState.DONE, results[job.name].error
        assert list(results[job.name].losses) == losses, job.name
        trained = results[job.name].model().state_dict()
        for key, value in expected.items():
            assert torch.equal(trained[key], value), (job.name, key)
    for device in results.devices:
        assert device.peak_bytes <= device.budget_bytes == 2_500_000
        assert (device.recompute_s > 0) == recompute


@pytest.mark.parametrize("budget", ["900KB", "2MB", "100MB"])
def test_a_measured_peak_stays_below_the_budget(budget):
    """One large model alone is a fleet of one."""
    job = make_job(model=Mixed, accumulate=2)
    results = train([job], num_devices=1, budget=budget, verify=True)
    (device,) = results.devices
    assert list(results["job"].losses) == train_plainly(job)[0]
    assert 0 < device.measured_peak_bytes <= device.peak_bytes <= device.budget_bytes


def test_jobs_with_one_frozen_base_keep_it_once(tmp_path):
    jobs = [JOBS["frozen base"].with_changes(name=f"{index}", seed=3) for index in range(4)]
    running = fleet.Fleet([fleet.Device(name="cpu", threads=1)], "2500KB", host="64MiB", progress=None)
    counts = []

    def more():
        counts.append(len(running._engine.frozen))
        return any(row.state in ("pending", "running") for row in running.rows())

    with running:
        for job in jobs:
            running.add(job)
        results = running.wait(more)
        assert 0 < max(counts) < 4 * 4  # shards of the base, not of each job
        assert not running._engine.frozen  # given back with the last job
    assert len({results[job.name].losses for job in jobs}) == 1
    assert list(results["0"].losses) == train_plainly(jobs[0])[0]


def test_a_validation_sees_the_model_in_evaluation():
    job = make_job(
        model=Mixed,
        validation=lambda: batches(3, seed=9),
        evaluate_every=2,
        metric=lambda model, batch: {"loss": (loss := model(*batch)), "twice": 2 * loss},
    )
    results = train([job], num_devices=1, budget="2MB")
    assert results["job"].error is None
    validations = results["job"].validations
    assert [entry["step"] for entry in validations] == [2, 4]
    _, model = train_plainly(job)
    model.eval()
    with torch.no_grad():
        expected = sum(model(*batch).item() for batch in batches(3, seed=9)) / 3
    assert validations[-1]["loss"] == expected
    assert validations[-1]["twice"] == pytest.approx(2 * expected)
    assert results.best("loss").name == "job"


@functools.cache
def losses_from(seed):
    return train_plainly(make_job(seed=seed, steps=3))[0]


@pytest.mark.parametrize("scheduler", ["sharded-lrtf", "fifo", "shortest-first", "random"])
def test_every_scheduler_trains_the_same(scheduler):
    jobs = [make_job(name=f"{index}", seed=index, steps=3) for index in range(4)]
    results = train(jobs, scheduler=scheduler)
    for job in jobs:
        assert list(results[job.name].losses) == losses_from(job.seed)


@pytest.mark.parametrize("ablation", [{"double_buffer": False}, {"sharp": False}], ids=["no double buffer", "no SHARP"])
def test_what_is_switched_off_changes_no_number(ablation):
    jobs = [make_job(name=f"{index}", seed=index, steps=3) for index in range(3)]
    results = train(jobs, ablation=fleet.Ablation(**ablation))
    for job in jobs:
        assert list(results[job.name].losses) == losses_from(job.seed)


def test_batches_may_be_views_of_one_tensor():
    whole = torch.stack([torch.stack(batch) for batch in batches(4)])
    job = make_job(data=lambda: whole, steps=4)
    results = train([job])
    assert results["job"].error is None
    assert list(results["job"].losses) == train_plainly(job)[0]


def test_three_architectures_of_hugging_face():
    transformers = pytest.importorskip("transformers")
    tokens = [{"input_ids": batch[0], "labels": batch[0]} for batch in batches(4)]
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
            "pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(index)),
            "labels": torch.tensor([1, 2]),
        }
        for index in range(4)
    ]

    def step(model, batch):
        return model(**batch).loss

    jobs = [
        make_job("GPT-2", lambda: transformers.GPT2LMHeadModel(gpt2), lambda: tokens, step, steps=3),
        make_job(
            "GPT-2 in half",
            lambda: transformers.GPT2LMHeadModel(gpt2),
            lambda: tokens,
            step,
            steps=2,
            precision="bfloat16",
        ),
        make_job("BERT", lambda: transformers.BertForMaskedLM(bert), lambda: tokens, step, steps=3),
        make_job("ViT", lambda: transformers.ViTForImageClassification(vit), lambda: images, step, steps=3),
    ]
    results = train(jobs, budget="2MB")
    for job in jobs:
        assert results[job.name].error is None
        assert list(results[job.name].losses) == train_plainly(job)[0], job.name
    assert all(len(result.checkpoint.name) for result in results.values())
