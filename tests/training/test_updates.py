"""Updates of the optimizer, at once, deferred, in backward and together: the same bits as in plain PyTorch."""

import contextlib
import copy
import functools
from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from training_loops import (
    OPTIMIZERS,
    VOCABULARY,
    WIDTH,
    Transformer,
    assert_same_loop,
    assert_same_training,
    batches,
    loss_of,
    simple_step,
)

from penstock.offload import parameters
from penstock.state import _updates


@pytest.mark.filterwarnings("ignore:Lion is not PyTorch's own")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(make_training, name):
    torch.manual_seed(0)
    assert_same_training(make_training, Transformer(), OPTIMIZERS[name])


def clipped(model, optimizer, tokens):
    loss = loss_of(model, tokens)
    loss.backward()
    norm = clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss.item(), norm.item()


def clipped_by_value(model, optimizer, tokens):
    loss = loss_of(model, tokens)
    loss.backward()
    clip_grad_value_(model.parameters(), 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def accumulated(model, optimizer, tokens):
    losses = []
    for part in tokens.chunk(4):
        loss = loss_of(model, part) / 4
        loss.backward()
        losses.append(loss.item())
    clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return losses


def norms_of_gradients_that_change(model, optimizer, tokens):
    """Norms are taken when gradients are complete; here some are not what they were then."""
    loss = loss_of(model, tokens)
    loss.backward()
    parameters = list(model.parameters())
    seen = [clip_grad_norm_(parameters, 1e9).item()]
    for parameter in parameters[::2]:
        parameter.grad.mul_(0.5)
    seen.append(clip_grad_norm_(parameters, 0.1).item())
    seen += [torch.linalg.vector_norm(parameter.grad, kind).item() for parameter in parameters for kind in (2.0, 1.0)]
    (loss_of(model, tokens) / 2).backward()  # to what is there
    seen.append(clip_grad_norm_(parameters, 0.1).item())
    optimizer.step()
    optimizer.zero_grad()
    return seen


def under_autocast(model, optimizer, tokens):
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def scaled(model, optimizer, tokens):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(loss_of(model, tokens)).backward()
    scaler.unscale_(optimizer)
    norm = clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return norm.item(), scaler.get_scale()


def two_forwards(model, optimizer, tokens):
    first, second = tokens.chunk(2)
    loss = loss_of(model, first) + loss_of(model, second)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def with_evaluation(model, optimizer, tokens):
    loss = simple_step(model, optimizer, tokens)
    model.eval()
    with torch.no_grad():
        tokens = tokens[:1, :8]
        for _ in range(3):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
    model.train()
    return loss, tokens.tolist()


def with_a_closure(model, optimizer, tokens):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, tokens)
        loss.backward()
        return loss

    return optimizer.step(closure).item()


def reading_everything(model, optimizer, tokens):
    loss = loss_of(model, tokens)
    loss.backward()
    seen = [parameter.grad.norm().item() for parameter in model.parameters()]
    seen += [parameter.detach().numpy().sum().item() for parameter in model.parameters()]
    seen += [
        model.head.weight.data.tolist()[3],
        torch.stack([parameter.sum() for parameter in model.parameters()]).tolist(),
    ]
    copied = copy.deepcopy(model.blocks[0])
    seen += [parameter.sum().item() for parameter in copied.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), seen


STEPS = {
    "clipped": clipped,
    "clipped by value": clipped_by_value,
    "norms": norms_of_gradients_that_change,
    "accumulated": accumulated,
    "autocast": under_autocast,
    "scaled": scaled,
    "two forwards": two_forwards,
    "evaluation": with_evaluation,
    "closure": with_a_closure,
    "reading": reading_everything,
}


@pytest.mark.parametrize("name", STEPS)
def test_steps(make_training, name):
    torch.manual_seed(0)
    is_bounded = name != "reading"  # arrays and copies of the user's own are his
    assert_same_training(
        make_training, Transformer(), OPTIMIZERS["adamw"], STEPS[name], share=0.35, is_bounded=is_bounded
    )


@pytest.mark.parametrize("name", ["clipped", "accumulated", "autocast", "evaluation"])
def test_parameters_leave_and_activations_stay(make_training, name):
    torch.manual_seed(0)
    statistics = assert_same_training(
        make_training, Transformer(), OPTIMIZERS["adamw"], STEPS[name], share=0.6, num_free=2, door=parameters
    )
    assert statistics.step_fetched["activations"] == statistics.step_parked["activations"] == 0


