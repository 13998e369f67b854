"""Optimizers that nobody here wrote: their own step runs, once, whole, at its time; results are those without us."""

import contextlib
import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from training_loops import Lion, Transformer, assert_same_training, simple_step

from penstock import probe, stepping
from penstock.errors import PenstockWarning
from penstock.offload import training
from penstock.state._taken import nbytes_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Its own step runs whole"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
]
MIB = 2**20


def make_model(depth=4, width=192):
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def usual_step(model, optimizer, batch, number):
    del number
    loss = functional.cross_entropy(model(batch), torch.arange(len(batch)) % 10)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def assert_same(tmp_path, make_optimizer, step=usual_step, *, num_steps=6, model=make_model, size_mib=2, **options):
    """Trains plainly and within a budget that holds a part of the model; losses, parameters and draws are equal."""
    seen = []
    for is_ours in (False, True):
        trained = model()
        optimizer = make_optimizer(trained)
        gc.collect()
        with contextlib.ExitStack() as stack:
            context = contextlib.nullcontext()
            if is_ours:
                own_bytes = sum(map(nbytes_of, trained.parameters()))
                budget = probe.held_bytes("cpu") - own_bytes + size_mib * MIB
                context = stack.enter_context(
                    contextlib.closing(training(trained, optimizer, budget, disk=tmp_path, **options))
                )
            torch.manual_seed(1)
            generator = torch.Generator().manual_seed(7)
            losses = []
            for number in range(num_steps):
                batch = torch.randn(256, 192, generator=generator)
                if is_ours:
                    context.park()
                with context:
                    losses.append(step(trained, optimizer, batch, number))
            if is_ours:
                assert context.statistics().fetched_bytes > 0
            draws = torch.rand(3).tolist()
        seen.append((losses, [parameter.detach().clone() for parameter in trained.parameters()], draws))
    (losses, parameters, draws), (our_losses, our_parameters, our_draws) = seen
    assert our_losses == losses
    assert all(map(torch.equal, our_parameters, parameters))
    assert our_draws == draws


class Sgd(torch.optim.Optimizer):
    """A base for what follows: plain steps over groups and parameters."""

    def __init__(self, parameters, lr=0.1, **settings):
        super().__init__(parameters, {"lr": lr, **settings})

    def own(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield group, parameter

    @torch.no_grad()
    def step(self, closure=None):
        for group, parameter in self.own():
            parameter.add_(parameter.grad, alpha=-group["lr"])


class Counting(Sgd):
    def __init__(self, parameters):
        super().__init__(parameters)
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.num_steps += 1
        for group, parameter in self.own():
            parameter.add_(parameter.grad, alpha=-group["lr"] / self.num_steps)


class Naming(Sgd):
    @torch.no_grad()
    def step(self, closure=None):
        self.state["step"] = (self.state.get("step") or 0) + 1
        for group, parameter in self.own():
            parameter.add_(parameter.grad, alpha=-group["lr"] / self.state["step"])


class Normed(Sgd):
    @torch.no_grad()
    def step(self, closure=None):
        norm = torch.stack([parameter.grad.norm() for _, parameter in self.own()]).norm()
        for group, parameter in self.own():
            parameter.add_(parameter.grad / norm, alpha=-group["lr"])


class SharedByGroup(Sgd):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0.0) + sum(each.grad.square().sum().item() for each in group["params"])
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"] / (1 + group["seen"]) ** 0.5)


class Shampoo(Sgd):
    """State in lists, dicts and objects."""

    class Projector:
        def __init__(self, size):
            self.basis = torch.eye(size)

    @torch.no_grad()
    def step(self, closure=None):
        for group, parameter in self.own():
            state = self.state[parameter]
            if not state:
                state["mean"] = torch.zeros_like(parameter)
                state["sides"] = [torch.zeros(size, size) for size in parameter.shape]
                state["parts"] = {"square": torch.zeros_like(parameter)}
                state["projector"] = Shampoo.Projector(parameter.shape[0])
            state["mean"].lerp_(parameter.grad, 0.1)
            state["parts"]["square"].addcmul_(parameter.grad, parameter.grad)
            if parameter.ndim == 2:
                state["sides"][0].lerp_(parameter.grad @ parameter.grad.T, 0.05)
                state["sides"][1].lerp_(parameter.grad.T @ parameter.grad, 0.05)
                state["projector"].basis.lerp_(state["sides"][0], 0.01)
            update = state["projector"].basis @ state["mean"] / (1 + state["parts"]["square"].sqrt())
            parameter.add_(update, alpha=-group["lr"])


