"""Optimizers as people write or wrap them: what step() does beyond one parameter, its gradient and its state."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from benchmarks.loops_common import STEPS, WIDTH, batches, class_loss, mlp, supervised
from benchmarks.loops_door import Door, loop

Parameters = Iterable[nn.Parameter]


class Own(torch.optim.Optimizer):
    """What the classes below share: a loop over the parameters that have gradients."""

    def __init__(self, parameters: Any, **defaults: Any):
        super().__init__(parameters, {"lr": 0.05, **defaults})

    def each(self) -> Iterable[tuple[dict[str, Any], nn.Parameter, torch.Tensor]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield group, parameter, parameter.grad


class CountsOnSelf(Own):
    def __init__(self, parameters: Any):
        super().__init__(parameters)
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        for group, parameter, gradient in self.each():
            parameter.add_(gradient, alpha=-group["lr"] / math.sqrt(self.num_steps))


class CountsInState(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["num_steps"] = self.state.get("num_steps", 0) + 1
        for group, parameter, gradient in self.each():
            parameter.add_(gradient, alpha=-group["lr"] / self.state["num_steps"])


class CountsInGroup(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["t"] = group.get("t", 0) + 1
        for group, parameter, gradient in self.each():
            parameter.add_(gradient, alpha=-group["lr"] / group["t"])


class ClipsInside(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.05)
        return super().step(closure)


class Lars(Own):
    """A trust ratio per layer (LARS)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameter, gradient in self.each():
            ratio = parameter.norm() / (gradient.norm() + 1e-8) if parameter.ndim > 1 else torch.ones(())
            buffer = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
            buffer.mul_(0.9).add_(gradient * ratio.clamp(max=10.0))
            parameter.add_(buffer, alpha=-group["lr"] * 0.01)


class GlobalTrust(Own):
    """One step size for all, from the norm of all gradients (as DAdaptation and Prodigy do)."""

    def __init__(self, parameters: Any):
        super().__init__(parameters)
        self.sum_of_squares = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        total = sum(float(gradient.square().sum()) for _, _, gradient in self.each())
        self.sum_of_squares += total
        for group, parameter, gradient in self.each():
            parameter.add_(gradient, alpha=-group["lr"] / math.sqrt(self.sum_of_squares))


