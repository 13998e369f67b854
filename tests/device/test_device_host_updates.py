"""Updates on the host: states stay in its memory, and only gradients and weights go down the link."""

import contextlib
import copy
import functools
import gc
import threading
import time

import pytest
import test_device_training
import torch
from test_device_training import make_batch, simple_step

from penstock import offload, probe
from penstock.host_stepping import HostStep
from penstock.native import HostUpdatePass
from penstock.state._on_host import HostUpdates, Update
from penstock.state._replay import Replay
from penstock.testing import GPT

NUM_STEPS = 6
OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(model, lr=1e-3),
    "sgd": lambda model: torch.optim.SGD(model, lr=0.1, momentum=0.9),
    "adagrad": lambda model: torch.optim.Adagrad(model, lr=1e-2),
}


def bare_step(model, optimizer, batch):
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.fixture
def make_training(tmp_path):
    made = []

    def make(model, optimizer, budget, **options):
        made.append(offload.training(model, optimizer, budget, **{"host": "64MiB", "update": "host", **options}))
        return made[-1]

    yield make
    for opened in made:
        opened.close(discard=True)


def make_model(device):
    """Without biases of keys: their gradient is zero but for rounding, which Adam and Adagrad divide by itself."""
    model = test_device_training.make_model(device)
    for block in model.blocks:
        block.qkv.bias = None
    return model


