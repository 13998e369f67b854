"""Under autocast, with updates on the host: weights and gradients travel in half precision, and numbers are plain's."""

import contextlib
import copy
import functools
import gc

import pytest
import torch
from test_device_training import make_batch
from torch import nn

from penstock import offload, probe
from penstock.state._order_split import late_weights
from penstock.state._page import Narrow
from penstock.state._replay import Replay
from penstock.storages import storage_id
from penstock.testing import GPT

NUM_STEPS = 5


def make_model(device):
    torch.manual_seed(0)
    model = GPT(num_layers=3, width=128, num_heads=2, context=64)
    for block in model.blocks:
        block.qkv.bias = None  # its gradient is zero but for rounding
    return model.to(device)


@pytest.fixture
def make_training(tmp_path):
    made = []

    def make(model, optimizer, budget_bytes=2**21, **options):
        budget = probe.held_bytes(next(model.parameters()).device) + budget_bytes
        own = offload.training(model, optimizer, budget, **{"host": "64MiB", "update": "host", **options})
        made.append(own)
        return own

    yield make
    for opened in made:
        opened.close(discard=True)


def loss_of(model, batch, dtype=torch.bfloat16):
    with torch.autocast(batch[0].device.type, dtype):
        return model(*batch)


def step(model, optimizer, batch, *, micro_batches=1, clip_norm=None, dtype=torch.bfloat16):
    for _ in range(micro_batches):
        loss = loss_of(model, batch, dtype)
        loss.backward()
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def gradients_of(model, batch, micro_batches=1, clip_norm=None):
    """Of plain PyTorch, from a copy of the model as it is."""
    plain = copy.deepcopy(model)
    for _ in range(micro_batches):
        loss_of(plain, batch).backward()
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(plain.parameters(), clip_norm)
    return [parameter.grad.cpu() for parameter in plain.parameters()]


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("options", [{}, {"micro_batches": 6, "clip_norm": 0.5}])
def test_losses_are_plains_and_peaks_within_the_budget(device, make_training, options, in_backward):
    if in_backward and options:
        pytest.skip("updates in backward are for one backward without clipping")
    batch, model = make_batch(device), make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    expected = [step(model, optimizer, batch, **options).item() for _ in range(NUM_STEPS)]
    model = optimizer = None
    gc.collect()
    model, losses, peaks = make_model(device), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    own = make_training(model, optimizer, update_in_backward=in_backward)

    def step_inside():
        with own:
            losses.append(step(model, optimizer, batch, **options))

    for _ in range(NUM_STEPS):
        peaks.append(probe.peak_bytes(step_inside, device=device).peak_bytes)
    torch.testing.assert_close(
        torch.tensor([loss.item() for loss in losses]), torch.tensor(expected), rtol=1e-3, atol=0
    )
    assert max(peaks) <= own.budget_bytes * 1.02  # the first step of a kind is the one that is measured
    assert own.statistics().num_host_updates > 0


