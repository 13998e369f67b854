"""Steps put together from records, and records of models on a machine that is not available."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.machines import MACHINES
from penstock.state import Rates, StepKind, best_plan, best_split, modelled_record, simulate, step_problem, verify
from penstock.state._record import NOBODY
from penstock.state._split import places
from penstock.state._step import can_be_on_host
from penstock.testing import GPT

KIB = 2**10
RATES = Rates(in_bytes_per_s=54e9, out_bytes_per_s=54e9, both_in_bytes_per_s=48e9, both_out_bytes_per_s=44e9)
KIND = StepKind(device_bytes_per_s=2.6e12, slice_bytes=256 * KIB, min_page_bytes=16 * KIB, min_saved_bytes=64 * KIB)


def make():
    return GPT(num_layers=4, width=128, num_heads=4, context=64, checkpointed=True)


def make_step():
    model, tokens = make(), torch.zeros(8, 64, dtype=torch.int64)
    return model, lambda: model(tokens, tokens)


@pytest.fixture(scope="module")
def record():
    return modelled_record(make_step, MACHINES["h200"])


def named(record, name):
    return next(index for index in record.parameters if record.storages[index].name == name)


def pages_of(problem, start):
    return [page for page in problem.pages if page.name.startswith(start)]


def test_a_record_has_every_parameter_with_its_gradient(record):
    expected = {name: parameter.nbytes for name, parameter in make().named_parameters()}
    assert {record.storages[index].name: record.storages[index].size_bytes for index in record.parameters} == expected
    gradients = {storage.gradient_of: storage for storage in record.storages if storage.gradient_of != NOBODY}
    assert gradients.keys() == set(record.parameters)
    assert 0 < record.backward < len(record.seconds)
    assert all(gradient.born >= record.backward for gradient in gradients.values())


def test_uses_are_in_order_and_within_the_life(record):
    for storage in record.storages:
        assert list(storage.uses) == sorted(set(storage.uses))
        assert len(storage.uses) == len(storage.writes)
        if storage.uses:
            assert max(0, storage.born) <= storage.uses[0]
            assert storage.uses[-1] <= storage.dies


def test_a_checkpointed_weight_is_cast_in_forward_and_once_more(record):
    """Autocast casts it for forward, and again when the block is recomputed."""
    weight = named(record, "blocks.1.qkv.weight")
    casts = [storage for storage in record.storages if storage.cast_of == weight]
    assert [storage.born < record.backward for storage in casts] == [True, False]
    assert all(storage.size_bytes * 2 == record.storages[weight].size_bytes for storage in casts)
    assert weight in can_be_on_host(record)
    assert named(record, "blocks.1.norm1.weight") not in can_be_on_host(record)  # a layer norm reads it as it is


def test_operators_take_the_time_that_the_machine_needs(record):
    other = modelled_record(make_step, MACHINES["a100"])
    assert other.names == record.names
    assert sum(other.seconds) >= sum(record.seconds) > 0


def test_without_autocast_nothing_is_cast():
    plain = modelled_record(make_step, MACHINES["h200"], dtype=None)
    assert all(storage.cast_of == NOBODY for storage in plain.storages)
    assert not can_be_on_host(plain)


def test_activations_between_forward_and_backward_are_pages(record):
    problem = step_problem(record, KIND, {}, RATES, 2**30)
    saved = pages_of(problem, "saved")
    assert len(saved) >= 3  # the input of each block but the last, which backward needs at once
    assert all(page.is_born and page.uses[0] < record.backward for page in saved)
    without = StepKind(device_bytes_per_s=2.6e12, slice_bytes=256 * KIB, min_saved_bytes=2**40)
    assert max(step_problem(record, without, {}, RATES, 2**30).pool_bytes) > max(problem.pool_bytes)


@pytest.mark.parametrize("place", ["backward", "step", "forward"])
def test_each_parameter_is_updated_once(record, place):
    problem = step_problem(record, KIND, dict.fromkeys(record.parameters, place), RATES, 2**30)
    weight = next(page for page in problem.pages if page.name == "weight of blocks.1.expand.weight")
    states = pages_of(problem, "state of blocks.1.expand.weight")
    assert weight.size_bytes == 4 * 128 * 512
    assert sum(page.size_bytes for page in states) == 2 * weight.size_bytes
    assert all(len(page.uses) == 1 and page.writes == (True,) for page in states)
    updates = {page.uses[0] for page in states}
    assert {use for use, writes in zip(weight.uses, weight.writes, strict=True) if writes} == updates
    gradients = pages_of(problem, "gradient of blocks.1.expand.weight")
    assert bool(gradients) == (place != "backward")
    if place == "forward":  # born late in one step, used up early in the next
        assert gradients[0].uses[-1] >= problem.num_operators > gradients[0].uses[0]


def test_what_the_host_updates_never_comes_in_but_as_a_cast(record):
    weight = named(record, "blocks.1.expand.weight")
    problem = step_problem(record, KIND, {weight: "host"}, RATES, 2**30)
    assert not pages_of(problem, "weight of blocks.1.expand.weight")
    assert not pages_of(problem, "state of blocks.1.expand.weight")
    (cast,) = pages_of(problem, "cast of blocks.1.expand.weight")
    (gradient,) = pages_of(problem, "gradient of blocks.1.expand.weight")
    assert cast.is_from_host
    assert gradient.leaves
    assert cast.size_bytes == gradient.size_bytes == 2 * 128 * 512
    (update,) = problem.updates
    assert (problem.pages[update.reads], problem.pages[update.writes]) == (gradient, cast)


def test_micro_batches_add_up_and_update_once(record):
    kind = StepKind(device_bytes_per_s=2.6e12, num_micro_batches=3, slice_bytes=256 * KIB)
    problem = step_problem(record, kind, dict.fromkeys(record.parameters, "backward"), RATES, 2**30)
    (gradient,) = pages_of(problem, "gradient of blocks.1.expand.weight")
    assert gradient.size_bytes == 4 * 128 * 512
    assert gradient.writes[:3] == (True, True, True)
    (weight,) = pages_of(problem, "weight of blocks.1.expand.weight")
    assert sum(weight.writes) == 1
    weights = [index for index in record.parameters if index in can_be_on_host(record)]
    split = step_problem(record, kind, dict.fromkeys(weights, "host"), RATES, 2**30)
    assert len(pages_of(split, "gradient of blocks.1.expand.weight")) == 3  # each micro-batch's leaves


@pytest.mark.parametrize("elsewhere", ["backward", "step", "forward"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_plans_of_whole_steps_are_correct(record, elsewhere, share, num_micro_batches):
    kind = StepKind(
        device_bytes_per_s=2.6e12,
        num_micro_batches=num_micro_batches,
        slice_bytes=64 * KIB,
        min_saved_bytes=64 * KIB,
        waits_for_step=elsewhere == "forward",
    )
    rates = Rates(
        in_bytes_per_s=54e9,
        out_bytes_per_s=54e9,
        both_in_bytes_per_s=48e9,
        both_out_bytes_per_s=44e9,
        host_bytes_per_s=122e9,
    )
    problem = step_problem(record, kind, places(record, share, elsewhere), rates, 2**62)
    all_bytes = sum(page.size_bytes for page in problem.pages)
    budget_bytes = max(problem.pool_bytes) + all_bytes // 2
    problem = step_problem(record, kind, places(record, share, elsewhere), rates, budget_bytes)
    best = best_plan([problem])
    verify(best.problem, best.plan)
    assert best.simulated == simulate(best.problem, best.plan)


def test_late_layers_go_to_the_host_first(record):
    where = places(record, 0.3, "backward")
    on_host = [record.storages[index].name for index, place in where.items() if place == "host"]
    assert any(name.startswith("blocks.3") for name in on_host)
    assert not any(name.startswith("blocks.0") for name in on_host)
    assert set(places(record, 0.0, "step").values()) == {"step"}


def test_the_host_takes_what_makes_a_step_shorter():
    """Small tensors on a slow link: moving the state is all that counts."""
    record = modelled_record(make_step, MACHINES["h200"])
    slow = Rates(in_bytes_per_s=1e8, out_bytes_per_s=1e8, both_in_bytes_per_s=1e8, both_out_bytes_per_s=1e8, copy_s=0.0)
    budget_bytes = max(step_problem(record, KIND, {}, slow, 2**30).pool_bytes) + 3 * 2**20
    share, exact = best_split(record, KIND, slow, budget_bytes, elsewhere="backward")
    assert share == 0.0
    fast_host = Rates(
        in_bytes_per_s=1e8,
        out_bytes_per_s=1e8,
        both_in_bytes_per_s=1e8,
        both_out_bytes_per_s=1e8,
        copy_s=0.0,
        host_bytes_per_s=1e12,
    )
    share, split = best_split(record, KIND, fast_host, budget_bytes, elsewhere="backward")
    assert share > 0.5
    assert split.simulated.step_s < exact.simulated.step_s
    assert split.plan.in_bytes(split.problem) < exact.plan.in_bytes(exact.problem)


class Shared(nn.Module):
    """A weight that two layers share, a frozen one, one without use, and blocks that are recomputed."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 256)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(256, 256).requires_grad_(False)
        self.unused = nn.Linear(256, 256)

    def forward(self, x):
        x = checkpoint(self.first, x, use_reentrant=False)
        return self.second(self.frozen(x)).square().mean()


def test_shared_frozen_and_unused_parameters():
    def make_shared():
        shared, x = Shared(), torch.ones(16, 256)
        return shared, lambda: shared(x)

    record = modelled_record(make_shared, MACHINES["h200"])
    names = {record.storages[index].name for index in record.parameters}
    assert "first.weight" in names
    assert "second.weight" not in names
    problem = step_problem(record, KIND, dict.fromkeys(record.parameters, "backward"), RATES, 2**30)
    (weight,) = pages_of(problem, "weight of first.weight")
    assert sum(weight.writes) == 1
    (frozen,) = pages_of(problem, "weight of frozen.weight")  # it leaves too, and is never copied out
    assert not any(frozen.writes)
    assert not pages_of(problem, "state of frozen.weight")
    assert not pages_of(problem, "state of unused.weight")
    verify(problem, best_plan([problem]).plan)
