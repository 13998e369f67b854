"""Factories that return what somebody else has too."""

import copy
import functools
import warnings

import pytest
import torch
from fleet_jobs import train as train_all
from fleet_jobs import train_plainly
from torch import nn

from penstock import fleet
from penstock.errors import SharedModelWarning
from penstock.fleet._handed import held_elsewhere


def net():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))


def make_job(name, model, **options):
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    return fleet.Job(
        **{
            "name": name,
            "model": model,
            "data": lambda: x.split(8),
            "loss": lambda model, batch: (model(batch) - batch.sum(1, keepdim=True)).square().mean(),
            "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
            "epochs": 2,
        }
        | options
    )


def train(jobs, **options):
    return list(train_all(jobs, **options).values())


def numbers(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("num_jobs", [1, 2, 3])
def test_jobs_whose_factory_returns_one_model_train_copies_of_it(num_jobs):
    model = net()
    before = numbers(model)
    plain, _ = train_plainly(make_job("plain", lambda: copy.deepcopy(model)))
    with pytest.warns(SharedModelWarning, match="trains a copy"):
        results = train([make_job(f"job {index}", lambda: model) for index in range(num_jobs)])
    assert [result.state for result in results] == [fleet.JobState.DONE] * num_jobs
    assert all(list(result.losses) == plain for result in results)
    assert equal(numbers(model), before)
    assert model(torch.ones(2, 8)).shape == (2, 1)  # whole, and usable


def test_a_part_that_is_held_elsewhere_is_named_and_stays_whole():
    backbone = nn.Linear(8, 16)
    before = numbers(backbone)
    with pytest.warns(SharedModelWarning, match="part '0'"):
        results = train(
            [make_job(f"head {index}", lambda: nn.Sequential(backbone, nn.Linear(16, 1))) for index in range(2)]
        )
    assert all(result.state is fleet.JobState.DONE for result in results)
    assert equal(numbers(backbone), before)


def test_what_is_held_elsewhere_and_cannot_be_copied_is_refused_by_name():
    class Stubborn(nn.Linear):
        def __deepcopy__(self, memo):
            raise RuntimeError("no copies")

    model = Stubborn(8, 1)
    (result,) = train([make_job("stubborn", lambda: model)])
    assert result.state is fleet.JobState.FAILED
    assert "job 'stubborn': model()" in result.error
    assert "no copies" in result.error
    assert model(torch.ones(2, 8)).shape == (2, 1)


def test_a_tensor_that_a_checkpoint_is_read_into_is_not_the_users():
    table = torch.randn(16, 8)
    before = table.clone()
    x = torch.arange(16)
    job = make_job(
        "table",
        lambda: nn.Sequential(nn.Embedding.from_pretrained(table, freeze=False), nn.Linear(8, 1)),
        data=lambda: x.split(4),
        loss=lambda model, batch: model(batch).square().mean(),
    )
    with fleet.Fleet(["cpu"], "8MiB", host="64MiB", progress=None) as running:
        running.add(job)

        def more():
            if "warm" not in running and running.results()["table"].state is fleet.JobState.DONE:
                running.clone("table", "warm", warm=True)
            return "warm" not in running

        results = running.wait(more)
    assert results["warm"].losses[0] < results["table"].losses[0]  # of the same batch: it went on from the other's end
    assert torch.equal(table, before)


class Weird(nn.Module):
    """Refers to itself and its parts in many ways."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.again = [self.layers[0], (self.layers[1], {"key": self.layers[0]})]
        self.bound = self.layers[0].forward
        self.partial = functools.partial(self.layers[1].forward)
        self.hidden = [self]
        layer = self.layers[0]
        self.closure = lambda x: layer(x) + 1
        self.layers[1].register_forward_hook(lambda *_: layer.weight)
        self.layers[1].weight = self.layers[0].weight


@pytest.mark.parametrize(
    "make",
    [
        net,
        Weird,
        lambda: nn.LSTM(4, 4, num_layers=2),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    ],
)
def test_a_new_module_is_nobody_elses(make):
    assert held_elsewhere([make()]) is None
    kept = make()
    assert held_elsewhere([kept]) == ""
    box, modules = [kept], dict(kept.named_modules())
    del kept, modules[""]
    for name in list(modules)[:-1]:
        del modules[name]
    assert held_elsewhere(box) == next(iter(modules), None)
    del modules
    parameter = next(box[0].parameters())
    assert held_elsewhere(box) == next(name for name, held in box[0].named_parameters() if held is parameter)


def test_an_iterator_that_two_jobs_read_is_refused_by_name():
    batches = iter(torch.randn(32, 8).split(8))
    results = train([make_job(name, net, data=lambda: batches, epochs=None, steps=2) for name in ("first", "second")])
    assert sorted(result.state.value for result in results) == ["done", "failed"]
    (failed,) = (result for result in results if result.state is fleet.JobState.FAILED)
    assert "each of its batches can be read only once" in failed.error


def test_no_warning_for_factories():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (result,) = train([make_job("own", net)])
    assert result.state is fleet.JobState.DONE