def trained_plainly(device, make_optimizer, step):
    model, batch = make_model(device), make_batch(device)
    optimizer = make_optimizer(model.parameters())
    losses = [step(model, optimizer, batch).item() for _ in range(NUM_STEPS)]
    return losses, [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_results_are_those_of_the_device(device, make_training, name, in_backward):
    step = bare_step if in_backward else simple_step
    expected, parameters = trained_plainly(device, OPTIMIZERS[name], step)
    gc.collect()
    start_bytes = probe.held_bytes(device)
    model, batch = make_model(device), make_batch(device)
    optimizer, losses, peaks = OPTIMIZERS[name](model.parameters()), [], []
    budget = start_bytes + 5 * 2**19
    own = make_training(model, optimizer, budget, update_in_backward=in_backward)

    def step_inside():
        with own:
            losses.append(step(model, optimizer, batch))

    for _ in range(NUM_STEPS):
        peaks.append(probe.peak_bytes(step_inside, device=device).peak_bytes)
    statistics = own.statistics()
    own.close()
    torch.testing.assert_close(torch.tensor([loss.item() for loss in losses]), torch.tensor(expected))
    for parameter, two in zip(model.parameters(), parameters, strict=True):
        torch.testing.assert_close(parameter.detach().cpu(), two, rtol=1e-4, atol=1e-6)
    assert max(peaks) <= budget * 1.01
    assert statistics.num_host_updates > 0
    assert "penstock host updates" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("has_library", [True, False])
def test_the_host_reads_and_writes_memory_once_an_update(prompt_device, make_training, monkeypatch, has_library):
    counts, run = {}, HostUpdatePass.run

    def passed(self, *args):
        name = ("adamw", "sgd", "adagrad")[self.kind]
        counts[f"_fused_{name}_"] = counts.get(f"_fused_{name}_", 0) + has_library
        return has_library and run(self, *args)

    monkeypatch.setattr(HostUpdatePass, "run", passed)
    for name in ("_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"):
        kernel = getattr(torch, name)

        def counted(*args, kernel=kernel, name=name, **options):
            counts[name] = counts.get(name, 0) + 1
            return kernel(*args, **options)

        monkeypatch.setattr(torch, name, counted)
    for name, make_optimizer in OPTIMIZERS.items():
        model, batch = make_model(prompt_device), make_batch(prompt_device)
        optimizer = make_optimizer(model.parameters())
        own = make_training(model, optimizer, probe.held_bytes(prompt_device) + 2**21)
        for _ in range(4):
            with own:
                bare_step(model, optimizer, batch)
        own.close()
        assert counts[f"_fused_{name}_"] == own.statistics().num_host_updates > 0


@pytest.mark.parametrize("zeroes", [False, True])
def test_a_clipped_gradient_is_clipped_after_the_step_too(prompt_device, make_training, zeroes):
    def train(model, optimizer, enter):
        norms = []
        for _ in range(NUM_STEPS):
            with enter():
                model(*make_batch(prompt_device)).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                norms.append(torch.stack([own.grad.float().norm() for own in model.parameters()]).cpu())
                if zeroes:
                    optimizer.zero_grad()
        return torch.stack(norms)

    plain, ours = make_model(prompt_device), make_model(prompt_device)
    expected = train(plain, torch.optim.AdamW(plain.parameters()), contextlib.nullcontext)
    optimizer = torch.optim.AdamW(ours.parameters())
    own = make_training(ours, optimizer, probe.held_bytes(prompt_device) + 2**21)
    norms = train(ours, optimizer, lambda: own)
    assert own.statistics().num_host_updates > 0
    torch.testing.assert_close(norms, expected, rtol=1e-3, atol=1e-6)


def test_a_number_of_the_state_that_somebody_holds_counts_on(prompt_device, make_training):
    model, batch = make_model(prompt_device), make_batch(prompt_device)
    optimizer = torch.optim.AdamW(model.parameters())
    own = make_training(model, optimizer, probe.held_bytes(prompt_device) + 2**21)
    weight = max(model.parameters(), key=torch.numel)
    with own:
        bare_step(model, optimizer, batch)
    held = optimizer.state[weight]["step"]
    for number in range(3):
        with own:
            bare_step(model, optimizer, batch)
        assert optimizer.state[weight]["step"].item() == held.item() == number + 2
    assert own.statistics().num_host_updates > 0


def test_a_step_does_not_wait_for_the_updates_of_its_backward(prompt_device, make_training, monkeypatch):
    model, batch = make_model(prompt_device), make_batch(prompt_device)
    budget = probe.held_bytes(prompt_device) + 2**20
    own = make_training(model, torch.optim.AdamW(model.parameters()), budget, update_in_backward=True)
    for number in range(4):
        with own:
            model(*batch).backward()
            with monkeypatch.context() as patch:
                if number:
                    patch.setattr(HostStep, "wait", lambda _: pytest.fail("it waited"))
                own.optimizer.step()
            own.optimizer.zero_grad()
    assert own.statistics().num_host_updates > 0


def test_states_stay_where_they_are_and_twelve_bytes_move(device, make_training):
    torch.manual_seed(0)
    model = GPT(num_layers=6, width=256, num_heads=2, context=32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(256, (1, 33), generator=torch.Generator().manual_seed(0)).to(device)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    size_bytes = 16 * sum(parameter.numel() for parameter in model.parameters())
    budget = probe.held_bytes(device) - size_bytes // 4 + size_bytes // 12
    own = make_training(model, optimizer, budget, host="256MiB")
    for _ in range(5):
        with own:
            bare_step(model, optimizer, batch)
    statistics = own.statistics()
    moved = {
        name: (statistics.step_fetched.get(name, 0) + statistics.step_parked.get(name, 0)) / statistics.num_parameters
        for name in ("parameters", "gradients", "optimizer state")
    }
    assert moved["parameters"] < 8.5
    assert moved["gradients"] < 4.5
    assert moved["optimizer state"] < 1


@pytest.mark.parametrize("host", ["2MiB", "5MiB"])
def test_what_has_no_room_in_host_memory_is_updated_by_the_device(device, make_training, tmp_path, host):
    expected, _ = trained_plainly(device, OPTIMIZERS["adamw"], simple_step)
    model, batch = make_model(device), make_batch(device)
    optimizer, losses = OPTIMIZERS["adamw"](model.parameters()), []
    own = make_training(model, optimizer, probe.held_bytes(device) + 2**21, host=host, disk=tmp_path)
    for _ in range(NUM_STEPS):
        with own:
            losses.append(simple_step(model, optimizer, batch).item())
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))