@pytest.mark.parametrize(
    ("options", "most"),
    [({}, 6), ({"clip_norm": 0.5}, 6.2), ({"micro_batches": 4, "clip_norm": 0.5}, 32)],
)
def test_bytes_per_parameter_and_step(prompt_device, make_training, options, most):
    """2 in for forward, 2 for backward, 2 out for the gradient, in each micro-batch; a sum's norm wants its parts."""
    torch.manual_seed(0)
    model = GPT(num_layers=6, width=256, num_heads=2, context=32).to(prompt_device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(256, (1, 33), generator=torch.Generator().manual_seed(0)).to(prompt_device)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    size_bytes = 16 * sum(parameter.numel() for parameter in model.parameters())
    own = make_training(model, optimizer, size_bytes // 12 - size_bytes // 4, host="256MiB")
    for _ in range(NUM_STEPS):
        with own:
            step(model, optimizer, batch, **options)
    statistics = own.statistics()
    moved = [
        (statistics.step_fetched.get(kind, 0) + statistics.step_parked.get(kind, 0)) / statistics.num_parameters
        for kind in ("parameters", "gradients", "optimizer state")
    ]
    assert sum(moved) <= most, moved
    assert statistics.state_bytes <= 1.01 * size_bytes


@pytest.mark.parametrize("micro_batches", [1, 3, 6])
def test_a_gradient_that_is_read_is_plains_to_the_bit(device, make_training, micro_batches):
    model, batch = make_model(device), make_batch(device)
    own = make_training(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with own:
        step(model, own.optimizer, batch)
    with own.whole():
        expected = gradients_of(model, batch, micro_batches)
    gc.collect()
    with own:
        for _ in range(micro_batches):
            loss_of(model, batch).backward()
        found = [parameter.grad.cpu() for parameter in model.parameters()]
        own.optimizer.step()
        again = [parameter.grad.cpu() for parameter in model.parameters()]
        own.optimizer.zero_grad()
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, again, expected))


def test_a_gradient_that_was_clipped_is_read_as_it_was_scaled(prompt_device, make_training):
    model, batch = make_model(prompt_device), make_batch(prompt_device)
    own = make_training(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with own:
        step(model, own.optimizer, batch)
    with own.whole():
        expected = gradients_of(model, batch, clip_norm=0.1)
    gc.collect()
    with own:
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        own.optimizer.step()
        found = [parameter.grad.cpu() for parameter in model.parameters()]
        own.optimizer.zero_grad()
    torch.testing.assert_close(found, expected)


def trained_twice(model, own, batch):
    for _ in range(2):
        with own:
            step(model, own.optimizer, batch)


def is_right(model, own, batch):
    """Whether the loss that the training gives now is that of a copy in plain PyTorch."""
    with own:
        found = loss_of(model, batch).item()
    with own.whole():
        return found == loss_of(copy.deepcopy(model), batch).item()


CHANGES = {
    "nothing": lambda model, own: None,
    "the cast is written to": lambda model, own: [
        parameter.to(torch.bfloat16).zero_() for parameter in model.parameters()
    ],
    "the weight is": lambda model, own: [parameter.data.mul_(0.5) for parameter in model.parameters()],
    "a checkpoint is loaded": lambda model, own: model.load_state_dict(
        {name: 0.9 * value.cpu() for name, value in model.state_dict().items()}
    ),
    "a weight is replaced": lambda model, own: setattr(
        model.blocks[0].expand.weight, "data", 0.5 * model.blocks[0].expand.weight.data
    ),
    "it is evaluated": lambda model, own: model.eval() and None,
}


@pytest.mark.parametrize("change", CHANGES)
def test_casts_are_those_of_the_weights_as_they_are(prompt_device, make_training, change):
    model, batch = make_model(prompt_device), make_batch(prompt_device)
    own = make_training(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    trained_twice(model, own, batch)
    with torch.no_grad(), own:
        CHANGES[change](model, own)
    assert is_right(model, own, batch)
    with torch.inference_mode():
        assert is_right(model, own, batch)
    trained_twice(model, own, batch)
    assert is_right(model, own, batch)


def test_several_casts_of_a_weight_live_at_once(device, make_training):
    model, batch = make_model(device), make_batch(device)
    own = make_training(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    trained_twice(model, own, batch)
    weight = model.blocks[1].expand.weight
    with own:
        first, second = weight.detach().to(torch.bfloat16), weight.detach().to(torch.bfloat16)
        first.zero_()
        assert torch.equal(second.cpu(), weight.detach().cpu().to(torch.bfloat16))
        kept = weight.detach().to(torch.bfloat16)
        before = kept.cpu()
        step(model, own.optimizer, batch)
    with own:
        step(model, own.optimizer, batch)
        assert torch.equal(kept.cpu(), before)
    assert is_right(model, own, batch)


def test_a_weight_with_two_uses_two_forwards_and_checkpointed_blocks(device, make_training):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(128, 128)
            self.tied = nn.Linear(128, 128)
            self.tied.weight = self.inner.weight

        def forward(self, x):
            x = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False).relu()
            return (self.tied(x).float() @ self.inner.weight).square().mean()  # and a third one, in single precision

    def train(model, optimizer, enter):
        losses = []
        for _ in range(NUM_STEPS):
            with enter():
                with torch.autocast(device, torch.bfloat16):
                    one, other = model(x), model(2 * x)
                (one + other).backward()
                losses.append(one.item())
                optimizer.step()
                optimizer.zero_grad()
        return losses

    torch.manual_seed(0)
    model = Twice().to(device)
    x = torch.randn(16, 128, generator=torch.Generator().manual_seed(1)).to(device)
    plain = copy.deepcopy(model)
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), torch.enable_grad)
    own = make_training(model, torch.optim.SGD(model.parameters(), lr=0.1), 2**18)
    losses = train(model, own.optimizer, lambda: own)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=2e-3, atol=0)