class Shampoo(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameter, gradient in self.each():
            state = self.state[parameter]
            if not state:
                state["step"], state["factors"] = 0, [1e-3 * torch.eye(size) for size in parameter.shape]
            state["step"] += 1
            if parameter.ndim == 2:
                left, right = state["factors"]
                left.add_(gradient @ gradient.T)
                right.add_(gradient.T @ gradient)
                gradient = left.diagonal().rsqrt()[:, None] * gradient * right.diagonal().rsqrt()
            parameter.add_(gradient, alpha=-group["lr"] * 0.1)


class Soap(Own):
    """Adam in the eigenbasis of Shampoo's factors, which are kept in lists and made anew every few steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameter, gradient in self.each():
            state = self.state[parameter]
            if not state:
                state |= {"step": 0, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
                state["GG"], state["Q"] = [torch.zeros(n, n) for n in parameter.shape], None
            state["step"] += 1
            if parameter.ndim == 2:
                state["GG"][0].lerp_(gradient @ gradient.T, 0.05)
                state["GG"][1].lerp_(gradient.T @ gradient, 0.05)
                if state["Q"] is None or state["step"] % 5 == 0:
                    state["Q"] = [torch.linalg.qr(part + torch.eye(len(part)))[0] for part in state["GG"]]
                gradient = state["Q"][0].T @ gradient @ state["Q"][1]
            state["exp_avg"].lerp_(gradient, 0.1)
            state["exp_avg_sq"].mul_(0.95).addcmul_(gradient, gradient, value=0.05)
            update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8)
            if parameter.ndim == 2:
                update = state["Q"][0] @ update @ state["Q"][1].T
            parameter.add_(update, alpha=-group["lr"] * 0.02)


class Projector:
    """GaLore's: an object in the state of a parameter."""

    def __init__(self, rank: int):
        self.rank, self.matrix, self.num_uses = rank, torch.zeros(0), 0

    def down(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.num_uses % 4 == 0:
            self.matrix = torch.linalg.qr(gradient @ gradient.T[:, : self.rank])[0]
        self.num_uses += 1
        return self.matrix.T @ gradient

    def up(self, low: torch.Tensor) -> torch.Tensor:
        return self.matrix @ low


class GaLore(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameter, gradient in self.each():
            state = self.state[parameter]
            is_wide = parameter.ndim == 2 and min(parameter.shape) > 8
            if is_wide:
                gradient = state.setdefault("projector", Projector(8)).down(gradient)
            state.setdefault("exp_avg", torch.zeros_like(gradient)).lerp_(gradient, 0.1)
            state.setdefault("exp_avg_sq", torch.zeros_like(gradient)).mul_(0.99).addcmul_(
                gradient, gradient, value=0.01
            )
            update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8)
            parameter.add_(state["projector"].up(update) if is_wide else update, alpha=-1e-3)


class EightBit(Own):
    """Moments as 8-bit codes with a scale, in a dict in the state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameter, gradient in self.each():
            state = self.state[parameter]
            if not state:
                state["exp_avg"] = {"code": torch.zeros_like(parameter, dtype=torch.int8), "scale": torch.ones(())}
            kept = state["exp_avg"]
            moment = (kept["code"].float() * kept["scale"]).mul_(0.9).add_(gradient)
            kept["scale"] = moment.abs().max() / 127 + 1e-12
            kept["code"] = (moment / kept["scale"]).round().to(torch.int8)
            parameter.add_(moment, alpha=-group["lr"])


class Langevin(torch.optim.SGD):
    """SGLD: noise is drawn in step()."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(torch.randn_like(parameter), alpha=1e-3)


class StochasticRounding(Own):
    """Weights in bfloat16, rounded up or down at random."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameter, gradient in self.each():
            exact = parameter.float().add_(gradient.float(), alpha=-group["lr"])
            bits = exact.view(torch.int32) + torch.randint(0, 2**16, exact.shape, dtype=torch.int32)
            parameter.copy_((bits & -(2**16)).view(torch.float32))


class NeedsClosure(Own):
    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        for group, parameter, gradient in self.each():
            parameter.add_(gradient, alpha=-group["lr"] * float(loss.detach()) ** 0.5)
        return loss


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization as everybody copies it: a base optimizer inside, and two steps."""

    def __init__(self, parameters: Any, base: Any, rho: float = 0.05, **options: Any):
        super().__init__(parameters, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        norms = [p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack(norms).norm()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["old_p"] = parameter.data.clone()
                    parameter.add_(parameter.grad * (group["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = self.state[parameter]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer and shares its groups and state; every fifth step pulls slow weights along."""

    def __init__(self, inner: torch.optim.Optimizer, every: int = 5):
        super().__init__(inner.param_groups, {})
        self.inner, self.every, self.num_steps = inner, every, 0
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.num_steps += 1
        if self.num_steps % self.every == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for parameter, kept in zip(group["params"], slow, strict=True):
                    kept.lerp_(parameter, 0.5)
                    parameter.copy_(kept)
        return loss


class ScheduleFree(Own):
    """Schedule-free SGD: other weights for training than for evaluation, swapped in place by train() and eval()."""

    def __init__(self, parameters: Any):
        super().__init__(parameters)
        self.is_training, self.num_steps = True, 0

    @torch.no_grad()
    def eval(self) -> None:
        self._swap(1 - 1 / 0.9) if self.is_training else None
        self.is_training = False

    @torch.no_grad()
    def train(self) -> None:
        self._swap(1 - 0.9) if not self.is_training else None
        self.is_training = True

    def _swap(self, weight: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if "z" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["z"], weight)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        share = 1 / self.num_steps
        for group, parameter, gradient in self.each():
            z = self.state[parameter].setdefault("z", parameter.clone())
            parameter.lerp_(z, share)
            parameter.add_(gradient, alpha=group["lr"] * (0.9 * (1 - share) - 1))
            z.sub_(gradient, alpha=group["lr"])


class Muon(Own):
    """Newton and Schulz's iteration on the momentum of matrices; AdamW for the rest, in one class."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameter, gradient in self.each():
            state = self.state[parameter]
            if parameter.ndim < 2:
                state.setdefault("exp_avg", torch.zeros_like(parameter)).lerp_(gradient, 0.1)
                parameter.add_(state["exp_avg"], alpha=-group["lr"])
                continue
            buffer = state.setdefault("momentum_buffer", torch.zeros_like(parameter)).mul_(0.9).add_(gradient)
            update = (
                (buffer / (buffer.norm() + 1e-7)).T if buffer.shape[0] > buffer.shape[1] else buffer / buffer.norm()
            )
            for _ in range(3):
                square = update @ update.T
                update = 3.4445 * update + (-4.775 * square + 2.0315 * square @ square) @ update
            parameter.add_(update.T if buffer.shape[0] > buffer.shape[1] else update, alpha=-group["lr"] * 0.1)


class Lion(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameter, gradient in self.each():
            average = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
            parameter.add_(torch.sign(average * 0.9 + gradient * 0.1), alpha=-1e-3)
            average.lerp_(gradient, 0.01)


class Centralized(torch.optim.SGD):
    """Changes the gradients before PyTorch's own step."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None and parameter.ndim > 1:
                        parameter.grad.sub_(parameter.grad.mean(1, keepdim=True))
        return super().step(closure)


for _name, _class in {
    "counter_on_self": CountsOnSelf,
    "counter_in_state": CountsInState,
    "counter_in_group": CountsInGroup,
    "clips_inside_step": ClipsInside,
    "trust_ratio": Lars,
    "norm_of_all_inside_step": GlobalTrust,
    "shampoo": Shampoo,
    "soap": Soap,
    "galore": GaLore,
    "eight_bit_states": EightBit,
    "muon_by_hand": Muon,
    "lion": Lion,
}.items():
    supervised(_name, _class, module=__name__)
supervised("noise_in_step", lambda parameters: Langevin(parameters, lr=0.1), module=__name__)
supervised("gradients_centralized_in_step", lambda parameters: Centralized(parameters, lr=0.1), module=__name__)
supervised(
    "lookahead", lambda parameters: Lookahead(torch.optim.SGD(parameters, lr=0.1, momentum=0.9)), module=__name__
)
supervised(
    "stochastic_rounding",
    StochasticRounding,
    model=lambda: mlp().bfloat16(),
    loss=lambda model, batch: class_loss(model, (batch[0].bfloat16(), batch[1])),
    module=__name__,
)


@loop
def noise_in_step_and_dropout(door: Door) -> None:
    model = nn.Sequential(mlp(outputs=WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, 10))
    optimizer = Langevin(model.parameters(), lr=0.1)
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def sam_by_closure(door: Door) -> None:
    model = mlp()
    optimizer = Sam(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):

        def closure(batch: Any = batch) -> torch.Tensor:
            loss = class_loss(net, batch)
            loss.backward()
            return loss

        with door:
            loss = closure()
            optimizer.step(closure)
            optimizer.zero_grad()
        door.note(loss)


@loop
def sam_by_hand(door: Door) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            with torch.no_grad():
                norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
                moves = [p.grad * (0.05 / norm) if p.grad is not None else None for p in model.parameters()]
                for parameter, move in zip(model.parameters(), moves, strict=True):
                    parameter.add_(move)
            optimizer.zero_grad()
            class_loss(net, batch).backward()
            with torch.no_grad():
                for parameter, move in zip(model.parameters(), moves, strict=True):
                    parameter.sub_(move)
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def sam_in_two_steps(door: Door) -> None:
    model = mlp()
    optimizer = Sam(model.parameters(), torch.optim.AdamW, lr=1e-3)
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.first_step(zero_grad=True)
            class_loss(net, batch).backward()
            optimizer.second_step(zero_grad=True)
        door.note(loss)


@loop
def lbfgs(door: Door) -> None:
    model = mlp(depth=2)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=4)
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(8), batches(8), strict=True):

        def closure(batch: Any = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = class_loss(net, batch)
            loss.backward()
            return loss

        with door:
            loss = optimizer.step(closure)
        door.note(loss)


@loop
def step_requires_closure(door: Door) -> None:
    model = mlp()
    optimizer = NeedsClosure(model.parameters())
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):

        def closure(batch: Any = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = class_loss(net, batch)
            loss.backward()
            return loss

        with door:
            loss = optimizer.step(closure)
        door.note(loss)


@loop
def adam_with_closure(door: Door) -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):

        def closure(batch: Any = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = class_loss(net, batch)
            loss.backward()
            return loss

        with door:
            loss = optimizer.step(closure)
        door.note(loss)


class RateOnSelf(Own):
    def __init__(self, parameters: Any):
        super().__init__(parameters)
        self.rate = 0.1

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for _, parameter, gradient in self.each():
            parameter.add_(gradient, alpha=-self.rate)


@loop
def rate_set_on_self(door: Door) -> None:
    model = mlp()
    optimizer = RateOnSelf(model.parameters())
    net = door.train(model, optimizer)
    for number, batch in zip(door.steps(STEPS), batches(), strict=True):
        optimizer.rate = 0.1 / (1 + number)
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def rate_set_in_groups(door: Door) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    net = door.train(model, optimizer)
    for number, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (1 + number)
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"], group["momentum"] = 0.0, 0.5 + 0.01 * number
            optimizer.zero_grad()
        door.note(loss)


@loop
def rate_in_a_tensor(door: Door) -> None:
    model = mlp()
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    net = door.train(model, optimizer)
    for number, batch in zip(door.steps(STEPS), batches(), strict=True):
        rate.fill_(0.1 / (1 + number))
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def factor_of_gradients_reused(door: Door) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scale = torch.ones(())
    net = door.train(model, optimizer)
    for number, batch in zip(door.steps(STEPS), batches(), strict=True):
        scale.fill_(1 / (1 + number))
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            gradients: Any = [parameter.grad for parameter in model.parameters()]
            torch._foreach_mul_(gradients, scale)
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def hooks_of_all_optimizers(door: Door) -> None:
    counts = [0, 0]
    handles = [
        register_optimizer_step_pre_hook(lambda *_: counts.__setitem__(0, counts[0] + 1)),
        register_optimizer_step_post_hook(lambda *_: counts.__setitem__(1, counts[1] + 1)),
    ]
    try:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters())
        net = door.train(model, optimizer)
        for _, batch in zip(door.steps(STEPS), batches(), strict=True):
            with door:
                loss = class_loss(net, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            door.note(loss, *counts)
    finally:
        for handle in handles:
            handle.remove()


@loop
def hooks_of_one_optimizer(door: Door) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    counts = [0, 0]

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        counts[0] += 1
        optimizer.param_groups[0]["lr"] = 1e-3 / counts[0]

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda *_: counts.__setitem__(1, counts[1] + 1))
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss, *counts)


@loop
def muon_with_adamw(door: Door) -> None:
    model = mlp()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    rest = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    first, second = torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest)
    net = door.train(model, first)
    door.also(second)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        door.note(loss)


class Together(torch.optim.Optimizer):
    """Two optimizers behind one interface, as training scripts chain Muon and AdamW."""

    def __init__(self, *optimizers: torch.optim.Optimizer):
        self.optimizers = optimizers
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    def step(self, closure: Any = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


@loop
def muon_and_adamw_behind_one(door: Door) -> None:
    model = mlp()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    rest = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    optimizer = Together(torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest))
    net = door.train(model, optimizer)
    door.also(*optimizer.optimizers)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def schedule_free(door: Door) -> None:
    model = mlp()
    optimizer = ScheduleFree(model.parameters())
    net = door.train(model, optimizer)
    for number, batch in zip(door.steps(STEPS), batches(), strict=True):
        optimizer.train()
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if number % 3 == 2:
            optimizer.eval()
            with torch.no_grad():
                door.note(class_loss(model, batch))
        door.note(loss)


@loop
def update_by_hand(door: Door) -> None:
    model = mlp()
    net = door.train(model)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad  # type: ignore[operator]
            model.zero_grad()
        door.note(loss)


@loop
def optimizers_in_backward(door: Door) -> None:
    model = mlp()
    optimizers = {parameter: torch.optim.Adam([parameter], foreach=False) for parameter in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    net = door.train(model)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
        door.note(loss)


@loop
def privacy_noise(door: Door) -> None:
    """DP-SGD: gradients of samples by torch.func, clipped, summed, and noise added."""
    model = mlp(depth=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    door.train(model, optimizer)

    def loss_of_one(weights: Any, row: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        out = torch.func.functional_call(model, weights, (row[None],))
        return nn.functional.cross_entropy(out, label[None])

    for _, batch in zip(door.steps(6), batches(6, rows=24), strict=True):
        with door:
            weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
            each = torch.func.vmap(torch.func.grad(loss_of_one), in_dims=(None, 0, 0))(weights, *batch)
            norms = torch.stack([part.flatten(1).norm(dim=1) for part in each.values()]).norm(dim=0)
            factor = (1.0 / (norms + 1e-6)).clamp(max=1.0)
            for name, parameter in model.named_parameters():
                total = torch.einsum("n,n...->...", factor, each[name])
                parameter.grad = (total + 0.1 * torch.randn_like(total)) / len(batch[0])
            optimizer.step()
            optimizer.zero_grad()
        door.note(norms)


@loop
def conflicting_gradients(door: Door) -> None:
    """PCGrad: gradients of two tasks by autograd.grad, projected, and set."""
    body, heads = mlp(outputs=WIDTH), nn.ModuleList([nn.Linear(WIDTH, 10), nn.Linear(WIDTH, 10)])
    model = nn.Sequential(body, heads[0])
    model.add_module("second", heads[1])
    optimizer = torch.optim.Adam([*body.parameters(), *heads.parameters()])
    whole = nn.ModuleList([body, heads])
    net, *_ = door.train([body, heads], optimizer)
    shared = list(body.parameters())
    for _, (rows, labels) in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            hidden = net(rows)
            losses = [nn.functional.cross_entropy(head(hidden), (labels + n) % 10) for n, head in enumerate(heads)]
            parts = [torch.autograd.grad(loss, shared, retain_graph=True) for loss in losses]
            flat = [torch.cat([part.flatten() for part in task]) for task in parts]
            inner = torch.dot(flat[0], flat[1])
            projected = flat[0] - (inner.clamp(max=0) / flat[1].square().sum()) * flat[1] + flat[1]
            for head, loss in zip(heads, losses, strict=True):
                for parameter, gradient in zip(
                    head.parameters(),
                    torch.autograd.grad(loss, list(head.parameters()), retain_graph=True),
                    strict=True,
                ):
                    parameter.grad = gradient
            at = 0
            for parameter in shared:
                parameter.grad = projected[at : at + parameter.numel()].view_as(parameter).clone()
                at += parameter.numel()
            optimizer.step()
            whole.zero_grad()
        door.note(*losses, inner)


@loop
def kfac_hooks(door: Door) -> None:
    """Factors from hooks on modules, used in a preconditioner between backward and step."""
    model = mlp(depth=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    factors: dict[nn.Module, list[torch.Tensor]] = {}
    for module in model:
        if isinstance(module, nn.Linear):
            factors[module] = [torch.zeros(module.in_features, module.in_features), torch.zeros(module.out_features)]

            def forward(module: nn.Module, inputs: Any) -> None:
                if torch.is_grad_enabled():
                    rows = inputs[0].detach()
                    factors[module][0].lerp_(rows.T @ rows / len(rows), 0.1)

            def backward(module: nn.Module, _: Any, outputs: Any) -> None:
                factors[module][1].lerp_(outputs[0].square().sum(0), 0.1)

            module.register_forward_pre_hook(forward)
            module.register_full_backward_hook(backward)
    net = door.train(model, optimizer)
    door.also(list(factors.values()))
    for _, batch in zip(door.steps(8), batches(8), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            for module, (inputs, outputs) in factors.items():
                weight: Any = module.weight
                damped = inputs + 0.1 * torch.eye(len(inputs))
                weight.grad = torch.linalg.solve(damped, weight.grad, left=False) / (1 + outputs[:, None])
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def two_time_scales(door: Door) -> None:
    """The head steps at every batch, the body at every third, with what has accumulated."""
    model = mlp()
    body = torch.optim.AdamW(model[:-1].parameters(), lr=1e-3)
    head = torch.optim.AdamW(model[-1].parameters(), lr=1e-2)
    net = door.train(model, body)
    door.also(head)
    for number, batch in zip(door.steps(12), batches(12), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            head.step()
            head.zero_grad()
            if number % 3 == 2:
                body.step()
                body.zero_grad()
        door.note(loss)


@loop
def step_skipped_when_not_finite(door: Door) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    net = door.train(model, optimizer)
    for number, batch in zip(door.steps(12), batches(12), strict=True):
        with door:
            loss = class_loss(net, batch) * (float("nan") if number in (3, 9) else 1.0)
            loss.backward()
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            if torch.isfinite(norm):
                optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def weight_decay_by_hand_after_step(door: Door) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.999).clamp_(-0.5, 0.5)
            optimizer.zero_grad(set_to_none=False)
        door.note(loss)


for _name, _make in {
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=1e-3),
    "averaged_sgd": lambda parameters: torch.optim.ASGD(parameters, lr=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    "adam_amsgrad_maximize": lambda parameters: torch.optim.Adam(parameters, amsgrad=True, maximize=True),
}.items():
    supervised(_name, _make, module=__name__)


@loop
def groups_by_kind(door: Door) -> None:
    model = nn.Sequential(mlp(outputs=WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 3e-3}], fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 0.9**n, lambda n: 1 / (1 + n)])
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        door.note(loss)
