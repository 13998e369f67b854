"""Tools around and inside loops: profilers, modes, hooks, parametrizations, quantisation, scripts, lazy modules."""

import contextlib
import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.loops_common import STEPS, WIDTH, batches, class_loss, job, mlp
from benchmarks.loops_door import Door, loop


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def trained(
    door: Door,
    model: nn.Module,
    *,
    around: Any = contextlib.nullcontext,
    inside: Any = contextlib.nullcontext,
    loss_of: Any = class_loss,
    data: Any = None,
    steps: int = STEPS,
) -> None:
    """Train, with a context around the door's, or inside it."""
    optimizer = sgd(model.parameters())
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(steps), data or batches(steps), strict=True):
        with around(), door, inside():
            loss = loss_of(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def regions_named(door: Door) -> None:
    """record_function around forward, backward and step; two micro-batches in one context."""
    model = mlp()
    optimizer = sgd(model.parameters())
    net = door.train(model, optimizer)
    data = list(batches(2 * STEPS))
    for number in door.steps(STEPS):
        with door:
            for part in range(2):
                with record_function("forward"):
                    loss = class_loss(net, data[2 * number + part])
                with record_function("backward"):
                    loss.backward()
                door.note(loss)
            with record_function("step"):
                optimizer.step()
                optimizer.zero_grad()


@loop
def region_around_everything(door: Door) -> None:
    with record_function("training"):
        trained(door, mlp(), around=lambda: record_function("step"), inside=lambda: record_function("inside"))


@loop
def profiler_around(door: Door) -> None:
    """One profile over all steps, with a schedule and memory."""
    model = mlp()
    optimizer = sgd(model.parameters())
    net = door.train(model, optimizer)
    plan = torch.profiler.schedule(wait=2, warmup=1, active=2, repeat=2)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, profile_memory=True) as recorded:
        for _, batch in zip(door.steps(12), batches(12), strict=True):
            with door:
                loss = class_loss(net, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            recorded.step()
            door.note(loss)
    door.note(len(recorded.key_averages()) > 0)


@loop
def profiler_in_one_step(door: Door) -> None:
    model = mlp()
    optimizer = sgd(model.parameters())
    net = door.train(model, optimizer)
    for number, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door, profile(profile_memory=True) if number in (0, 1, 6) else contextlib.nullcontext() as recorded:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if number in (0, 1, 6):
            door.note(any(event.key == "aten::addmm" for event in recorded.key_averages()))
        door.note(loss)


@loop
def profiler_of_forward_only(door: Door) -> None:
    model = mlp()
    optimizer = sgd(model.parameters())
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            with torch.autograd.profiler.profile():
                loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def flops_counted(door: Door) -> None:
    model = mlp()
    optimizer = sgd(model.parameters())
    net = door.train(model, optimizer)
    for number, batch in zip(door.steps(STEPS), batches(), strict=True):
        counter = FlopCounterMode(display=False) if number % 3 == 1 else contextlib.nullcontext()
        with counter, door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if isinstance(counter, FlopCounterMode):
            door.note(counter.get_total_flops())
        door.note(loss)


@loop
def flops_counted_inside(door: Door) -> None:
    model = mlp()
    optimizer = sgd(model.parameters())
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            with FlopCounterMode(display=False) as counter:
                loss = class_loss(net, batch)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss, counter.get_total_flops())


@loop
def door_made_inside_a_mode(door: Door) -> None:
    """The mode is open when the door is made, and ends before it is closed."""
    model = mlp()
    optimizer = sgd(model.parameters())
    with FlopCounterMode(display=False):
        net = door.train(model, optimizer)
        with door:
            loss = class_loss(net, next(batches()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


class CountsOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num_matrices = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_matrices += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*args, **(kwargs or {}))


@loop
def dispatch_mode_of_the_user(door: Door) -> None:
    counter = CountsOperators()
    trained(door, mlp(), around=lambda: counter)
    door.note(counter.num_matrices)


@loop
def dispatch_mode_inside(door: Door) -> None:
    counter = CountsOperators()
    trained(door, mlp(), inside=lambda: counter)
    door.note(counter.num_matrices)


class NamesFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += function is F.linear
        return function(*args, **(kwargs or {}))


@loop
def function_mode(door: Door) -> None:
    counter = NamesFunctions()
    trained(door, mlp(), inside=lambda: counter)
    door.note(counter.num_calls)


@loop
def anomalies_detected(door: Door) -> None:
    trained(door, mlp(), inside=torch.autograd.detect_anomaly)


@loop
def saved_tensors_packed_by_the_user(door: Door) -> None:
    """Hooks of the user's that save halves."""

    def hooks() -> Any:
        return torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: (tensor.dtype, tensor.bfloat16() if tensor.is_floating_point() else tensor),
            lambda pair: pair[1].to(pair[0]),
        )

    def loss_of(net: Any, batch: Any) -> torch.Tensor:
        with hooks():
            return class_loss(net, batch)

    trained(door, mlp(), loss_of=loss_of)


@loop
def saved_on_cpu(door: Door) -> None:
    trained(door, mlp(), inside=lambda: torch.autograd.graph.save_on_cpu())