def test_a_checkpoint_in_between_and_a_new_learning_rate(device, make_training, tmp_path):
    def run(model, optimizer, own):
        losses = []
        for number in range(NUM_STEPS):
            optimizer.param_groups[0]["lr"] = 1e-2 / (number + 1)
            if own is None:
                losses.append(bare_step(model, optimizer, batch).item())
                continue
            if number == 3:
                own.save(tmp_path / "saved")
                with own:
                    bare_step(model, optimizer, batch)  # which is undone
                own.load(tmp_path / "saved")
                optimizer.param_groups[0]["lr"] = 1e-2 / (number + 1)
            with own:
                losses.append(bare_step(model, optimizer, batch).item())
        return losses

    batch, model = make_batch(device), make_model(device)
    expected = run(model, OPTIMIZERS["adamw"](model.parameters()), None)
    model = make_model(device)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    own = make_training(model, optimizer, probe.held_bytes(device) + 2**21)
    torch.testing.assert_close(torch.tensor(run(model, optimizer, own)), torch.tensor(expected))


def test_who_looks_at_the_number_of_steps_waits_for_the_update(prompt_device, make_training, monkeypatch):
    """It is no page, and may be written to: the bias correction would be wrong."""
    compute = Update.compute
    monkeypatch.setattr(Update, "compute", lambda update: (time.sleep(0.01), compute(update)))
    model, batch = make_model(prompt_device), make_batch(prompt_device)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    own = make_training(model, optimizer, probe.held_bytes(prompt_device) + 2**20)
    weight = model.blocks[0].contract.weight
    for number in range(6):
        with own:
            bare_step(model, optimizer, batch)
        assert optimizer.state[weight]["step"].item() == number + 1
    assert own.statistics().num_host_updates > 0
    with own:
        bare_step(model, optimizer, batch)
    optimizer.state[weight]["step"].zero_()
    assert [optimizer.state[weight]["step"].item(), weight.isfinite().all().item()] == [0, True]


RATES = {
    "a slow link": (1e3, 1e15, 1.0),
    "a fast link and a slow host": (1e15, 1e5, 0.0),
    "a host as slow as the link": (1e5, 2e5, 0.5),
    "an optimizer that does not work on the host": (1e3, 0.0, 0.0),
}


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("rates", RATES)
def test_auto_takes_what_the_plan_says(prompt_device, make_training, monkeypatch, rates, in_backward):
    """Most of it where the link is slow, nothing where the host is, late layers first."""
    link, host, share = RATES[rates]
    monkeypatch.setattr("penstock.tiers.Waterfall.rates_bytes_per_s", lambda _: (link, link))
    monkeypatch.setattr(HostUpdates, "tried_bytes_per_s", lambda _: host)
    monkeypatch.setattr(Replay, "prepare", functools.partialmethod(Replay.prepare, is_waited_for=True))
    torch.manual_seed(0)
    plain = GPT(num_layers=6, width=64, num_heads=2, context=64).to(prompt_device)
    model, batch = copy.deepcopy(plain), make_batch(prompt_device)
    expected = [bare_step(plain, OPTIMIZERS["adamw"](plain.parameters()), batch).item() for _ in range(1)]
    del plain
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    budget = probe.held_bytes(prompt_device) + 2**21
    own = make_training(model, optimizer, budget, update="auto", update_in_backward=in_backward)
    updated, losses = [], []
    for _ in range(12):
        with own:
            losses.append(bare_step(model, optimizer, batch).item())
        updated.append(own.statistics().num_host_updates)
    assert losses[0] == expected[0]
    num_large = len([parameter for parameter in model.parameters() if parameter.nbytes >= 2**14])
    chosen = own._managed.updates._hosted
    if share == 0.0:
        assert updated[-1] == len(chosen) == 0
    else:
        assert updated[-1] > 0
        assert len(chosen) >= (0.7 * num_large if share == 1.0 else 1)
        assert id(model.head.weight) in chosen


