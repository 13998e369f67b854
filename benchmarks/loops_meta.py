"""Learning to learn, and torch.func: inner steps, gradients of gradients, samples' gradients, other modes."""

import copy
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jvp, vmap
from torch.nn import functional as F

from benchmarks.loops_common import STEPS, WIDTH, batches, class_loss, mlp
from benchmarks.loops_door import Door, loop


def inner_steps(model: nn.Module, batch: Any, *, is_exact: bool, number: int = 2) -> dict[str, torch.Tensor]:
    weights = dict(model.named_parameters())
    for _ in range(number):
        loss = F.cross_entropy(functional_call(model, weights, (batch[0],)), batch[1])
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=is_exact)
        weights = {name: w - 0.05 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
    return weights


@loop
def maml(door: Door) -> None:
    """Gradients through two inner steps, by functional_call."""
    model = mlp(depth=2)
    optimizer = torch.optim.Adam(model.parameters())
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(8), batches(8, rows=96), strict=True):
        with door:
            weights = inner_steps(net, (batch[0][:48], batch[1][:48]), is_exact=True)
            loss = F.cross_entropy(functional_call(net, weights, (batch[0][48:],)), batch[1][48:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def first_order_maml(door: Door) -> None:
    """A deep copy per task learns; its gradients are given to the model."""
    model = mlp(depth=2)
    optimizer = torch.optim.Adam(model.parameters())
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(8), batches(8), strict=True):
        with door:
            learner = copy.deepcopy(model)
            inner = torch.optim.SGD(learner.parameters(), lr=0.05)
            for _ in range(2):
                inner.zero_grad()
                class_loss(learner, batch).backward()
                inner.step()
            inner.zero_grad()
            loss = class_loss(learner, batch)
            loss.backward()
            for mine, theirs in zip(model.parameters(), learner.parameters(), strict=True):
                mine.grad = None if theirs.grad is None else theirs.grad.clone()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss, net(batch[0]).sum())


@loop
def reptile(door: Door) -> None:
    """The weights walk away, and are pulled back to a part of the way by load_state_dict."""
    model = mlp(depth=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(10), batches(10), strict=True):
        before = copy.deepcopy(model.state_dict())
        for _ in range(3):
            with door:
                loss = class_loss(net, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        after = model.state_dict()
        model.load_state_dict({name: before[name] + 0.3 * (after[name] - before[name]) for name in before})
        door.note(loss)


@loop
def learnt_rates(door: Door) -> None:
    """Meta-SGD: a learning rate per weight, as parameters of their own beside the model's."""
    model = mlp(depth=2)
    rates = nn.ParameterList([nn.Parameter(torch.full_like(p, 0.05)) for p in model.parameters()])
    whole = nn.ModuleList([model, rates])
    optimizer = torch.optim.Adam(whole.parameters())
    door.train(whole, optimizer)
    for _, batch in zip(door.steps(8), batches(8, rows=96), strict=True):
        with door:
            weights = dict(model.named_parameters())
            gradients = torch.autograd.grad(class_loss(model, batch), list(weights.values()), create_graph=True)
            moved = {n: w - r * g for (n, w), r, g in zip(weights.items(), rates, gradients, strict=True)}
            loss = F.cross_entropy(functional_call(model, moved, (batch[0],)), batch[1])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def gradients_by_func(door: Door) -> None:
    """torch.func.grad inside the context; gradients are set by hand."""
    model = mlp(depth=2)
    optimizer = torch.optim.AdamW(model.parameters())
    door.train(model, optimizer)

    def loss_of(weights: Any, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, weights, (rows,)), labels)

    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            gradients = grad(loss_of)({n: p.detach() for n, p in model.named_parameters()}, *batch)
            for name, parameter in model.named_parameters():
                parameter.grad = gradients[name]
            optimizer.step()
            optimizer.zero_grad()
        door.note(sum(part.abs().sum() for part in gradients.values()))


