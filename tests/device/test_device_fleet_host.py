"""Fleets whose optimizer steps on the host: states stay there, and only gradients and weights cross the link."""

import gc

import pytest
import torch
from test_device_fleet import batches, job, train_plainly
from torch import nn

from penstock import fleet
from penstock.fleet import _host_steps as host_steps
from penstock.testing import GPT
from penstock.tiers import MAX_IN_FLIGHT_BYTES

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
}
CHANGES = {
    "as it is": {},
    "clipped": {"clip_norm": 0.5},
    "bfloat16": {"precision": "bfloat16"},
    "float16, scaled": {"precision": "float16", "clip_norm": 1.0},
    "accumulated": {"accumulate": 2},
    "accumulated and clipped": {"accumulate": 2, "clip_norm": 0.5},
    "a scheduler": {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)},
}


def without_biases_of_keys():
    """Their gradient is zero but for rounding, which Adam and Adagrad divide by itself."""
    model = GPT(num_layers=4, width=64, num_heads=2, context=32)
    for block in model.blocks:
        block.qkv.bias = None
    return model


def run(device, *jobs, budget="1MiB", **options):
    options = {"host": "64MiB", "progress": None, **options}
    return fleet.run(list(jobs), [f"{device}:0"], budget, **options)


@pytest.fixture
def num_on_host(monkeypatch):
    """The number of groups that the host has stepped."""
    counts = []
    begin = host_steps.HostSteps.begin

    def counting(self, training, one, factor):
        found = begin(self, training, one, factor)
        counts.append(found)
        return found

    monkeypatch.setattr(host_steps.HostSteps, "begin", counting)
    return lambda: sum(counts)  # those that it took


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(prompt_device, num_on_host, name):
    one = job("a", model=without_biases_of_keys, optimizer=OPTIMIZERS[name], update="host")
    expected = train_plainly(one, prompt_device)
    result = run(prompt_device, one)["a"]
    assert result.error is None
    assert result.losses == pytest.approx(expected, rel=2e-5)
    assert num_on_host() >= (one.steps - 1) * 3  # all but the first, of some shards


@pytest.mark.parametrize("name", CHANGES)
def test_equals_steps_on_the_device(prompt_device, num_on_host, name):
    compare(prompt_device, num_on_host, rel=1e-2 if "16" in name else 2e-5, **CHANGES[name])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_equals_steps_on_the_device_under_all_conditions(device, num_on_host, precision):
    rel = 2e-5 if precision == "float32" else 1e-2
    compare(device, num_on_host, rel, precision=precision, accumulate=2, clip_norm=0.5)


def compare(device, num_on_host, rel, **changes):
    """Losses and weights are those of updates on the device, and the peak is within the budget."""
    jobs = {way: job("a", model=without_biases_of_keys, update=way, **changes) for way in ("device", "host")}
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    results = {way: run(device, one, budget=2**20)["a"] for way, one in jobs.items()}
    assert torch.accelerator.max_memory_allocated() - before <= 2**20
    assert num_on_host()
    assert results["host"].losses == pytest.approx(results["device"].losses, rel=rel)
    pairs = zip(results["host"].model().parameters(), results["device"].model().parameters(), strict=True)
    for mine, other in pairs:
        torch.testing.assert_close(mine, other, rtol=1e-2, atol=2e-3 if rel > 1e-3 else 2e-5)