@loop
def deterministic_algorithms(door: Door) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        model = nn.Sequential(nn.EmbeddingBag(300, WIDTH), mlp(depth=2))
        tokens = [(torch.randint(0, 300, (64, 9)), torch.randint(0, 10, (64,))) for _ in range(STEPS)]
        trained(door, model, data=tokens)
    finally:
        torch.use_deterministic_algorithms(False)


@loop
def default_device_and_dtype(door: Door) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("cpu"):
            model = mlp(depth=2)
            trained(door, model, loss_of=lambda net, batch: class_loss(net, (batch[0].double(), batch[1])))
    finally:
        torch.set_default_dtype(torch.float32)


@loop
def lazy_layers(door: Door) -> None:
    """Shapes are known at the first forward; the optimizer is made before."""
    model = nn.Sequential(nn.LazyLinear(WIDTH), nn.GELU(), nn.LazyLinear(WIDTH), nn.GELU(), nn.LazyLinear(10))
    trained(door, model)


@loop
def lazy_layers_initialized_first(door: Door) -> None:
    model = nn.Sequential(nn.LazyLinear(WIDTH), nn.GELU(), nn.LazyLinear(WIDTH), nn.GELU(), nn.LazyLinear(10))
    with torch.no_grad():
        model(torch.zeros(1, WIDTH))
    trained(door, model)


def with_weight_norm() -> nn.Module:
    model = mlp()
    for at in (0, 2, 4):
        model[at] = parametrizations.weight_norm(model[at])
    return model


@loop(job=job(sgd, with_weight_norm))
def weight_norm(door: Door) -> None:
    trained(door, with_weight_norm())


@loop
def spectral_norm(door: Door) -> None:
    model = mlp()
    for at in (0, 2, 4):
        model[at] = parametrizations.spectral_norm(model[at])
    trained(door, model)


@loop
def old_spectral_norm(door: Door) -> None:
    model = mlp()
    for at in (0, 2):
        model[at] = nn.utils.spectral_norm(model[at])
    trained(door, model)


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


@loop
def parametrized_and_cached(door: Door) -> None:
    model = mlp()
    for at in (2, 4):
        parametrize.register_parametrization(model[at], "weight", Symmetric())
    trained(door, model, inside=parametrize.cached)


@loop
def pruned_by_masks(door: Door) -> None:
    """nn.utils.prune in the middle: the parameter is renamed, the weight becomes a product."""
    model = mlp()
    optimizer = sgd(model.parameters())
    net = door.train(model, optimizer)
    for number, batch in zip(door.steps(12), batches(12), strict=True):
        if number == 4:
            for at in (0, 2, 4):
                prune.l1_unstructured(model[at], "weight", amount=0.3)
        if number == 8:
            prune.remove(model[0], "weight")
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def quantisation_aware(door: Door) -> None:
    """FakeQuantize with moving observers between layers."""
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    layers: list[nn.Module] = []
    for layer in mlp():
        layers += [layer, FakeQuantize(observer=MovingAverageMinMaxObserver)]
    trained(door, nn.Sequential(*layers))


@loop
def quantisation_aware_fused(door: Door) -> None:
    from torch.ao.quantization.fake_quantize import FusedMovingAvgObsFakeQuantize

    layers: list[nn.Module] = []
    for layer in mlp():
        layers += [layer, FusedMovingAvgObsFakeQuantize()]
    trained(door, nn.Sequential(*layers))