def test_updates_in_backward(make_training):
    torch.manual_seed(0)
    statistics = assert_same_training(
        make_training, Transformer(), OPTIMIZERS["adamw"], share=0.35, update_in_backward=True
    )
    assert statistics.step_parked["gradients"] == 0


@pytest.mark.parametrize("options", [{}, {"update_in_backward": True}], ids=str)
def test_updates_whose_pages_come_at_once(make_training, monkeypatch, options):
    """As they do where the budget is large beside every parameter."""
    monkeypatch.setattr(_updates, "_AT_ONCE", 2)
    torch.manual_seed(0)
    assert_same_training(make_training, Transformer(), OPTIMIZERS["adamw"], share=0.5, **options)


@pytest.mark.parametrize("in_backward", [False, True])
def test_small_parameters_are_updated_together(make_training, monkeypatch, in_backward):
    calls, step_part = [], _updates.step_part

    def counted(optimizer, parameters, *args, **options):
        calls.append(len(parameters))
        return step_part(optimizer, parameters, *args, **options)

    monkeypatch.setattr(_updates, "step_part", counted)
    model = Transformer()
    ours = make_training(model, OPTIMIZERS["adamw"](model), "1GiB", update_in_backward=in_backward)
    small = sum(parameter.nbytes < 16 * 1024 for parameter in model.parameters())
    for _ in range(2):
        calls.clear()
        with ours:
            loss_of(model, batches()[0]).backward()
            used = [parameter.grad.untyped_storage().nbytes() < parameter.nbytes for parameter in model.parameters()]
            assert used.count(True) == len(used) * in_backward
            ours.optimizer.step()
            ours.optimizer.zero_grad()
        assert calls.count(small) == 1


def test_gradient_hooks_and_batch_norm(make_training):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        nn.Flatten(0, 1),
        nn.Linear(WIDTH, 4 * WIDTH),
        nn.BatchNorm1d(4 * WIDTH),
        nn.ReLU(inplace=True),
        nn.Linear(4 * WIDTH, VOCABULARY),
        nn.Unflatten(0, (4, 32)),
    )

    def step(model, optimizer, tokens):
        hook = model[2].weight.register_hook(lambda gradient: gradient * 0.5)
        loss = simple_step(model, optimizer, tokens)
        hook.remove()
        return loss

    assert_same_training(make_training, model, OPTIMIZERS["adamw"], step, share=0.5)


def arrays_of_gradients(model, optimizer, context):
    for tokens in batches(3):
        with context:
            loss_of(model, tokens).backward()
            arrays = [parameter.grad.numpy() for parameter in model.parameters()]
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return [float(array.sum()) for array in arrays]


def gradients_of_one_storage(model, optimizer, context):
    flat = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    with context:
        begin = 0
        for parameter in model.parameters():
            parameter.grad = flat[begin : begin + parameter.numel()].view_as(parameter)
            begin += parameter.numel()
        loss_of(model, batches()[0]).backward()
        optimizer.step()
        flat.zero_()
    return loss_of(model, batches()[0]).item()


def a_state_that_is_thrown_away(model, optimizer, context):
    for tokens in batches(3):
        with context:
            simple_step(model, optimizer, tokens)
        optimizer.state = defaultdict(dict)
    with context:
        return simple_step(model, optimizer, batches()[3])


def a_state_that_is_loaded(model, optimizer, context):
    whole = getattr(context, "whole", contextlib.nullcontext)
    with context:
        simple_step(model, optimizer, batches()[0])
    with whole():
        best = copy.deepcopy(optimizer.state_dict())
    losses = []
    for tokens in batches(3):
        with context:
            losses.append(simple_step(model, optimizer, tokens))
    with whole():
        optimizer.load_state_dict(best)
    with context:
        return [*losses, simple_step(model, optimizer, batches()[3])]


def averages_in_place_of_weights(model, optimizer, context):
    losses = []
    averages = [torch.full_like(parameter, 0.01) for parameter in model.parameters()]
    for tokens in batches(3):
        with context:
            losses.append(simple_step(model, optimizer, tokens))
        kept = [parameter.data for parameter in model.parameters()]
        for parameter, average in zip(model.parameters(), averages, strict=True):
            parameter.data = average
        with context, torch.no_grad():
            losses.append(loss_of(model, tokens).item())
        for parameter, data in zip(model.parameters(), kept, strict=True):
            parameter.data = data
    return losses


