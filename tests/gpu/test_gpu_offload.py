"""Offloading from a real GPU: gradients equal to the bit, a lower peak, and no byte lost."""

import gc
import warnings

import pytest
import torch

from penstock import offload, probe
from penstock.testing import GPT

TIERS = {
    "host": {"host": "4GiB"},
    "disk": {"disk": True},
    "both": {"host": "192MiB", "disk": True},
}


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    return GPT(num_layers=4, width=512, num_heads=8, context=256).to("cuda", dtype)


def make_batch():
    tokens = torch.randint(256, (16, 257), generator=torch.Generator().manual_seed(0)).cuda()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train(model, offloader, steps=4):
    batch = make_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=False)
        if offloader is None:
            loss = model(*batch)
            loss.backward()
        else:
            with offloader:
                loss = model(*batch)
                loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def make_offloader(tmp_path):
    made = []

    def make(model, where, **options):
        settings = dict(TIERS[where])
        if settings.get("disk"):
            settings["disk"] = tmp_path
        made.append(offload.activations(model, **settings, **options))
        return made[-1]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a tmp directory may be without direct I/O
        yield make
        for offloader in made:
            offloader.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", TIERS)
def test_losses_and_parameters_are_equal_to_the_bit(make_offloader, where, dtype):
    plain, ours = make_model(dtype), make_model(dtype)
    offloader = make_offloader(ours, where, min_saving=0, max_stall=1, max_in_flight="32MiB", verify=True)
    assert train(plain, None) == train(ours, offloader)
    for one, two in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(one, two)
    gc.collect()
    for waterfall in offloader._waterfalls.values():
        waterfall.drain()
    statistics = offloader.tier_statistics()
    assert statistics.parked_bytes > 0
    assert statistics.fetched_bytes > 0
    assert statistics.num_live_handles == 0
    assert set(statistics.held_bytes.values()) == {0}


def test_the_peak_falls(make_offloader):
    model = make_model()
    batch = make_batch()
    model(*batch).backward()
    plain = probe.peak_bytes(lambda: model(*batch).backward(), device="cuda")
    offloader = make_offloader(model, "host", max_in_flight="64MiB", max_stall=1)

    def step():
        with offloader:
            model(*batch).backward()

    step()
    ours = probe.peak_bytes(step, device="cuda")
    assert ours.activation_bytes < 0.7 * plain.activation_bytes


def test_a_budget_is_kept(make_offloader):
    model = make_model()
    batch = make_batch()
    model(*batch).backward()
    plain = probe.peak_bytes(lambda: model(*batch).backward(), device="cuda")
    budget = plain.start_bytes + int(0.7 * plain.activation_bytes)
    offloader = make_offloader(model, "host", max_in_flight="32MiB", max_stall=1, budget=budget)

    def step():
        with offloader:
            model(*batch).backward()

    for _ in range(4):
        step()
    assert probe.peak_bytes(step, device="cuda").peak_bytes <= budget


def test_many_micro_batches_in_flight_on_a_side_stream(make_offloader):
    plain, ours = make_model(), make_model()
    offloader = make_offloader(ours, "both", min_saving=0, max_stall=1, max_in_flight="32MiB", verify=True)
    batch = make_batch()
    stream = torch.cuda.Stream()
    for model, context in ((plain, None), (ours, offloader)):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
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
        torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    for one, two in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


def test_autocast_keeps_weight_casts(make_offloader):
    plain, ours = make_model(), make_model()
    offloader = make_offloader(ours, "host", min_size=0, min_saving=0, max_stall=1)
    batch = make_batch()
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16):
            first = plain(*batch)
        first.backward()
        with offloader:
            with torch.autocast("cuda", torch.bfloat16):
                second = ours(*batch)
            second.backward()
        assert torch.equal(first, second)
    for one, two in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)
