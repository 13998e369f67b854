"""Updates in slices: an embedding that fits once but not four times is trained, equal to plain PyTorch to the bit."""

import contextlib
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from penstock import offload, probe
from penstock.errors import BudgetError, PenstockError
from penstock.state._replay import Replay
from penstock.state._slices import SlicedUpdates

MIB = 2**20
WIDTH, VOCABULARY, NUM_STEPS = 64, 6000, 8
OPTIMIZERS = {
    "Adam": torch.optim.Adam,
    "amsgrad": functools.partial(torch.optim.Adam, amsgrad=True),
    "AdamW": functools.partial(torch.optim.AdamW, weight_decay=0.1),
    "SGD": torch.optim.SGD,
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "nesterov": functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": functools.partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
}


class Words(nn.Module):
    """Most of it is one embedding, of 1.5 MiB, which no multiple of a slice fills."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY + 3, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = functional.gelu(layer(x))
        return x


def made(device, name):
    torch.manual_seed(0)
    model = Words().to(device)
    return model, OPTIMIZERS[name](model.parameters(), lr=0.01)


def batches(device, num=NUM_STEPS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (8, 16), generator=generator).to(device) for _ in range(num)]


def step(model, optimizer, tokens, clips=False):
    loss = model(tokens).square().mean()
    loss.backward()
    norm = clip_grad_norm_(model.parameters(), 1e-3).item() if clips else 0.0
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), norm


def plainly(device, name, run=step):
    model, optimizer = made(device, name)
    told = [run(model, optimizer, tokens) for tokens in batches(device)]
    return told, model, optimizer


def opened(model, optimizer, room, **options):
    """A training that has room for so many times the embedding beside what is there."""
    own_bytes = sum(parameter.nbytes for parameter in model.parameters())
    budget = probe.held_bytes(model.embedding.weight.device) - own_bytes + int(room * model.embedding.weight.nbytes)
    return offload.training(model, optimizer, budget, **{"host": "64MiB", **options})


def assert_equal(ours, plain):
    model, optimizer = ours
    for own, other in zip(model.parameters(), plain[1].parameters(), strict=True):
        assert torch.equal(own, other)
        state, expected = optimizer.state.get(own, {}), plain[2].state.get(other, {})
        assert state.keys() == expected.keys()
        for field, value in expected.items():
            same = torch.equal(state[field], value) if isinstance(value, torch.Tensor) else state[field] == value
            assert same, field


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_embedding_that_fits_once_is_trained(prompt_device, name):
    plain = plainly(prompt_device, name)
    model, optimizer = made(prompt_device, name)
    training = opened(model, optimizer, 2.6)
    told = []
    for tokens in batches(prompt_device):
        with training:
            told.append(step(model, optimizer, tokens))
    statistics = training.statistics()
    assert training._managed.updates._slices.num_updates >= NUM_STEPS - 1
    training.close()
    assert told == plain[0]
    assert_equal((model, optimizer), plain)
    assert statistics.measured_peak_bytes <= training._pages.course.budget_bytes


@pytest.mark.parametrize("way", ["clipped", "in backward", "accumulated", "gradients kept", "half"])
def test_in_every_kind_of_loop(prompt_device, way):
    def run(model, optimizer, tokens):
        if way == "clipped":
            return step(model, optimizer, tokens, clips=True)
        parts = tokens.split(2) if way == "accumulated" else [tokens]
        losses = []
        for part in parts:
            with torch.autocast(prompt_device, torch.bfloat16, enabled=way == "half"):
                loss = model(part).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=way != "gradients kept")
        return losses

    plain = plainly(prompt_device, "AdamW", run)
    model, optimizer = made(prompt_device, "AdamW")
    training = opened(model, optimizer, 3.2, update_in_backward=way == "in backward")
    told = []
    for tokens in batches(prompt_device):
        with training:
            told.append(run(model, optimizer, tokens))
    assert training._managed.updates._slices.num_updates >= NUM_STEPS - 1
    training.close()
    assert told == plain[0]
    assert_equal((model, optimizer), plain)


GROUPS = {
    "amsgrad": (torch.optim.Adam, {"amsgrad": False}, {"amsgrad": True}),
    "no amsgrad": (torch.optim.Adam, {"amsgrad": True}, {"amsgrad": False}),
    "momentum": (torch.optim.SGD, {"momentum": 0.0}, {"momentum": 0.9}),
    "no momentum": (torch.optim.SGD, {"momentum": 0.9}, {"momentum": 0.0}),
    "centered": (torch.optim.RMSprop, {"centered": False}, {"centered": True}),
}


@pytest.mark.parametrize("name", GROUPS)
def test_groups_with_settings_of_their_own(prompt_device, name):
    kind, first, second = GROUPS[name]

    def made_so():
        model, _ = made(prompt_device, "SGD")
        groups = [{"params": model.layers.parameters(), **first}, {"params": model.embedding.parameters(), **second}]
        return model, kind(groups, lr=0.01)

    outcomes = []
    for is_ours in (False, True):
        model, optimizer = made_so()
        training = opened(model, optimizer, 2.6) if is_ours else None
        for tokens in batches(prompt_device):
            with training or contextlib.nullcontext():
                step(model, optimizer, tokens)
        if training is not None:
            assert training._managed.updates._slices.num_updates >= NUM_STEPS - 1
            training.close()
        outcomes.append((model, optimizer))
    assert_equal(outcomes[1], (None, *outcomes[0]))


@pytest.mark.parametrize("is_scaled", [False, True])
def test_fused_steps_are_sliced_unless_a_scaler_is_part_of_them(prompt_device, is_scaled):
    outcomes = []
    for is_ours in (False, True):
        model, _ = made(prompt_device, "SGD")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        scaler = torch.amp.GradScaler(prompt_device, init_scale=2.0**24, growth_interval=2, enabled=is_scaled)
        training = opened(model, optimizer, 6.5 if is_scaled else 2.6) if is_ours else None
        told = []
        for tokens in batches(prompt_device, 12):
            with training or contextlib.nullcontext():
                with torch.autocast(prompt_device, torch.float16, enabled=is_scaled):
                    loss = model(tokens).square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                told.append((loss.item(), scaler.get_scale()))
        if training is not None:
            assert (training._managed.updates._slices.num_updates > 0) != is_scaled
            training.close()
        outcomes.append((told, model, optimizer))
    assert outcomes[1][0] == outcomes[0][0]
    assert_equal(outcomes[1][1:], outcomes[0])


@pytest.mark.parametrize("begins_with_none", [False, True])
def test_momentum_that_begins_later(prompt_device, begins_with_none):
    outcomes = []
    for is_ours in (False, True):
        model, optimizer = made(prompt_device, "SGD")
        training = opened(model, optimizer, 5.5) if is_ours else None
        for number, tokens in enumerate(batches(prompt_device)):
            if number == 3:
                for group in optimizer.param_groups:
                    group["momentum"] = 0.9
                if begins_with_none:
                    for parameter in model.parameters():
                        optimizer.state[parameter]["momentum_buffer"] = None
            with training or contextlib.nullcontext():
                step(model, optimizer, tokens)
        if training is not None:
            training.close()
        outcomes.append((model, optimizer))
    assert_equal(outcomes[1], (None, *outcomes[0]))


def begun(device):
    """A training after three steps."""
    model, optimizer = made(device, "AdamW")
    training = opened(model, optimizer, 2.6)
    for tokens in batches(device, 3):
        with training:
            step(model, optimizer, tokens)
    return model, optimizer, training


def test_what_is_kept_whole_stays(prompt_device):
    model, optimizer, training = begun(prompt_device)
    with contextlib.suppress(BudgetError), training:  # all of it exceeds the budget, which does not matter here
        model(batches(prompt_device)[0]).square().mean().backward()
        with training.whole():
            optimizer.step()
            assert all(page.is_here for page in training._pages)
    training.close()


def test_steps_are_planned_and_move_what_the_plan_says(device, monkeypatch):
    monkeypatch.setattr(Replay, "prepare", functools.partialmethod(Replay.prepare, is_waited_for=True))
    model, optimizer = made(device, "AdamW")
    training = opened(model, optimizer, 2.6)
    pages = training._pages
    for tokens in batches(device, 10):
        before = sum(pages.copies.fetched_bytes.values()), sum(pages.copies.parked_bytes.values())
        with training:
            step(model, optimizer, tokens)
    script = pages.replay.script_of(pages.course.last)
    problem, plan = script.ordered.problem, script.planned.plan
    assert pages.replay.num_steps >= 3
    assert pages.replay.num_left == 0
    assert sum(pages.copies.fetched_bytes.values()) - before[0] == plan.in_bytes(problem)
    assert sum(pages.copies.parked_bytes.values()) - before[1] == plan.out_bytes(problem)
    training.close(discard=True)


def test_what_has_room_is_updated_whole(prompt_device):
    model, optimizer = made(prompt_device, "AdamW")
    training = opened(model, optimizer, 20)
    for tokens in batches(prompt_device, 3):
        with training:
            step(model, optimizer, tokens)
    assert training._managed.updates._slices.num_updates == 0
    training.close()


def test_on_a_disk_it_is_updated_whole(prompt_device, tmp_path):
    model, optimizer = made(prompt_device, "AdamW")
    training = opened(model, optimizer, 8, host="4MiB", disk=tmp_path)
    plain = plainly(prompt_device, "AdamW")
    told = []
    for tokens in batches(prompt_device):
        with training:
            told.append(step(model, optimizer, tokens))
    assert training._managed.updates._slices.num_updates == 0
    training.close()
    assert told == plain[0]
    assert_equal((model, optimizer), plain)


def test_an_update_that_finds_no_memory_before_it_begins_can_be_done_again(prompt_device, monkeypatch):
    model, optimizer, training = begun(prompt_device)
    before, num_updates = SlicedUpdates._step, training._managed.updates._slices.num_updates

    def broken(*_):
        monkeypatch.setattr(SlicedUpdates, "_step", before)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(SlicedUpdates, "_step", broken)
    with pytest.raises(torch.OutOfMemoryError), training:
        step(model, optimizer, batches(prompt_device)[0])
    with training:
        optimizer.step()
    assert training._managed.updates._slices.num_updates == num_updates + 1
    training.close()


def test_an_update_that_breaks_off_is_said_before_the_next_step(prompt_device, monkeypatch):
    model, optimizer, training = begun(prompt_device)
    whole, count = SlicedUpdates._step, []

    def broken(*args):
        count.append(1)
        if len(count) == 3:
            raise KeyboardInterrupt
        return whole(*args)

    monkeypatch.setattr(SlicedUpdates, "_step", broken)
    with pytest.raises(KeyboardInterrupt), training:
        step(model, optimizer, batches(prompt_device)[0])
    with pytest.raises(PenstockError, match="half way"), training:
        pass
    training.close(discard=True)


def test_a_budget_without_room_for_the_embedding_names_the_smallest(prompt_device):
    model, optimizer = made(prompt_device, "AdamW")
    training = opened(model, optimizer, 1.5)
    with pytest.raises(BudgetError, match=r"`budget` must be at least") as refusal, training:
        step(model, optimizer, batches(prompt_device)[0])
    training.close(discard=True)
    assert "embedding.weight" in str(refusal.value)
