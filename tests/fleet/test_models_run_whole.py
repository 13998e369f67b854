"""Models whose forward depends on numbers: no graph stands for them, and they train as the plain loop trains them."""

import random
import re

import numpy as np
import pytest
import torch
from fleet_jobs import train, train_plainly
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock import fleet
from penstock.errors import BudgetError, BudgetNotKeptWarning
from penstock.fleet import _prepare
from penstock.fleet._tree import Tree


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

    def _expert(self, at, x):
        return self.dropout(nn.functional.gelu(self.experts[at](x)))


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def batches(lengths=(16,) * 5, batch=8):
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randint(64, (batch, length), generator=generator) for _ in range(2)) for length in lengths]


def job(name="whole", **options):
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


def plainly(one):
    random.seed(one.seed)
    np.random.seed(one.seed)
    return train_plainly(one)


def assert_as_plain(one, result):
    assert result.error is None, result.error
    losses, model = plainly(one)
    assert list(result.losses) == losses
    trained = result.model().state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, trained[name]), name


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
    one = job(**CASES[case])
    results = train([one], num_devices=1, budget=budget, verify=True)
    assert_as_plain(one, results["whole"])
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
    one = job(model=Framed, accumulate=3, clip_norm=clip_norm, data=lambda: batches((16,) * 6))
    refused = train([one], num_devices=1, budget="1KiB")["whole"].error
    smallest = int(re.search(r"at least (\d+) ", refused)[1])
    results = train([one], num_devices=1, budget=smallest, verify=True)
    assert_as_plain(one, results["whole"])
    (device,) = results.devices
    assert 0 < device.measured_peak_bytes <= device.budget_bytes
    assert device.parked_bytes > 0


def test_a_named_budget_holds_whichever_cuts_were_tried_before(monkeypatch):
    """How long gradients wait for each other depends on all shards: what one took in another cut is no measure."""
    one = job(model=Framed, accumulate=3, clip_norm=0.5, data=lambda: batches((16,) * 6))
    refused = train([one], num_devices=1, budget="1KiB")["whole"].error
    smallest = int(re.search(r"at least (\d+) ", refused)[1])
    cuts = [(1, 2, 4, 7, 10)]  # the first of the eight blocks alone, the others beside each other

    def partition(_):
        if not cuts:
            raise BudgetError("none fits by estimate")
        return cuts.pop()

    monkeypatch.setattr(_prepare, "partition", partition)
    assert_as_plain(one, train([one], num_devices=1, budget=smallest, verify=True)["whole"])
    assert not cuts


def test_several_train_beside_others_on_two_devices():
    jobs = [job(f"whole {seed}", seed=seed) for seed in range(3)]
    traced = fleet.Job(
        name="traced",
        model=lambda: nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.3), nn.Linear(32, 1)),
        data=lambda: torch.randn(32, 8, generator=torch.Generator().manual_seed(1)).split(8),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=torch.optim.AdamW,
        epochs=3,
    )
    results = train([*jobs, traced], budget="1MiB")
    for one in (*jobs, traced):
        assert_as_plain(one, results[one.name])


def test_a_job_goes_on_where_it_was_stopped(tmp_path):
    one = job(clip_norm=1.0)
    stopped = one.with_changes(validation=lambda: batches()[:1], evaluate_every=4)
    first = train([stopped], budget="1MiB", num_devices=1, run_dir=tmp_path, stopper=lambda *_: True)
    assert first["whole"].state is fleet.JobState.STOPPED
    losses, _ = plainly(one)
    assert list(first["whole"].losses) == losses[:4]


def test_a_validation_sees_the_model_in_evaluation():
    def metric(model, batch):
        assert not model.training
        with torch.no_grad():
            return {"right": (model(batch[0]).argmax(-1) == batch[1]).float().mean()}

    one = job(validation=lambda: batches()[:2], metric=metric)
    results = train([one], budget="1MiB", num_devices=1)
    assert results["whole"].error is None, results["whole"].error
    assert [row["step"] for row in results["whole"].validations] == [5.0, 10.0]
    assert all(0 <= row["right"] <= 1 for row in results["whole"].validations)


