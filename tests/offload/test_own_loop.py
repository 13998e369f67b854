"""Parameters, gradients, states and activations leave the device in a loop of the user's own: results stay the same."""

import contextlib
import copy
import errno
import gc
import io
import itertools
import os
import pickle
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from penstock import probe
from penstock.directio import SpillFile
from penstock.errors import BudgetError, TierDegradedWarning, TierReadError
from penstock.offload import _updates, parameters, training

WIDTH, VOCABULARY, NUM_STEPS = 128, 500, 4


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True, dropout=dropout)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.dropout(self.layers(self.norm(x)))


class Transformer(nn.Module):
    """Ties its first and last weight, reads the attention's without calling its module, and may recompute blocks."""

    def __init__(self, num_blocks=3, dropout=0.0, recompute=None):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.recompute = recompute

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return self.head(x)


class Lion(torch.optim.Optimizer):
    """One that PyTorch does not have."""

    def __init__(self, parameters, lr=1e-3, beta=0.9):
        super().__init__(parameters, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                update = momentum.lerp(parameter.grad, 1 - group["beta"]).sign_()
                parameter.add_(update, alpha=-group["lr"])
                momentum.lerp_(parameter.grad, 0.01)


def batches(num=NUM_STEPS, length=32):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (4, length), generator=generator) for _ in range(num)]


