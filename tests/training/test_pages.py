"""Pages within a budget: what is recomputed, compiled or frozen, other shapes, and disks that fail."""

import contextlib
import copy
import errno
import itertools
import os

import pytest
import torch
from torch import nn
from training_loops import (
    OPTIMIZERS,
    Transformer,
    assert_same_training,
    batches,
    beside,
    loss_of,
    run_plain,
    simple_step,
)

from penstock import probe
from penstock.directio import SpillFile
from penstock.errors import BudgetError, TierDegradedWarning, TierReadError


@pytest.mark.parametrize("recompute", ["reentrant", "not reentrant"])
def test_checkpointed_blocks_with_dropout(make_training, recompute):
    torch.manual_seed(0)
    assert_same_training(make_training, Transformer(dropout=0.1, recompute=recompute), OPTIMIZERS["adamw"])


def test_frozen_parameters_are_fetched_and_never_written(make_training):
    torch.manual_seed(0)
    model = Transformer()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or name.startswith("embedding"))
    statistics = assert_same_training(
        make_training,
        model,
        lambda model: torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad]),
    )
    frozen = sum(parameter.nbytes for parameter in model.parameters() if not parameter.requires_grad)
    assert statistics.fetched_bytes > 2 * frozen


def test_a_compiled_block_and_one_in_float64(make_training):
    torch.manual_seed(0)
    model = Transformer(num_blocks=2)
    model.blocks[0].layers.compile(dynamic=False)
    model.blocks[1].double()
    first = model.blocks[1].forward
    model.blocks[1].forward = lambda x: first(x.double()).float()
    # a copy shares the bound method of the original, so that the twin is made anew
    twin = Transformer(num_blocks=2)
    twin.load_state_dict(model.state_dict())
    twin.blocks[0].layers.compile(dynamic=False)
    twin.blocks[1].double()
    twin.blocks[1].load_state_dict(model.blocks[1].state_dict())
    second = twin.blocks[1].forward
    twin.blocks[1].forward = lambda x: second(x.double()).float()
    expected = run_plain(twin, OPTIMIZERS["adamw"](twin), simple_step, batches())
    optimizer = OPTIMIZERS["adamw"](model)
    ours = make_training(model, optimizer, beside(model, 5))
    losses = []
    for tokens in batches():
        ours.park()
        with ours:
            losses.append(simple_step(model, optimizer, tokens))
    assert losses == expected
    assert ours.statistics().step_fetched_bytes > 0


def test_batches_of_other_lengths_keep_the_budget(make_training):
    torch.manual_seed(0)
    model, data = Transformer(), [batch for length in (32, 16, 64, 24) for batch in batches(2, length)]
    twin = copy.deepcopy(model)
    expected = run_plain(twin, OPTIMIZERS["adamw"](twin), simple_step, data)
    optimizer = OPTIMIZERS["adamw"](model)
    budget = beside(model, 6)
    ours = make_training(model, optimizer, budget)
    losses, peaks = [], []
    for number, tokens in enumerate(data):
        if number < 3:
            with ours:
                losses.append(simple_step(model, optimizer, tokens))
            continue
        ours.park()
        with probe.record_memory("cpu") as recording, ours:
            losses.append(simple_step(model, optimizer, tokens))
        peaks.append(recording.report.peak_bytes)
    assert losses == expected
    assert max(peaks) <= budget * 1.03  # what a longer batch's first operators make is learned from them


def test_a_budget_below_what_an_operator_needs_is_named(make_training):
    model = Transformer()
    optimizer = OPTIMIZERS["adamw"](model)
    ours = make_training(model, optimizer, beside(model, 0.6))
    with pytest.raises(BudgetError, match=r"must be at least \d+ .*an operator on"), ours:
        simple_step(model, optimizer, batches()[0])