@loop
def sensitivity_by_jvp(door: Door) -> None:
    model = mlp(depth=2)
    optimizer = torch.optim.AdamW(model.parameters())
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            _, slope = jvp(lambda rows: net(rows), (batch[0],), (torch.ones_like(batch[0]),))
            loss = class_loss(net, batch) + 1e-3 * slope.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def input_gradients_by_vmap(door: Door) -> None:
    """A penalty on the gradients of each sample, inside the loss."""
    model = mlp(outputs=1, depth=2)
    optimizer = torch.optim.AdamW(model.parameters())
    net = door.train(model, optimizer)
    for _, (rows, _) in zip(door.steps(8), batches(8, rows=64), strict=True):
        with door:
            slopes = vmap(grad(lambda row: net(row[None])[0, 0]))(rows)
            loss = (slopes.norm(dim=1) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def physics_informed(door: Door) -> None:
    """Second derivatives with respect to inputs, with create_graph."""
    model = nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.Adam(model.parameters())
    net = door.train(model, optimizer)
    for _ in door.steps(STEPS):
        points = torch.rand(256, 2, requires_grad=True)
        with door:
            values = net(points)
            (first,) = torch.autograd.grad(values.sum(), points, create_graph=True)
            (second,) = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)
            loss = (first[:, 1:] - 0.1 * second[:, :1]).square().mean() + values[:8].square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def curvature_of_a_small_part(door: Door) -> None:
    model = mlp(depth=2)
    optimizer = torch.optim.Adam(model.parameters())
    net = door.train(model, optimizer)
    for number, batch in zip(door.steps(8), batches(8, rows=64), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % 2:
                hidden = model[:-1](batch[0]).detach()
                bias = model[-1].bias.detach()
                found = hessian(lambda b, h=hidden, y=batch[1]: F.cross_entropy(h @ model[-1].weight.T + b, y))(bias)
                door.note(found.detach())
        door.note(loss)


@loop
def hessian_vector_products(door: Door) -> None:
    """Sophia's estimate: a Hutchinson product every few steps, by a backward through a backward."""
    model = mlp(depth=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    net = door.train(model, optimizer)
    diagonal = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for number, batch in zip(door.steps(12), batches(12), strict=True):
        with door:
            loss = class_loss(net, batch)
            if number % 3 == 0:
                weights = list(model.parameters())
                gradients = torch.autograd.grad(loss, weights, create_graph=True)
                signs = [torch.randint_like(parameter, 2) * 2 - 1 for parameter in weights]
                products = torch.autograd.grad(gradients, weights, signs, retain_graph=True)
                for kept, sign, product in zip(diagonal, signs, products, strict=True):
                    kept.mul_(0.9).add_(sign * product, alpha=0.1)
            loss.backward()
            for parameter, kept in zip(model.parameters(), diagonal, strict=True):
                parameter.grad.div_(kept.abs().add(1.0))  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def architecture_search(door: Door) -> None:
    """DARTS, first order: weights by one optimizer, the mixture by another, on different batches."""
    choices = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), act) for act in (nn.ReLU(), nn.Tanh(), nn.GELU())])

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.choices, self.head = choices, nn.Linear(WIDTH, 10)
            self.mixture = nn.Parameter(1e-3 * torch.randn(3))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            weights = self.mixture.softmax(0)
            return self.head(sum(w * choice(rows) for w, choice in zip(weights, self.choices, strict=True)))

    model = Mixed()
    of_weights = torch.optim.SGD([*model.choices.parameters(), *model.head.parameters()], lr=0.05, momentum=0.9)
    of_mixture = torch.optim.Adam([model.mixture], lr=3e-3)
    net = door.train(model, of_weights)
    door.also(of_mixture)
    data = list(batches(2 * STEPS))
    for number in door.steps(STEPS):
        with door:
            of_mixture.zero_grad()
            class_loss(net, data[2 * number]).backward()
            of_mixture.step()
            of_weights.zero_grad()
            loss = class_loss(net, data[2 * number + 1])
            loss.backward()
            of_weights.step()
        door.note(loss)


@loop
def reweighted_examples(door: Door) -> None:
    """Weights of samples by a gradient through one step of the model."""
    model = mlp(depth=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(8), batches(8, rows=96), strict=True):
        rows, labels = batch[0][:64], batch[1][:64]
        with door:
            weights = torch.zeros(64, requires_grad=True)
            named = dict(model.named_parameters())
            each = F.cross_entropy(net(rows), labels, reduction="none")
            steps = torch.autograd.grad((weights * each).sum(), list(named.values()), create_graph=True)
            moved = {n: p - 0.1 * g for (n, p), g in zip(named.items(), steps, strict=True)}
            clean = F.cross_entropy(functional_call(model, moved, (batch[0][64:],)), batch[1][64:])
            (found,) = torch.autograd.grad(clean, weights)
            chosen = (-found).clamp(min=0)
            chosen = chosen / (chosen.sum() + 1e-8)
            loss = (chosen * F.cross_entropy(net(rows), labels, reduction="none")).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(clean, loss)


@loop
def ensemble_by_vmap(door: Door) -> None:
    """Weights of several models stacked into parameters of one, called under vmap."""
    models = [mlp(depth=2) for _ in range(3)]
    stacked, _ = torch.func.stack_module_state(models)  # type: ignore[arg-type]
    names = [name.replace(".", "_") for name in stacked]
    whole = nn.Module()
    for name, tensor in zip(names, stacked.values(), strict=True):
        whole.register_parameter(name, nn.Parameter(tensor.detach().clone()))
    base = copy.deepcopy(models[0]).to("meta")
    optimizer = torch.optim.Adam(whole.parameters())
    door.train(whole, optimizer)
    for _, batch in zip(door.steps(8), batches(8, rows=96), strict=True):
        with door:
            weights = {key: getattr(whole, name) for key, name in zip(stacked, names, strict=True)}
            outs = vmap(lambda w, rows=batch[0]: functional_call(base, w, (rows,)), randomness="different")(weights)
            loss = F.cross_entropy(outs.flatten(0, 1), batch[1].repeat(3))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def hypergradient(door: Door) -> None:
    """The rate moves by the product of this gradient with the last one."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    net = door.train(model, optimizer)
    last: list[torch.Tensor] | None = None
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            optimizer.zero_grad()
            loss = class_loss(net, batch)
            gradients = list(torch.autograd.grad(loss, list(model.parameters())))
            if last is not None:
                inner = sum(float((new * old).sum()) for new, old in zip(gradients, last, strict=True))
                optimizer.param_groups[0]["lr"] += 1e-4 * inner
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
            last = gradients
        door.note(loss)