def loss_of(model, tokens):
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def simple_step(model, optimizer, tokens):
    loss = loss_of(model, tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def run_plain(model, optimizer, step, data):
    torch.manual_seed(2)
    return [step(model, optimizer, tokens) for tokens in data]


def beside(model, size_mib):
    """A budget of so much beside what else there is in this process."""
    gc.collect()
    own_bytes = sum(one.nbytes for one in model.parameters())
    return probe.held_bytes("cpu") - own_bytes + int(size_mib * 2**20)


@pytest.fixture
def make_training(tmp_path):
    made = []

    def make(model, optimizer, budget, door=training, **tiers):
        made.append(door(model, optimizer, budget, **{"disk": tmp_path, **tiers}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def assert_same_training(
    make_training, model, make_optimizer, step=simple_step, *, share=0.25, is_bounded=True, num_free=0, **options
):
    """Trains a copy plainly, then the model within a share of what the copy's training took; the same to the bit.

    The first ``num_free`` steps may take more.
    """
    data = batches()
    gc.collect()
    twin = copy.deepcopy(model)
    optimizer = make_optimizer(twin)
    with probe.record_memory("cpu") as recording:
        expected = run_plain(twin, optimizer, step, data)
    after = {name: value.clone() for name, value in twin.state_dict().items()}
    states = [optimizer.state[one] for one in twin.parameters()]
    own_bytes = sum(one.nbytes for one in model.parameters())
    base = probe.held_bytes("cpu") - own_bytes
    budget = base + int((recording.report.peak_bytes - recording.report.start_bytes + own_bytes) * share)
    optimizer = make_optimizer(model)
    ours = make_training(model, optimizer, budget, **options)
    torch.manual_seed(2)
    losses, peaks = [], []
    for number, tokens in enumerate(data):
        if number < 3:  # each kind of step is measured by the training itself, and two profilers break each other
            with ours:
                losses.append(step(model, optimizer, tokens))
            peaks.append(ours.statistics().measured_peak_bytes or 0)
            continue
        ours.park()  # the profiler does not see what was there before it go
        with probe.record_memory("cpu") as recording, ours:
            losses.append(step(model, optimizer, tokens))
        peaks.append(recording.report.peak_bytes)
    statistics = ours.statistics()
    ours.close()
    assert losses == expected
    assert all(torch.equal(value, after[name]) for name, value in model.state_dict().items())
    for one, theirs in zip(model.parameters(), states, strict=True):
        mine = optimizer.state[one]
        assert all(torch.equal(torch.as_tensor(mine[name]), torch.as_tensor(theirs[name])) for name in theirs)
    assert statistics.fetched_bytes > 0
    assert not is_bounded or max(peaks[num_free:]) <= budget * 1.01
    return statistics


OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "adamw foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True, amsgrad=True),
    "adamw fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
    "lion": lambda model: Lion(model.parameters()),
    "groups": lambda model: torch.optim.AdamW(
        [
            {"params": [one for one in model.parameters() if one.dim() > 1], "weight_decay": 0.1},
            {"params": [one for one in model.parameters() if one.dim() == 1], "lr": 1e-2},
        ]
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(make_training, name):
    torch.manual_seed(0)
    assert_same_training(make_training, Transformer(), OPTIMIZERS[name])


def clipped(model, optimizer, tokens):
    loss = loss_of(model, tokens)
    loss.backward()
    norm = clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss.item(), norm.item()


def clipped_by_value(model, optimizer, tokens):
    loss = loss_of(model, tokens)
    loss.backward()
    clip_grad_value_(model.parameters(), 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def accumulated(model, optimizer, tokens):
    losses = []
    for part in tokens.chunk(4):
        loss = loss_of(model, part) / 4
        loss.backward()
        losses.append(loss.item())
    clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return losses


def norms_of_gradients_that_change(model, optimizer, tokens):
    """Norms are taken when gradients are complete; here some are not what they were then."""
    loss = loss_of(model, tokens)
    loss.backward()
    parameters = list(model.parameters())
    seen = [clip_grad_norm_(parameters, 1e9).item()]
    for one in parameters[::2]:
        one.grad.mul_(0.5)
    seen.append(clip_grad_norm_(parameters, 0.1).item())
    seen += [torch.linalg.vector_norm(one.grad, kind).item() for one in parameters for kind in (2.0, 1.0)]
    (loss_of(model, tokens) / 2).backward()  # to what is there
    seen.append(clip_grad_norm_(parameters, 0.1).item())
    optimizer.step()
    optimizer.zero_grad()
    return seen


def under_autocast(model, optimizer, tokens):
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def scaled(model, optimizer, tokens):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(loss_of(model, tokens)).backward()
    scaler.unscale_(optimizer)
    norm = clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return norm.item(), scaler.get_scale()


def two_forwards(model, optimizer, tokens):
    first, second = tokens.chunk(2)
    loss = loss_of(model, first) + loss_of(model, second)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def with_evaluation(model, optimizer, tokens):
    loss = simple_step(model, optimizer, tokens)
    model.eval()
    with torch.no_grad():
        tokens = tokens[:1, :8]
        for _ in range(3):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
    model.train()
    return loss, tokens.tolist()


def with_a_closure(model, optimizer, tokens):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, tokens)
        loss.backward()
        return loss

    return optimizer.step(closure).item()


def reading_everything(model, optimizer, tokens):
    loss = loss_of(model, tokens)
    loss.backward()
    seen = [one.grad.norm().item() for one in model.parameters()]
    seen += [one.detach().numpy().sum().item() for one in model.parameters()]
    seen += [model.head.weight.data.tolist()[3], torch.stack([one.sum() for one in model.parameters()]).tolist()]
    copied = copy.deepcopy(model.blocks[0])
    seen += [one.sum().item() for one in copied.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), seen


STEPS = {
    "clipped": clipped,
    "clipped by value": clipped_by_value,
    "norms": norms_of_gradients_that_change,
    "accumulated": accumulated,
    "autocast": under_autocast,
    "scaled": scaled,
    "two forwards": two_forwards,
    "evaluation": with_evaluation,
    "closure": with_a_closure,
    "reading": reading_everything,
}


@pytest.mark.parametrize("name", STEPS)
def test_steps(make_training, name):
    torch.manual_seed(0)
    is_bounded = name != "reading"  # arrays and copies of the user's own are his
    assert_same_training(
        make_training, Transformer(), OPTIMIZERS["adamw"], STEPS[name], share=0.35, is_bounded=is_bounded
    )


@pytest.mark.parametrize("name", ["clipped", "accumulated", "autocast", "evaluation"])
def test_parameters_leave_and_activations_stay(make_training, name):
    torch.manual_seed(0)
    statistics = assert_same_training(
        make_training, Transformer(), OPTIMIZERS["adamw"], STEPS[name], share=0.6, num_free=2, door=parameters
    )
    assert statistics.step_fetched["activations"] == statistics.step_parked["activations"] == 0


def test_without_activations_a_model_is_made_within_the_budget_too(make_training):
    def make_model():
        return nn.Sequential(*[nn.Linear(256, 256) for _ in range(16)])

    made, budget = [], probe.held_bytes("cpu") + 2**21
    peak = probe.peak_bytes(lambda: made.append(make_training(make_model, torch.optim.SGD, budget, door=parameters)))
    assert made[0].statistics().state_bytes == 2**22
    assert peak.peak_bytes <= budget


def test_updates_in_backward(make_training):
    torch.manual_seed(0)
    statistics = assert_same_training(
        make_training, Transformer(), OPTIMIZERS["adamw"], share=0.35, update_in_backward=True
    )
    assert statistics.step_parked["gradients"] == 0


@pytest.mark.parametrize("options", [{}, {"update_in_backward": True}], ids=str)
def test_updates_whose_pages_come_at_once(make_training, monkeypatch, options):
    """As they do where the budget is large beside every parameter."""
    monkeypatch.setattr(_updates, "_AT_ONCE", 2)
    torch.manual_seed(0)
    assert_same_training(make_training, Transformer(), OPTIMIZERS["adamw"], share=0.5, **options)


@pytest.mark.parametrize("in_backward", [False, True])
def test_small_parameters_are_updated_together(make_training, monkeypatch, in_backward):
    calls, step_part = [], _updates.step_part

    def counted(optimizer, parameters, *args, **options):
        calls.append(len(parameters))
        return step_part(optimizer, parameters, *args, **options)

    monkeypatch.setattr(_updates, "step_part", counted)
    model = Transformer()
    ours = make_training(model, OPTIMIZERS["adamw"](model), "1GiB", update_in_backward=in_backward)
    small = sum(one.nbytes < 16 * 1024 for one in model.parameters())
    for _ in range(2):
        calls.clear()
        with ours:
            loss_of(model, batches()[0]).backward()
            assert all(one.grad is None for one in model.parameters()) is in_backward
            ours.optimizer.step()
            ours.optimizer.zero_grad()
        assert calls.count(small) == 1


def test_a_process_that_ends_with_an_open_training_ends_well(tmp_path):
    script = f"""
import torch
from penstock import offload
model = torch.nn.Linear(300, 300)
training = offload.training(model, torch.optim.Adam(model.parameters()), "1GiB", disk={str(tmp_path)!r})
with training:
    model(torch.randn(8, 300)).sum().backward()
    training.optimizer.step()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_a_second_backward_before_the_step_breaks_the_promise(make_training):
    model = Transformer(num_blocks=1)
    ours = make_training(model, OPTIMIZERS["adamw"](model), "1GiB", update_in_backward=True)
    with pytest.raises(RuntimeError, match="got a second gradient in one step"), ours:
        (loss_of(model, batches()[0]).backward(), loss_of(model, batches()[1]).backward())


@pytest.mark.parametrize("recompute", ["reentrant", "not reentrant"])
def test_checkpointed_blocks_with_dropout(make_training, recompute):
    torch.manual_seed(0)
    assert_same_training(make_training, Transformer(dropout=0.1, recompute=recompute), OPTIMIZERS["adamw"])


def test_frozen_parameters_are_fetched_and_never_written(make_training):
    torch.manual_seed(0)
    model = Transformer()
    for name, one in model.named_parameters():
        one.requires_grad_("norm" in name or name.startswith("embedding"))
    statistics = assert_same_training(
        make_training, model, lambda model: torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    )
    frozen = sum(one.nbytes for one in model.parameters() if not one.requires_grad)
    assert statistics.fetched_bytes > 2 * frozen


def test_gradient_hooks_and_batch_norm(make_training):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        nn.Flatten(0, 1),
        nn.Linear(WIDTH, 4 * WIDTH),
        nn.BatchNorm1d(4 * WIDTH),
        nn.ReLU(inplace=True),
        nn.Linear(4 * WIDTH, VOCABULARY),
        nn.Unflatten(0, (4, 32)),
    )

    def step(model, optimizer, tokens):
        hook = model[2].weight.register_hook(lambda gradient: gradient * 0.5)
        loss = simple_step(model, optimizer, tokens)
        hook.remove()
        return loss

    assert_same_training(make_training, model, OPTIMIZERS["adamw"], step, share=0.5)


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
    model, data = Transformer(), [one for length in (32, 16, 64, 24) for one in batches(2, length)]
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


@pytest.mark.parametrize("how", ["whole", "in parts", "into memory"])
def test_torch_save_finds_what_is_elsewhere(make_training, tmp_path, how):
    torch.manual_seed(0)
    model = Transformer()
    twin = copy.deepcopy(model)
    plain = OPTIMIZERS["adamw"](twin)
    expected = run_plain(twin, plain, simple_step, batches())
    optimizer = OPTIMIZERS["adamw"](model)
    budget = beside(model, 6)
    ours = make_training(model, optimizer, budget)
    saved, losses = io.BytesIO() if how == "into memory" else tmp_path / "saved.pt", []
    for number, tokens in enumerate(batches()):
        if number == 2:
            with ours.whole() if how == "whole" else contextlib.nullcontext():
                peak = probe.peak_bytes(lambda: torch.save((model.state_dict(), optimizer.state_dict()), saved))
            if how == "in parts":
                assert peak.peak_bytes <= budget
        with ours:
            losses.append(simple_step(model, optimizer, tokens))
    assert losses == expected
    if how == "into memory":
        saved.seek(0)
    parameters, states = torch.load(saved, mmap=how == "in parts")
    with ours.whole() if how == "whole" else contextlib.nullcontext():
        model.load_state_dict(parameters)
        optimizer.load_state_dict(states)
    del parameters, states
    losses = losses[:2]
    for tokens in batches()[2:]:
        with ours:
            losses.append(simple_step(model, optimizer, tokens))
    assert losses == expected


def test_what_takes_all_memory_at_once_is_refused(make_training, tmp_path):
    model = Transformer()
    ours = make_training(model, OPTIMIZERS["adamw"](model), beside(model, 6))
    for refused in (
        lambda: pickle.dumps(model.head.weight),
        lambda: torch.save(model.head.weight, tmp_path / "old.pt", _use_new_zipfile_serialization=False),
        lambda: save_file({"weight": model.head.weight.detach()}, tmp_path / "model.safetensors"),
    ):
        with pytest.raises(ValueError, match=r"with training\.whole\(\)"):
            refused()
        with ours.whole():
            refused()


def test_a_part_is_whole_and_the_rest_stays_away(make_training):
    model = Transformer()
    ours = make_training(model, OPTIMIZERS["adamw"](model), "64MiB")
    assert ours.statistics().held_bytes == 0
    with ours.whole(model.blocks[1]):
        held = ours.statistics().held_bytes
        assert model.blocks[1].layers[0].weight.untyped_storage().nbytes() > 0
        assert model.blocks[2].layers[0].weight.untyped_storage().nbytes() == 0
    large = [one.nbytes for one in model.blocks[1].parameters() if one.nbytes >= 16 * 1024]
    assert held == sum(large)


def test_after_an_error_in_a_step_the_next_is_right(make_training):
    torch.manual_seed(0)
    model = Transformer()
    twin = copy.deepcopy(model)
    expected = run_plain(twin, OPTIMIZERS["adamw"](twin), simple_step, batches())
    optimizer = OPTIMIZERS["adamw"](model)
    ours = make_training(model, optimizer, beside(model, 6))
    losses = []
    for tokens in batches():
        with pytest.raises(KeyError), ours:
            raise KeyError(loss_of(model, tokens).item())
        with ours:
            losses.append(simple_step(model, optimizer, tokens))
    assert losses == expected


def test_a_step_outside_of_the_context_is_right(make_training):
    torch.manual_seed(0)
    model = Transformer()
    twin = copy.deepcopy(model)
    expected = run_plain(twin, OPTIMIZERS["adamw"](twin), simple_step, batches())
    optimizer = OPTIMIZERS["adamw"](model)
    ours = make_training(model, optimizer, beside(model, 6))
    losses = []
    for number, tokens in enumerate(batches()):
        if number == 2:
            losses.append(simple_step(model, optimizer, tokens))
        else:
            with ours:
                losses.append(simple_step(model, optimizer, tokens))
    assert losses == expected


def test_closing_gives_everything_back(make_training):
    model = Transformer()
    optimizer = OPTIMIZERS["adamw"](model)
    ours = make_training(model, optimizer, beside(model, 6))
    with ours:
        simple_step(model, optimizer, batches()[0])
    ours.close()
    assert all(one.untyped_storage().nbytes() >= one.nbytes for one in model.parameters())
    assert all(one["exp_avg"].untyped_storage().nbytes() > 0 for one in optimizer.state.values())
    assert "step" not in optimizer.__dict__
    assert "tolist" not in torch.Tensor.__dict__
    model.state_dict()
    with pytest.raises(ValueError, match="closed"), ours:
        pass


def test_a_budget_below_what_an_operator_needs_is_named(make_training):
    model = Transformer()
    optimizer = OPTIMIZERS["adamw"](model)
    ours = make_training(model, optimizer, beside(model, 0.6))
    with pytest.raises(BudgetError, match=r"must be at least \d+ .*an operator on"), ours:
        simple_step(model, optimizer, batches()[0])


def test_a_budget_below_what_is_there_already_is_refused(make_training):
    model = Transformer()
    with pytest.raises(BudgetError, match="the device already holds"):
        make_training(model, OPTIMIZERS["adamw"](model), 1024)
    model.state_dict()


@pytest.fixture
def small_steps(make_training):
    """Losses of plain training, and a way to train the same model within 5 MiB beside what else there is."""
    torch.manual_seed(0)
    model = Transformer()
    twin = copy.deepcopy(model)
    expected = run_plain(twin, OPTIMIZERS["adamw"](twin), simple_step, batches())
    after = [one.detach().clone() for one in twin.parameters()]
    del twin

    def run(**tiers):
        optimizer = OPTIMIZERS["adamw"](model)
        ours, losses = make_training(model, optimizer, beside(model, 5), **tiers), []
        for tokens in batches():
            with ours:
                losses.append(simple_step(model, optimizer, tokens))
        ours.close()
        assert losses == expected
        assert all(torch.equal(one, two) for one, two in zip(model.parameters(), after, strict=True))
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
    before = [one.detach().clone() for one in model.parameters()]
    ours = make_training(model, OPTIMIZERS["adamw"](model), beside(model, 6))
    read = SpillFile.read

    def fail(self, view, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(SpillFile, "read", fail)
    with pytest.raises(TierReadError), ours:
        loss_of(model, batches()[0])
    monkeypatch.setattr(SpillFile, "read", read)
    with ours.whole():
        assert all(torch.equal(one, two) for one, two in zip(model.parameters(), before, strict=True))


def test_a_disk_without_room_for_the_state_is_refused_before_anything_moves(make_training, tmp_path):
    model = Transformer()
    with pytest.raises(BudgetError, match=r"of parameters, .* of gradients and .* of optimizer state"):
        make_training(model, OPTIMIZERS["adamw"](model), beside(model, 1), disk={tmp_path: "2MiB"})
    assert all(one.untyped_storage().nbytes() for one in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda model: (3, OPTIMIZERS["adamw"](model), "1GiB"), "`model` must be a"),
        (lambda model: (model, model, "1GiB"), "`optimizer` must be a"),
        (lambda model: (model, torch.optim.LBFGS(model.parameters()), "1GiB"), "all parameters at once"),
        (lambda model: (model, OPTIMIZERS["adamw"](model)), "`budget` is required"),
        (lambda model: (Transformer().to("meta"), OPTIMIZERS["adamw"](model), "1GiB"), "on one device"),
    ],
)
def test_misuse(make_training, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make_training(*(*arguments(Transformer(num_blocks=1)), None)[:3])


def test_a_model_that_is_made_within_the_budget_is_never_whole(make_training, tmp_path):
    def make():
        torch.manual_seed(0)
        return Transformer(num_blocks=8)

    twin = make()
    expected = run_plain(twin, OPTIMIZERS["adamw"](twin), simple_step, batches())
    after = [one.detach().clone() for one in twin.parameters()]
    size_bytes = sum(one.nbytes for one in twin.parameters())
    del twin
    gc.collect()
    budget = (
        probe.held_bytes("cpu") + size_bytes * 2 // 3
    )  # an eighth of parameters, gradients and states: 2/3 of 1/4 x 4
    with probe.record_memory("cpu") as recording:
        ours = make_training(make, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), budget)
    losses = []
    for tokens in batches():
        with ours:
            losses.append(simple_step(ours.model, ours.optimizer, tokens))
    peak = ours.statistics().measured_peak_bytes
    for name, part in ours.model.named_children():
        with ours.whole(part):
            torch.save(part.state_dict(), tmp_path / f"{name}.pt")
    ours.close(discard=True)
    assert losses == expected
    assert recording.report.peak_bytes <= budget * 1.01
    assert peak <= budget * 1.01
    saved = Transformer(num_blocks=8)
    for name, part in saved.named_children():
        part.load_state_dict(torch.load(tmp_path / f"{name}.pt"))
    assert all(torch.equal(one, two) for one, two in zip(saved.parameters(), after, strict=True))


@pytest.mark.parametrize(
    ("model", "optimizer", "message"),
    [
        (lambda: 3, lambda parameters: torch.optim.SGD(parameters, lr=1), "`model` must return .* got int"),
        (lambda: nn.Linear(8, 8), lambda parameters: 4, "`optimizer` must return .* got int"),
        (lambda: nn.Linear(8, 8, device="meta"), lambda parameters: 4, "on one device"),
    ],
)
def test_functions_that_make_something_else_are_refused(make_training, model, optimizer, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make_training(model, optimizer, "1GiB")
    assert "tolist" not in torch.Tensor.__dict__


def test_parameters_that_are_new_or_moved_are_taken_over(make_training):
    torch.manual_seed(0)
    model = Transformer(num_blocks=2)
    twin = copy.deepcopy(model)
    optimizer = OPTIMIZERS["adamw"](model)
    ours = make_training(model, optimizer, beside(model, 8))
    plain = OPTIMIZERS["adamw"](twin)
    for one, stepped in ((twin, plain), (model, optimizer)):
        losses = run_plain(one, stepped, simple_step, batches(1))
        torch.manual_seed(3)
        extra = nn.Linear(WIDTH, 4 * WIDTH)
        one.blocks[0].layers[0] = extra
        stepped.add_param_group({"params": list(extra.parameters())})
        one.blocks[1].double().float()
        for tokens in batches():
            with ours:
                losses.append(simple_step(one, stepped, tokens))
        if one is twin:
            expected = losses
    assert losses == expected
    ours.park()
    assert model.blocks[1].layers[0].weight.untyped_storage().nbytes() == 0
    assert model.blocks[0].layers[0].weight.untyped_storage().nbytes() == 0


def assert_same_loop(make_training, model, loop, *, size_mib=8, make_optimizer=None):
    """The loop's results and the parameters afterwards, plainly and inside of a training."""
    make_optimizer = make_optimizer or OPTIMIZERS["adamw"]
    twin = copy.deepcopy(model)
    plain = make_optimizer(twin)
    expected = loop(twin, plain, contextlib.nullcontext())
    optimizer = make_optimizer(model)
    ours = make_training(model, optimizer, beside(model, size_mib))
    assert loop(model, optimizer, ours) == expected
    ours.close()
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), twin.parameters(), strict=True))
    assert all(torch.equal(one, two) for one, two in zip(model.buffers(), twin.buffers(), strict=True))
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        mine, theirs = optimizer.state[one], plain.state[two]
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(theirs[key])) for key in theirs)


