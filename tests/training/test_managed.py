"""A training from its beginning to its end: what is made within the budget, taken over, refused and given back."""

import copy
import gc
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from training_loops import OPTIMIZERS, WIDTH, Transformer, batches, beside, loss_of, run_plain, simple_step

from penstock import probe
from penstock.errors import BudgetError
from penstock.offload import parameters


def test_without_activations_a_model_is_made_within_the_budget_too(make_training):
    def make_model():
        return nn.Sequential(*[nn.Linear(256, 256) for _ in range(16)])

    made, budget = [], probe.held_bytes("cpu") + 2**21
    peak = probe.peak_bytes(lambda: made.append(make_training(make_model, torch.optim.SGD, budget, door=parameters)))
    assert made[0].statistics().state_bytes == 2**22
    assert peak.peak_bytes <= budget


def test_a_process_that_ends_with_an_open_training_ends_well(tmp_path):
    script = f"""
import torch
from penstock import offload
model = torch.nn.Linear(300, 300)
training = offload.training(model, torch.optim.Adam(model.parameters()), "1GiB", disk={str(tmp_path)!r})
with training:
    model(torch.randn(8, 300)).sum().backward()
    training.optimizer.step()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_after_an_error_in_a_step_the_next_is_right(make_training):
    torch.manual_seed(0)
    model = Transformer()
    twin = copy.deepcopy(model)
    expected = run_plain(twin, OPTIMIZERS["adamw"](twin), simple_step, batches())
    optimizer = OPTIMIZERS["adamw"](model)
    ours = make_training(model, optimizer, beside(model, 6))
    losses = []
    for tokens in batches():
        with pytest.raises(KeyError), ours:
            raise KeyError(loss_of(model, tokens).item())
        with ours:
            losses.append(simple_step(model, optimizer, tokens))
    assert losses == expected


def test_a_step_outside_of_the_context_is_right(make_training):
    torch.manual_seed(0)
    model = Transformer()
    twin = copy.deepcopy(model)
    expected = run_plain(twin, OPTIMIZERS["adamw"](twin), simple_step, batches())
    optimizer = OPTIMIZERS["adamw"](model)
    ours = make_training(model, optimizer, beside(model, 6))
    losses = []
    for number, tokens in enumerate(batches()):
        if number == 2:
            losses.append(simple_step(model, optimizer, tokens))
        else:
            with ours:
                losses.append(simple_step(model, optimizer, tokens))
    assert losses == expected


def test_closing_gives_everything_back(make_training):
    model = Transformer()
    optimizer = OPTIMIZERS["adamw"](model)
    ours = make_training(model, optimizer, beside(model, 6))
    with ours:
        simple_step(model, optimizer, batches()[0])
    ours.close()
    assert all(parameter.untyped_storage().nbytes() >= parameter.nbytes for parameter in model.parameters())
    assert all(value["exp_avg"].untyped_storage().nbytes() > 0 for value in optimizer.state.values())
    assert "step" not in optimizer.__dict__
    assert "tolist" not in torch.Tensor.__dict__
    model.state_dict()
    with pytest.raises(ValueError, match="closed"), ours:
        pass


def test_a_budget_below_what_is_there_already_is_refused(make_training):
    model = Transformer()
    with pytest.raises(BudgetError, match="the device already holds"):
        make_training(model, OPTIMIZERS["adamw"](model), 1024)
    model.state_dict()


def test_a_disk_without_room_for_the_state_is_refused_before_anything_moves(make_training, tmp_path):
    model = Transformer()
    with pytest.raises(BudgetError, match=r"of parameters, .* of gradients and .* of optimizer state"):
        make_training(model, OPTIMIZERS["adamw"](model), beside(model, 1), disk={tmp_path: "2MiB"})
    assert all(parameter.untyped_storage().nbytes() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda model: (3, OPTIMIZERS["adamw"](model), "1GiB"), "`model` must be a"),
        (lambda model: (model, model, "1GiB"), "`optimizer` must be a"),
        (lambda model: (model, OPTIMIZERS["adamw"](model)), "`budget` is required"),
        (lambda model: (Transformer().to("meta"), OPTIMIZERS["adamw"](model), "1GiB"), "on one device"),
    ],
)
def test_misuse(make_training, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make_training(*(*arguments(Transformer(num_blocks=1)), None)[:3])


def test_a_model_that_is_made_within_the_budget_is_never_whole(make_training, tmp_path):
    def make():
        torch.manual_seed(0)
        return Transformer(num_blocks=8)

    twin = make()
    expected = run_plain(twin, OPTIMIZERS["adamw"](twin), simple_step, batches())
    after = [parameter.detach().clone() for parameter in twin.parameters()]
    size_bytes = sum(parameter.nbytes for parameter in twin.parameters())
    del twin
    gc.collect()
    budget = (
        probe.held_bytes("cpu") + size_bytes * 2 // 3
    )  # an eighth of parameters, gradients and states: 2/3 of 1/4 x 4
    with probe.record_memory("cpu") as recording:
        ours = make_training(make, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), budget)
    losses = []
    for tokens in batches():
        with ours:
            losses.append(simple_step(ours.model, ours.optimizer, tokens))
    peak = ours.statistics().measured_peak_bytes
    for name, part in ours.model.named_children():
        with ours.whole(part):
            torch.save(part.state_dict(), tmp_path / f"{name}.pt")
    ours.close(discard=True)
    assert losses == expected
    assert recording.report.peak_bytes <= budget * 1.01
    assert peak <= budget * 1.01
    saved = Transformer(num_blocks=8)
    for name, part in saved.named_children():
        part.load_state_dict(torch.load(tmp_path / f"{name}.pt"))
    assert all(torch.equal(parameter, two) for parameter, two in zip(saved.parameters(), after, strict=True))


@pytest.mark.parametrize(
    ("model", "optimizer", "message"),
    [
        (lambda: 3, lambda parameters: torch.optim.SGD(parameters, lr=1), "`model` must return .* got int"),
        (lambda: nn.Linear(8, 8), lambda parameters: 4, "`optimizer` must return .* got int"),
        (lambda: nn.Linear(8, 8, device="meta"), lambda parameters: 4, "on one device"),
    ],
)
def test_functions_that_make_something_else_are_refused(make_training, model, optimizer, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make_training(model, optimizer, "1GiB")
    assert "tolist" not in torch.Tensor.__dict__


def test_parameters_that_are_new_or_moved_are_taken_over(make_training):
    torch.manual_seed(0)
    model = Transformer(num_blocks=2)
    twin = copy.deepcopy(model)
    optimizer = OPTIMIZERS["adamw"](model)
    ours = make_training(model, optimizer, beside(model, 8))
    plain = OPTIMIZERS["adamw"](twin)
    for trained, stepped in ((twin, plain), (model, optimizer)):
        losses = run_plain(trained, stepped, simple_step, batches(1))
        torch.manual_seed(3)
        extra = nn.Linear(WIDTH, 4 * WIDTH)
        trained.blocks[0].layers[0] = extra
        stepped.add_param_group({"params": list(extra.parameters())})
        trained.blocks[1].double().float()
        for tokens in batches():
            with ours:
                losses.append(simple_step(trained, stepped, tokens))
        if trained is twin:
            expected = losses
    assert losses == expected
    ours.park()
    assert model.blocks[1].layers[0].weight.untyped_storage().nbytes() == 0
    assert model.blocks[0].layers[0].weight.untyped_storage().nbytes() == 0


def test_tensors_made_of_others_are_seen(make_training):
    model = Transformer(num_blocks=1)
    ours = make_training(model, OPTIMIZERS["adamw"](model), "1GiB")
    with ours:
        simple_step(model, ours.optimizer, batches()[0])
    ours.park()
    assert model.embedding.weight.untyped_storage().nbytes() == 0
    weight = model.embedding.weight.detach()
    assert (TwoTensor(weight, weight) * 2).a.equal(weight * 2)


def test_a_training_is_entered_in_the_thread_that_made_it(make_training):
    model = Transformer(num_blocks=1)
    ours = make_training(model, OPTIMIZERS["adamw"](model), "1GiB")
    with ThreadPoolExecutor() as threads, pytest.raises(ValueError, match="in the thread that made it"):
        threads.submit(ours.__enter__).result()
