"""Steps that follow a plan, on an accelerator: equal to the bit, no race, and nothing is asked of the device."""

import contextlib
import functools
import gc
import threading
import time
from collections import Counter

import pytest
import torch

from penstock import offload, probe
from penstock.devices._accelerator import AcceleratorStreams
from penstock.state import verify
from penstock.state._on_host import Update
from penstock.state._replay import Replay
from penstock.testing import GPT

MOST_STEPS = 30
"""By then the plan no longer changes."""


@pytest.fixture(autouse=True)
def _planned(monkeypatch):
    monkeypatch.setattr(Replay, "prepare", functools.partialmethod(Replay.prepare, is_waited_for=True))


@pytest.fixture
def asked(monkeypatch):
    """How often the host asks the device or waits for it, by method."""
    counts = Counter()
    for name in ("is_done", "synchronize"):
        monkeypatch.setattr(AcceleratorStreams, name, counted(counts, name))
    return counts


def counted(counts, name):
    method = getattr(AcceleratorStreams, name)

    def count(streams, event):
        counts[name] += threading.current_thread() is threading.main_thread()
        return method(streams, event)

    return count


def make(device, checkpointed):
    torch.manual_seed(0)
    model = GPT(num_layers=3, width=64, num_heads=2, context=64, checkpointed=checkpointed).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def step(model, optimizer, device, number, *, is_half):
    tokens = torch.randint(256, (4, 64), generator=torch.Generator().manual_seed(number)).to(device)
    with torch.autocast(device, torch.bfloat16) if is_half else contextlib.nullcontext():
        loss = model(tokens, tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


CASES = {
    "simple": {},
    "checkpointed": {"checkpointed": True},
    "half": {"is_half": True, "checkpointed": True},
    "in backward": {"update_in_backward": True},
    "in backward, half": {"update_in_backward": True, "is_half": True, "checkpointed": True},
    "host": {"update": "host"},
    "host, in backward": {"update": "host", "update_in_backward": True},
    "host, half": {"update": "host", "is_half": True, "checkpointed": True},
    "host, in backward, half": {
        "update": "host", "update_in_backward": True, "is_half": True, "checkpointed": True,
    },
    "host, slow": {"update": "host", "update_in_backward": True, "delay_s": 0.01},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_settled_steps_ask_nothing_and_move_what_is_planned(device, asked, case, monkeypatch):
    """Nothing but the host's updates, where there are any."""
    options = dict(CASES[case])
    on_host = options.get("update") == "host"
    slow_down(monkeypatch, options.pop("delay_s", 0.0))
    is_half, checkpointed = options.pop("is_half", False), options.pop("checkpointed", False)
    one_step = functools.partial(step, device=device, is_half=is_half)
    model, optimizer = make(device, checkpointed)
    plain = [one_step(model, optimizer, number=number).item() for number in range(MOST_STEPS)]
    own_bytes = sum(parameter.nbytes for parameter in model.parameters())
    del model, optimizer
    gc.collect()
    model, optimizer = make(device, checkpointed)
    share = 2 if is_half or not on_host else 1
    budget = probe.held_bytes(device) - own_bytes + share * own_bytes + 2**21
    with contextlib.closing(offload.training(model, optimizer, budget, host="64MiB", **options)) as training:
        pages = training._managed.pages
        losses, moved, num_asked, num_replayed = [], [], [], []
        for number in range(MOST_STEPS):
            copies = pages.copies
            with training:
                asked.clear()
                losses.append(one_step(model, optimizer, number=number))
                num_asked.append(sum(asked.values()))
            script = pages.replay.script_of(pages.course.last)
            moved.append((sum(copies.fetched_bytes.values()), sum(copies.parked_bytes.values()), script))
            num_replayed.append(pages.replay.num_steps)
            is_settled = len(moved) > 4 and all(before is script for _, _, before in moved[-4:])
            if script is not None and is_settled and num_replayed[-1] == num_replayed[-4] + 3:
                break
        script = moved[-1][2]
        problem, plan = script.ordered.problem, script.planned.plan
        verify(problem, plan)
        assert num_asked[-1] == 0
        assert moved[-1][0] - moved[-2][0] == plan.in_bytes(problem) > 0
        assert moved[-1][1] - moved[-2][1] == plan.out_bytes(problem) > 0
        assert pages.replay.num_steps >= 3
        # the first plan is made from a step that ended copies at other times; more and more is updated on the host
        assert pages.replay.num_left <= 1 + 3 * on_host
        assert training._progress.peak_bytes <= pages.course.budget_bytes
        assert (training.statistics().num_host_updates or 0) >= 3 * len(problem.updates) * on_host
        if on_host:
            assert [loss.item() for loss in losses] == pytest.approx(plain[: len(losses)], abs=2e-3)
        else:
            assert [loss.item() for loss in losses] == plain[: len(losses)]


@pytest.mark.parametrize("update", ["device", "host"])
def test_steps_that_come_in_turns_ask_nothing_either(device, asked, update):
    """A context around each of three micro-batches: what one leaves on the device is what the plan of the next says."""

    def micro_step(model, optimizer, number):
        tokens = torch.randint(256, (4, 64), generator=torch.Generator().manual_seed(number)).to(device)
        loss = model(tokens, tokens)
        loss.backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    num_steps = 48
    model, optimizer = make(device, checkpointed=False)
    plain = [micro_step(model, optimizer, number).item() for number in range(num_steps)]
    own_bytes = sum(parameter.nbytes for parameter in model.parameters())
    del model, optimizer
    gc.collect()
    model, optimizer = make(device, checkpointed=False)
    budget = probe.held_bytes(device) + own_bytes // 2 + 2**21
    with contextlib.closing(offload.training(model, optimizer, budget, host="64MiB", update=update)) as training:
        pages = training._managed.pages
        losses, moved, num_asked = [], [], []
        for number in range(num_steps):
            with training:
                asked.clear()
                losses.append(micro_step(model, optimizer, number))
                num_asked.append(sum(asked.values()))
            copies = pages.copies
            moved.append(
                (sum(copies.fetched_bytes.values()), sum(copies.parked_bytes.values()), pages.replay.num_steps)
            )
        script = pages.replay.script_of(pages.course.last)
        problem, plan = script.ordered.problem, script.planned.plan
        verify(problem, plan)
        fetched, parked, num_planned = (after - before for after, before in zip(moved[-1], moved[-4], strict=True))
        assert num_asked[-3:] == [0, 0, 0]
        assert num_planned == 3
        assert fetched == plan.in_bytes(problem) > 0
        assert parked == plan.out_bytes(problem) > 0
        assert training._progress.peak_bytes <= pages.course.budget_bytes
        if update == "device":
            assert [loss.item() for loss in losses] == plain
        else:
            assert [loss.item() for loss in losses] == pytest.approx(plain, abs=2e-3)


@pytest.mark.parametrize("update", ["device", "host"])
def test_planned_steps_forget_the_copies_that_have_ended(prompt_device, update):
    """Once a step, since nobody asks in it: else space below, and events, would grow from step to step."""
    model, optimizer = make(prompt_device, checkpointed=False)
    budget = probe.held_bytes(prompt_device) + 2**21
    with contextlib.closing(offload.training(model, optimizer, budget, host="64MiB", update=update)) as training:
        pages, used = training._managed.pages, []
        waterfall = pages.copies.waterfall
        for number in range(MOST_STEPS):
            with training:
                step(model, optimizer, prompt_device, number, is_half=False)
            used.append(waterfall.tiers[0].used_bytes)
        hop, plan = waterfall._mover._copies, pages.replay.script_of(pages.course.last).planned.plan
        assert pages.replay.num_steps > 10
        assert len(hop._arriving) <= 2 * len(plan.copies_in)
        assert len(hop._passing) <= 2 * len(plan.copies_out)
        assert len(hop.stalls._waits) <= 4 * len(plan.copies_in)
        assert used[-1] <= 1.05 * used[-10]


def slow_down(monkeypatch, delay_s):
    """Let each update on the host take at least that long."""
    compute = Update.compute

    def late(update):
        time.sleep(delay_s)
        compute(update)

    monkeypatch.setattr(Update, "compute", late)
