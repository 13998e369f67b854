"""Images and views: self-supervision with targets, queues and centres, several tasks, mixing, deep supervision."""

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.loops_common import STEPS, WIDTH, batches, class_loss, job, mlp
from benchmarks.loops_door import Door, loop


def convolutions(channels: int = 24, outputs: int = 10) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(32 * channels, outputs),
    )


def images(number: int = STEPS, rows: int = 16) -> list[Any]:
    generator = torch.Generator().manual_seed(11)
    return [
        (torch.randn(rows, 3, 16, 16, generator=generator), torch.randint(0, 10, (rows,), generator=generator))
        for _ in range(number)
    ]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)


@loop(job=job(sgd, convolutions, class_loss, images))
def convolutional(door: Door) -> None:
    model = convolutions()
    optimizer = sgd(model.parameters())
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), images(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop(job=job(sgd, lambda: convolutions().to(memory_format=torch.channels_last), class_loss, images))
def channels_last(door: Door) -> None:
    model = convolutions().to(memory_format=torch.channels_last)
    optimizer = sgd(model.parameters())
    net = door.train(model, optimizer)
    for _, (pictures, labels) in zip(door.steps(STEPS), images(), strict=True):
        with door:
            loss = class_loss(net, (pictures.to(memory_format=torch.channels_last), labels))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def mixed_samples(door: Door) -> None:
    """Mixup and CutMix by turns; pictures are changed in place."""
    model = convolutions()
    optimizer = sgd(model.parameters())
    net = door.train(model, optimizer)
    for number, (pictures, labels) in zip(door.steps(12), images(12), strict=True):
        other = torch.randperm(len(labels))
        share = float(torch.distributions.Beta(1.0, 1.0).sample())
        if number % 2:
            pictures = share * pictures + (1 - share) * pictures[other]
        else:
            pictures[:, :, 2:9, 3:12] = pictures[other][:, :, 2:9, 3:12]
            share = 1 - 63 / 256
        with door:
            logits = net(pictures)
            loss = share * F.cross_entropy(logits, labels) + (1 - share) * F.cross_entropy(logits, labels[other])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


class WithPredictor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online, self.predictor = mlp(outputs=64, depth=3), mlp(64, 64, depth=1)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            goals = self.target(first), self.target(second)
        guesses = self.predictor(self.online(first)), self.predictor(self.online(second))
        return 2 - sum(F.cosine_similarity(a, b).mean() for a, b in zip(guesses, reversed(goals), strict=True))

    @torch.no_grad()
    def follow(self) -> None:
        for mine, theirs in zip(self.target.parameters(), self.online.parameters(), strict=True):
            mine.data = 0.95 * mine.data + 0.05 * theirs.data


@loop
def byol(door: Door) -> None:
    """The target is part of the model, without gradients; its data are replaced after each step."""
    model = WithPredictor()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    net = door.train(model, optimizer)
    for _, (rows, _) in zip(door.steps(STEPS), batches(), strict=True):
        first, second = rows + 0.1 * torch.randn_like(rows), rows * (torch.rand_like(rows) > 0.1)
        with door:
            loss = net(first, second)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.follow()
        door.note(loss)


@loop
def byol_follows_outside(door: Door) -> None:
    model = WithPredictor()
    optimizer = torch.optim.AdamW(model.parameters())
    net = door.train(model, optimizer)
    for _, (rows, _) in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = net(rows, rows.roll(1, 1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.follow()
        door.note(loss)


@loop
def contrastive(door: Door) -> None:
    """SimCLR: both views in one batch; the diagonal is filled in place."""
    model = mlp(outputs=64)
    optimizer = torch.optim.AdamW(model.parameters())
    net = door.train(model, optimizer)
    for _, (rows, _) in zip(door.steps(STEPS), batches(rows=96), strict=True):
        with door:
            views = torch.cat([rows + 0.1 * torch.randn_like(rows), rows * 0.9])
            out = F.normalize(net(views), dim=1)
            near = out @ out.T / 0.5
            near = near.masked_fill(torch.eye(len(near), dtype=torch.bool), float("-inf"))
            loss = F.cross_entropy(near, torch.arange(len(near)).roll(96))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def momentum_contrast(door: Door) -> None:
    """MoCo: a queue in a tensor of its own, a second encoder that follows by lerp before the step."""
    model = mlp(outputs=64)
    keys_model = copy.deepcopy(model).requires_grad_(False)
    optimizer = sgd(model.parameters())
    net = door.train(model, optimizer)
    queue, at = F.normalize(torch.randn(512, 64), dim=1), 0
    door.also(keys_model, queue)
    for _, (rows, _) in zip(door.steps(12), batches(12, rows=64), strict=True):
        with door:
            with torch.no_grad():
                for mine, theirs in zip(keys_model.parameters(), model.parameters(), strict=True):
                    mine.lerp_(theirs, 0.01)
                keys = F.normalize(keys_model(rows.roll(1, 1)), dim=1)
            own = F.normalize(net(rows), dim=1)
            logits = torch.cat([(own * keys).sum(1, keepdim=True), own @ queue.T], 1) / 0.2
            loss = F.cross_entropy(logits, torch.zeros(64, dtype=torch.long))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            queue[at : at + 64] = keys
            at = (at + 64) % 512
        door.note(loss)


@loop
def self_distillation(door: Door) -> None:
    """DINO: a teacher with a centre, several crops, the last layer frozen at first, schedules set by hand."""
    student, teacher = mlp(outputs=64, depth=3), mlp(outputs=64, depth=3).requires_grad_(False)
    teacher.load_state_dict(student.state_dict())
    optimizer = torch.optim.AdamW(student.parameters())
    net = door.train(student, optimizer)
    centre = torch.zeros(64)
    door.also(teacher, centre)
    for number, (rows, _) in zip(door.steps(12), batches(12, rows=64), strict=True):
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = 1e-3 * (number + 1) / 12, 0.04 + 0.01 * number
        crops = [rows, rows.roll(1, 1), rows * 0.8, rows * 1.1]
        with door:
            with torch.no_grad():
                goals = [((teacher(crop) - centre) / 0.04).softmax(1) for crop in crops[:2]]
            outs = [(net(crop) / 0.1).log_softmax(1) for crop in crops]
            pairs = [(g, o) for i, g in enumerate(goals) for j, o in enumerate(outs) if i != j]
            loss = -sum((goal * out).sum(1).mean() for goal, out in pairs) / len(pairs)
            optimizer.zero_grad()
            loss.backward()
            if number < 3:
                for parameter in student[-1].parameters():
                    parameter.grad = None
            optimizer.step()
            with torch.no_grad():
                centre.mul_(0.9).add_(teacher(crops[0]).mean(0), alpha=0.1)
                for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
                    mine.mul_(0.99).add_((1 - 0.99) * theirs.detach())
        door.note(loss)


@loop
def weighted_by_uncertainty(door: Door) -> None:
    """Three tasks whose weights are learnt, small parameters beside large ones."""
    body, heads = mlp(outputs=WIDTH), nn.ModuleList([nn.Linear(WIDTH, 10) for _ in range(3)])
    scales = nn.Parameter(torch.zeros(3))
    whole = nn.ModuleDict({"body": body, "heads": heads})
    whole.register_parameter("scales", scales)
    optimizer = torch.optim.Adam(whole.parameters())
    door.train(whole, optimizer)
    for _, (rows, labels) in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            hidden = body(rows)
            losses = [F.cross_entropy(head(hidden), (labels + at) % 10) for at, head in enumerate(heads)]
            loss = sum((-scale).exp() * part + scale for scale, part in zip(scales, losses, strict=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def task_after_task(door: Door) -> None:
    """One backward per task into the same gradients, each with its own head; a task is left out at random."""
    body, heads = mlp(outputs=WIDTH), nn.ModuleList([nn.Linear(WIDTH, 10) for _ in range(4)])
    whole = nn.ModuleList([body, heads])
    optimizer = torch.optim.AdamW(whole.parameters())
    net, _ = door.train([body, heads], optimizer)
    generator = torch.Generator().manual_seed(8)
    for _, (rows, labels) in zip(door.steps(12), batches(12), strict=True):
        chosen = torch.randperm(4, generator=generator)[:3].tolist()
        with door:
            for task in chosen:
                loss = F.cross_entropy(heads[task](net(rows)), (labels + task) % 10)
                loss.backward()
                door.note(loss)
            optimizer.step()
            optimizer.zero_grad()


@loop
def gradient_reversal(door: Door) -> None:
    """A domain classifier behind an autograd function of the user's own."""

    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: float) -> torch.Tensor:
            ctx.weight = weight
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
            return -ctx.weight * gradient, None

    body, label, domain = mlp(outputs=WIDTH, depth=2), nn.Linear(WIDTH, 10), nn.Linear(WIDTH, 2)
    whole = nn.ModuleList([body, label, domain])
    optimizer = sgd(whole.parameters())
    net, _, _ = door.train([body, label, domain], optimizer)
    for number, (rows, labels) in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            hidden = net(rows)
            other = F.cross_entropy(domain(Reverse.apply(hidden, number / 10)), (rows[:, 0] > 0).long())
            loss = F.cross_entropy(label(hidden), labels) + other
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


class Deep(nn.Module):
    """Heads at every depth; results are kept on self, as people do to reach them later."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)])
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 10) for _ in range(4)])
        self.features: list[torch.Tensor] = []

    def forward(self, rows: torch.Tensor) -> list[torch.Tensor]:
        self.features = []
        outs = []
        for layer, head in zip(self.layers, self.heads, strict=True):
            rows = layer(rows)
            self.features.append(rows)
            outs.append(head(rows))
        return outs


@loop
def features_kept_on_self(door: Door) -> None:
    model = Deep()
    optimizer = torch.optim.AdamW(model.parameters())
    net = door.train(model, optimizer)
    for _, (rows, labels) in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            outs = net(rows)
            loss = sum(F.cross_entropy(out, labels) for out in outs)
            loss = loss + 1e-3 * sum(part.square().mean() for part in model.features)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss, model.features[-1])


@loop
def features_by_hooks(door: Door) -> None:
    """Activations are caught by forward hooks, their gradients by tensor hooks and retain_grad (Grad-CAM)."""
    model = convolutions()
    caught: dict[str, Any] = {}

    def keep(_: nn.Module, __: Any, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.retain_grad()
            out.register_hook(lambda gradient: caught.__setitem__("norm", gradient.norm()))
        caught["out"] = out

    model[4].register_forward_hook(keep)
    optimizer = sgd(model.parameters())
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), images(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            weights = caught["out"].grad.mean((2, 3), keepdim=True)
            map_ = (weights * caught["out"]).sum(1).relu().detach()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss, caught["norm"], map_.sum())


@loop
def frozen_statistics(door: Door) -> None:
    """Fine-tuning: batch norm in eval mode with frozen weights, three rates for three depths."""
    model = convolutions()
    for module in model:
        if isinstance(module, nn.BatchNorm2d):
            module.eval().requires_grad_(False)
    groups = [
        {"params": [p for p in model[at].parameters() if p.requires_grad], "lr": rate}
        for at, rate in ((0, 1e-3), (4, 1e-2), (9, 1e-1))
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), images(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def larger_pictures_later(door: Door) -> None:
    model = convolutions()
    optimizer = sgd(model.parameters())
    net = door.train(model, optimizer)
    for number, (pictures, labels) in zip(door.steps(14), images(14), strict=True):
        size = (8, 12, 16)[min(number // 4, 2)]
        with door:
            loss = class_loss(net, (F.interpolate(pictures, size=(size, size)), labels))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def layers_dropped_at_random(door: Door) -> None:
    """Stochastic depth: Python decides which layers run."""
    model = Deep()
    optimizer = torch.optim.AdamW(model.parameters())
    net = door.train(model, optimizer)
    generator = torch.Generator().manual_seed(6)
    for _, (rows, labels) in zip(door.steps(14), batches(14), strict=True):
        keep = (torch.rand(4, generator=generator) > 0.3).tolist()
        with door:
            hidden = rows
            for layer, is_kept in zip(net.layers, keep, strict=True):
                hidden = hidden + layer(hidden) if is_kept else hidden
            loss = F.cross_entropy(net.heads[3](hidden), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def adversarial(door: Door) -> None:
    """PGD: inputs are moved by gradients of the model, then the model learns them."""
    model = mlp()
    optimizer = sgd(model.parameters())
    net = door.train(model, optimizer)
    for _, (rows, labels) in zip(door.steps(8), batches(8), strict=True):
        with door:
            model.eval()
            moved = rows + 0.05 * torch.randn_like(rows)
            for _ in range(2):
                moved.requires_grad_()
                (slope,) = torch.autograd.grad(F.cross_entropy(net(moved), labels), moved)
                moved = (moved.detach() + 0.02 * slope.sign()).clamp(rows - 0.1, rows + 0.1)
            model.train()
            optimizer.zero_grad()
            loss = F.cross_entropy(net(moved), labels)
            loss.backward()
            optimizer.step()
        door.note(loss)


@loop
def free_adversarial(door: Door) -> None:
    """FreeLB: perturbations of embeddings get gradients beside the weights, over several accumulated passes."""
    words, rest = nn.Embedding(300, WIDTH), mlp(depth=2)
    whole = nn.ModuleList([words, rest])
    optimizer = torch.optim.AdamW(whole.parameters())
    _, net = door.train([words, rest], optimizer)
    for _, (_, labels) in zip(door.steps(8), batches(8, rows=64), strict=True):
        tokens = torch.randint(0, 300, (64, 6))
        with door:
            delta = torch.zeros(64, 1, WIDTH, requires_grad=True)
            for _ in range(3):
                loss = F.cross_entropy(net((words(tokens) + delta).mean(1)), labels) / 3
                loss.backward()
                assert delta.grad is not None
                delta = (delta + 0.1 * delta.grad / (delta.grad.norm() + 1e-8)).detach().requires_grad_()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def implicit_images(door: Door) -> None:
    """One small network per picture, made and thrown away, as a hypernetwork's weights."""
    hyper = mlp(16, 2 * 32 + 32 + 32 * 3, depth=2)
    optimizer = torch.optim.Adam(hyper.parameters())
    net = door.train(hyper, optimizer)
    grid = torch.stack(torch.meshgrid(torch.linspace(-1, 1, 12), torch.linspace(-1, 1, 12), indexing="ij"), -1)
    for _ in door.steps(STEPS):
        codes, pictures = torch.randn(4, 16), torch.rand(4, 144, 3)
        with door:
            loss = torch.zeros(())
            for weights, picture in zip(net(codes), pictures, strict=True):
                first, bias, second = weights.split([64, 32, 96])
                hidden = torch.sin(30 * F.linear(grid.flatten(0, 1), first.view(32, 2), bias))
                loss = loss + F.mse_loss(F.linear(hidden, second.view(3, 32)), picture)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)