@pytest.fixture
def small_steps(make_training):
    """Losses of plain training, and a way to train the same model within 5 MiB beside what else there is."""
    torch.manual_seed(0)
    model = Transformer()
    twin = copy.deepcopy(model)
    expected = run_plain(twin, OPTIMIZERS["adamw"](twin), simple_step, batches())
    after = [parameter.detach().clone() for parameter in twin.parameters()]
    del twin

    def run(**tiers):
        optimizer = OPTIMIZERS["adamw"](model)
        ours, losses = make_training(model, optimizer, beside(model, 5), **tiers), []
        for tokens in batches():
            with ours:
                losses.append(simple_step(model, optimizer, tokens))
        ours.close()
        assert losses == expected
        assert all(torch.equal(parameter, two) for parameter, two in zip(model.parameters(), after, strict=True))
        return ours

    return run


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_writes_that_fail_now_and_then_lose_nothing(small_steps, monkeypatch, code):
    write, turn = SpillFile.write, itertools.count()

    def fail_sometimes(self, view, offset):
        if next(turn) % 7 == 3:
            raise OSError(code, os.strerror(code))
        return write(self, view, offset)

    monkeypatch.setattr(SpillFile, "write", fail_sometimes)
    with pytest.warns(TierDegradedWarning, match="stays on the device") as caught:
        small_steps()
    assert len(caught) == 1


def test_a_disk_that_fills_up_in_mid_step_loses_nothing(small_steps, monkeypatch):
    write, turn = SpillFile.write, itertools.count()

    def fail_from_then_on(self, view, offset):
        if next(turn) > 150:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, view, offset)

    monkeypatch.setattr(SpillFile, "write", fail_from_then_on)
    with pytest.warns(TierDegradedWarning, match="stays on the device") as caught:
        small_steps()
    assert len(caught) == 1


def test_a_read_that_fails_is_an_error_and_may_be_tried_again(make_training, monkeypatch):
    model = Transformer()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    ours = make_training(model, OPTIMIZERS["adamw"](model), beside(model, 6))
    read = SpillFile.read

    def fail(self, view, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(SpillFile, "read", fail)
    with pytest.raises(TierReadError), ours:
        loss_of(model, batches()[0])
    monkeypatch.setattr(SpillFile, "read", read)
    with ours.whole():
        assert all(torch.equal(parameter, two) for parameter, two in zip(model.parameters(), before, strict=True))


def test_statistics_of_wide_batch_norms(make_training):
    torch.manual_seed(0)

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 8192), nn.BatchNorm1d(8192), nn.ReLU(), nn.Linear(8192, 4))

    def step(model, optimizer):
        model(torch.ones(8, 16).cumsum(0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    twin = make()
    plain = OPTIMIZERS["adamw"](twin)
    ours = make_training(make, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), "1GiB")
    for _ in range(3):
        step(twin, plain)
        with ours:
            step(ours.model, ours.optimizer)
        ours.park()
    ours.close()
    assert all(torch.equal(tensor, two) for tensor, two in zip(ours.model.buffers(), twin.buffers(), strict=True))


def test_a_step_of_small_tensors_that_exceeds_the_budget_is_refused(make_training):
    model = nn.Sequential(*[layer for _ in range(20) for layer in (nn.Linear(16, 16), nn.GELU())])
    optimizer = OPTIMIZERS["adamw"](model)
    ours = make_training(model, optimizer, probe.held_bytes("cpu") + 4096)
    with pytest.raises(BudgetError, match="are smaller than 16 KiB"), ours:
        model(torch.ones(64, 16)).square().mean().backward()


class CastsAndWeights(nn.Module):
    """Casts of its weights are read early, and late together with the weights, in one operator."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(256, 256)) for _ in range(12)])

    def forward(self, x, is_late):
        casts = [weight.to(torch.bfloat16) for weight in self.weights]
        for weight in self.weights:
            x = torch.tanh(x @ weight / 16)
        for cast, weight in zip(casts, self.weights, strict=True):
            x = x + x @ (torch.sub(cast, weight) if is_late else cast.float())
        return torch.tanh(x).sum()


@pytest.mark.parametrize("kinds", ["11111", "00010001"])
def test_an_operator_that_reads_a_cast_before_its_weight(make_training, kinds):
    """Both are away. Filling the cast fetches the weight, which comes next."""

    def train(context, model):
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=1e-3), []
        for kind in kinds:
            with context(optimizer):
                loss = model(torch.ones(4, 256), kind == "1")
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    torch.manual_seed(0)
    model = CastsAndWeights()
    plain = train(lambda _: contextlib.nullcontext(), copy.deepcopy(model))
    opened = []

    def context(optimizer):
        if not opened:
            opened.append(make_training(model, optimizer, 3_000_000))
        return opened[0]

    assert train(context, model) == plain
    assert opened[0].statistics().fetched_bytes > 0
