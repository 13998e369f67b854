"""Trainings in files: checkpoints a part at a time, models that begin on the meta device, processes that are killed."""

import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from penstock import probe
from penstock.errors import CheckpointError, PenstockError
from penstock.offload import load, training
from penstock.state import _updates
from penstock.testing import GPT

SIZE = {"num_layers": 4, "width": 128, "num_heads": 4, "context": 64}


class Dropping(GPT):
    """Draws random numbers and counts its calls in buffers, one of which is not saved."""

    def __init__(self):
        super().__init__(**SIZE)
        self.register_buffer("calls", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens, targets):
        self.calls += 1
        return nn.functional.dropout(super().forward(tokens, targets), 0.3)


OPEN = []


@pytest.fixture(autouse=True)
def closed():
    """Whatever a test has left open."""
    yield
    while OPEN:
        OPEN.pop().close(discard=True)
    gc.collect()  # a budget is beside what is held, and what goes later is not seen to go


def make(path, budget=None, optimizer=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    budget = probe.held_bytes("cpu") + 2**22 if budget is None else budget
    OPEN.append(training(Dropping, lambda parameters: optimizer(parameters, lr=1e-2), budget, disk=path, **options))
    return OPEN[-1]


def batch(number):
    return torch.randint(256, (2, 2, 64), generator=torch.Generator().manual_seed(number))


def step(own, number):
    with own:
        loss = own.model(*batch(number))
        loss.backward()
        own.optimizer.step()
        own.optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_checkpoint_goes_on_to_the_bit(tmp_path, optimizer):
    own = make(tmp_path, optimizer=optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(own.optimizer, 2, 0.5)
    losses = []
    for number in range(6):
        if number == 3:
            own.save(tmp_path / "saved", extra={"scheduler": scheduler.state_dict(), "number": number})
        losses.append(step(own, number))
        scheduler.step()
    own.close(discard=True)

    own = make(tmp_path, optimizer=optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(own.optimizer, 2, 0.5)
    step(own, 17)  # somewhere else
    extra = own.load(tmp_path / "saved")
    scheduler.load_state_dict(extra["scheduler"])
    again = []
    for number in range(extra["number"], 6):
        again.append(step(own, number))
        scheduler.step()
    own.close(discard=True)
    assert again == losses[3:]


def test_a_fresh_optimizer_gets_its_states_without_a_step_before(tmp_path):
    own = make(tmp_path)
    losses = [step(own, number) for number in range(2)]
    own.save(tmp_path / "saved")
    losses.append(step(own, 2))
    with own.whole():
        states = {key: value.clone() for key, value in own.optimizer.state[own.model.head.weight].items()}
    own.close(discard=True)
    own = make(tmp_path)
    assert own.load(tmp_path / "saved") is None
    assert step(own, 2) == losses[2]
    with own.whole():
        assert all(torch.equal(value, states[key]) for key, value in own.optimizer.state[own.model.head.weight].items())


def test_saving_and_loading_keep_the_budget(tmp_path):
    budget = probe.held_bytes("cpu") + 2**22
    own = make(tmp_path, budget)
    for number in range(3):
        step(own, number)
    saved = probe.peak_bytes(lambda: own.save(tmp_path / "saved"))
    loaded = probe.peak_bytes(lambda: own.load(tmp_path / "saved"))
    own.close(discard=True)
    assert saved.peak_bytes <= budget
    assert loaded.peak_bytes <= budget
    assert len(list((tmp_path / "saved").glob("optimizer-*.safetensors"))) > 3


def test_weights_have_the_names_of_state_dict(tmp_path):
    own = make(tmp_path)
    step(own, 0)
    own.save(tmp_path / "saved")
    with own.whole():
        expected = {name: value.clone() for name, value in own.model.state_dict().items()}
    own.close(discard=True)
    index = json.loads((tmp_path / "saved/model.safetensors.index.json").read_text())["weight_map"]
    found = {name: load_file(tmp_path / "saved" / file)[name] for name, file in index.items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_an_older_checkpoint_is_whole_where_the_new_one_cannot_be_written(tmp_path, monkeypatch):
    own = make(tmp_path)
    expected = [step(own, 0)]
    own.save(tmp_path / "saved", extra=1)
    expected.append(step(own, 1))

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("penstock.training._checkpoint.save_file", full)
        with pytest.raises(CheckpointError, match="No space left"):
            own.save(tmp_path / "saved", extra=2)
    assert [path.name for path in tmp_path.iterdir() if "saved" in path.name] == ["saved"]
    assert own.load(tmp_path / "saved") == 1
    assert step(own, 1) == expected[1]


@pytest.mark.parametrize(
    "how", ["flipped", "cut", "missing", "other model", "no folder", "more groups", "other groups", "other optimizer"]
)
def test_damage_is_told_before_anything_changes(tmp_path, how):
    own = make(tmp_path)
    step(own, 0)
    own.save(tmp_path / "saved")
    path = max((tmp_path / "saved").glob("optimizer-*.safetensors"))
    if how == "flipped":
        raw = bytearray(path.read_bytes())
        raw[-3] ^= 1
        path.write_bytes(raw)
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "missing":
        path.unlink()
    elif how == "no folder":
        (tmp_path / "saved").rename(tmp_path / "elsewhere")
    elif how == "other model":
        own.close(discard=True)
        OPEN.append(
            training(lambda: nn.Linear(300, 300), lambda some: torch.optim.AdamW(some, lr=1e-2), "1GiB", disk=tmp_path)
        )
        own = OPEN[-1]
    elif how == "other optimizer":
        own.close(discard=True)
        own = make(tmp_path, optimizer=torch.optim.Adagrad)
    elif how == "other groups":
        own.optimizer.add_param_group({"params": [own.optimizer.param_groups[0]["params"].pop()]})
    else:
        own.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    before = {name: parameter.detach().clone() for name, parameter in own.model.named_parameters()}
    with pytest.raises(CheckpointError, match="no checkpoint" if how == "no folder" else "cannot be used"):
        own.load(tmp_path / "saved")
    assert all(torch.equal(parameter, before[name]) for name, parameter in own.model.named_parameters())


def test_misuse_is_told(tmp_path):
    own = make(tmp_path)
    with own:
        with pytest.raises(ValueError, match="between two steps"):
            own.save(tmp_path / "saved")
        with pytest.raises(ValueError, match="between two steps"):
            own.load(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="cannot hold a"):
        own.save(tmp_path / "saved", extra=object())
    own.close(discard=True)
    with pytest.raises(ValueError, match="is closed"):
        own.save(tmp_path / "saved")


KILLED = """
    import os, signal, sys
    from pathlib import Path
    import torch
    sys.path.insert(0, sys.argv[1])
    from test_training_checkpoint import make, step
    saved, last = Path(sys.argv[2]) / "saved", int(sys.argv[3])
    own = make(sys.argv[2])
    first = own.load(saved) if saved.exists() or saved.with_name(".saved.old").exists() else 0
    for number in range(first, 8):
        print(number, step(own, number).hex(), flush=True)
        own.save(saved, extra=number + 1)
    own.close(discard=True)
"""


def test_killed_processes_go_on_to_the_bit(tmp_path):
    own = make(tmp_path)
    expected = [step(own, number).hex() for number in range(8)]
    own.close(discard=True)
    found = {}
    for num_lines in (2, 1, 3, 8):  # until the process is killed, in the middle of whatever comes then
        command = [sys.executable, "-c", textwrap.dedent(KILLED), os.path.dirname(__file__), str(tmp_path), "8"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for number, line in enumerate(process.stdout, 1):
                place, loss = line.split()
                assert found.setdefault(int(place), loss) == loss
                if number == num_lines:
                    process.send_signal(signal.SIGKILL)
    assert [found[number] for number in range(8)] == expected


def on_meta():
    with torch.device("meta"):
        return GPT(**SIZE)


@pytest.mark.parametrize("kind", ["file", "folder", "index"])
def test_files_fill_a_model_of_the_meta_device_within_the_budget(tmp_path, kind):
    torch.manual_seed(0)
    twin = GPT(**SIZE)
    tensors = {name: value.clone() for name, value in twin.state_dict().items()}
    if kind == "index":
        files = {name: f"part-{number % 3}.safetensors" for number, name in enumerate(tensors)}
        for file in set(files.values()):
            save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, tmp_path / file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    path = tmp_path / "model.safetensors" if kind == "file" else tmp_path
    del tensors
    budget = probe.held_bytes("cpu") + 2**21
    model = lambda: load(on_meta(), path)  # noqa: E731
    peak = probe.peak_bytes(
        lambda: OPEN.append(training(model, lambda some: torch.optim.SGD(some, lr=0.1), budget, disk=tmp_path))
    )
    own = OPEN[-1]
    assert peak.peak_bytes <= budget
    expected = dict(twin.named_parameters())
    assert all(torch.equal(parameter, expected[name]) for name, parameter in own.model.named_parameters())


def test_modules_initialise_themselves():
    torch.manual_seed(0)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.Embedding(7, 40))
        model.add_module("again", model[0])
    assert load(model, device="cpu") is model
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert model.again is model[0]
    assert 0 < model[0].weight.abs().max() <= 30**-0.5
    assert torch.equal(model[1].running_var, torch.ones(40))


class Scaled(nn.Embedding):
    """Has ``reset_parameters``, which knows nothing of the buffer."""

    def __init__(self):
        super().__init__(7, 4)
        self.register_buffer("scale", torch.tensor(3.0), persistent=False)


@pytest.mark.parametrize("knows", [False, True])
def test_no_value_is_left_to_chance(tmp_path, knows):
    save_file({"0.weight": torch.ones(7, 4)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(Scaled())
    if knows:  # as models of transformers do
        model._init_weights = lambda module: module.scale.fill_(3)
        assert load(model, tmp_path, device="cpu")[0].scale == 3
        assert torch.equal(model[0].weight, torch.ones(7, 4))
    else:
        with pytest.raises(ValueError, match="no values for scale"):
            load(model, tmp_path, device="cpu")


class Positions(nn.Module):
    """Has a buffer that was expanded, and a weight of its own beside one of the meta device."""

    def __init__(self):
        super().__init__()
        self.register_buffer("places", torch.arange(4).expand(3, 4))
        self.linear = nn.Linear(4, 4)


def test_other_layouts_and_values_that_are_there_already(tmp_path):
    save_file({"places": torch.arange(12).reshape(3, 4), "linear.weight": torch.ones(4, 4)}, tmp_path / "a.safetensors")
    with torch.device("meta"):
        model = Positions()
    model.linear.bias = nn.Parameter(torch.full((4,), 7.0))
    with torch.device("meta"):
        model.linear.other = nn.Parameter(torch.empty(4))
    model.linear.reset_parameters = lambda: [nn.init.zeros_(parameter) for parameter in model.linear.parameters()]
    load(model, tmp_path / "a.safetensors", device="cpu", strict=False)
    assert torch.equal(model.places, torch.arange(12).reshape(3, 4))
    assert torch.equal(model.linear.bias, torch.full((4,), 7.0))
    assert torch.equal(model.linear.weight, torch.ones(4, 4))


def test_tied_parameters_stay_tied_and_frozen_ones_frozen(tmp_path):
    def tied():
        model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)).half()
        model[1].weight = model[0].weight
        return model.requires_grad_(False)

    values = torch.randn(10, 4)
    save_file({"0.weight": values}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = tied()
    load(model, tmp_path, device="cpu")
    assert model[0].weight is model[1].weight
    assert not model[0].weight.requires_grad
    assert torch.equal(model[0].weight, values.half())


@pytest.mark.parametrize(
    ("tensors", "strict", "message"),
    [
        ({"weight": torch.zeros(3, 2)}, True, "lack bias"),
        ({"weight": torch.zeros(3, 2), "bias": torch.zeros(3), "more": torch.zeros(1)}, True, "has no more"),
        ({"weight": torch.zeros(2, 3), "bias": torch.zeros(3)}, False, r"weight is \(2, 3\) in the file"),
    ],
)
def test_files_of_another_model_are_refused(tmp_path, tensors, strict, message):
    save_file(tensors, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Linear(2, 3)
    with pytest.raises(CheckpointError, match=message):
        load(model, tmp_path, strict=strict)
    if strict:
        load(model, tmp_path, strict=False, device="cpu")
        assert torch.equal(model.weight, tensors["weight"])
        assert not model.bias.is_meta


def test_what_cannot_be_loaded_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match="no .safetensors file"):
        load(nn.Linear(2, 3), tmp_path)
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="save_file"):
        load(nn.Linear(2, 3), tmp_path / "model.bin")
    (tmp_path / "model.safetensors").write_bytes(b"12345678{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(nn.Linear(2, 3), tmp_path)
    model = nn.Module()
    model.register_buffer("table", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(ValueError, match="no values for table"):
        load(model)


def test_another_thread_saves_and_reads(tmp_path):
    own = make(tmp_path)
    for number in range(3):
        step(own, number)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(own.save, tmp_path / "saved").result()
        pool.submit(torch.save, own.model.state_dict(), tmp_path / "saved.pt").result()
        loss = step(own, 3)
        pool.submit(own.load, tmp_path / "saved").result()
    assert step(own, 3) == loss
    stored = torch.load(tmp_path / "saved.pt")
    own.load(tmp_path / "saved")
    assert all(torch.equal(parameter, stored[name]) for name, parameter in own.model.named_parameters())


def test_a_forked_process_is_told_what_is_not_there(tmp_path):
    own = make(tmp_path)
    step(own, 0)
    own.park()
    weight = own.model.head.weight
    for use in (weight.norm, weight.tolist, own.__enter__, own.park, lambda: own.save(tmp_path / "saved")):
        assert in_a_child(use) == "ForkedProcessError"
    assert in_a_child(own.close) == ""
    with own.whole():
        assert in_a_child(weight.norm) == ""
    step(own, 1)


def in_a_child(use):
    """The error that it raises in a forked process."""
    receives, sends = os.pipe()
    child = os.fork()
    if not child:
        try:
            use()
        except BaseException as error:
            os.write(sends, type(error).__name__.encode())
        os._exit(0)
    os.close(sends)
    _, status = os.waitpid(child, 0)
    assert status == 0
    with os.fdopen(receives) as file:
        return file.read()


def test_whatever_is_beside_a_checkpoint_stays(tmp_path):
    own = make(tmp_path)
    step(own, 0)
    own.save(tmp_path / "saved")
    (tmp_path / "saved" / "config.json").write_text("{}")
    own.load(tmp_path / "saved")
    own.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "config.json").read_text() == "{}"
    (tmp_path / "saved" / "config.json").write_text("{1: 2}")
    (tmp_path / "saved" / "logs").mkdir()
    save_file({"average": torch.ones(3)}, tmp_path / "saved" / "model_average.safetensors")
    for _ in range(2):
        own.load(tmp_path / "saved")
        own.save(tmp_path / "saved")
    assert {"logs", "config.json", "model_average.safetensors"} < {path.name for path in (tmp_path / "saved").iterdir()}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("text")
    with pytest.raises(CheckpointError, match="not a checkpoint of a training"):
        own.save(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").exists()
    (tmp_path / "latest").symlink_to(tmp_path / "saved")
    for _ in range(2):
        own.save(tmp_path / "latest")
    assert (tmp_path / "latest").is_symlink()
    own.load(tmp_path / "latest")


def test_extra_has_what_schedulers_and_averages_have(tmp_path):
    own = make(tmp_path)
    average = torch.randn(200, 200)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(own.optimizer, [2, 4])
    own.save(tmp_path / "saved", extra={"average": average, "scheduler": scheduler.state_dict(), "size": average.shape})
    assert (tmp_path / "saved" / "training.json").stat().st_size < 20_000
    extra = own.load(tmp_path / "saved")
    assert torch.equal(extra["average"], average)
    assert extra["size"] == (200, 200)
    scheduler.load_state_dict(extra["scheduler"])
    scheduler.milestones.elements()


def test_weights_take_the_place_of_older_ones(tmp_path):
    own = make(tmp_path)
    names = [name for name, _ in own.model.named_parameters()]
    own.save_weights(tmp_path / "weights", names=names[:1])
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["model.safetensors"]
    own.save_weights(tmp_path / "weights")
    assert "model.safetensors" not in [path.name for path in (tmp_path / "weights").iterdir()]
    own.save_weights(tmp_path / "weights", names=names[:1])
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["model.safetensors"]


def test_two_threads_save_beside_a_step(tmp_path):
    own = make(tmp_path)
    step(own, 0)
    expected = {name: parameter.detach().clone() for name, parameter in own.model.named_parameters()}
    states = own.model.state_dict()

    def save(number):
        torch.save({"other": torch.ones(5)}, tmp_path / f"other-{number}.pt")
        torch.save(states, tmp_path / f"{number}.pt")

    with ThreadPoolExecutor(2) as pool:
        saving = [pool.submit(save, number) for number in range(6)]
        with own:
            for number in range(4):
                own.model(*batch(number)).backward()
            own.optimizer.zero_grad()
        for thread in saving:
            thread.result()
    for number in range(6):
        stored = torch.load(tmp_path / f"{number}.pt")
        assert all(torch.equal(stored[name], value) for name, value in expected.items())


def test_an_update_that_is_interrupted_is_done_again_or_told(tmp_path, monkeypatch):
    fails, step_part = set(), _updates.step_part

    def failing(*arguments, **keywords):
        if "before" in fails:
            raise MemoryError
        after = step_part(*arguments, **keywords)
        if "after" in fails:
            raise MemoryError
        return after

    monkeypatch.setattr(_updates, "step_part", failing)
    own, plain = make(tmp_path, optimizer=torch.optim.SGD), []
    for number in range(3):
        plain.append(step(own, number))
    own.close(discard=True)
    own = make(tmp_path, optimizer=torch.optim.SGD)
    losses = [step(own, 0)]
    fails.add("before")
    with pytest.raises(MemoryError):
        own.model.head.weight.norm()
    fails.clear()
    losses += [step(own, number) for number in (1, 2)]
    assert losses == plain
    fails.add("after")
    with pytest.raises(MemoryError):
        own.model.head.weight.norm()
    fails.clear()
    with pytest.raises(PenstockError, match="go on from the last checkpoint"):
        step(own, 3)
