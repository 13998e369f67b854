"""What happens in notebooks and searches: cells run again, interrupts, retries, nothing closed, copies, printing."""

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.loops_common import STEPS, WIDTH, batches, class_loss, mlp
from benchmarks.loops_door import Door, loop


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


@loop
def interrupted_before_step(door: Door) -> None:
    """Stop is pressed between backward and step; the cell with the loop runs again."""
    model = mlp()
    optimizer = adamw(model)
    net = door.train(model, optimizer)
    data = list(batches(14))
    try:
        for number in range(4):
            with door:
                loss = class_loss(net, data[number])
                loss.backward()
                if number == 3:
                    raise KeyboardInterrupt
                optimizer.step()
                optimizer.zero_grad()
            door.note(loss)
    except KeyboardInterrupt:
        pass
    for number in door.steps(10):
        with door:
            optimizer.zero_grad()
            loss = class_loss(net, data[4 + number])
            loss.backward()
            optimizer.step()
        door.note(loss)


@loop
def interrupted_in_forward(door: Door) -> None:
    model = mlp()
    optimizer = adamw(model)
    net = door.train(model, optimizer)
    data = list(batches(14))
    fuse = {"left": 3}

    def stop(*_: Any) -> None:
        fuse["left"] -= 1
        if fuse["left"] == 0:
            raise KeyboardInterrupt

    handle = model[4].register_forward_pre_hook(stop)
    for number in door.steps(12):
        try:
            with door:
                optimizer.zero_grad()
                loss = class_loss(net, data[number])
                loss.backward()
                optimizer.step()
            door.note(loss)
        except KeyboardInterrupt:
            handle.remove()


@loop
def interrupted_in_backward(door: Door) -> None:
    """An error in a hook in the middle of backward; gradients of a part are there, and the step is repeated."""
    model = mlp()
    optimizer = adamw(model)
    net = door.train(model, optimizer)
    data = list(batches(12))
    fuse = {"left": 4}

    def stop(_: torch.Tensor) -> None:
        fuse["left"] -= 1
        if fuse["left"] == 0:
            raise RuntimeError("a bug of the user's")

    model[4].weight.register_hook(stop)
    for number in door.steps(12):
        try:
            with door:
                optimizer.zero_grad()
                loss = class_loss(net, data[number])
                loss.backward()
                optimizer.step()
            door.note(loss)
        except RuntimeError as error:
            assert "a bug of the user's" in str(error)  # noqa: PT017


@loop
def cell_run_again(door: Door) -> None:
    """Model, optimizer and door are made again under the same names; nothing was closed."""
    data = list(batches(STEPS))
    for attempt in range(3):
        model = mlp()
        optimizer = adamw(model)
        net = door.train(model, optimizer)
        for number in door.steps(STEPS) if attempt == 2 else range(3):
            with door:
                loss = class_loss(net, data[number])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            door.note(loss)
        if attempt < 2:
            door.forget()


@loop
def door_made_again_for_same_model(door: Door) -> None:
    """The cell that makes the door runs again, the one that makes the model does not."""
    model = mlp()
    optimizer = adamw(model)
    data = list(batches(STEPS))
    for attempt in range(2):
        net = door.train(model, optimizer)
        for number in door.steps(STEPS) if attempt else range(3):
            with door:
                loss = class_loss(net, data[number])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            door.note(loss)
        if attempt == 0:
            door.forget()


def find_executable_batch_size(function: Callable[[int], None], start: int) -> None:
    """As accelerate's decorator: after an out-of-memory error the function runs again with half of the batch."""
    size = start
    while True:
        gc.collect()
        try:
            function(size)
            return
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            size //= 2


@loop
def retries_after_out_of_memory(door: Door) -> None:
    def attempt(rows: int) -> None:
        torch.manual_seed(0)
        model = mlp()
        optimizer = adamw(model)
        net = door.train(model, optimizer)
        for number, batch in zip(door.steps(STEPS), batches(rows=rows), strict=True):
            with door:
                loss = class_loss(net, batch)
                if rows > 200 and number == 1:
                    door.forget()
                    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: out of memory")
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            door.note(loss)

    find_executable_batch_size(attempt, 768)


