"""A budget in bytes is kept at the true peak, with the least moved, or refused with the smallest that works."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from penstock import offload, probe
from penstock.directio import SpillFile
from penstock.errors import BudgetError, OffloadDeclinedWarning, PenstockWarning
from penstock.tiers import Waterfall

MIB = 2**20


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))])


def prepare(model):
    batch = torch.ones(2048, 128)
    model(batch).square().mean().backward()  # gradients exist
    return batch


def profiled(name):
    del name
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)


def step_of(model, batch, offloader):
    def step():
        for parameter in model.parameters():
            parameter.grad.zero_()
        with offloader:
            model(batch).square().mean().backward()

    return step


@pytest.fixture
def plain_report(collected):  # what an earlier test left would count as held
    model = make_model()
    batch = prepare(model)

    def step():
        for parameter in model.parameters():
            parameter.grad.zero_()
        model(batch).square().mean().backward()

    return probe.peak_bytes(step, device="cpu")


@pytest.mark.parametrize("share", [0.85, 0.7])
def test_a_budget_is_kept_with_less_moved_than_without(tmp_path, plain_report, share):
    model = make_model()
    batch = prepare(model)
    budget = plain_report.start_bytes + int(share * plain_report.activation_bytes)
    offloader = offload.activations(model, disk=tmp_path, max_in_flight="8MiB", min_size="64KiB", budget=budget)
    step = step_of(model, batch, offloader)
    for _ in range(5):
        step()
    report = probe.peak_bytes(step, device="cpu")
    statistics = offloader.statistics()
    assert report.peak_bytes <= budget
    assert 0 < statistics.parked_bytes < statistics.saved_bytes
    assert statistics.kept_bytes["kept: the budget has room"] > 0
    offloader.close()


@pytest.mark.parametrize("share", [0.9, 0.6])
def test_no_step_exceeds_a_small_budget_whatever_may_be_in_flight(tmp_path, plain_report, share):
    """Neither the steps that are recorded nor those that turn out otherwise; copies out are slow."""
    model = make_model()
    batch = prepare(model)
    budget = plain_report.start_bytes + int(share * plain_report.activation_bytes)
    with offload.activations(model, disk=tmp_path, min_size="64KiB", budget=budget) as offloader:  # 128 MiB in flight
        pass
    peaks = []
    for rows in (2048, 2048, 1024, 2048, 1024):
        step_of(model, batch[:rows], offloader)()
        peaks.append(offloader.statistics().peak_bytes or 0)
    assert peaks[0] > plain_report.start_bytes
    assert max(peaks) <= budget
    offloader.close()


def test_a_budget_that_cannot_be_met_is_refused_with_the_smallest_that_can(tmp_path, plain_report):
    model = make_model()
    batch = prepare(model)
    budget = plain_report.start_bytes + 2 * MIB
    offloader = offload.activations(model, disk=tmp_path, max_in_flight="8MiB", min_size="64KiB", budget=budget)
    with pytest.raises(BudgetError, match="needs at least .* because"):
        step_of(model, batch, offloader)()
    offloader.close()


def test_what_a_step_takes_before_it_saves_anything_counts(tmp_path, collected):
    front = nn.Sequential(nn.Linear(128, 4096), nn.Linear(4096, 128)).requires_grad_(False)  # it takes most
    back = make_model()
    model = nn.Sequential(front, back)
    batch = prepare(model)

    def through(offloader):
        def step():
            back.zero_grad(set_to_none=False)
            with offloader:
                model(batch).square().mean().backward()

        return step

    with (
        contextlib.closing(offload.activations(model, disk=tmp_path, budget="24MiB")) as offloader,
        pytest.raises(BudgetError, match="needs at least") as caught,
    ):
        through(offloader)()
    named = int(str(caught.value).split("needs at least ")[1].split()[0])
    assert named > batch.shape[0] * 4096 * 4
    with contextlib.closing(offload.activations(model, disk=tmp_path, budget=named)) as offloader:
        for _ in range(3):
            through(offloader)()
        assert probe.peak_bytes(through(offloader), device="cpu").peak_bytes <= 1.01 * named


def test_a_named_budget_has_room_for_what_addresses_decide(tmp_path, collected):
    """Small storages leave their edges in memory, and where they lie differs from step to step."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(40) for layer in (nn.Linear(36, 36), nn.Tanh())])
    batch = torch.ones(150, 36)
    model(batch).square().mean().backward()
    scattered = []
    for attempt in range(8):
        scattered.append(torch.empty(1000 + 64 * attempt))
        with (
            contextlib.closing(offload.activations(model, disk=tmp_path, budget="500KiB", min_size=0)) as offloader,
            pytest.raises(BudgetError, match="needs at least") as caught,
        ):
            step_of(model, batch, offloader)()
        named = int(str(caught.value).split("needs at least ")[1].split()[0])
        with contextlib.closing(offload.activations(model, disk=tmp_path, budget=named, min_size=0)) as offloader:
            for _ in range(3):
                step_of(model, batch, offloader)()


