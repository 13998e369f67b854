"""Models whose forward depends on numbers: no graph stands for them, and they train as the plain loop trains them."""

import re

import pytest
import torch
from fleet_jobs import train
from torch import nn
from whole_jobs import assert_as_plain, batches, loss, make_job, plainly

from penstock import fleet
from penstock.errors import BudgetError, BudgetNotKeptWarning
from penstock.fleet import _prepare

CASES = {
    "plain": {},
    "accumulated and clipped": {"accumulate": 2, "clip_norm": 0.5},
    "bfloat16": {"precision": "bfloat16"},
    "float16": {"precision": "float16"},
    "momentum and a schedule": {
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3),
    },
    "batches of several lengths": {"data": lambda: batches((16, 16, 12, 8, 16))},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("budget", ["64MiB", "1MiB"])
def test_losses_and_tensors_equal_the_plain_loop(case, budget):
    job = make_job(**CASES[case])
    results = train([job], num_devices=1, budget=budget, verify=True)
    assert_as_plain(job, results["whole"])
    (device,) = results.devices
    assert 0 < device.measured_peak_bytes <= device.budget_bytes
    if budget == "1MiB":
        assert device.parked_bytes > 0


class Framed(nn.Module):
    """Its own parameters are used at the begin and at the end, so their gradients arrive far apart."""

    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.scale, self.shift, self.head = (nn.Parameter(torch.randn(64, width) * 0.1) for _ in range(3))
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(8))

    def forward(self, tokens):
        x = self.embed(tokens) * self.scale[: tokens.shape[1]] + self.shift[: tokens.shape[1]]
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        if torch.isnan(x).any():
            raise ValueError("no number")
        return x @ self.head.T


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_gradients_that_arrive_far_apart_stay_while_autograd_adds_to_them(clip_norm):
    job = make_job(model=Framed, accumulate=3, clip_norm=clip_norm, data=lambda: batches((16,) * 6))
    refused = train([job], num_devices=1, budget="1KiB")["whole"].error
    smallest = int(re.search(r"at least (\d+) ", refused)[1])
    results = train([job], num_devices=1, budget=smallest, verify=True)
    assert_as_plain(job, results["whole"])
    (device,) = results.devices
    assert 0 < device.measured_peak_bytes <= device.budget_bytes
    assert device.parked_bytes > 0


def test_a_named_budget_holds_whichever_cuts_were_tried_before(monkeypatch):
    """How long gradients wait for each other depends on all shards: what one took in another cut is no measure."""
    job = make_job(model=Framed, accumulate=3, clip_norm=0.5, data=lambda: batches((16,) * 6))
    refused = train([job], num_devices=1, budget="1KiB")["whole"].error
    smallest = int(re.search(r"at least (\d+) ", refused)[1])
    cuts = [(1, 2, 4, 7, 10)]  # the first of the eight blocks alone, the others beside each other

    def partition(_):
        if not cuts:
            raise BudgetError("none fits by estimate")
        return cuts.pop()

    monkeypatch.setattr(_prepare, "partition", partition)
    assert_as_plain(job, train([job], num_devices=1, budget=smallest, verify=True)["whole"])
    assert not cuts


def test_several_train_beside_others_on_two_devices():
    jobs = [make_job(f"whole {seed}", seed=seed) for seed in range(3)]
    traced = fleet.Job(
        name="traced",
        model=lambda: nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.3), nn.Linear(32, 1)),
        data=lambda: torch.randn(32, 8, generator=torch.Generator().manual_seed(1)).split(8),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=torch.optim.AdamW,
        epochs=3,
    )
    results = train([*jobs, traced], budget="1MiB")
    for job in (*jobs, traced):
        assert_as_plain(job, results[job.name])


def test_a_job_goes_on_where_it_was_stopped(tmp_path):
    job = make_job(clip_norm=1.0)
    stopped = job.with_changes(validation=lambda: batches()[:1], evaluate_every=4)
    first = train([stopped], budget="1MiB", num_devices=1, run_dir=tmp_path, stopper=lambda *_: True)
    assert first["whole"].state is fleet.JobState.STOPPED
    losses, _ = plainly(job)
    assert list(first["whole"].losses) == losses[:4]


def test_a_validation_sees_the_model_in_evaluation():
    def metric(model, batch):
        assert not model.training
        with torch.no_grad():
            return {"right": (model(batch[0]).argmax(-1) == batch[1]).float().mean()}

    job = make_job(validation=lambda: batches()[:2], metric=metric)
    results = train([job], budget="1MiB", num_devices=1)
    assert results["whole"].error is None, results["whole"].error
    assert [row["step"] for row in results["whole"].validations] == [5.0, 10.0]
    assert all(0 <= row["right"] <= 1 for row in results["whole"].validations)


def test_the_smallest_budget_that_a_refusal_names_holds_for_batches_that_go_the_same_way():
    job = make_job(clip_norm=1.0)
    refused = train([job], budget="64KiB", num_devices=1)["whole"]
    assert BudgetError.__name__ in refused.error
    named = int(refused.error.split("must be at least ")[1].split()[0])
    with pytest.warns(BudgetNotKeptWarning, match="another path through the model"):
        assert_as_plain(job, train([job], budget=named, num_devices=1)["whole"])
    below = train([job], budget=int(named * 0.9), num_devices=1)["whole"]
    assert below.state is fleet.JobState.FAILED


