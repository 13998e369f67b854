"""Models, optimizers and loops with which the tests of `offload.training` train twice, plainly and within a budget."""

import contextlib
import copy
import gc

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from penstock import probe

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
    own_bytes = sum(parameter.nbytes for parameter in model.parameters())
    return probe.held_bytes("cpu") - own_bytes + int(size_mib * 2**20)


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
    states = [optimizer.state[parameter] for parameter in twin.parameters()]
    own_bytes = sum(parameter.nbytes for parameter in model.parameters())
    base = probe.held_bytes("cpu") - own_bytes
    budget = base + int((recording.report.peak_bytes - recording.report.start_bytes + own_bytes) * share)
    optimizer = make_optimizer(model)
    ours = make_training(model, optimizer, budget, **options)
    torch.manual_seed(2)
    losses, peaks = [], []
    for number, tokens in enumerate(data):
        if number < 3:  # each kind of step is measured by the training itself
            with ours:
                losses.append(step(model, optimizer, tokens))
            peaks.append(ours.statistics().measured_peak_bytes or 0)
            continue
        with probe.record_memory("cpu") as recording, ours:
            losses.append(step(model, optimizer, tokens))
        peaks.append(recording.report.peak_bytes)
    statistics = ours.statistics()
    ours.close()
    assert losses == expected
    assert all(torch.equal(value, after[name]) for name, value in model.state_dict().items())
    for state, theirs in zip(model.parameters(), states, strict=True):
        mine = optimizer.state[state]
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
            {"params": [parameter for parameter in model.parameters() if parameter.dim() > 1], "weight_decay": 0.1},
            {"params": [parameter for parameter in model.parameters() if parameter.dim() == 1], "lr": 1e-2},
        ]
    ),
}


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
    assert all(
        torch.equal(parameter, two) for parameter, two in zip(model.parameters(), twin.parameters(), strict=True)
    )
    assert all(torch.equal(tensor, two) for tensor, two in zip(model.buffers(), twin.buffers(), strict=True))
    for parameter, two in zip(model.parameters(), twin.parameters(), strict=True):
        mine, theirs = optimizer.state[parameter], plain.state[two]
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(theirs[key])) for key in theirs)
