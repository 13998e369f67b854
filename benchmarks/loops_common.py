"""What loops share: small models, batches from a generator, and the plain supervised loop."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.loops_door import Door, loop
from penstock import fleet

WIDTH, CLASSES, ROWS, STEPS = 160, 10, 192, 10
Batch = tuple[torch.Tensor, torch.Tensor]
Optimizers = Callable[[Any], torch.optim.Optimizer]


def mlp(inputs: int = WIDTH, outputs: int = CLASSES, *, depth: int = 4, width: int = WIDTH) -> nn.Sequential:
    layers: list[nn.Module] = []
    for number in range(depth):
        layers += [nn.Linear(width if number else inputs, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def batches(number: int = STEPS, rows: int = ROWS, inputs: int = WIDTH) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(7)
    for _ in range(number):
        yield (
            torch.randn(rows, inputs, generator=generator),
            torch.randint(0, CLASSES, (rows,), generator=generator),
        )


def class_loss(model: Callable[..., torch.Tensor], batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def job(
    optimizer: Optimizers,
    model: Callable[[], nn.Module] = mlp,
    loss: Callable[..., torch.Tensor] = class_loss,
    data: Callable[[], Any] = lambda: list(batches()),
    **options: Any,
) -> Callable[[], fleet.Job]:
    """Return a function that makes a job of a supervised loop."""
    settings: dict[str, Any] = {"steps": STEPS, **options}
    return lambda: fleet.Job(name="job", model=model, data=data, loss=loss, optimizer=optimizer, **settings)


def supervised(
    name: str,
    optimizer: Optimizers,
    *,
    model: Callable[[], nn.Module] = mlp,
    loss: Callable[..., torch.Tensor] = class_loss,
    data: Callable[[], Any] = lambda: list(batches()),
    with_job: bool = True,
    module: str,
    **options: Any,
) -> None:
    """Register the loop that everybody knows, with an optimizer, model or loss of its own, and its job."""

    def run(door: Door) -> None:
        network = model()
        stepping = optimizer(network.parameters())
        net = door.train(network, stepping)
        data_of_all = data()
        for number in door.steps(STEPS):
            with door:
                value = loss(net, data_of_all[number])
                value.backward()
                stepping.step()
                stepping.zero_grad()
            door.note(value)

    run.__name__, run.__module__ = name, module
    loop(job=job(optimizer, model, loss, data, **options) if with_job else None)(run)