def arrays_of_gradients(model, optimizer, context):
    for tokens in batches(3):
        with context:
            loss_of(model, tokens).backward()
            arrays = [one.grad.numpy() for one in model.parameters()]
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return [float(one.sum()) for one in arrays]


def gradients_of_one_storage(model, optimizer, context):
    flat = torch.zeros(sum(one.numel() for one in model.parameters()))
    with context:
        begin = 0
        for one in model.parameters():
            one.grad = flat[begin : begin + one.numel()].view_as(one)
            begin += one.numel()
        loss_of(model, batches()[0]).backward()
        optimizer.step()
        flat.zero_()
    return loss_of(model, batches()[0]).item()


def a_state_that_is_thrown_away(model, optimizer, context):
    for tokens in batches(3):
        with context:
            simple_step(model, optimizer, tokens)
        optimizer.state = defaultdict(dict)
    with context:
        return simple_step(model, optimizer, batches()[3])


def a_state_that_is_loaded(model, optimizer, context):
    whole = getattr(context, "whole", contextlib.nullcontext)
    with context:
        simple_step(model, optimizer, batches()[0])
    with whole():
        best = copy.deepcopy(optimizer.state_dict())
    losses = []
    for tokens in batches(3):
        with context:
            losses.append(simple_step(model, optimizer, tokens))
    with whole():
        optimizer.load_state_dict(best)
    with context:
        return [*losses, simple_step(model, optimizer, batches()[3])]


