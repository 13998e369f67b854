"""A budget in bytes is kept at the true peak, with the least moved, or refused with the smallest that works."""

import pytest
import torch
from torch import nn

from penstock import offload, probe
from penstock.errors import BudgetError

MIB = 2**20


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))])


def prepare(model):
    batch = torch.ones(2048, 128)
    model(batch).square().mean().backward()  # gradients exist
    return batch


def step_of(model, batch, offloader):
    def step():
        for parameter in model.parameters():
            parameter.grad.zero_()
        with offloader:
            model(batch).square().mean().backward()

    return step


@pytest.fixture
def plain_report():
    model = make_model()
    batch = prepare(model)

    def step():
        for parameter in model.parameters():
            parameter.grad.zero_()
        model(batch).square().mean().backward()

    return probe.peak_bytes(step, device="cpu")


@pytest.mark.parametrize("share", [0.85, 0.7])
def test_a_budget_is_kept_with_less_moved_than_without(tmp_path, plain_report, share):
    model = make_model()
    batch = prepare(model)
    budget = plain_report.start_bytes + int(share * plain_report.activation_bytes)
    offloader = offload.activations(model, disk=tmp_path, max_in_flight="8MiB", min_size="64KiB", budget=budget)
    step = step_of(model, batch, offloader)
    for _ in range(5):
        step()
    report = probe.peak_bytes(step, device="cpu")
    statistics = offloader.statistics()
    assert report.peak_bytes <= budget
    assert 0 < statistics.parked_bytes < statistics.saved_bytes
    assert statistics.kept_bytes["kept: the budget has room"] > 0
    offloader.close()


def test_a_budget_that_cannot_be_met_is_refused_with_the_smallest_that_can(tmp_path, plain_report):
    model = make_model()
    batch = prepare(model)
    budget = plain_report.start_bytes + 2 * MIB
    offloader = offload.activations(model, disk=tmp_path, max_in_flight="8MiB", min_size="64KiB", budget=budget)
    with pytest.raises(BudgetError, match="needs at least .* because"):
        step_of(model, batch, offloader)()
    offloader.close()


def test_without_a_budget_the_peak_falls_far(tmp_path, plain_report):
    model = make_model()
    batch = prepare(model)
    offloader = offload.activations(model, disk=tmp_path, max_in_flight="8MiB", min_size="64KiB", max_stall=1.0)
    step = step_of(model, batch, offloader)
    for _ in range(3):
        step()
    assert probe.peak_bytes(step, device="cpu").activation_bytes < 0.6 * plain_report.activation_bytes
    offloader.close()


def test_a_fetched_storage_lives_no_longer_than_its_last_use(tmp_path, plain_report):
    """In backward, what was fetched goes again: the sum of all of it never stands on the device at once."""
    model = make_model()
    batch = prepare(model)
    offloader = offload.activations(model, disk=tmp_path, max_in_flight="4MiB", min_size="64KiB", max_stall=1.0)
    loss = None
    with offloader:
        loss = model(batch).square().mean()
        for waterfall in offloader._waterfalls.values():
            waterfall.drain()
    report = probe.peak_bytes(loss.backward, device="cpu")
    assert report.activation_bytes < 0.45 * plain_report.activation_bytes
    offloader.close()