class Straight(nn.Module):
    """Binary weights with a straight-through estimator; the weight's data are replaced and put back in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.layer.weight.data
        self.layer.weight.data = kept.sign() * kept.abs().mean()
        out = self.layer(x)
        self.layer.weight.data = kept
        return out


@loop
def data_replaced_in_forward(door: Door) -> None:
    trained(door, nn.Sequential(nn.Linear(WIDTH, WIDTH), Straight(), nn.BatchNorm1d(WIDTH), nn.ReLU(), mlp(depth=2)))


@loop
def scripted(door: Door) -> None:
    trained(door, torch.jit.script(mlp()))


@loop(job=job(sgd, lambda: nn.Sequential(torch.jit.script(mlp(outputs=WIDTH, depth=2)), nn.Linear(WIDTH, 10))))
def scripted_part(door: Door) -> None:
    trained(door, nn.Sequential(torch.jit.script(mlp(outputs=WIDTH, depth=2)), nn.Linear(WIDTH, 10)))


@loop
def traced_part(door: Door) -> None:
    traced = torch.jit.trace(mlp(outputs=WIDTH, depth=2), torch.zeros(4, WIDTH))
    trained(door, nn.Sequential(traced, nn.Linear(WIDTH, 10)))


@loop
def rms_norms(door: Door) -> None:
    """Operators whose names begin with _fused."""
    trained(door, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH), nn.GELU(), nn.RMSNorm(WIDTH), mlp(depth=2)))


@loop
def functions_in_a_partial(door: Door) -> None:
    """The step is a closure by functools.partial over model and optimizer."""
    model = mlp()
    optimizer = sgd(model.parameters())
    net = door.train(model, optimizer)

    def step(net: Any, optimizer: torch.optim.Optimizer, scale: float, batch: Any) -> torch.Tensor:
        loss = class_loss(net, batch) * scale
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = functools.partial(step, net, optimizer, 0.5)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = run(batch)
        door.note(loss)


@loop
def other_method_than_forward(door: Door) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def training_step(self, batch: Any) -> torch.Tensor:
            return class_loss(self.layers, batch)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.layers(rows).softmax(1)

    trained(door, Model(), loss_of=lambda net, batch: net.training_step(batch))


@loop
def hooks_on_modules(door: Door) -> None:
    """Forward, pre-forward and backward hooks that change what passes."""
    model = mlp()
    model[0].register_forward_hook(lambda module, inputs, out: out * 1.01)
    model[2].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 0.01,))
    model[4].register_full_backward_hook(lambda module, inside, outside: tuple(part * 0.9 for part in inside))
    trained(door, model)


@loop
def hooks_on_gradients(door: Door) -> None:
    model = mlp()

    def halve(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        parameter.register_post_accumulate_grad_hook(halve)
    trained(door, model)


@loop
def anomalous_values_replaced(door: Door) -> None:
    """nan_to_num_ on gradients, and a check by torch.isfinite of every weight."""
    model = mlp()
    optimizer = sgd(model.parameters())
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            for parameter in model.parameters():
                torch.nan_to_num_(parameter.grad)  # type: ignore[arg-type]
            optimizer.step()
            finite = all(torch.isfinite(parameter).all() for parameter in model.parameters())
            optimizer.zero_grad()
        door.note(loss, finite)


@loop
def operator_of_the_user(door: Door) -> None:
    """A custom operator by torch.library, with autograd."""
    name = "penstock_loops::halved"
    if not hasattr(torch.ops.penstock_loops, "halved"):

        @torch.library.custom_op(name, mutates_args=())
        def halved(x: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(x.detach().numpy() * 0.5)

        halved.register_fake(torch.empty_like)
        halved.register_autograd(lambda ctx, gradient: gradient * 0.5)
    operator = torch.ops.penstock_loops.halved

    def loss_of(net: Any, batch: Any) -> torch.Tensor:
        return class_loss(lambda rows: operator(net(rows)), batch)

    trained(door, mlp(), loss_of=loss_of)


@loop
def inner_function_recomputed(door: Door) -> None:
    """Checkpoint of a function, with a random mask that must be drawn alike."""
    from torch.utils.checkpoint import checkpoint, checkpoint_sequential

    body, head = mlp(outputs=WIDTH, depth=4), nn.Linear(WIDTH, 10)
    model = nn.Sequential(body, nn.Dropout(0.2), head)

    def loss_of(net: Any, batch: Any) -> torch.Tensor:
        hidden = checkpoint_sequential(body, 2, batch[0], use_reentrant=False)
        hidden = checkpoint(lambda x: F.dropout(x.tanh(), 0.1, training=True), hidden, use_reentrant=False)
        return F.cross_entropy(head(hidden), batch[1])

    trained(door, model, loss_of=loss_of)


@loop
def complex_weights(door: Door) -> None:
    class Fourier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.cfloat) * 0.1)
            self.mix = nn.Parameter(torch.randn(WIDTH // 2 + 1, WIDTH // 2 + 1, dtype=torch.cfloat) * 0.05)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.irfft((torch.fft.rfft(x) @ self.mix) * self.weight, n=WIDTH)

    trained(door, nn.Sequential(Fourier(), nn.GELU(), mlp(depth=2)))


@loop
def weights_without_a_model(door: Door) -> None:
    """Parameters in a ParameterDict; forward is a function of the user's."""
    weights = nn.ParameterDict(
        {"first": torch.randn(WIDTH, WIDTH) * 0.05, "second": torch.randn(10, WIDTH) * 0.05, "bias": torch.zeros(10)}
    )
    optimizer = sgd(weights.parameters())
    door.train(weights, optimizer)
    for _, (rows, labels) in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            hidden = F.gelu(rows @ weights["first"])
            loss = F.cross_entropy(F.linear(hidden, weights["second"], weights["bias"]), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def wrapped_in_data_parallel(door: Door) -> None:
    """DistributedDataParallel around the model, in a group of one."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
        try:
            inner = mlp()
            optimizer = sgd(inner.parameters())
            door.train(inner, optimizer)
            net = nn.parallel.DistributedDataParallel(inner)
            data = list(batches(2 * STEPS))
            for number in door.steps(STEPS):
                with door:
                    with net.no_sync():
                        class_loss(net, data[2 * number]).backward()
                    loss = class_loss(net, data[2 * number + 1])
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                door.note(loss)
        finally:
            torch.distributed.destroy_process_group()


@loop
def prepared_by_accelerate(door: Door) -> None:
    """Accelerate's optimizer and model."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = mlp()
    model, optimizer = accelerator.prepare(model, sgd(model.parameters()))
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door, accelerator.accumulate(model):
            loss = class_loss(net, batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def adafactor_of_transformers(door: Door) -> None:
    from transformers.optimization import Adafactor

    model = mlp()
    optimizer = Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=True)
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)