def averages_in_place_of_weights(model, optimizer, context):
    losses = []
    averages = [torch.full_like(one, 0.01) for one in model.parameters()]
    for tokens in batches(3):
        with context:
            losses.append(simple_step(model, optimizer, tokens))
        kept = [one.data for one in model.parameters()]
        for one, average in zip(model.parameters(), averages, strict=True):
            one.data = average
        with context, torch.no_grad():
            losses.append(loss_of(model, tokens).item())
        for one, data in zip(model.parameters(), kept, strict=True):
            one.data = data
    return losses


def groups_that_change_after_the_step(model, optimizer, context):
    losses = []
    for number, tokens in enumerate(batches(4)):
        with context:
            losses.append(simple_step(model, optimizer, tokens))
        optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
        if number == 2:
            del optimizer.param_groups[0]["params"][-4:]
    return losses


def clipping_twice_and_going_on(model, optimizer, context):
    norms = []
    for tokens in batches(4):
        with context:
            loss_of(model, tokens).backward()
            norms.append(clip_grad_norm_(model.parameters(), 0.5).item())
            norms.append(clip_grad_norm_(model.parameters(), 0.1).item())
            loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=len(norms) % 4 == 0)
    return norms


def weights_copied_to_themselves(model, optimizer, context):
    for tokens in batches(3):
        with context:
            simple_step(model, optimizer, tokens)
        getattr(context, "park", lambda: None)()
        with torch.no_grad():
            for one in model.parameters():
                one.copy_(one)
    return 0


