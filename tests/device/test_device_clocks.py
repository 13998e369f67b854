"""What is measured on a device: peaks that nobody spoils for others, times of its own clock, and when it is ready."""

import itertools

import pytest
import torch

from penstock import fleet, offload, probe
from penstock.offload._learn import _mapped_bytes
from penstock.testing import GPT
from penstock.tiers import MAX_IN_FLIGHT_BYTES, Budget, waterfall_for, waterfalls_for

MIB = 2**20


@pytest.fixture
def model(prompt_device):
    torch.manual_seed(0)
    return GPT(num_layers=3, width=64, num_heads=2, context=64).to(prompt_device)


@pytest.fixture
def step(model, prompt_device):
    tokens = torch.randint(256, (4, 64)).to(prompt_device)
    return lambda: model(tokens, tokens).backward()


@pytest.fixture
def make_offloader(model):
    made = []

    def make(**options):
        options = {"host": "64MiB", "min_size": "16KiB", "min_saving": 0, "max_stall": 1, **options}
        made.append(offload.activations(model, **options))
        return made[-1]

    yield make
    for opened in made:
        opened.close()


def lessons(offloader):
    return list(offloader._learner._lessons.values())


def test_the_first_cycle_is_cold_and_teaches_nothing(make_offloader, step):
    offloader = make_offloader()
    for num_steps in (1, 2, 3):
        with offloader:
            step()
        (lesson,) = lessons(offloader)
        assert (lesson.plan is not None) == (num_steps > 1)
    assert offloader.statistics().is_planned


def test_a_cycle_in_which_memory_was_mapped_is_recorded_again(make_offloader, step, monkeypatch):
    """Mapping and pinning take time that no later cycle takes."""
    monkeypatch.setattr("penstock.tiers._host.SLAB_BYTES", 256 * 1024)
    monkeypatch.setattr("penstock.tiers._build.SLAB_BYTES", 256 * 1024)
    offloader = make_offloader()
    waterfall = next(iter(offloader._waterfalls.values()))
    mapped = [_mapped_bytes(waterfall)]
    while not lessons(offloader) or lessons(offloader)[0].plan is None:
        with offloader:
            step()
        mapped.append(_mapped_bytes(waterfall))
        assert len(mapped) < 8
    assert mapped[0] > 0  # before the first step
    assert mapped[1] > mapped[0]  # in the cold one
    assert mapped[-1] == mapped[-2]  # and not in the recorded one
    assert lessons(offloader)[0].num_cold <= 3


def test_memory_is_there_before_the_first_step(prompt_device):
    waterfall = waterfall_for(prompt_device, Budget(host="8MiB"))
    assert _mapped_bytes(waterfall) == 8 * MIB
    tensors = [torch.ones(MIB, dtype=torch.uint8, device=prompt_device) for _ in range(4)]
    handles = [waterfall.park(tensors.pop().untyped_storage()) for _ in range(4)]
    assert _mapped_bytes(waterfall) == 8 * MIB
    for handle in handles:
        handle.release()
    waterfall.close()


def test_bytes_in_flight_are_what_the_link_carries(prompt_device, tmp_path, monkeypatch):
    assert probe.link_rate_bytes_per_s(torch.device(prompt_device, 0)) > 0
    monkeypatch.setattr("penstock.tiers._build.link_rate_bytes_per_s", lambda _: 50e9)
    near = waterfall_for(prompt_device, Budget(host="64MiB"))
    assert near.max_in_flight_bytes == 5 * 10**9
    assert not near.has_staging
    near.close()
    (staged,) = waterfalls_for([torch.device(prompt_device, 0)], Budget(host="4GiB", disk=tmp_path))
    assert staged.has_staging
    assert staged.max_in_flight_bytes == 4 * 2**30 // 8 // 2  # staging memory is twice as much, an eighth of the host's
    staged.close()
    monkeypatch.setattr("penstock.tiers._build.link_rate_bytes_per_s", lambda _: 1e6)
    slow = waterfall_for(prompt_device, Budget(host="64MiB"))
    assert slow.max_in_flight_bytes == MAX_IN_FLIGHT_BYTES
    slow.close()