def test_the_cpu_has_no_host_below_it(tmp_path):
    model = make_model("cpu")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with pytest.raises(ValueError, match="update='host' needs an accelerator"):
        offload.training(model, optimizer, "1GiB", disk=tmp_path, update="host")
    with pytest.raises(ValueError, match="`update` must be 'device'"):
        offload.training(model, optimizer, "1GiB", disk=tmp_path, update="cloud")


class Choosy(torch.optim.SGD):
    """Looks at what else a parameter is."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.grad is not None:
                    self.state[parameter].setdefault("seen", torch.zeros_like(parameter)).add_(1)
                    parameter.add_(parameter.grad, alpha=-getattr(parameter, "rate", 0.1))


class Listed(torch.optim.SGD):
    """Keeps tensors in a list."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    sums = self.state[parameter].setdefault("sums", [torch.zeros_like(parameter)])
                    sums[0].add_(parameter.grad)
                    parameter.add_(sums[0], alpha=-0.1)


@pytest.mark.filterwarnings("ignore:.*Its own step runs whole")
@pytest.mark.parametrize("made_of", [Choosy, Listed, torch.optim.SGD])
@pytest.mark.parametrize("update", ["host", "auto"])
def test_optimizers_of_other_kinds(device, make_training, made_of, update):
    def prepared():
        model = make_model(device)
        for number, parameter in enumerate(model.parameters()):
            parameter.rate = 0.01 * (number % 3)
        return model, made_of(model.parameters(), lr=0.1)

    batch = make_batch(device)
    model, optimizer = prepared()
    expected = [bare_step(model, optimizer, batch).item() for _ in range(NUM_STEPS)]
    model, optimizer = prepared()
    budget = probe.held_bytes(device) + 2**21
    if made_of is not torch.optim.SGD:
        with pytest.raises(ValueError, match=f"update='{update}' is for optimizers of PyTorch"):
            make_training(model, optimizer, budget, update=update)
        own = make_training(model, optimizer, budget, update="device")
    else:
        own = make_training(model, optimizer, budget, update=update)
    losses = []
    for _ in range(NUM_STEPS):
        with own:
            losses.append(bare_step(model, optimizer, batch).item())
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
    if update == "host" and made_of is torch.optim.SGD:
        assert own.statistics().num_host_updates


def test_what_keeps_numbers_on_the_device_is_refused(device, make_training):
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    with pytest.raises(ValueError, match="fused and capturable"):
        make_training(model, optimizer, probe.held_bytes(device) + 2**21)


def test_states_that_are_replaced_after_the_step(device, make_training):
    def run(model, optimizer, own):
        losses = []
        for number in range(NUM_STEPS):
            with own or contextlib.nullcontext():
                losses.append(bare_step(model, optimizer, make_batch(device)).item())
            if number == 3:
                for state in optimizer.state.values():
                    state["momentum_buffer"] = torch.zeros_like(state["momentum_buffer"])
        return losses

    model = make_model(device)
    expected = run(model, OPTIMIZERS["sgd"](model.parameters()), None)
    model = make_model(device)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    own = make_training(model, optimizer, probe.held_bytes(device) + 2**21)
    torch.testing.assert_close(torch.tensor(run(model, optimizer, own)), torch.tensor(expected))
    assert own.statistics().num_host_updates > 0


def test_host_memory_that_inference_has_mapped_is_written_to(device, make_training):
    model, batch = make_model(device), make_batch(device)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    own = make_training(model, optimizer, probe.held_bytes(device) + 2**22)
    with torch.inference_mode():
        own.park()
        model(*batch)
    for _ in range(3):
        with own:
            bare_step(model, optimizer, batch)
        own.park()
    assert own.statistics().held_bytes == 0