def evaluation_without_gradients_after_a_step(model, optimizer, context):
    losses = []
    for tokens in batches(3):
        with context:
            losses.append(simple_step(model, optimizer, tokens))
        with torch.inference_mode():
            losses.append(loss_of(model, tokens).item())
    return losses


LOOPS = [
    arrays_of_gradients,
    gradients_of_one_storage,
    a_state_that_is_thrown_away,
    a_state_that_is_loaded,
    averages_in_place_of_weights,
    groups_that_change_after_the_step,
    clipping_twice_and_going_on,
    weights_copied_to_themselves,
    evaluation_without_gradients_after_a_step,
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_updates_that_wait_are_those_of_their_step(make_training, loop):
    torch.manual_seed(0)
    assert_same_loop(make_training, Transformer(num_blocks=2), loop)


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
    assert all(torch.equal(one, two) for one, two in zip(ours.model.buffers(), twin.buffers(), strict=True))


def test_tensors_made_of_others_are_seen(make_training):
    model = Transformer(num_blocks=1)
    ours = make_training(model, OPTIMIZERS["adamw"](model), "1GiB")
    with ours:
        simple_step(model, ours.optimizer, batches()[0])
    ours.park()
    assert model.embedding.weight.untyped_storage().nbytes() == 0
    weight = model.embedding.weight.detach()
    assert (TwoTensor(weight, weight) * 2).a.equal(weight * 2)


def test_one_training_at_a_time_in_the_thread_that_made_it(make_training):
    model = Transformer(num_blocks=1)
    ours = make_training(model, OPTIMIZERS["adamw"](model), "1GiB")
    with pytest.raises(ValueError, match="another training is open"):
        make_training(nn.Linear(8, 8), torch.optim.SGD(nn.Linear(8, 8).parameters(), lr=1), "1GiB")
    with ThreadPoolExecutor() as threads, pytest.raises(ValueError, match="in the thread that made it"):
        threads.submit(ours.__enter__).result()


def test_a_weight_that_was_updated_cannot_be_used_by_an_older_graph(make_training):
    model = Transformer(num_blocks=1)
    optimizer = OPTIMIZERS["adamw"](model)
    ours = make_training(model, optimizer, "1GiB")

    def step():
        loss = loss_of(model, batches()[0])
        loss.backward(retain_graph=True)
        optimizer.step()
        loss.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"), ours:
        step()


def test_what_numpy_shares_stays_shared(make_training):
    model = Transformer(num_blocks=1)
    ours = make_training(model, OPTIMIZERS["adamw"](model), "1GiB")
    array = model.blocks[0].layers[0].weight.detach().numpy()
    for tokens in batches(2):
        with ours:
            simple_step(model, ours.optimizer, tokens)
    ours.park()
    with torch.no_grad():
        assert array.sum() == pytest.approx(model.blocks[0].layers[0].weight.sum().item(), rel=1e-3)
    assert model.blocks[0].layers[0].weight.data_ptr() == array.ctypes.data


def test_a_step_of_small_tensors_that_exceeds_the_budget_is_refused(make_training):
    model = nn.Sequential(*[layer for _ in range(20) for layer in (nn.Linear(16, 16), nn.GELU())])
    optimizer = OPTIMIZERS["adamw"](model)
    ours = make_training(model, optimizer, probe.held_bytes("cpu") + 4096)
    with pytest.raises(BudgetError, match="are smaller than 16 KiB"), ours:
        model(torch.ones(64, 16)).square().mean().backward()