class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)


class Attribute(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.lr = 0.1

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad, alpha=-self.lr)


class Lookahead(torch.optim.Optimizer):
    """Does something new at every fifth step, around another optimizer."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups, self.num_steps = inner.param_groups, 0
        self.slow = None

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [each for group in self.param_groups for each in group["params"]]
        if self.slow is None:
            self.slow = [each.detach().clone() for each in parameters]
        loss = self.inner.step(closure)
        self.num_steps += 1
        if self.num_steps % 5 == 0:
            for slow, parameter in zip(self.slow, parameters, strict=True):
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)
        return loss


class Sam(torch.optim.Optimizer):
    """Needs a closure, and runs the model within its step."""

    def __init__(self, parameters, base, rho=0.05, **settings):
        super().__init__(parameters, {"rho": rho, **settings})
        self.base = base(self.param_groups, **settings)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        own = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        norm = torch.norm(torch.stack([each.grad.norm() for each in own]))
        for parameter in own:
            self.state[parameter]["before"] = parameter.data.clone()
            parameter.add_(parameter.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for parameter in [each for group in self.param_groups for each in group["params"]]:
            parameter.data = self.state[parameter]["before"]
        self.base.step()
        self.zero_grad()

    def step(self, closure=None):
        assert closure is not None
        closure = torch.enable_grad()(closure)
        self.first_step()
        closure()
        self.second_step()


OPTIMIZERS = {
    "a counter on the optimizer": lambda model: Counting(model.parameters()),
    "a name in its state": lambda model: Naming(model.parameters()),
    "a norm of all gradients": lambda model: Normed(model.parameters()),
    "a value shared by a group": lambda model: SharedByGroup(model.parameters()),
    "state in lists and objects": lambda model: Shampoo(model.parameters(), lr=0.01),
    "random numbers": lambda model: Noisy(model.parameters(), lr=0.1),
    "another around it": lambda model: Lookahead(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)),
    "another around Adam": lambda model: Lookahead(torch.optim.AdamW(model.parameters(), lr=1e-3)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_foreign_optimizers(tmp_path, name):
    assert_same(tmp_path, OPTIMIZERS[name])


def test_an_attribute_that_is_read_in_the_step(tmp_path):
    def step(model, optimizer, batch, number):
        optimizer.lr = 0.1 / (1 + number)
        return usual_step(model, optimizer, batch, number)

    assert_same(tmp_path, lambda model: Attribute(model.parameters()), step)


def test_sam_by_hand(tmp_path):
    def step(model, optimizer, batch, number):
        target = torch.arange(len(batch)) % 10
        loss = functional.cross_entropy(model(batch), target)
        loss.backward()
        optimizer.first_step()
        functional.cross_entropy(model(batch), target).backward()
        optimizer.second_step()
        return loss.item()

    assert_same(tmp_path, lambda model: Sam(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9), step)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: Sam(model.parameters(), torch.optim.SGD, lr=0.1),
        lambda model: torch.optim.LBFGS(model.parameters(), max_iter=3),
    ],
)
def test_steps_that_need_a_closure(tmp_path, make):
    def step(model, optimizer, batch, number):
        del number
        target, losses = torch.arange(len(batch)) % 10, []

        def closure():
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(batch), target)
            loss.backward()
            losses.append(loss.item())
            return loss

        if isinstance(optimizer, Sam):
            closure()
        optimizer.step(closure)
        return losses

    assert_same(tmp_path, make, step)


def test_a_patched_step_is_somebody_elses(tmp_path):
    def make(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        own, optimizer.num_calls = optimizer.step, 0

        def step(closure=None):
            optimizer.num_calls += 1
            if optimizer.num_calls % 2:
                own(closure)

        optimizer.step = step
        return optimizer

    assert_same(tmp_path, make)


def test_a_constructor_of_ones_own_changes_nothing():
    class Mine(torch.optim.AdamW):
        def __init__(self, parameters):
            super().__init__(parameters, lr=1e-3)

    parameters = list(nn.Linear(4, 4).parameters())
    assert stepping.is_own(Mine(parameters))
    assert not stepping.is_own(Noisy(parameters))
    optimizer = torch.optim.AdamW(parameters)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert stepping.is_own(optimizer)
    optimizer.step = torch.compile(optimizer.step)
    assert not stepping.is_own(optimizer)


@pytest.mark.parametrize(
    "make", [lambda model: torch.optim.SGD(model.parameters(), lr=0.1), OPTIMIZERS["random numbers"]]
)
def test_hooks_run_once_a_step(tmp_path, make):
    calls = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("before all")),
        register_optimizer_step_post_hook(lambda *_: calls.append("after all")),
    ]

    def step(model, optimizer, batch, number):
        if number == 0:
            optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
            optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        calls.clear()
        usual_step(model, optimizer, batch, number)
        return list(calls)

    try:
        assert_same(tmp_path, make, step)
    finally:
        for handle in handles:
            handle.remove()


def test_a_factor_that_is_filled_anew(tmp_path):
    factor = torch.ones(())

    def step(model, optimizer, batch, number):
        factor.fill_(1 / (1 + number))
        loss = functional.cross_entropy(model(batch), torch.arange(len(batch)) % 10)
        loss.backward()
        torch._foreach_mul_([parameter.grad for parameter in model.parameters()], factor)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    assert_same(tmp_path, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), step)


def test_what_is_put_off_is_seen_by_whoever_looks_at_states(tmp_path):
    def step(model, optimizer, batch, number):
        loss = usual_step(model, optimizer, batch, number)
        first = next(iter(model.parameters()))
        steps = optimizer.state[first]["step"].item()
        if number == 3:
            for state in optimizer.state.values():
                state["step"].fill_(1)
        return loss, steps, len(optimizer.state[first]), "exp_avg" in optimizer.state[first]

    assert_same(tmp_path, lambda model: torch.optim.Adam(model.parameters(), lr=1e-3), step)


def test_a_learning_rate_in_a_tensor_that_changes_after_the_step(tmp_path):
    def step(model, optimizer, batch, number):
        loss = usual_step(model, optimizer, batch, number)
        optimizer.param_groups[0]["lr"].mul_(0.5)
        return loss

    assert_same(tmp_path, lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-2)), step)


# sparse gradients


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(2000, 192, sparse=True)
        self.head = nn.Linear(192, 10)

    def forward(self, batch):
        return self.head(self.embedding(batch.abs().sum(1).long() * 7 % 2000))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_sparse_gradients(tmp_path, kind):
    assert_same(tmp_path, lambda model: kind(model.parameters(), lr=0.1), model=Embedded, size_mib=16)


def test_sparse_adam(tmp_path):
    def step(model, optimizer, batch, number):
        del number
        loss = functional.cross_entropy(model(batch), torch.arange(len(batch)) % 10)
        loss.backward()
        optimizer.step()
        model.zero_grad()
        return loss.item()

    assert_same(
        tmp_path, lambda model: torch.optim.SparseAdam(model.embedding.parameters()), step, model=Embedded, size_mib=16
    )


def test_sparse_matrices_made_in_a_step(tmp_path):
    def step(model, optimizer, batch, number):
        torch.manual_seed(number)
        indices = torch.randint(0, 256, (2, 8000))
        adjacency = torch.sparse_coo_tensor(indices, torch.rand(8000) / 64, (256, 256))
        dense = torch.sparse.mm(adjacency, model(batch))
        rows = torch.sparse.mm(adjacency.coalesce().to_sparse_csr(), batch)
        loss = dense.square().mean() + model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    assert_same(tmp_path, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), step)


def test_lazy_parameters(tmp_path):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.LazyLinear(192), nn.GELU(), nn.LazyLinear(192), nn.GELU(), nn.Linear(192, 10))

    assert_same(tmp_path, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3), model=model)


def test_fused_operators_that_take_no_lists(tmp_path):
    from torch.ao.quantization.fake_quantize import FusedMovingAvgObsFakeQuantize

    def model():
        torch.manual_seed(0)
        return nn.Sequential(
            *[
                part
                for _ in range(4)
                for part in (nn.Linear(192, 192), FusedMovingAvgObsFakeQuantize(), nn.RMSNorm(192))
            ],
            nn.Linear(192, 10),
        )

    assert_same(tmp_path, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), model=model)


def test_forward_mode(tmp_path):
    def step(model, optimizer, batch, number):
        _, tangent = torch.func.jvp(model, (batch,), (torch.ones_like(batch),))
        return usual_step(model, optimizer, batch, number), tangent.sum().item()

    assert_same(tmp_path, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), step)


# what is said, and what is refused


def test_it_is_said_that_a_step_runs_whole(tmp_path):
    model = make_model()
    with pytest.warns(PenstockWarning, match="Counting is not PyTorch's own.*separable=True"):
        training(model, Counting(model.parameters()), "1GiB", disk=tmp_path).close()


def test_separable_optimizers_step_in_parts(make_training):
    torch.manual_seed(0)
    assert_same_training(make_training, Transformer(), lambda model: Lion(model.parameters()), separable=True)
    assert_same_training(
        make_training, Transformer(), lambda model: Lion(model.parameters()), separable=True, update_in_backward=True
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a counter on the optimizer", "changes num_steps on the optimizer"),
        ("a name in its state", "keys that are no parameters"),
        ("a norm of all gradients", "other values together than apart"),
        ("a value shared by a group", "changes the settings of a group"),
        ("random numbers", "draws random numbers"),
        ("another around it", "has another optimizer inside"),
    ],
)
def test_separable_is_tried(tmp_path, name, message):
    model = make_model()
    optimizer = OPTIMIZERS[name](model)
    before = copy.deepcopy(optimizer.state_dict())
    draws = torch.random.get_rng_state()
    with pytest.raises(TypeError, match=message):
        training(model, optimizer, "1GiB", disk=tmp_path, separable=True)
    assert optimizer.state_dict() == before
    assert torch.equal(torch.random.get_rng_state(), draws)


@pytest.mark.parametrize(
    "make", [lambda model: Noisy(model.parameters()), lambda model: torch.optim.LBFGS(model.parameters())]
)
def test_updates_in_backward_are_for_pytorchs_own(tmp_path, make):
    model = make_model()
    with pytest.raises(ValueError, match="update_in_backward=True is for optimizers of PyTorch"):
        training(model, make(model), "1GiB", disk=tmp_path, update_in_backward=True)


# the promise of updates in backward


def promise(tmp_path, step):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours = training(model, optimizer, "1GiB", disk=tmp_path, update_in_backward=True)
    try:
        for _ in range(2):
            with ours:
                step(model, optimizer, torch.ones(8, 192))
    finally:
        ours.close()


def backward(model, batch):
    model(batch).square().mean().backward()


def clipped(model, optimizer, batch):
    backward(model, batch)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def accumulated(model, optimizer, batch):
    backward(model, batch)
    backward(model, batch)
    optimizer.step()


def never_zeroed(model, optimizer, batch):
    backward(model, batch)
    optimizer.step()


def scheduled_before(model, optimizer, batch):
    backward(model, batch)
    optimizer.param_groups[0]["lr"] *= 0.5
    optimizer.step()


def skipped(model, optimizer, batch):
    backward(model, batch)
    optimizer.zero_grad()


def averaged_before(model, optimizer, batch):
    backward(model, batch)
    [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (clipped, "gradient of .* was used by its update"),
        (accumulated, "used between backward and optimizer.step"),
        (never_zeroed, "gradient of .* was used by its update"),
        (scheduled_before, "'lr' of an optimizer's group was changed"),
        (skipped, "used between backward and optimizer.step"),
        (averaged_before, "used between backward and optimizer.step"),
    ],
)
def test_a_broken_promise_is_refused(tmp_path, step, message):
    with pytest.raises(RuntimeError, match=message):
        promise(tmp_path, step)


def test_a_kept_promise_is_the_same(make_training):
    torch.manual_seed(0)
    for make in (
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    ):
        assert_same_training(make_training, Transformer(), make, simple_step, update_in_backward=True)
