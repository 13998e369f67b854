"""The plans of earlier runs: a second run of a training begins with them, and is as right as one without."""

import contextlib
import functools
import gc
import hashlib
import os
from dataclasses import dataclass

import pytest
import torch
from training_loops import Transformer, batches, loss_of, simple_step

from penstock import probe
from penstock.files import cache_folder
from penstock.offload import training
from penstock.state import _recalled
from penstock.state._replay import Replay

MIB = 2**20
NUM_STEPS = 9


@pytest.fixture(autouse=True)
def _planned(monkeypatch):
    """Wait for the plan of every kind of step as soon as it is measured."""
    monkeypatch.setattr(Replay, "prepare", functools.partialmethod(Replay.prepare, is_waited_for=True))


@dataclass(frozen=True)
class Run:
    """What is left of a run of its own."""

    told: list
    digest: str
    planned: list[bool]
    peak_bytes: int
    budget: int

    def is_plains(self, plain):
        return (self.told, self.digest) == plain


def digest_of(model):
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()


def made(num_blocks=3):
    torch.manual_seed(0)
    model = Transformer(num_blocks)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def run(tmp_path, step=simple_step, *, length=32, num_blocks=3, budget=None, begun=None, room=3 * MIB):
    model, optimizer = made(num_blocks)
    gc.collect()
    own_bytes = sum(parameter.nbytes for parameter in model.parameters())
    budget = budget or probe.held_bytes("cpu") - own_bytes + int(4 * own_bytes * 0.4) + room
    with contextlib.closing(training(model, optimizer, budget, disk=tmp_path)) as context:
        if begun is not None:
            context.load(begun)
        torch.manual_seed(1)
        told, planned = [], []
        for tokens in batches(NUM_STEPS, length):
            before = context.statistics().num_planned_steps
            with context:
                told.append(step(model, optimizer, tokens))
            planned.append(context.statistics().num_planned_steps > before)
        if begun is None:
            context.save(tmp_path / "saved")
        peak_bytes = context.statistics().measured_peak_bytes
    return Run(told, digest_of(model), planned, peak_bytes, budget)


def plainly(step=simple_step, length=32):
    model, optimizer = made()
    torch.manual_seed(1)
    told = [step(model, optimizer, tokens) for tokens in batches(NUM_STEPS, length)]
    return told, digest_of(model)


def steps_folder():
    return cache_folder() / "steps"


def in_micro_batches(model, optimizer, tokens):
    losses = []
    for part in tokens.split(2):
        loss = loss_of(model, part) / 2
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("step", [simple_step, in_micro_batches])
def test_a_second_run_follows_a_plan_from_its_third_step_on(tmp_path, step):
    first = run(tmp_path, step)
    second = run(tmp_path, step, budget=first.budget)
    assert first.is_plains(plainly(step))
    assert second.is_plains(plainly(step))
    # no update is due in the first step, and the second makes the states
    assert second.planned == [False, False] + [True] * (NUM_STEPS - 2)
    assert first.planned.index(True) > 3
    assert second.peak_bytes <= second.budget


def test_a_run_that_goes_on_from_a_checkpoint_follows_a_plan_from_its_second_step_on(tmp_path):
    first = run(tmp_path)
    again = run(tmp_path, budget=first.budget, begun=tmp_path / "saved")
    assert again.planned[1:] == [True] * (NUM_STEPS - 1)


@pytest.mark.parametrize("damage", ["cut", "other bytes", "a folder", "another format", "no rights"])
def test_a_damaged_cache_is_none(tmp_path, damage):
    first = run(tmp_path)
    (file,) = steps_folder().iterdir()
    whole = file.read_bytes()
    if damage == "cut":
        file.write_bytes(whole[: len(whole) // 2])
    elif damage == "other bytes":
        file.write_bytes(bytes(byte ^ 255 if number % 97 == 0 else byte for number, byte in enumerate(whole)))
    elif damage == "a folder":
        file.unlink()
        file.mkdir()
    elif damage == "another format":
        torch.save({"orders": 1}, file)
    else:
        file.parent.chmod(0)
    try:
        second = run(tmp_path, budget=first.budget)
    finally:
        file.parent.chmod(0o700)
    assert second.is_plains(plainly())
    assert second.planned == first.planned or damage == "no rights"  # root may read everything


@pytest.mark.parametrize("change", [lambda order: order["needs"].clear(), lambda order: order["others_bytes"].pop()])
def test_a_cache_that_does_not_fit_together_is_none(tmp_path, change):
    first = run(tmp_path)
    (file,) = steps_folder().iterdir()
    stored = torch.load(file, weights_only=True)
    change(stored["orders"][0])
    torch.save(stored, file)
    second = run(tmp_path, budget=first.budget)
    assert second.is_plains(plainly())
    assert second.planned == first.planned


def test_other_trainings_are_told_apart(tmp_path):
    first = run(tmp_path)
    larger = run(tmp_path, num_blocks=4)
    assert not any(larger.planned[:4])
    assert len(list(steps_folder().iterdir())) == 2
    with_more = run(tmp_path, budget=first.budget + MIB)
    assert with_more.planned[2:] == [True] * (NUM_STEPS - 2)


@pytest.mark.parametrize(("before", "now"), [(32, 48), (48, 32)])
def test_a_run_with_other_batches_keeps_its_budget_and_is_right(tmp_path, before, now):
    first = run(tmp_path, length=before, room=5 * MIB)
    second = run(tmp_path, length=now, budget=first.budget)
    assert second.is_plains(plainly(length=now))
    assert second.planned[-1]
    assert second.peak_bytes <= second.budget


def test_a_run_with_another_loop_is_planned_as_without_a_cache(tmp_path):
    first = run(tmp_path)
    other = run(tmp_path, in_micro_batches, budget=first.budget)
    assert other.is_plains(plainly(in_micro_batches))
    assert other.planned[-2:] == [True, True]


def test_only_the_latest_trainings_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(_recalled, "_MOST_FILES", 2)
    folder = steps_folder()
    folder.mkdir(parents=True)
    for name, changed_s in (("old", 2e9), ("older", 1e9)):
        (folder / name).write_bytes(b"")
        os.utime(folder / name, (changed_s, changed_s))
    run(tmp_path)
    assert "older" not in {file.name for file in folder.iterdir()}
    assert len(list(folder.iterdir())) == 2
