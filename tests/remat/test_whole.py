"""Operators that are captured whole: results and gradients are eager PyTorch's, at every budget."""

import gc

import pytest
import torch
from torch import nn

from penstock import probe, remat
from penstock.testing import assert_gradients_equal


class Recurrent(nn.Module):
    """An RNN between two layers."""

    def __init__(self, kind, **options):
        super().__init__()
        self.before, self.rnn = nn.Linear(16, 24), kind(24, 24, batch_first=True, **options)
        self.after = nn.LazyLinear(8)

    def forward(self, x):
        y, state = self.rnn(torch.tanh(self.before(x)))
        last = state[0] if isinstance(state, tuple) else state
        return self.after(y).square().mean() + last.mean()


KINDS = {
    "LSTM": (nn.LSTM, {}),
    "deep LSTM that drops": (nn.LSTM, {"num_layers": 2, "dropout": 0.3}),
    "LSTM with projections": (nn.LSTM, {"proj_size": 12}),
    "GRU both ways": (nn.GRU, {"bidirectional": True}),
    "deep GRU that drops": (nn.GRU, {"num_layers": 2, "dropout": 0.2}),
    "RNN": (nn.RNN, {}),
    "RNN of relu": (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
}


def make(name):
    torch.manual_seed(0)
    kind, options = KINDS[name]
    model, x = Recurrent(kind, **options), torch.randn(8, 10, 16)
    model(x)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model, x


@pytest.mark.parametrize("name", KINDS)
def test_rnns_train_as_plain_at_every_budget(name):
    plain, x = make(name)
    torch.manual_seed(1)
    loss = plain(x)
    loss.backward()
    model, _ = make(name)
    problem = remat.optimize(model, [x], None).plan.problem
    low, high = remat.smallest_budget_bytes(problem, method="recompute"), remat.plan(problem, 2**62).keep_all_peak_bytes
    for share in (1.0, 0.0):
        model, _ = make(name)
        budget = int(low + share * (high - low)) + 4096
        step = remat.optimize(model, [x], budget, method="recompute", profile=problem, verify=True)
        torch.manual_seed(1)
        ours = step(x)
        assert any(operator.target.startswith("penstock.whole") for operator in step.plan.problem.operators)
        ours.backward()
        assert torch.equal(ours, loss)
        assert_gradients_equal(plain, model)


def test_the_peak_of_an_rnn_is_known():
    model, x = make("deep GRU that drops")
    step = remat.optimize(model, [x], None)
    step(x).backward()
    gc.collect()
    measured = probe.peak_bytes(lambda: step(x).backward(), device="cpu").activation_bytes
    predicted = step.plan.peak_bytes - step.plan.problem.static_bytes
    assert 0.98 * predicted <= measured <= predicted + 2 * 5056 + 4096  # states of the generator count as static


def test_what_an_rnn_saved_goes_with_its_graph():
    model, x = make("LSTM")
    step = remat.optimize(model, [x], None)
    step(x).backward()
    gc.collect()
    before = probe.peak_bytes(lambda: None, device="cpu").start_bytes
    for _ in range(3):
        step(x).backward()
        step(x)  # whose backward never comes
    gc.collect()
    assert probe.peak_bytes(lambda: None, device="cpu").start_bytes == before


@pytest.mark.parametrize("name", KINDS)
def test_an_rnn_under_autocast(name):
    """Its weights are cast once for all time steps, and in half precision their gradients are summed."""
    losses = []
    for planned in (False, True):
        model, x = make(name)

        def run(x, model=model):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return model(x)

        step = remat.optimize(run, [x], None, verify=True) if planned else run
        torch.manual_seed(1)
        loss = step(x)
        loss.backward()
        losses.append((loss, [parameter.grad for parameter in model.parameters()]))
    (plain_loss, gradients), (planned_loss, planned_gradients) = losses
    assert torch.equal(plain_loss, planned_loss)
    assert all(map(torch.equal, gradients, planned_gradients))


@pytest.mark.parametrize("are_tensors", [True, False])
def test_the_ctc_loss(are_tensors):
    torch.manual_seed(0)
    plain, ours = nn.Linear(12, 7), nn.Linear(12, 7)
    ours.load_state_dict(plain.state_dict())
    x, targets = torch.randn(20, 4, 12), torch.randint(1, 7, (4, 6))
    lengths = ([20, 15, 20, 9], [6, 4, 5, 3])
    sizes = list(map(torch.tensor, lengths)) if are_tensors else lengths

    def loss(layer, x):
        scores = layer(x).log_softmax(2)
        return nn.functional.ctc_loss(scores, targets, *sizes)

    expected = loss(plain, x)
    expected.backward()
    step = remat.compile(lambda x: loss(ours, x), budget="1MiB")
    for _ in range(2):
        ours.zero_grad()
        output = step(x)
        output.backward()
        assert torch.equal(output, expected)
        assert_gradients_equal(plain, ours)
