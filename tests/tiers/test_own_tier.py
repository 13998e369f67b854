"""A tier of one's own under every room: one file, and a `Budget` that names it."""

import pytest
import torch
from object_store import ObjectStore

from penstock import fleet, offload, remat
from penstock.errors import TierFullError
from penstock.links import DEVICE, Link, Place
from penstock.testing import GPT
from penstock.tiers import Budget, waterfall_for, waterfalls_for

MIB = 2**20


@pytest.fixture
def store():
    tier = ObjectStore(256 * MIB)
    yield tier
    assert tier.used_bytes == 0
    tier.close()


def model_and_batch():
    torch.manual_seed(0)
    model = GPT(num_layers=3, width=64, num_heads=2, context=64)
    return model, torch.randint(256, (8, 64))


def gradients_of(model, run):
    model.zero_grad()
    run().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_a_waterfall_ends_in_it(store):
    waterfall = waterfall_for("cpu", Budget(tiers=[store]))
    tensor = torch.arange(1000)
    handle = waterfall.park(tensor.untyped_storage())
    del tensor
    waterfall.drain()
    assert waterfall.statistics().held_bytes == {"store": store.used_bytes}
    assert torch.empty(0, dtype=torch.int64).set_(handle.get()).tolist() == list(range(1000))
    handle.release()
    waterfall.close()
    events = waterfall.events.since()
    assert {event.lane for event in events} - {"compute"} == {"device->store", "store->device"}
    assert {event.label for event in events if event.lane == "compute"} <= {"device->store", "store->device"}
    assert store.reserve(1).size_bytes == 1  # its own waterfall has not closed it
    store.close()


def test_a_full_disk_leaves_the_rest_to_it(store, tmp_path):
    waterfall = waterfall_for("cpu", Budget(disk={tmp_path: 64 * 4096}, tiers=[store]))
    tensors = [torch.full((16 * 4096,), number, dtype=torch.uint8) for number in range(8)]
    handles = [waterfall.park(tensors.pop(0).untyped_storage()) for _ in range(8)]
    waterfall.drain()
    held = waterfall.statistics().held_bytes
    assert 0 < held["disk"] <= 64 * 4096
    assert held["store"] > 0
    for number, handle in enumerate(handles):
        assert torch.empty(0, dtype=torch.uint8).set_(handle.get()).unique().tolist() == [number]
        handle.release()
    waterfall.close()


def test_activations_go_there(store):
    model, batch = model_and_batch()
    expected = gradients_of(model, lambda: model(batch, batch))
    account = Budget(tiers=[store])
    with offload.activations(model, budget=account, min_size="16KiB", min_saving=0, max_stall=1) as offloader:
        for _ in range(3):
            gradients = gradients_of(model, lambda: model(batch, batch))
            assert all(map(torch.equal, gradients, expected))
    assert offloader.statistics().parked_bytes > 0
    offloader.close()


def test_a_step_swaps_to_it(store, monkeypatch):
    monkeypatch.setattr("penstock.remat._describe.lane_rates", lambda *_: (1e12, 1e12))  # however busy the machine is
    model, batch = model_and_batch()
    expected = gradients_of(model, lambda: model(batch, batch))
    kept = remat.optimize(model, [batch, batch], None)
    budget = int(0.95 * kept.plan.peak_bytes)
    step = remat.optimize(model, [batch, batch], Budget(device=budget, tiers=[store]), method="swap")
    for _ in range(2):
        assert all(map(torch.equal, gradients_of(model, lambda: step(batch, batch)), expected))
    assert step._session.emitter.tiers.waterfall.statistics().parked_bytes > 0
    step.close()


def test_a_fleet_keeps_its_models_there(store, tmp_path):
    def job(name):
        return fleet.Job(
            name=name,
            model=lambda: GPT(num_layers=4, width=64, num_heads=2, context=32),
            data=lambda: [(torch.arange(64).reshape(2, 32) % 256,) * 2] * 2,
            loss=lambda model, batch: model(*batch),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
            steps=4,
        )

    in_memory = fleet.run([job("a")], ["cpu"], "64MiB", host="64MiB", progress=None)
    results = fleet.run([job("a")], ["cpu"], Budget(device="2MiB", tiers=[store]), progress=None)
    assert results["a"].losses == in_memory["a"].losses
    assert results.devices[0].parked_bytes > 0


def test_what_it_carries_is_measured_once(store):
    assert store.rates_bytes_per_s() == store.rates_bytes_per_s()
    assert min(store.rates_bytes_per_s()) > 0
    with pytest.raises(TierFullError):
        ObjectStore(0).rates_bytes_per_s()


def test_devices_share_it(store):
    first, second = waterfalls_for([torch.device("cpu")] * 2, Budget(tiers=[store]))
    tensor = torch.arange(100)
    handle = first.park(tensor.untyped_storage())
    del tensor
    first.drain()
    borrowed = second.borrow(handle)
    assert torch.empty(0, dtype=torch.int64).set_(borrowed.get()).sum() == 4950
    borrowed.release()
    handle.release()
    for waterfall in (first, second):
        waterfall.drain()
        waterfall.close()


def test_links_are_called_after_their_ends():
    assert str(Link(DEVICE, Place("store"))) == "device->store"
    assert Link.named("device->store") == Link(DEVICE, Place("store"))
    for name in ("device", "->disk", "device->"):
        with pytest.raises(ValueError, match=r"named after its two ends, such as 'device->disk'"):
            Link.named(name)