def test_a_plan_sets_what_may_be_in_flight(make_offloader, step):
    offloader = make_offloader()
    for _ in range(4):
        with offloader:
            step()
    waterfall = next(iter(offloader._waterfalls.values()))
    (lesson,) = lessons(offloader)
    assert waterfall.max_in_flight_bytes == lesson.plan.max_in_flight_bytes <= lesson.problem.max_in_flight_bytes


def test_a_step_that_is_measured_spoils_no_other_measure(make_offloader, step, prompt_device):
    """With a budget the offloader looks at peaks of its own between all hooks of a recorded step."""
    offloader = make_offloader(budget="64MiB")
    big = torch.empty(40 * MIB, dtype=torch.uint8, device=prompt_device)
    del big

    def measured():
        with offloader:
            step()

    for _ in range(3):
        report = probe.peak_bytes(measured, device=prompt_device)
        assert report.peak_bytes == report.start_bytes + report.activation_bytes
        assert 0 < report.activation_bytes < 20 * MIB
        assert report.peak_bytes >= (offloader.statistics().peak_bytes or 0)
    with_one_inside = probe.peak_bytes(
        lambda: (torch.empty(30 * MIB, dtype=torch.uint8, device=prompt_device), probe.peak_bytes(step)),
        device=prompt_device,
    )
    assert with_one_inside.activation_bytes >= 30 * MIB


def test_a_peak_of_an_earlier_step_is_not_this_ones(make_offloader, step, prompt_device):
    """A large step before, and a budget that only the later ones keep."""
    big = torch.empty(80 * MIB, dtype=torch.uint8, device=prompt_device)
    del big
    offloader = make_offloader(budget="48MiB")
    for _ in range(4):
        with offloader:
            step()
        assert (offloader.statistics().peak_bytes or 0) < 48 * MIB
    (lesson,) = {id(lesson): lesson for lesson in lessons(offloader) if lesson.plan is not None}.values() or [None]
    assert lesson is None or lesson.margin_bytes == 0


def test_copies_are_on_the_devices_clock(prompt_device):
    waterfall = waterfall_for(prompt_device, Budget(host="64MiB"))
    tensors = [torch.ones(4 * MIB, dtype=torch.uint8, device=prompt_device) for _ in range(6)]
    handles = [waterfall.park(tensors.pop().untyped_storage()) for _ in range(6)]
    waterfall.drain()
    for handle in handles:
        handle.get()
    torch.accelerator.synchronize()
    waterfall.drain()
    for lane, kind in (("device->host", "park"), ("host->device", "fetch")):
        spans = [
            (event.start_s, event.end_s)
            for event in waterfall.events.since()
            if (event.lane, event.kind) == (lane, kind)
        ]
        assert len(spans) == 6
        assert all(end_s >= start_s for start_s, end_s in spans)
        assert all(later[0] >= sooner[1] - 1e-4 for sooner, later in itertools.pairwise(spans))  # one by one
    for handle in handles:
        handle.release()
    waterfall.close()


def test_a_fleets_times_add_up(prompt_device):
    job = fleet.Job(
        name="a",
        model=lambda: GPT(num_layers=4, width=64, num_heads=2, context=32),
        data=lambda: [tuple(torch.randint(256, (2, 32)) for _ in range(2))] * 3,
        loss=lambda model, batch: model(*batch),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        steps=3,
    )
    results = fleet.run([job], [f"{prompt_device}:0"], "1536KiB", host="32MiB", progress=None)
    (device,) = results.devices
    assert device.num_units > 6
    assert device.compute_s > 0
    assert device.stall_s >= 0