def test_scaled_losses_in_float16(prompt_device, make_training):
    batch = make_batch(prompt_device)

    def train(model, optimizer, enter):
        scaler, losses = torch.amp.GradScaler(prompt_device, init_scale=2.0**8), []
        for _ in range(NUM_STEPS):
            with enter():
                loss = loss_of(model, batch, torch.float16)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                losses.append(loss.item())
        return losses

    model = make_model(prompt_device)
    expected = train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), torch.enable_grad)
    model = make_model(prompt_device)
    own = make_training(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = train(model, own.optimizer, lambda: own)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-3, atol=0)


def test_a_frozen_weight_comes_as_its_cast(prompt_device, make_training):
    """Whoever updates the others."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(8)], nn.Linear(512, 1)).to(prompt_device)
    for parameter in model[:-1].parameters():
        parameter.requires_grad_(False)
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(1)).to(prompt_device)

    def train(model, optimizer, enter):
        losses = []
        for _ in range(4):
            with enter():
                with torch.autocast(prompt_device, torch.bfloat16):
                    loss = model(x).square().mean()
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
        return losses

    plain = copy.deepcopy(model)
    expected = train(plain, torch.optim.SGD(plain[-1].parameters(), lr=0.1), torch.enable_grad)
    own = make_training(model, torch.optim.SGD(model[-1].parameters(), lr=0.1), -(2**22), update="device")
    assert train(model, own.optimizer, lambda: own) == expected
    statistics = own.statistics()
    assert statistics.step_fetched["parameters"] / statistics.num_parameters <= 2.1
    assert statistics.step_parked.get("parameters", 0) / statistics.num_parameters <= 0.1


def test_closing_gives_all_back_and_nothing_more(prompt_device, make_training):
    batch, model = make_batch(prompt_device), make_model(prompt_device)
    start_bytes = probe.held_bytes(prompt_device)
    own = make_training(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    trained_twice(model, own, batch)
    assert own.fits == (own.statistics().state_bytes + start_bytes <= own.budget_bytes)
    own.close()
    gc.collect()
    own_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert probe.held_bytes(prompt_device) - start_bytes <= 2.1 * own_bytes  # the optimizer's states
    step(model, own.optimizer, batch)


@pytest.mark.parametrize("update", ["host", "device"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_cast_leaves_without_a_copy(device, make_training, recompute, update):
    """Autocast keeps all casts until it ends; copied out, each would take 2 bytes a parameter."""
    torch.manual_seed(0)
    model = GPT(num_layers=6, width=128, num_heads=2, context=64, checkpointed=recompute).to(device)
    batch, twin = make_batch(device), copy.deepcopy(model)
    size_bytes = 16 * sum(parameter.numel() for parameter in model.parameters())
    own = make_training(model, torch.optim.SGD(model.parameters(), lr=0.1), size_bytes // 8, update=update)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    expected = [step(twin, optimizer, batch).item() for _ in range(NUM_STEPS)]
    losses = []
    for _ in range(NUM_STEPS):
        with own:
            losses.append(step(model, own.optimizer, batch).item())
    assert losses == (pytest.approx(expected, rel=1e-3) if update == "host" else expected)
    if recompute:
        statistics = own.statistics()
        assert statistics.step_parked.get("activations", 0) <= statistics.num_parameters


def test_a_cast_that_is_held_keeps_its_values_when_the_weight_changes(prompt_device, make_training):
    weight = nn.Parameter(torch.randn(256, 256, device=prompt_device))
    own = make_training(
        nn.ParameterList([weight, *(torch.zeros(256, 256, device=prompt_device) for _ in range(12))]),
        torch.optim.SGD([weight], lr=1.0),
        update="device",
    )
    before = weight.detach().bfloat16().cpu()
    with own, torch.no_grad():
        held = weight.to(torch.bfloat16)
        page = own._managed.pages.find(storage_id(held))
        own._managed.pages.let_leave(page)
        assert not page.is_here
        assert page.handle is None
        weight.zero_()
        assert torch.equal(held.cpu(), before)


def test_a_cast_that_is_held_keeps_its_values_when_the_host_begins_to_update(prompt_device, make_training, monkeypatch):
    monkeypatch.setattr(Replay, "prepare", functools.partialmethod(Replay.prepare, is_waited_for=True))
    monkeypatch.setattr("penstock.state._replay.weights_for_host", lambda order, *_: late_weights(order, 1.0))
    model, batch = make_model(prompt_device), make_batch(prompt_device)
    own = make_training(model, torch.optim.AdamW(model.parameters(), lr=0.1), 2**20, update="auto")
    for _ in range(10):
        with own:
            held = model.blocks[0].contract.weight.to(torch.bfloat16)
            before = held.detach().cpu()
            step(model, own.optimizer, batch)
            assert torch.equal(held.detach().cpu(), before)
    assert own.statistics().num_host_updates > 0


def test_a_second_run_begins_with_the_updates_that_the_host_had_in_the_first(prompt_device, monkeypatch):
    monkeypatch.setattr(Replay, "prepare", functools.partialmethod(Replay.prepare, is_waited_for=True))
    monkeypatch.setattr("penstock.state._replay.weights_for_host", lambda order, *_: late_weights(order, 1.0))
    batch, model = make_batch(prompt_device), make_model(prompt_device)
    budget = probe.held_bytes(prompt_device) + 2**20
    del model

    def train(num_steps):
        gc.collect()
        model = make_model(prompt_device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with contextlib.closing(offload.training(model, optimizer, budget, host="64MiB", update="auto")) as own:
            for _ in range(num_steps):
                with own:
                    step(model, optimizer, batch)
            return own.statistics().num_host_updates

    assert train(4) == 0  # the device does all while steps are measured
    assert train(14) > 0
    assert train(4) > 0


class Products(nn.Module):
    """Weights alone, each cast and used as its loop says."""

    def __init__(self, count=4, width=128):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(width, width) / width**0.5) for _ in range(count))


def transposed_before(model, x):
    views = [weight.t() for weight in model.weights]  # made while all are there; the weights leave before they are cast
    for view in views:
        x = torch.tanh(x @ view)
    return x.float().square().mean()


def summed_before(model, x):
    """Both weights of a pair have the same gradient in half precision, which is one tensor."""
    for weight, other in zip(model.weights[::2], model.weights[1::2], strict=True):
        x = torch.tanh(x @ (weight.to(torch.bfloat16) + other.to(torch.bfloat16)))
    return x.float().square().mean()


class IntoBuffer(torch.autograd.Function):
    """Writes the gradients of a weight into one place, time after time."""

    @staticmethod
    def forward(ctx, x, weight, buffer):
        ctx.save_for_backward(x, weight)
        ctx.buffer = buffer
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        torch.mm(x.t(), gradient, out=ctx.buffer)
        return gradient @ weight.t(), ctx.buffer, None


def into_buffers(model, x):
    if not hasattr(model, "buffers_of"):
        model.buffers_of = [torch.empty_like(weight, dtype=torch.bfloat16).detach() for weight in model.weights]
    for weight, buffer in zip(model.weights, model.buffers_of, strict=True):
        x = torch.tanh(IntoBuffer.apply(x.to(torch.bfloat16), weight.to(torch.bfloat16), buffer))
    return x.float().square().mean()


def overwritten_by_a_hook(model, x):
    model.seen = []
    for weight in model.weights:
        half = weight.to(torch.bfloat16)
        half.register_hook(model.seen.append)
        x = torch.tanh(x @ half)
    return x.float().square().mean()


def straight(model, x):
    for weight in model.weights:
        x = torch.tanh(x @ weight)
    return x.float().square().mean()


LOOPS = {
    "views that were made before": (transposed_before, {"budget": 200_000}),
    "weights whose gradient is one tensor": (
        summed_before,
        {"reads": True, "count": 8, "budget": 300_000, "optimizer": lambda own: torch.optim.AdamW(own, lr=1e-3)},
    ),
    "gradients in a buffer": (into_buffers, {"micro_batches": 3}),
    "gradients that a hook keeps and somebody overwrites": (overwritten_by_a_hook, {}),
    "clipped after each micro-batch": (straight, {"micro_batches": 3, "clips": True}),
    "never zeroed": (straight, {"clips": True, "zeroes": False}),
}


@pytest.mark.parametrize("name", LOOPS)
def test_what_is_made_of_others_is_what_it_was_then(prompt_device, make_training, name):
    loss_of_loop, options = LOOPS[name]
    make_optimizer = options.get("optimizer", lambda own: torch.optim.SGD(own, lr=0.1))
    x = torch.randn(16, 128, generator=torch.Generator().manual_seed(1)).to(prompt_device)

    def train(model, optimizer, enter):
        losses = []
        for _ in range(NUM_STEPS):
            with enter():
                for number in range(options.get("micro_batches", 1)):
                    with torch.autocast(prompt_device, torch.bfloat16):
                        loss = loss_of_loop(model, x * (number + 1))
                    loss.backward()
                    for tensor in getattr(model, "seen", []):
                        tensor.zero_()
                    if options.get("clips"):
                        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                losses.append(loss.item())
                optimizer.step()
                if options.get("reads"):
                    losses += [parameter.grad.norm().item() for parameter in model.parameters()]
                if options.get("zeroes", True):
                    optimizer.zero_grad()
        return losses

    torch.manual_seed(0)
    model = Products(options.get("count", 4)).to(prompt_device)
    plain = copy.deepcopy(model)
    own_bytes = sum(parameter.nbytes for parameter in model.parameters())
    expected = train(plain, make_optimizer(plain.parameters()), torch.enable_grad)
    del plain
    gc.collect()
    budget = options.get("budget", own_bytes + 2**18) - own_bytes
    own = make_training(model, make_optimizer(model.parameters()), budget)
    losses = train(model, own.optimizer, lambda: own)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=1e-6)
    assert own.statistics().num_host_updates > 0


def test_a_gradient_whose_making_was_interrupted_is_made_again(prompt_device, make_training, monkeypatch):
    torch.manual_seed(0)
    model = Products().to(prompt_device)
    x = torch.randn(16, 128, generator=torch.Generator().manual_seed(1)).to(prompt_device)
    own = make_training(model, torch.optim.SGD(model.parameters(), lr=0.1), 2**18)
    with own:
        with torch.autocast(prompt_device, torch.bfloat16):
            loss = straight(model, x)
        loss.backward()
        weight = model.weights[0]
        put = Narrow.put

        def interrupted(self, *given):
            monkeypatch.setattr(Narrow, "put", put)
            raise KeyboardInterrupt

        monkeypatch.setattr(Narrow, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            weight.grad.norm()
        found = weight.grad.cpu()
    with own.whole():
        plain = copy.deepcopy(model)
        plain.zero_grad()
        with torch.autocast(prompt_device, torch.bfloat16):
            straight(plain, x).backward()
        assert torch.equal(found, plain.weights[0].grad.cpu())
