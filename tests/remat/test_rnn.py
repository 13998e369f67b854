"""RNNs over packed sequences: captured, with results and gradients of eager PyTorch."""

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

from penstock import remat


class Tagger(nn.Module):
    """Packs, runs an RNN, pads."""

    def __init__(self, kind, *, are_sorted, **options):
        super().__init__()
        self.before, self.rnn = nn.Embedding(50, 16), kind(16, 24, batch_first=True, bidirectional=True, **options)
        self.after = nn.LazyLinear(8)
        self.are_sorted = are_sorted

    def forward(self, words, lengths):
        packed = rnn.pack_padded_sequence(self.before(words), lengths, batch_first=True, enforce_sorted=self.are_sorted)
        y, _ = rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return torch.tanh(self.after(y))


def sentences(seed):
    """Six of up to 20 words, the longest first."""
    choices = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 21, (6,), generator=choices).sort(descending=True).values
    return torch.randint(50, (6, 20), generator=choices), lengths


DOORS = {
    "own": lambda model: remat.compile(model, budget="64MiB"),
    "string": lambda model: torch.compile(model, backend="penstock", options={"budget": "64MiB"}),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("are_sorted", [True, False])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(nn.LSTM, {"num_layers": 2, "dropout": 0.3}), (nn.LSTM, {"proj_size": 8}), (nn.GRU, {}), (nn.RNN, {})],
)
def test_rnns_over_packed_sequences_are_captured(kind, options, are_sorted, door):
    torch.manual_seed(0)
    model = Tagger(kind, are_sorted=are_sorted, **options)
    model(*sentences(0))
    step = DOORS[door](model)
    for seed in range(2):
        results = []
        for run in (model, step):
            model.zero_grad()
            torch.manual_seed(seed)
            y = run(*sentences(seed))
            y.sum().backward()
            results.append([y, *(parameter.grad for parameter in model.parameters())])
        assert all(map(torch.equal, *results))
    if door == "own":
        (targets,) = {tuple(operator.target for operator in plan.problem.operators) for plan in step.plans}
        num_parts = 2 * model.rnn.num_layers  # forward and backward of each layer
        assert sum(target.startswith("penstock.whole") for target in targets) == num_parts
        assert len(step.plans) == 2  # one for each number of words


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_an_rnn_itself_takes_packed_sequences_and_states(kind):
    torch.manual_seed(0)
    model = kind(8, 12)
    step = remat.compile(model, budget="64MiB")
    packed = rnn.pack_sequence([torch.randn(length, 8) for length in (3, 5, 2)], enforce_sorted=False)
    state = torch.randn(1, 3, 12)
    results = []
    for run in (model, step):
        model.zero_grad()
        y, last = run(packed, (state, state) if kind is nn.LSTM else state)
        assert isinstance(y, rnn.PackedSequence)
        last = last[0] if kind is nn.LSTM else last
        (y.data.sum() + last[:, 1].sum()).backward()
        results.append([y.data, last, *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *results))
    wrong = torch.randn(1, 4, 12)
    with pytest.raises(RuntimeError, match=r"\(1, 3, 12\), got \[1, 4, 12\]"):
        step(packed, (wrong, wrong) if kind is nn.LSTM else wrong)
    assert kind.forward.__module__ == "torch.nn.modules.rnn"  # as before, outside of the step
    assert not hasattr(kind.forward, "_takes_packed")
