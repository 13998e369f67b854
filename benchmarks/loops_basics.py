"""Loops that everybody writes: accumulation, clipping, mixed precision, schedules, averages, freezing."""

import copy
import io

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.loops_common import ROWS, STEPS, WIDTH, batches, class_loss, job, mlp, supervised
from benchmarks.loops_door import Door, loop

supervised("classifier", lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), module=__name__)
supervised("momentum", lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), module=__name__)


@loop(job=job(lambda parameters: torch.optim.AdamW(parameters), accumulate=2, clip_norm=0.5))
def accumulation_with_clipping(door: Door) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    net = door.train(model, optimizer)
    data = list(batches(2 * STEPS))
    for step in door.steps(STEPS):
        with door:
            for part in range(2):
                loss = class_loss(net, data[2 * step + part]) / 2
                loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss, norm)


@loop
def accumulation_one_context_each(door: Door) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    net = door.train(model, optimizer)
    for number, batch in zip(door.steps(4 * STEPS), batches(4 * STEPS), strict=True):
        with door:
            loss = class_loss(net, batch) / 4
            loss.backward()
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
        door.note(loss)


@loop
def autocast_with_scaler(door: Door) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = class_loss(net, batch)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        door.note(loss)


@loop
def scaler_enabled(door: Door) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    net = door.train(model, optimizer)
    for number, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch) * (float("inf") if number == 4 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        door.note(loss, scaler.get_scale())


@loop
def plateau(door: Door) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        schedule.step(loss.item())
        door.note(loss, optimizer.param_groups[0]["lr"])


@loop(
    job=job(
        lambda parameters: torch.optim.AdamW(parameters),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS + 1),
    )
)
def one_cycle(door: Door) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS + 1)
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        door.note(loss, schedule.get_last_lr()[0])


@loop
def moving_average(door: Door) -> None:
    model = mlp()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    net = door.train(model, optimizer)
    door.also(average)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.mul_(0.9).add_(theirs, alpha=0.1)
        door.note(loss)


@loop
def moving_average_by_state_dict(door: Door) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    net = door.train(model, optimizer)
    average = {name: value.detach().clone() for name, value in model.state_dict().items()}
    door.also(average)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for name, value in model.state_dict().items():
                average[name] = 0.9 * average[name] + 0.1 * value.detach()
        door.note(loss)


@loop
def averaged_model(door: Door) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(model)
    schedule = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=3)
    net = door.train(model, optimizer)
    door.also(average)
    for number, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if number > 2:
            average.update_parameters(model)
            schedule.step()
        door.note(loss)


@loop
def averaged_by_step_hook(door: Door) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    average = [parameter.detach().clone() for parameter in model.parameters()]

    def update(*_: object) -> None:
        with torch.no_grad():
            for mine, theirs in zip(average, model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)

    optimizer.register_step_post_hook(update)
    net = door.train(model, optimizer)
    door.also(average)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def freeze_and_unfreeze(door: Door) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    net = door.train(model, optimizer)
    for number, batch in zip(door.steps(15), batches(15), strict=True):
        model[0].requires_grad_(number >= 5)
        model[2].requires_grad_(number < 5 or number > 9)
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def group_added_later(door: Door) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model[-1].parameters())
    model[:-1].requires_grad_(False)
    net = door.train(model, optimizer)
    for number, batch in zip(door.steps(STEPS), batches(), strict=True):
        if number == 4:
            model[:-1].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[:-1].parameters()), "lr": 1e-4})
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def two_optimizers_one_model(door: Door) -> None:
    model = mlp()
    body, head = torch.optim.AdamW(model[:-1].parameters()), torch.optim.SGD(model[-1].parameters(), lr=0.1)
    net = door.train(model, body)
    door.also(head)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            body.step()
            head.step()
            body.zero_grad()
            head.zero_grad()
        door.note(loss)


@loop
def optimizer_replaced(door: Door) -> None:
    model = mlp()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters())
    net = door.train(model, optimizer)
    for number, batch in zip(door.steps(STEPS), batches(), strict=True):
        if number == 5:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            door.also(optimizer)
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def step_outside_context(door: Door) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        door.note(loss)


