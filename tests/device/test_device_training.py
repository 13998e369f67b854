"""Parameters, gradients, states and activations leave an accelerator: equal to the bit, within the budget, no race."""

import gc

import pytest
import torch
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from penstock import offload, probe
from penstock.testing import GPT

TIERS = {"host": {"host": "64MiB"}, "disk": {"disk": True}, "both": {"host": "3MiB", "disk": True}}
NUM_STEPS = 5


def make_model(device):
    torch.manual_seed(0)
    model = GPT(num_layers=3, width=64, num_heads=2, context=64)
    return model.to(device)


def make_batch(device):
    tokens = torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(0)).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def simple_step(model, optimizer, batch):
    loss = model(*batch)
    loss.backward()
    clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.fixture
def make_training(tmp_path):
    made = []

    def make(model, optimizer, budget, where):
        settings = dict(TIERS[where])
        if settings.get("disk"):
            settings["disk"] = tmp_path
        made.append(offload.training(model, optimizer, budget, **settings))
        return made[-1]

    yield make
    for opened in made:
        opened.close()


def trained_plainly(device, step=simple_step):
    """Losses, parameters on the host, and the bytes of device memory that a step took."""
    gc.collect()
    model, batch = make_model(device), make_batch(device)
    optimizer, losses = make_optimizer(model), []
    for _ in range(NUM_STEPS):
        report = probe.peak_bytes(lambda: losses.append(step(model, optimizer, batch)), device=device)
    return (
        [loss.item() for loss in losses],
        [parameter.detach().cpu() for parameter in model.parameters()],
        report.peak_bytes,
    )


@pytest.mark.parametrize("where", TIERS)
def test_equal_to_the_bit_and_within_the_budget(device, make_training, where):
    expected, parameters, plain_bytes = trained_plainly(device)
    gc.collect()
    start_bytes = probe.held_bytes(device)
    model, batch = make_model(device), make_batch(device)
    optimizer, losses, peaks = make_optimizer(model), [], []
    budget = start_bytes + (plain_bytes - start_bytes) * 2 // 5
    training = make_training(model, optimizer, budget, where)

    def step():
        with training:
            losses.append(simple_step(model, optimizer, batch))

    for _ in range(NUM_STEPS):
        peaks.append(probe.peak_bytes(step, device=device).peak_bytes)
    statistics = training.statistics()
    training.close()
    assert [loss.item() for loss in losses] == expected
    assert all(torch.equal(parameter.cpu(), two) for parameter, two in zip(model.parameters(), parameters, strict=True))
    assert statistics.step_fetched_bytes > 0
    assert max(peaks) <= budget * 1.01


def test_checkpointed_blocks_and_accumulation_in_autograds_own_thread(device, make_training):
    def step(model, optimizer, batch):
        losses = []
        for tokens, targets in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            loss = checkpoint(model, tokens, targets, use_reentrant=False)
            (loss / 2).backward()
            losses.append(loss.detach())
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return torch.stack(losses).sum()

    expected, parameters, plain_bytes = trained_plainly(device, step)
    model, batch = make_model(device), make_batch(device)
    optimizer, losses = make_optimizer(model), []
    training = make_training(model, optimizer, probe.held_bytes(device) + plain_bytes // 3, "both")
    for _ in range(NUM_STEPS):
        with training:
            losses.append(step(model, optimizer, batch))
    assert training.statistics().step_fetched_bytes > 0
    training.close()
    assert [loss.item() for loss in losses] == expected
    assert all(torch.equal(parameter.cpu(), two) for parameter, two in zip(model.parameters(), parameters, strict=True))


def test_clipping_fetches_no_gradient_again(prompt_device, make_training):
    device, fetched = prompt_device, []
    for most in (None, 0.5):
        model, batch = make_model(device), make_batch(device)
        optimizer = make_optimizer(model)
        training = make_training(model, optimizer, probe.held_bytes(device) + 2**21, "host")
        for _ in range(NUM_STEPS):
            with training:
                model(*batch).backward()
                if most is not None:
                    clip_grad_norm_(model.parameters(), most)
                optimizer.step()
                optimizer.zero_grad()
        fetched.append(training.statistics().step_fetched["gradients"])
        training.close()
    plainly, clipped = fetched
    assert clipped <= plainly + sum(parameter.nbytes for parameter in model.parameters()) / 4


def test_a_host_that_is_far_ahead_and_a_stream_of_the_users(device, make_training):
    expected, parameters, plain_bytes = trained_plainly(device)
    model, batch = make_model(device), make_batch(device)
    optimizer, losses = make_optimizer(model), []
    training = make_training(model, optimizer, probe.held_bytes(device) + plain_bytes // 3, "host")
    stream = torch.Stream(device=device)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        for _ in range(NUM_STEPS):
            with training:
                losses.append(simple_step(model, optimizer, batch))
    torch.accelerator.current_stream().wait_stream(stream)
    training.close()
    assert [loss.item() for loss in losses] == expected
    assert all(torch.equal(parameter.cpu(), two) for parameter, two in zip(model.parameters(), parameters, strict=True))


def test_a_model_on_the_host_comes_to_the_device_a_parameter_at_a_time(prompt_device, make_training):
    device = prompt_device
    expected, parameters, plain_bytes = trained_plainly(device)
    gc.collect()
    model, batch = make_model("cpu"), make_batch(device)
    optimizer, losses = make_optimizer(model), []
    budget = probe.held_bytes(device) + plain_bytes // 3
    made = []

    def make():
        made.append(offload.training(model, optimizer, budget, host="64MiB", device=device))

    peak_bytes = probe.peak_bytes(make, device=device).peak_bytes
    for _ in range(NUM_STEPS):
        with made[0]:
            losses.append(simple_step(model, optimizer, batch))
    made[0].close()
    assert [loss.item() for loss in losses] == expected
    assert all(torch.equal(parameter.cpu(), two) for parameter, two in zip(model.parameters(), parameters, strict=True))
    assert peak_bytes <= budget


@pytest.mark.parametrize("where", TIERS)
def test_a_checkpoint_goes_on_to_the_bit(device, make_training, tmp_path, where):
    model, batch = make_model(device), make_batch(device)
    optimizer = make_optimizer(model)
    training = make_training(model, optimizer, probe.held_bytes(device) + 2**21, where)
    losses = []
    for number in range(4):
        if number == 2:
            training.save(tmp_path / "saved", extra=number)
            torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
        with training:
            losses.append(simple_step(model, optimizer, batch))
    training.close(discard=True)
    with torch.device("meta"):
        model = make_model("meta")
    offload.load(model, tmp_path / "saved", device=device)
    optimizer = make_optimizer(model)
    training = make_training(model, optimizer, probe.held_bytes(device) + 2**21, where)
    assert training.load(tmp_path / "saved") == 2
    stored = torch.load(tmp_path / "optimizer.pt", map_location="cpu")["state"]
    with training.whole():
        states = optimizer.state_dict()["state"]
        assert all(
            torch.equal(value.cpu(), stored[at][key]) for at, state in states.items() for key, value in state.items()
        )
    for expected in losses[2:]:
        with training:
            assert torch.equal(simple_step(model, optimizer, batch), expected)