def test_the_smallest_budget_that_a_refusal_names_holds_for_batches_that_go_the_same_way():
    one = job(clip_norm=1.0)
    refused = train([one], budget="64KiB", num_devices=1)["whole"]
    assert BudgetError.__name__ in refused.error
    named = int(refused.error.split("must be at least ")[1].split()[0])
    with pytest.warns(BudgetNotKeptWarning, match="another path through the model"):
        assert_as_plain(one, train([one], budget=named, num_devices=1)["whole"])
    below = train([one], budget=int(named * 0.9), num_devices=1)["whole"]
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
            self.layers[1].register_full_backward_hook(lambda module, given, taken: (given[0] * 2,))

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
    one = job(
        model=lambda: Derived(kind), data=lambda: x.split(8), loss=lambda model, x: model(x).square().mean(), epochs=3
    )
    assert_as_plain(one, train([one], num_devices=1)["whole"])


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
    one = job(
        model=lambda: Teacher(writes),
        data=lambda: torch.ones(8, 8).split(4),
        loss=lambda model, x: model(x).square().mean(),
    )
    result = train([one], num_devices=1)["whole"]
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
    one = job(
        model=Penalized,
        data=lambda: torch.randn(16, 8, generator=torch.Generator().manual_seed(1)).split(4),
        loss=lambda model, x: model(x.clone()),
        optimizer=lambda named_parameters: torch.optim.SGD([p for name, p in named_parameters if "layer" in name], 0.1),
    )
    assert_as_plain(one, train([one], num_devices=1)["whole"])


def test_nothing_is_printed_on_the_way(capfd):
    assert train([job(epochs=None, steps=1)], num_devices=1)["whole"].error is None
    out, err = capfd.readouterr()
    assert "forward" not in out + err


def test_what_the_models_own_code_raises_is_said():
    def broken(model, batch):
        if batch[0].sum() > 0:
            raise LookupError("no such word")
        return loss(model, batch)

    result = train([job(loss=broken)], num_devices=1)["whole"]
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

    one = job(model=Growing, data=lambda: torch.ones(8, 8).split(4), loss=lambda model, x: model(x).square().mean())
    result = train([one], num_devices=1)["whole"]
    assert "buffer history" in result.error


def test_atoms_follow_first_uses_and_hold_every_tensor_once():
    model = Branching()
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    leaves = list(batches()[0])
    from penstock.fleet._batch import flatten

    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    _, structure = flatten(batches()[0])
    tree = Tree(model, loss, leaves, structure, names)
    found = [name for atom in tree.atoms for name in atom.tensors]
    assert sorted(found) == sorted(names.values())
    assert found.index("embed.weight") < found.index("position") < found.index("norm.weight")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class Dropping(nn.Module):
    """Half of it is left out where the numbers say so."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))

    def forward(self, x):
        for layer in self.layers[: 4 if x.sum() < 0 else 8]:
            x = torch.tanh(layer(x))
        return x


def test_mini_batches_that_take_more_than_the_first_are_said():
    one = fleet.Job(
        name="dropping",
        model=Dropping,
        data=lambda: [torch.full((64, 32), sign) for sign in (-1.0, -0.5, 1.0, -1.0, 0.5)],
        loss=lambda model, x: model(x).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        epochs=1,
    )
    refused = train([one], budget=1000, num_devices=1)["dropping"]
    named = int(refused.error.split("must be at least ")[1].split()[0])
    with pytest.warns(BudgetNotKeptWarning, match=r"step 3 took \d+ bytes") as caught:
        train([one], budget=named, num_devices=1)
    assert len(caught) == 1
    taken = int(str(caught[0].message).split(" took ")[1].split()[0])
    assert taken > 1.05 * named
    results = train([one], budget=2 * taken, num_devices=1, verify=True)
    assert_as_plain(one, results["dropping"])
    assert results.devices[0].measured_peak_bytes <= 2 * taken


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
    one = job(
        model=Counting,
        data=lambda: [torch.randn(4, 2, 16, generator=generator.manual_seed(at)) for at in range(4)],
        loss=lambda model, x: model(x).square().mean(),
    )
    assert_as_plain(one, train([one], num_devices=1)["whole"])


class Masked(nn.Module):
    """Layers that save one small mask, or each its own copy of it."""

    def __init__(self, is_shared):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.is_shared = is_shared

    def forward(self, x):
        mask = (x.sum((0, 1)) > 0).float() + 1
        for layer in self.layers[: 6 if x.sum() < 1e9 else 5]:  # a branch on numbers: run whole
            x = torch.tanh(layer(x)) * (mask if self.is_shared else mask.clone())
        return x


def test_a_small_tensor_that_many_units_save_pins_none_of_them():
    named = []
    for is_shared in (False, True):
        one = fleet.Job(
            name="masked",
            model=lambda is_shared=is_shared: Masked(is_shared),
            data=lambda: [torch.ones(64, 32, 64)],
            loss=lambda model, x: model(x).square().mean(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            epochs=1,
        )
        refused = train([one], budget=1000, num_devices=1)["masked"]
        named.append(int(refused.error.split("must be at least ")[1].split()[0]))
    assert named[1] <= named[0] + 4096