@loop
def validation_between(door: Door) -> None:
    model = nn.Sequential(mlp(outputs=WIDTH), nn.Dropout(0.1), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    net = door.train(model, optimizer)
    for number, batch in zip(door.steps(STEPS), batches(), strict=True):
        model.train()
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)
        if number % 3 == 1:
            model.eval()
            with torch.no_grad():
                door.note(class_loss(model, batch))


@loop
def validation_inside_context(door: Door) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            with torch.no_grad():
                before = class_loss(net, batch)
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            with torch.inference_mode():
                after = class_loss(net, batch).item()
            optimizer.zero_grad()
        door.note(before, loss, after)


@loop
def sizes_of_batches(door: Door) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    net = door.train(model, optimizer)
    generator = torch.Generator().manual_seed(3)
    for number in door.steps(14):
        rows = (ROWS, ROWS // 2, ROWS - 7, 5)[number % 4]
        batch = torch.randn(rows, WIDTH, generator=generator), torch.randint(0, 10, (rows,), generator=generator)
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def checkpoint_and_resume(door: Door) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    net = door.train(model, optimizer)
    saved = io.BytesIO()
    for number, batch in zip(door.steps(12), batches(12), strict=True):
        if number == 4:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
        if number == 8:
            saved.seek(0)
            content = torch.load(saved)
            model.load_state_dict(content["model"])
            optimizer.load_state_dict(content["optimizer"])
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def best_model_kept(door: Door) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    net = door.train(model, optimizer)
    best, least = copy.deepcopy(model.state_dict()), float("inf")
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if loss.item() < least:
            best, least = copy.deepcopy(model.state_dict()), loss.item()
        door.note(loss)
    model.load_state_dict(best)


@loop
def best_model_by_deepcopy(door: Door) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    net = door.train(model, optimizer)
    best, least = copy.deepcopy(model), float("inf")
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if loss.item() < least:
            best, least = copy.deepcopy(model), loss.item()
        door.note(loss)
    door.also(best)


@loop(
    job=job(
        lambda parameters: torch.optim.AdamW(parameters),
        loss=lambda model, batch: (
            F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1) + 1e-3 * batch[0].square().mean()
        ),
    )
)
def penalty_on_weights(door: Door) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            penalty = sum(parameter.abs().sum() for parameter in model.parameters())
            loss = F.cross_entropy(net(batch[0]), batch[1], label_smoothing=0.1) + 1e-5 * penalty
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def gradient_norms_logged(door: Door) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            gradients = {
                name: parameter.grad.norm().item()
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }
            optimizer.step()
            weights = {name: parameter.norm().item() for name, parameter in model.named_parameters()}
            optimizer.zero_grad()
        door.note(loss, *gradients.values(), *weights.values())


@loop
def gradients_kept_for_next_step(door: Door) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    net = door.train(model, optimizer)
    last: list[torch.Tensor] = []
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
            if last:
                agreement = sum((old * new).sum() for old, new in zip(last, gradients, strict=True))
                door.note(agreement)
            last = gradients
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def growing_net(door: Door) -> None:
    model = mlp(depth=2)
    optimizer = torch.optim.AdamW(model.parameters())
    net = door.train(model, optimizer)
    for number, batch in zip(door.steps(15), batches(15), strict=True):
        if number in (5, 9):
            layer = nn.Linear(WIDTH, WIDTH)
            model.insert(0, layer)
            optimizer.add_param_group({"params": list(layer.parameters())})
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def layer_reset(door: Door) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    net = door.train(model, optimizer)
    for number, batch in zip(door.steps(STEPS), batches(), strict=True):
        if number == 5:
            model[4].reset_parameters()
            for parameter in model[4].parameters():
                optimizer.state.pop(parameter)
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def weights_pruned_by_data(door: Door) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    net = door.train(model, optimizer)
    for number, batch in zip(door.steps(STEPS), batches(), strict=True):
        if number % 4 == 3:
            for parameter in model.parameters():
                parameter.data = parameter.data * (parameter.data.abs() > 1e-2)
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)