def test_a_model_that_is_run_whole(prompt_device, num_on_host):
    class Chooses(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
            self.view = self.layers[0].weight.detach()  # somebody who holds a weight

        def forward(self, tokens, targets):
            x = tokens.float().repeat(1, 2)[:, :64] / 256
            for layer in self.layers:
                x = layer(x).tanh() if x.sum() < 1e9 else x
            return (x - targets.float().repeat(1, 2)[:, :64] / 256).square().mean()

    one = job("a", model=Chooses, data=batches, update="host")
    expected = train_plainly(one, prompt_device)
    result = run(prompt_device, one, budget="512KiB" if prompt_device == "cuda" else "256KiB")["a"]
    assert result.error is None
    assert result.losses == pytest.approx(expected, rel=2e-5)
    assert num_on_host()


def test_what_stays_on_the_device_is_stepped_there(prompt_device, num_on_host):
    one = job("a", update="host")
    expected = train_plainly(one, prompt_device)
    result = run(prompt_device, one, budget="64MiB")["a"]
    assert list(result.losses) == expected or prompt_device != "sim"
    assert not num_on_host()


def test_states_on_a_disk_are_stepped_on_the_device(prompt_device, tmp_path, num_on_host):
    one = job("a", update="host")
    expected = train_plainly(one, prompt_device)
    result = run(prompt_device, one, budget="1536KiB", disk=tmp_path)["a"]  # all host memory is for staging
    assert result.losses == pytest.approx(expected, rel=2e-5)
    assert not num_on_host()


def test_host_memory_that_holds_only_a_part(device, tmp_path, num_on_host):
    """What is partly on the disk is stepped on the device, the rest on the host."""
    one = job("a", model=without_biases_of_keys, update="host", clip_norm=0.5)
    expected = train_plainly(one, device)
    result = run(device, one, budget="1MiB", host=2 * MAX_IN_FLIGHT_BYTES + 3200 * 2**10, disk=tmp_path)["a"]
    assert result.error is None
    assert result.losses == pytest.approx(expected, rel=2e-5)
    assert num_on_host()


def test_two_devices(device):
    """A job takes its twin along when it moves."""
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two devices")
    options = {"update": "host", "model": without_biases_of_keys, "precision": "bfloat16", "steps": 4}
    jobs = [job(name, seed=seed, **options) for seed, name in enumerate("abc")]
    expected = {name: result.losses for name, result in run(device, *jobs).items()}
    results = fleet.run(jobs, [f"{device}:0", f"{device}:1"], "1MiB", host="64MiB", progress=None)
    for one in jobs:
        assert results[one.name].error is None
        assert results[one.name].losses == pytest.approx(expected[one.name], rel=2e-5)


class Odd(nn.Module):
    """Widths that end in mid-word, parameters of one element, and tensors in two precisions."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)) for _ in range(4))
        self.narrow = nn.Linear(64, 3)
        self.last = nn.Linear(3, 1)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens, targets):
        x = (tokens.float() / 256).repeat(1, 2)[:, :64]
        for layer in self.layers:
            x = x + layer(x)
        return (self.scale * self.last(self.narrow(x)) - targets.float().mean() / 256).square().mean()


@pytest.mark.parametrize(("before", "after"), [("device", "device"), ("device", "host"), ("host", "host")])
def test_jobs_go_on_from_checkpoints(prompt_device, tmp_path, before, after):
    """These hold what the host has stepped, and states of one element."""

    def ends():
        yield from batches()[:3]
        raise OSError("the data has ended")

    jobs = [job(name, model=model, update=after) for name, model in (("a", without_biases_of_keys), ("b", Odd))]
    whole = run(prompt_device, *jobs)
    failing = [one.with_changes(data=ends, update=before) for one in jobs]
    failed = run(prompt_device, *failing, run_dir=tmp_path, checkpoint_every=1)
    assert all("the data has ended" in failed[one.name].error for one in jobs)
    state = fleet.FleetState(tmp_path)
    rows = [{name: getattr(row, name) for name in row.__slots__} for row in state.jobs()]
    state.write([fleet.JobRow(**{**row, "state": "running"}) for row in rows])  # as if the process had been killed
    result = run(prompt_device, *jobs, run_dir=tmp_path, checkpoint_every=1, resume=True)
    for one in jobs:
        assert result[one.name].error is None
        assert result[one.name].losses == pytest.approx(whole[one.name].losses, rel=2e-5)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_odd_sizes(prompt_device, num_on_host, precision):
    jobs = [job("a", model=Odd, update=way, precision=precision) for way in ("device", "host")]
    expected, result = (run(prompt_device, one, budget="180KiB")["a"] for one in jobs)
    assert expected.error is None and result.error is None
    assert result.losses == pytest.approx(expected.losses, rel=2e-5 if precision == "float32" else 1e-2)
    assert num_on_host() >= 5 * 3  # every step but the first, of several shards


@pytest.mark.parametrize("way", ["device", "host"])
def test_hooks_on_gradients_run(prompt_device, num_on_host, way):
    """A weight whose gradient somebody changes does not travel in half precision."""

    def model():
        made = GPT(num_layers=4, width=64, num_heads=2, context=32)
        made.blocks[1].qkv.weight.register_hook(torch.zeros_like)
        return made

    one = job("a", model=model, precision="bfloat16", update=way, optimizer=lambda some: torch.optim.SGD(some, lr=0.1))
    result = run(prompt_device, one)["a"]
    assert result.error is None
    torch.manual_seed(one.seed)
    assert torch.equal(result.model().blocks[1].qkv.weight, model().blocks[1].qkv.weight)
    assert bool(num_on_host()) == (way == "host")


def test_hooks_of_the_optimizer_run(prompt_device, num_on_host):
    """Once per step, since such an optimizer steps whole; on the host, where it would not, it is refused by name."""
    calls = []

    def optimizer(parameters):
        made = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        made.register_step_post_hook(lambda *_: calls.append(1))
        return made

    one = job("a", optimizer=optimizer)
    assert fleet.run([one], [f"{prompt_device}:0"], "64MiB", host="64MiB", progress=None)["a"].error is None
    assert len(calls) == one.steps
    assert "SGD has hooks on its steps" in run(prompt_device, one.with_changes(update="host"))["a"].error
    assert not num_on_host()


def test_shapes_that_change(prompt_device, num_on_host):
    """Another shape of batch is cut and measured while steps of the host are pending."""

    def data():
        found = batches()
        return [found[0], tuple(one[:, :16] for one in found[1]), found[2], tuple(one[:1] for one in found[3])]

    jobs = [job("a", data=data, update=way, precision="bfloat16") for way in ("device", "host")]
    expected, result = (run(prompt_device, one)["a"] for one in jobs)
    assert expected.error is None and result.error is None
    assert result.losses == pytest.approx(expected.losses, rel=1e-3)
    assert num_on_host()


def test_validation_between_steps(prompt_device, num_on_host):
    jobs = [
        job("a", update=way, precision="bfloat16", validation=batches, evaluate_every=2, model=without_biases_of_keys)
        for way in ("device", "host")
    ]
    expected, result = (run(prompt_device, one)["a"] for one in jobs)
    assert result.error is None and len(result.validations) == 3
    for mine, other in zip(result.validations, expected.validations, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-3)
    assert num_on_host()


def test_an_optimizer_that_the_host_cannot_run(prompt_device, num_on_host):
    """Its state has more than tensors and numbers."""

    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for one in group["params"]:
                    self.state[one]["seen"] = [1]

    one = job("a", optimizer=lambda parameters: Odd(parameters, lr=0.05), update="host", separable=True)
    expected = train_plainly(one, prompt_device)
    result = run(prompt_device, one)["a"]
    assert result.losses == pytest.approx(expected, rel=1e-6)
    assert not num_on_host()


def test_an_optimizer_that_fails_there(prompt_device):
    """The job ends with the error, and the others go on."""

    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            own = [one for group in self.param_groups for one in group["params"]]
            if any(one.device.type == "cpu" and one.shape[0] < 256 for one in own):  # not the stand-ins of a check
                raise OSError("no such instruction")
            return super().step(closure)

    failing = job(
        "a", optimizer=lambda parameters: Fails(parameters, lr=0.05, momentum=0.9), update="host", separable=True
    )
    results = run(prompt_device, failing, job("b", seed=1, update="host"))
    assert "no such instruction" in results["a"].error
    assert results["b"].error is None
    gc.collect()


@pytest.mark.parametrize(("seconds", "goes"), [(0.0, True), (1.0, False)])
def test_auto_takes_the_faster(prompt_device, num_on_host, monkeypatch, seconds, goes):
    monkeypatch.setattr(host_steps, "seconds_per_element", lambda *_: seconds)
    one = job("a", update="auto")
    expected = train_plainly(one, prompt_device)
    result = run(prompt_device, one)["a"]
    assert result.error is None
    assert result.losses == pytest.approx(expected, rel=1e-3)
    assert bool(num_on_host()) == goes


def test_bytes_per_parameter_and_step(prompt_device):
    """With nothing resident a step carries weights twice in and gradients once out, besides activations."""
    budget = "768KiB" if prompt_device == "cuda" else "512KiB"  # workspaces of matrix products

    def model():
        return nn.Sequential(*[nn.Sequential(nn.Linear(128, 128, bias=False), nn.Tanh()) for _ in range(12)])

    def moved(steps, **changes):
        one = job(
            "a",
            model=model,
            data=lambda: [torch.ones(1, 128) * number for number in range(4)],
            loss=lambda model, batch: model(batch).square().mean(),
            steps=steps,
            **changes,
        )
        with fleet.Fleet([fleet.Device(name=f"{prompt_device}:0")], budget, host="64MiB", progress=None) as own:
            own.add(one)
            results = own.wait()
        assert results["a"].error is None
        (use,) = results.devices
        return use.parked_bytes + use.fetched_bytes

    def per_step(**changes):
        return (moved(5, **changes) - moved(3, **changes)) / 2 / sum(one.numel() for one in model().parameters())

    assert per_step(update="host") <= 12.5
    assert per_step(update="host", clip_norm=0.5) <= 12.5
    assert per_step(update="host", clip_norm=0.5, accumulate=4) <= 12.5
    assert per_step(update="host", precision="bfloat16") <= 6.5
    assert per_step(update="host", precision="bfloat16", clip_norm=0.5) <= 6.5
    assert per_step(update="host", precision="bfloat16", clip_norm=0.5, accumulate=4) <= 8.5
    assert per_step() >= 20