def groups_that_change_after_the_step(model, optimizer, context):
    losses = []
    for number, tokens in enumerate(batches(4)):
        with context:
            losses.append(simple_step(model, optimizer, tokens))
        optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
        if number == 2:
            del optimizer.param_groups[0]["params"][-4:]
    return losses


def groups_that_are_loaded_with_another_rate(model, optimizer, context):
    losses = []
    for number, tokens in enumerate(batches(4)):
        with context:
            losses.append(simple_step(model, optimizer, tokens))
        state = optimizer.state_dict()
        state["param_groups"][0]["lr"] = 0.01 * (number + 1)
        optimizer.load_state_dict(state)
    return losses


def a_layer_that_is_trained_late(model, optimizer, context):
    late = max(model.blocks[0].parameters(), key=torch.numel)
    found = []
    late.requires_grad_(False)
    for number, tokens in enumerate(batches(4) * 2):
        if number == 5:
            late.requires_grad_(True)
        with context:
            found.append(simple_step(model, optimizer, tokens))
        found.append("exp_avg" in optimizer.state[late])
    return found


def clipping_twice_and_going_on(model, optimizer, context):
    norms = []
    for tokens in batches(4):
        with context:
            loss_of(model, tokens).backward()
            norms.append(clip_grad_norm_(model.parameters(), 0.5).item())
            norms.append(clip_grad_norm_(model.parameters(), 0.1).item())
            loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=len(norms) % 4 == 0)
    return norms


def weights_copied_to_themselves(model, optimizer, context):
    for tokens in batches(3):
        with context:
            simple_step(model, optimizer, tokens)
        getattr(context, "park", lambda: None)()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter)
    return 0


def evaluation_without_gradients_after_a_step(model, optimizer, context):
    losses = []
    for tokens in batches(3):
        with context:
            losses.append(simple_step(model, optimizer, tokens))
        with torch.inference_mode():
            losses.append(loss_of(model, tokens).item())
    return losses


LOOPS = [
    arrays_of_gradients,
    gradients_of_one_storage,
    a_state_that_is_thrown_away,
    a_state_that_is_loaded,
    groups_that_are_loaded_with_another_rate,
    a_layer_that_is_trained_late,
    averages_in_place_of_weights,
    groups_that_change_after_the_step,
    clipping_twice_and_going_on,
    weights_copied_to_themselves,
    evaluation_without_gradients_after_a_step,
]


@pytest.mark.parametrize("size_mib", [8, 1024], ids=["small", "all fits"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_updates_that_wait_are_those_of_their_step(make_training, loop, size_mib):
    torch.manual_seed(0)
    assert_same_loop(make_training, Transformer(num_blocks=2), loop, size_mib=size_mib)


@pytest.mark.parametrize("loop", [groups_that_are_loaded_with_another_rate, groups_that_change_after_the_step])
def test_groups_are_as_they_are_when_backward_comes(make_training, loop):
    torch.manual_seed(0)
    made_in_backward = functools.partial(make_training, update_in_backward=True)
    assert_same_loop(made_in_backward, Transformer(num_blocks=2), loop)


def test_updates_are_done_together_where_nothing_leaves(make_training):
    """As in plain PyTorch, one call for many parameters, so that nobody looks at each operator."""
    model = Transformer(num_blocks=2)
    optimizer = OPTIMIZERS["adamw"](model)
    ours = make_training(model, optimizer, "1GiB")
    num_operators = []
    for tokens in batches(4) * 2:
        with ours:
            simple_step(model, optimizer, tokens)
        num_operators.append(len(ours._managed.pages.course.last.needs))
    assert num_operators[-1] < 0.8 * num_operators[1]
    assert ours.statistics().step_parked_bytes == 0


def test_a_weight_that_was_updated_cannot_be_used_by_an_older_graph(make_training):
    model = Transformer(num_blocks=1)
    optimizer = OPTIMIZERS["adamw"](model)
    ours = make_training(model, optimizer, "1GiB")

    def step():
        loss = loss_of(model, batches()[0])
        loss.backward(retain_graph=True)
        optimizer.step()
        loss.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"), ours:
        step()


def test_a_second_backward_before_the_step_breaks_the_promise(make_training):
    model = Transformer(num_blocks=1)
    ours = make_training(model, OPTIMIZERS["adamw"](model), "1GiB", update_in_backward=True)
    with pytest.raises(RuntimeError, match="is used between backward and optimizer.step"), ours:
        (loss_of(model, batches()[0]).backward(), loss_of(model, batches()[1]).backward())
