"""Parameters, gradients, states and activations leave the device in a loop of the user's own: results stay the same."""

import copy
import gc
import io

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint

from penstock import probe
from penstock.errors import BudgetError
from penstock.offload import training

WIDTH, VOCABULARY, NUM_STEPS = 128, 500, 5


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

    def __init__(self, num_blocks=4, dropout=0.0, recompute=None):
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


@pytest.fixture
def make_training(tmp_path):
    made = []

    def make(model, optimizer, budget, **tiers):
        made.append(training(model, optimizer, budget, **{"disk": tmp_path, **tiers}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def assert_same_training(make_training, model, make_optimizer, step=simple_step, *, share=0.25, is_bounded=True):
    """Trains a copy plainly, then the model within a share of what the copy's training took; the same to the bit."""
    data = batches()
    gc.collect()
    twin = copy.deepcopy(model)
    optimizer = make_optimizer(twin)
    with probe.record_memory("cpu") as recording:
        expected = run_plain(twin, optimizer, step, data)
    after = {name: value.clone() for name, value in twin.state_dict().items()}
    states = list(optimizer.state.values())
    own_bytes = sum(one.nbytes for one in model.parameters())
    base = probe.held_bytes("cpu") - own_bytes
    budget = base + int((recording.report.peak_bytes - recording.report.start_bytes + own_bytes) * share)
    optimizer = make_optimizer(model)
    ours = make_training(model, optimizer, budget)
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
    for mine, theirs in zip(optimizer.state.values(), states, strict=True):
        assert all(torch.equal(torch.as_tensor(mine[name]), torch.as_tensor(theirs[name])) for name in theirs)
    assert statistics.fetched_bytes > 0
    assert not is_bounded or max(peaks) <= budget * 1.01
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


@pytest.mark.parametrize("recompute", ["reentrant", "not reentrant"])
def test_checkpointed_blocks_with_dropout(make_training, recompute):
    torch.manual_seed(0)
    assert_same_training(make_training, Transformer(dropout=0.1, recompute=recompute), OPTIMIZERS["adamw"])