@loop
def batch_halved_in_the_same_step(door: Door) -> None:
    """A batch that does not fit is cut in two and tried again, without leaving the context."""
    model = mlp()
    optimizer = adamw(model)
    net = door.train(model, optimizer)
    for number, (rows, labels) in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            try:
                loss = class_loss(net, (rows, labels))
                if number in (2, 3):
                    raise RuntimeError("out of memory")
                loss.backward()
            except RuntimeError:
                for part in range(2):
                    loss = class_loss(net, (rows[part::2], labels[part::2])) / 2
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def objective_of_a_search(door: Door) -> None:
    """An objective that is called for every trial, and returns early if pruned. Nothing is closed."""

    def objective(rate: float, depth: int, steps: Any) -> float:
        model = mlp(depth=depth)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        net = door.train(model, optimizer)
        loss = torch.zeros(())
        for number, batch in zip(steps, batches(), strict=False):
            with door:
                loss = class_loss(net, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            if number == 4 and rate > 5e-3:
                break
        return loss.item()

    for rate, depth in ((1e-3, 2), (1e-2, 3), (3e-4, 4)):
        door.note(objective(rate, depth, range(5)))
        door.forget()
    door.note(objective(2e-3, 3, door.steps(STEPS)))


@loop
def cross_validation(door: Door) -> None:
    """A model per fold; those of earlier folds are kept in a list."""
    models, data = [], list(batches(6))
    for fold in range(3):
        model = mlp(depth=2)
        optimizer = adamw(model)
        net = door.train(model, optimizer)
        for number in door.steps(6) if fold == 2 else range(6):
            if number % 3 == fold:
                continue
            with door:
                loss = class_loss(net, data[number])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            door.note(loss)
        door.close()
        models.append(model)
    with torch.no_grad():
        door.note(sum(model(data[0][0]) for model in models))


@loop
def two_models_by_turns(door: Door) -> None:
    models = [mlp(depth=2), mlp(depth=3)]
    optimizers = [adamw(models[0]), torch.optim.SGD(models[1].parameters(), lr=0.1)]
    nets = [door.train(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
    for number, batch in zip(door.steps(12), batches(12), strict=True):
        with door:
            loss = class_loss(nets[number % 2], batch)
            loss.backward()
            optimizers[number % 2].step()
            optimizers[number % 2].zero_grad()
        door.note(loss)


@loop
def two_models_in_a_step(door: Door) -> None:
    """Co-teaching: each learns what the other finds easy."""
    models = [mlp(depth=2), mlp(depth=2)]
    optimizers = [adamw(model) for model in models]
    nets = [door.train(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
    for _, (rows, labels) in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            each = [F.cross_entropy(net(rows), labels, reduction="none") for net in nets]
            easy = [part.detach().topk(96, largest=False).indices for part in each]
            for optimizer, part, others in zip(optimizers, each, reversed(easy), strict=True):
                optimizer.zero_grad()
                part[others].mean().backward()
                optimizer.step()
        door.note(*each)


@loop
def looks_at_weights(door: Door) -> None:
    """repr, print, item, tolist, numpy, comparison and formatting of weights and gradients between and in steps."""
    model = mlp()
    optimizer = adamw(model)
    net = door.train(model, optimizer)
    seen: list[int] = []
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            seen.append(hash(repr(model[0].weight.grad)))
            optimizer.step()
            seen += [hash(str(model[2].weight)), hash(tuple(model[4].weight[0, :4].tolist()))]
            optimizer.zero_grad()
        seen += [hash(repr(model[0].weight)), hash(f"{model[0].bias}"), hash(str(list(model.parameters())[2]))]
        door.note(loss, model[2].weight.detach().numpy().sum(), model[0].weight[3, 5].item())
        door.note([value % 2**20 for value in seen[-6:]])


@loop
def repr_of_a_parameter_alone(door: Door) -> None:
    model = mlp()
    optimizer = adamw(model)
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss, sum(map(ord, repr(model[0].weight))), sum(map(ord, str(model[-1].bias))))


@loop
def saved_by_pickle(door: Door) -> None:
    """The whole model and the optimizer are pickled in the middle, and compared with what comes back."""
    model = mlp()
    optimizer = adamw(model)
    net = door.train(model, optimizer)
    for number, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if number in (3, 7):
            saved = io.BytesIO()
            torch.save(model, saved)
            saved.seek(0)
            again = torch.load(saved, weights_only=False)
            door.note(*[parameter.sum() for parameter in again.parameters()])
            door.note(len(pickle.dumps(model[0])) > WIDTH**2, len(pickle.dumps(optimizer.state_dict())) > 2 * WIDTH**2)
        door.note(loss)


@loop
def saved_with_safetensors(door: Door) -> None:
    from safetensors.torch import load, save

    model = mlp()
    optimizer = adamw(model)
    net = door.train(model, optimizer)
    for number, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if number % 4 == 1:
            door.note(load(save(dict(model.state_dict()))))
        door.note(loss)


@loop
def model_deleted_and_made_again(door: Door) -> None:
    data = list(batches(STEPS))
    for attempt in range(2):
        model = mlp()
        optimizer = adamw(model)
        net = door.train(model, optimizer)
        for number in door.steps(STEPS) if attempt else range(4):
            with door:
                loss = class_loss(net, data[number])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            door.note(loss)
        if attempt == 0:
            door.forget()
            del model, optimizer, net, loss
            gc.collect()


@loop
def forward_without_backward(door: Door) -> None:
    """A metric is computed inside, someone forgot no_grad, and its result is dropped."""
    model = mlp()
    optimizer = adamw(model)
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            accuracy = (net(batch[0]).argmax(1) == batch[1]).float().mean()
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss, accuracy)


@loop
def forgotten_result(door: Door) -> None:
    """As above, but the result with its graph stays in a variable until the next step."""
    model = mlp()
    optimizer = adamw(model)
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(14), batches(14), strict=True):
        with door:
            logits = net(batch[0])
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss, logits.sum())


@loop
def losses_in_a_list(door: Door) -> None:
    """Losses are appended with their graphs, and summed up at the end."""
    model = mlp()
    optimizer = adamw(model)
    net = door.train(model, optimizer)
    losses = []
    for _, batch in zip(door.steps(14), batches(14), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss)
    door.note(sum(losses))


@loop
def model_copied_for_evaluation(door: Door) -> None:
    model = mlp()
    optimizer = adamw(model)
    net = door.train(model, optimizer)
    for number, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if number % 3 == 2:
            judge = copy.deepcopy(model).to(torch.bfloat16).eval()
            with torch.no_grad():
                door.note(judge(batch[0].bfloat16()).float().sum())
        door.note(loss)


@loop
def moved_away_and_back(door: Door) -> None:
    """The model goes to another dtype and back between steps, as people do to save it."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    net = door.train(model, optimizer)
    for number, batch in zip(door.steps(STEPS), batches(), strict=True):
        if number == 5:
            model.half()
            model.float()
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def weights_set_by_hand(door: Door) -> None:
    """A new initialization in the middle, in place, by copy_, by .data and by nn.utils."""
    model = mlp()
    optimizer = adamw(model)
    net = door.train(model, optimizer)
    for number, batch in zip(door.steps(12), batches(12), strict=True):
        if number == 3:
            nn.init.orthogonal_(model[0].weight)
        if number == 5:
            with torch.no_grad():
                model[2].weight.copy_(torch.eye(WIDTH))
        if number == 7:
            model[4].weight.data = torch.randn(WIDTH, WIDTH) * 0.05
        if number == 8:
            flat = nn.utils.parameters_to_vector(model.parameters())
            nn.utils.vector_to_parameters(flat * 0.99, model.parameters())
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def early_stopping_with_rollback(door: Door) -> None:
    """After a bad step, model and optimizer go back to the copy of the step before."""
    model = mlp()
    optimizer = adamw(model)
    net = door.train(model, optimizer)
    for number, batch in zip(door.steps(12), batches(12), strict=True):
        kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if number in (4, 8):
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
        door.note(loss)


@loop
def optimizer_state_changed_by_hand(door: Door) -> None:
    """Moments are scaled and reset between steps, as after a change of the rate."""
    model = mlp()
    optimizer = adamw(model)
    net = door.train(model, optimizer)
    for number, batch in zip(door.steps(12), batches(12), strict=True):
        if number == 5:
            for state in optimizer.state.values():
                state["exp_avg"].mul_(0.5)
                state["exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])
        if number == 8:
            optimizer.state.clear()
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)
