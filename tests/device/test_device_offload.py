"""Activations leave an accelerator: gradients equal to the bit, a lower peak, and no byte lost."""

import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from penstock import offload, probe
from penstock.testing import GPT

TIERS = {"host": {"host": "64MiB"}, "disk": {"disk": True}, "both": {"host": "5MiB", "disk": True}}


def make_model(device, dtype=torch.float32, **changes):
    torch.manual_seed(0)
    return GPT(**{"num_layers": 3, "width": 64, "num_heads": 2, "context": 64, **changes}).to(device, dtype)


def make_batch(device):
    tokens = torch.randint(256, (8, 65), generator=torch.Generator().manual_seed(0)).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train(model, offloader, batch, steps=4, run=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = run or model
    losses = []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=False)
        if offloader is None:
            loss = run(*batch)
            loss.backward()
        else:
            with offloader:
                loss = run(*batch)
                loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


@pytest.fixture
def make_offloader(tmp_path):
    made = []

    def make(model, where, **options):
        settings = dict(TIERS[where])
        if settings.get("disk"):
            settings["disk"] = tmp_path
        defaults = {"min_size": "16KiB", "min_saving": 0, "max_stall": 1, "max_in_flight": "1MiB"}
        made.append(offload.activations(model, **settings, **{**defaults, **options}))
        return made[-1]

    yield make
    for offloader in made:
        offloader.close()


def assert_equal(plain, ours):
    for parameter, two in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(parameter, two)
        assert torch.equal(parameter.grad, two.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", TIERS)
def test_losses_and_parameters_are_equal_to_the_bit(device, make_offloader, where, dtype):
    plain, ours, batch = make_model(device, dtype), make_model(device, dtype), make_batch(device)
    control = make_model(device, dtype)
    expected = train(plain, None, batch)
    assert train(control, None, batch) == expected, "plain training does not repeat itself on this device"
    offloader = make_offloader(ours, where, verify=True)
    assert train(ours, offloader, batch) == expected
    assert_equal(plain, ours)
    gc.collect()
    for waterfall in offloader._waterfalls.values():
        waterfall.drain()
    statistics = offloader.tier_statistics()
    assert statistics.parked_bytes > 0
    assert statistics.fetched_bytes > 0
    assert statistics.num_live_handles == 0
    assert set(statistics.held_bytes.values()) == {0}


def test_the_peak_falls(device, make_offloader):
    model, batch = make_model(device), make_batch(device)
    model(*batch).backward()
    plain = probe.peak_bytes(lambda: model(*batch).backward(), device=device)
    offloader = make_offloader(model, "host")

    def step():
        with offloader:
            model(*batch).backward()

    for _ in range(2):
        step()
    ours = probe.peak_bytes(step, device=device)
    assert ours.activation_bytes < 0.8 * plain.activation_bytes


def test_a_budget_is_kept(device, make_offloader):
    model, batch = make_model(device), make_batch(device)
    model(*batch).backward()
    plain = probe.peak_bytes(lambda: model(*batch).backward(), device=device)
    budget = plain.start_bytes + int(0.7 * plain.activation_bytes)
    offloader = make_offloader(model, "host", budget=budget)

    def step():
        with offloader:
            model(*batch).backward()

    for _ in range(4):
        step()
    assert probe.peak_bytes(step, device=device).peak_bytes <= budget


def test_many_micro_batches_in_flight_on_a_stream_of_the_users(device, make_offloader):
    plain, ours, batch = make_model(device), make_model(device), make_batch(device)
    offloader = make_offloader(ours, "both", verify=True)
    stream, default = torch.Stream(device=device), torch.accelerator.current_stream()
    for model, context in ((plain, None), (ours, offloader)):
        stream.wait_stream(default)
        with stream:
            for _ in range(3):
                if context is None:
                    losses = [model(*batch) for _ in range(3)]
                    for index in (1, 2, 0):
                        losses[index].backward()
                else:
                    with context:
                        losses = [model(*batch) for _ in range(3)]
                        for index in (1, 2, 0):
                            losses[index].backward()
        default.wait_stream(stream)
    torch.accelerator.synchronize()
    for parameter, two in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(parameter.grad, two.grad)


def test_autocast_and_a_gradient_scaler(device, make_offloader):
    plain, ours, batch = make_model(device), make_model(device), make_batch(device)
    offloader = make_offloader(ours, "host", min_size=0)
    scalers = [torch.amp.GradScaler(device), torch.amp.GradScaler(device)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (plain, ours)]
    for _ in range(3):
        with torch.autocast(device, torch.bfloat16):
            first = plain(*batch)
        scalers[0].scale(first).backward()
        with offloader:
            with torch.autocast(device, torch.bfloat16):
                second = ours(*batch)
            scalers[1].scale(second).backward()
        assert torch.equal(first, second)
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
    assert_equal(plain, ours)


def make_blocks(device, dropout=0.0):
    torch.manual_seed(0)
    block = lambda: torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Dropout(dropout))  # noqa: E731
    return torch.nn.Sequential(*[block() for _ in range(4)]).to(device)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_blocks(device, make_offloader, use_reentrant):
    plain, ours = make_blocks(device, 0.2), make_blocks(device, 0.2)
    x = torch.randn(256, 64).to(device).requires_grad_()
    offloader = make_offloader(ours, "host")

    def run(model):
        def forward(x):
            for block in model:
                x = checkpoint(block, x, use_reentrant=use_reentrant)
            return x.square().mean()

        return forward

    outcomes = []
    for model, context in ((plain, None), (ours, offloader)):
        torch.manual_seed(3)
        outcomes.append(train(model, context, (x,), run=run(model)))
    assert outcomes[0] == outcomes[1]
    assert_equal(plain, ours)