def test_another_thread_may_call_the_model_meanwhile(tmp_path):
    model = make_model()
    with (
        contextlib.closing(offload.activations(model, disk=tmp_path, budget="1GiB")) as offloader,
        offloader,
        ThreadPoolExecutor(1) as pool,
    ):
        assert pool.submit(model, torch.ones(4, 128)).result().shape == (4, 128)


@pytest.mark.parametrize("region", [torch.profiler.record_function, torch.autograd.profiler.record_function, profiled])
def test_regions_and_profilers_of_the_users_are_not_disturbed(tmp_path, region):
    """A region that begins in one measured cycle ends in the next, with two micro-batches in one context."""

    def losses(context):
        torch.manual_seed(0)
        model = make_model()
        batch = prepare(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(3):
            with context(model) as _:
                for _ in range(2):
                    with region("forward"):
                        loss = model(batch).square().mean()
                    with region("backward"):
                        loss.backward()
                    found.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return found

    offloaders = []

    def offloaded(model):
        if not offloaders:
            offloaders.append(offload.activations(model, disk=tmp_path, budget="40MiB"))
        return offloaders[0]

    assert losses(offloaded) == losses(contextlib.nullcontext)
    assert offloaders[0].statistics().is_planned
    offloaders[0].close()


@pytest.mark.parametrize(("rate_bytes_per_s", "moves_all"), [(1e12, True), (1e3, False)])
def test_without_a_budget_what_the_lanes_can_hide_moves(
    tmp_path, plain_report, monkeypatch, rate_bytes_per_s, moves_all
):
    """The rates are given, not measured: a fast disk takes everything, a slow one nothing."""
    monkeypatch.setattr(Waterfall, "rates_bytes_per_s", lambda _: (rate_bytes_per_s, rate_bytes_per_s))
    monkeypatch.setattr("penstock.offload._learn._MAX_REPLANS", 0)
    model = make_model()
    batch = prepare(model)
    offloader = offload.activations(
        model, disk=tmp_path, max_in_flight="8MiB", min_size="64KiB", max_stall=1.0, min_saving=0.0
    )
    step = step_of(model, batch, offloader)
    for _ in range(3):
        step()
    report = probe.peak_bytes(step, device="cpu")
    statistics = offloader.statistics()
    if moves_all:
        assert "kept: its copies could not be hidden" not in statistics.kept_bytes
        assert report.activation_bytes < 0.6 * plain_report.activation_bytes
    else:
        assert statistics.parked_bytes == 0
        assert statistics.kept_bytes["kept: its copies could not be hidden"] > 0.7 * statistics.saved_bytes
    offloader.close()


def test_a_disk_that_turns_slow_after_planning_costs_time_and_not_the_budget(tmp_path, plain_report, monkeypatch):
    model = make_model()
    batch = prepare(model)
    budget = plain_report.start_bytes + int(0.7 * plain_report.activation_bytes)
    offloader = offload.activations(model, disk=tmp_path, max_in_flight="32MiB", min_size="64KiB", budget=budget)
    step = step_of(model, batch, offloader)
    for _ in range(5):
        step()
    write = SpillFile.write

    def write_slowly(file, view, offset):
        time.sleep(0.05)
        return write(file, view, offset)

    monkeypatch.setattr(SpillFile, "write", write_slowly)
    report = probe.peak_bytes(step, device="cpu")
    assert offloader.statistics().parked_bytes > 0
    assert report.peak_bytes <= budget
    offloader.close()


def test_a_cycle_inside_of_another_measurement_or_profiler_is_measured(tmp_path, plain_report):
    model = make_model()
    batch = prepare(model)
    budget = plain_report.start_bytes + int(0.7 * plain_report.activation_bytes)
    offloader = offload.activations(model, disk=tmp_path, max_in_flight="8MiB", min_size="64KiB", budget=budget)
    step = step_of(model, batch, offloader)
    for _ in range(2):
        with profiled("a step"):
            probe.peak_bytes(step, device="cpu")
        assert offloader.statistics().peak_bytes is not None
    assert offloader.statistics().kept_bytes["kept: the budget has room"] > 0
    assert probe.peak_bytes(step, device="cpu").peak_bytes <= budget
    offloader.close()


def test_a_fetched_storage_lives_no_longer_than_its_last_use(tmp_path, plain_report):
    """In backward, what was fetched goes again: the sum of all of it never stands on the device at once."""
    model = make_model()
    batch = prepare(model)
    offloader = offload.activations(model, disk=tmp_path, max_in_flight="4MiB", min_size="64KiB", max_stall=1.0)
    loss = None
    with offloader:
        loss = model(batch).square().mean()
        for waterfall in offloader._waterfalls.values():
            waterfall.drain()
    report = probe.peak_bytes(loss.backward, device="cpu")
    assert report.activation_bytes < 0.45 * plain_report.activation_bytes
    offloader.close()


def test_a_peak_that_does_not_fall_is_explained(tmp_path):
    """Of small models nothing moves by default, and that is said; what the peak is made of adds up to it."""
    model = make_model()
    offloader = offload.activations(model, disk=tmp_path)
    step = step_of(model, prepare(model)[:256], offloader)
    with pytest.warns(OffloadDeclinedWarning, match="saved, .* are kept: small; min_size=0 parks them too"):
        step()
    step()
    statistics = offloader.statistics()
    assert sum(statistics.peak_parts.values()) == statistics.predicted_peak_bytes
    assert next(iter(statistics.peak_parts)) == "kept: small"
    assert "of which" in statistics.explain() and "kept: small" in statistics.explain()
    offloader.close()
    tiny = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    offloader = offload.activations(tiny, disk=tmp_path)
    with pytest.warns(OffloadDeclinedWarning, match="smaller than 64.0 KiB; min_size=0"), offloader:
        tiny(torch.ones(256, 4)).sum().backward()
    assert "min_size=0" in offloader.statistics().declined
    offloader.close()


def test_the_parts_of_a_planned_peak_name_what_is_not_saved(tmp_path, plain_report):
    model = make_model()
    batch = prepare(model)
    budget = plain_report.start_bytes + int(0.7 * plain_report.activation_bytes)
    offloader = offload.activations(model, disk=tmp_path, min_size="64KiB", budget=budget, verify=True)
    step = step_of(model, batch, offloader)
    for _ in range(3):
        step()
    parts = offloader.statistics().peak_parts
    assert sum(parts.values()) == offloader.statistics().predicted_peak_bytes <= budget
    beside = next(size for part, size in parts.items() if part.startswith("not saved for backward"))
    assert beside >= sum(2 * parameter.nbytes for parameter in model.parameters())
    offloader.close()


class Late(nn.Module):
    """What it saves first has the same size for every batch."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.num_more = 0

    def forward(self, x):
        x = self.layers(x @ (self.weight * self.weight).tanh())
        for _ in range(self.num_more):
            x = x.sin()
        return x


def test_batches_of_two_sizes_have_a_plan_each_whatever_they_save_first(tmp_path):
    model = Late()
    offloader = offload.activations(model, disk=tmp_path, min_size=0, budget="64MiB")
    for rows in (512, 384) * 3:
        with offloader:
            model(torch.ones(rows, 64)).sum().backward()
    with offloader:
        model(torch.ones(512, 64)).sum().backward()
    assert offloader.statistics().is_planned
    offloader.close()


def test_steps_that_all_differ_are_given_up_with_a_warning(tmp_path):
    model = Late()
    offloader = offload.activations(model, disk=tmp_path, min_size=0, budget="64MiB")

    def steps(*counts):
        for count in counts:
            model.num_more = count
            with offloader:
                model(torch.ones(512, 64)).sum().backward()

    with pytest.warns(PenstockWarning, match="saved different tensors, so such steps are not planned"):
        steps(0, 1, 2, 0, 3, 1, 1, 0, 2, 2, 3, 0, 0, 3, 3, 2, 0, 1, 0, 0, 2, 1, 3)
    steps(1, 2)  # once is enough
    offloader.close()


def test_steps_that_begin_alike_and_take_turns_are_planned(tmp_path):
    """As the two halves of a GAN's step."""
    model = Late()
    offloader = offload.activations(model, disk=tmp_path, min_size=0, budget="64MiB")
    for at in range(8):
        model.num_more = at % 2
        with offloader:
            model(torch.ones(512, 64)).sum().backward()
        assert offloader.statistics().is_planned or at < 6
    offloader.close()