class Straight(torch.autograd.Function):
    """A derivative that is not that of its forward."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.5


class Derived(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))
        if kind == "hook on a module":
            self.layers[1].register_full_backward_hook(lambda module, leaving, taken: (leaving[0] * 2,))

    def forward(self, x):
        x = self.layers[0](x)
        if self.kind == "function":
            x = Straight.apply(x)
        if self.kind == "hook on a tensor":
            x.register_hook(lambda gradient: gradient * 2)
        return self.layers[1](x)


@pytest.mark.parametrize("kind", ["function", "hook on a tensor", "hook on a module"])
def test_derivatives_of_the_models_own_are_kept(kind):
    """A trace would take the derivatives of forward's operators instead, and train something else without a word."""
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    job = make_job(
        model=lambda: Derived(kind), data=lambda: x.split(8), loss=lambda model, x: model(x).square().mean(), epochs=3
    )
    assert_as_plain(job, train([job], num_devices=1)["whole"])


class Teacher(nn.Module):
    """A moving average that is a parameter."""

    def __init__(self, writes):
        super().__init__()
        self.student, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        self.writes = writes

    def forward(self, x):
        if x.sum() > 1e9:
            return x
        with torch.no_grad():
            if self.writes == "in place":
                self.teacher.weight.mul_(0.9).add_(self.student.weight, alpha=0.1)
            elif self.writes == "data in place":
                self.teacher.weight.data.mul_(0.9)
            else:
                self.teacher.weight.data = self.teacher.weight.data * 0.9
        return self.student(x) - self.teacher(x)


@pytest.mark.parametrize("writes", ["in place", "data in place", "other data"])
def test_writes_to_parameters_are_refused_by_name(writes):
    job = make_job(
        model=lambda: Teacher(writes),
        data=lambda: torch.ones(8, 8).split(4),
        loss=lambda model, x: model(x).square().mean(),
    )
    result = train([job], num_devices=1)["whole"]
    assert "forward writes to the parameter teacher" in str(result.error)


class Penalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = x.requires_grad_()
        y = self.frozen(self.layer(x).tanh()).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        return y.square() / 100 + slope.square().mean()


def test_gradients_inside_of_forward_and_parameters_that_nobody_steps():
    job = make_job(
        model=Penalized,
        data=lambda: torch.randn(16, 8, generator=torch.Generator().manual_seed(1)).split(4),
        loss=lambda model, x: model(x.clone()),
        optimizer=lambda named_parameters: torch.optim.SGD([p for name, p in named_parameters if "layer" in name], 0.1),
    )
    assert_as_plain(job, train([job], num_devices=1)["whole"])


def test_nothing_is_printed_on_the_way(capfd):
    assert train([make_job(epochs=None, steps=1)], num_devices=1)["whole"].error is None
    out, err = capfd.readouterr()
    assert "forward" not in out + err


def test_what_the_models_own_code_raises_is_said():
    def broken(model, batch):
        if batch[0].sum() > 0:
            raise LookupError("no such word")
        return loss(model, batch)

    result = train([make_job(loss=broken)], num_devices=1)["whole"]
    assert "LookupError: no such word" in result.error


def test_a_buffer_that_changes_its_shape_is_refused_by_name():
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 1)
            self.register_buffer("history", torch.zeros(0))

        def forward(self, x):
            self.history = torch.cat([self.history, x.detach().sum().reshape(1)])
            return self.layer(x) if self.history.sum() < 1e9 else x

    job = make_job(
        model=Growing, data=lambda: torch.ones(8, 8).split(4), loss=lambda model, x: model(x).square().mean()
    )
    result = train([job], num_devices=1)["whole"]
    assert "buffer history" in result.error


class Counting(nn.Module):
    """PyTorch traces it, with sizes that only the numbers tell."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        size = int((x > 0).sum().clamp(4, 8))
        torch._check(size >= 4)
        torch._check(size <= 8)
        x = x[:, :1].expand(-1, size, -1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_sizes_that_depend_on_numbers():
    generator = torch.Generator().manual_seed(0)
    job = make_job(
        model=Counting,
        data=lambda: [torch.randn(4, 2, 16, generator=generator.manual_seed(index)) for index in range(4)],
        loss=lambda model, x: model(x).square().mean(),
    )
    assert_as_plain(job, train([job], num_devices=1)["whole"])


@pytest.mark.filterwarnings("ignore::penstock.errors.BudgetNotKeptWarning")
@pytest.mark.parametrize("changes", [{"accumulate": 2}, {"clip_norm": 0.5}], ids=str)
def test_a_named_budget_is_not_refused_again_when_batches_go_other_ways(changes):
    """Batches after the first may take more: that is told, and no error names another budget."""
    job = make_job(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), **changes)
    refused = fleet.run([job], ["cpu"], "1KB", host="64MiB", progress=None)["whole"]
    named = int(re.search(r"at least (\d+)", refused.error)[1])
    assert_as_plain(job, fleet.run([job], ["cpu"], named, host="64MiB", progress=None)["whole"])