def test_dropout_draws_what_plain_training_draws(device, make_offloader):
    plain, ours = make_blocks(device, 0.2), make_blocks(device, 0.2)
    x = torch.randn(256, 64).to(device)
    offloader = make_offloader(ours, "host")
    outcomes = []
    for model, context in ((plain, None), (ours, offloader)):
        torch.manual_seed(3)
        outcomes.append(train(model, context, (x,), run=lambda x, model=model: model(x).square().mean()))
    assert outcomes[0] == outcomes[1]
    assert_equal(plain, ours)


def test_an_exception_in_the_middle_of_a_step(device, make_offloader):
    plain, ours, batch = make_model(device), make_model(device), make_batch(device)
    expected = train(plain, None, batch)
    offloader = make_offloader(ours, "both")

    def fail():
        with offloader:
            ours(*batch)
            raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            fail()
    assert train(ours, offloader, batch) == expected
    gc.collect()
    for waterfall in offloader._waterfalls.values():
        waterfall.drain()
    assert set(offloader.tier_statistics().held_bytes.values()) == {0}


def test_out_of_memory_in_backward_raises_pytorchs_error_and_training_goes_on(prompt_device, make_offloader, request):
    if prompt_device != "sim":
        pytest.skip("a limit of memory is simulated")
    from penstock.testing import simulated

    plain, ours, batch = make_model("sim"), make_model("sim"), make_batch("sim")
    expected = train(plain, None, batch)
    offloader = make_offloader(ours, "host")
    with offloader:
        loss = ours(*batch)
        torch.accelerator.synchronize()
        used = torch.accelerator.memory_allocated()
        with simulated.conditions(limit=used + 2**12), pytest.raises(torch.OutOfMemoryError):
            loss.backward()
    del loss
    ours.zero_grad()
    assert train(ours, offloader, batch) == expected


def test_a_stream_of_another_device_is_not_waited_for(prompt_device, make_offloader):
    """The model's device goes on where it was; what the other one's stream is given stays its own."""
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two devices")
    first, second = (torch.device(prompt_device, index) for index in range(2))
    plain, ours, batch = make_model(first), make_model(first), make_batch(first)
    expected = train(plain, None, batch)
    offloader = make_offloader(ours, "both", verify=True)
    before = torch.accelerator.current_device_index()
    try:
        stream = torch.Stream(device=second)
        with stream:
            beside = torch.ones(8, device=second)
            assert train(ours, offloader, batch) == expected
            beside += 1
        stream.synchronize()
    finally:
        torch.accelerator.set_device_index(before)
    assert beside.cpu().tolist() == [2] * 8
    assert_equal(plain, ours)
