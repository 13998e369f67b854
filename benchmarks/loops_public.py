"""Every optimizer class of the package pytorch-optimizer, for six steps each; without the package there are none."""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.loops_common import batches, class_loss, job, mlp
from benchmarks.loops_door import Door, loop

STEPS = 6
Make = Callable[[list[nn.Parameter], nn.Module | None], torch.optim.Optimizer]


def small() -> nn.Module:
    return mlp(depth=2)


def split(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Return the groups that classes after Muon want: matrices, and the rest."""
    return [
        {"params": [parameter for parameter in parameters if parameter.ndim == 2], "use_muon": True},
        {"params": [parameter for parameter in parameters if parameter.ndim != 2], "use_muon": False},
    ]


def classes() -> dict[str, type[torch.optim.Optimizer]]:
    """Return the package's own classes by name, wrappers included."""
    with contextlib.suppress(ImportError):
        import pytorch_optimizer

        return {
            name: thing
            for name, thing in sorted(vars(pytorch_optimizer).items())
            if inspect.isclass(thing)
            and issubclass(thing, torch.optim.Optimizer)
            and thing.__module__.startswith("pytorch_optimizer.")
            and name not in LEFT_OUT
        }
    return {}


LEFT_OUT = {
    "BaseOptimizer": "the base of all",
    "DeMo": "wants the package einops and a group of processes",
    "GSAM": "wants a schedule object of its own",
    "Kron": "takes minutes and gigabytes for a step, with or without Penstock, unless opt_einsum is installed",
    "PCGrad": "has no step of the usual kind",
    "SafeFP16Optimizer": "wants a model in half precision and losses that it scales",
    "SpectralSphere": "takes matrices only",
    "DistributedMuon": "wants a group of processes",
    "LOMO": "steps in its own fused_backward",
    "AdaLOMO": "steps in its own fused_backward",
}
"""Classes that are no optimizer of a plain loop, and why."""
MUONS = ("AdaGO", "AdaMuon", "Muon", "MuonClip", "NorMuon")
OF_GRAPHS = ("AdaHessian", "SophiaH")
"""Differentiate the gradients, which need their graph."""
OF_CLOSURES = ("BSAM", "FriendlySAM", "LookSAM", "SAM", "WSAM")
WRAPPERS = ("Lookahead", "OrthoGrad", "TRAC")


def makes(name: str, kind: Any) -> Make:
    """Return a function that makes an optimizer of a class from parameters and the model."""
    if name in MUONS:
        return lambda parameters, _: kind(split(parameters))
    if name == "ScheduleFreeWrapper":
        return lambda parameters, _: in_training(kind(torch.optim.SGD(parameters, lr=0.05)))
    if name in WRAPPERS:
        return lambda parameters, _: kind(torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
    if name == "WSAM":
        return lambda parameters, model: kind(model, parameters, torch.optim.SGD, lr=0.05)
    if name in ("FriendlySAM", "LookSAM", "SAM"):
        return lambda parameters, _: kind(parameters, torch.optim.SGD, lr=0.05)
    if name == "BSAM":
        return lambda parameters, _: kind(parameters, num_data=1000, lr=1e-3)
    if name == "Ranger21":
        return lambda parameters, _: kind(parameters, num_iterations=STEPS)
    if name == "AdamMini":
        return lambda _, model: kind(model, lr=1e-3)
    return lambda parameters, _: kind(parameters)


def in_training(optimizer: Any) -> torch.optim.Optimizer:
    optimizer.train()
    return optimizer


def register(name: str, kind: type[torch.optim.Optimizer]) -> None:
    make = makes(name, kind)

    def run(door: Door) -> None:
        model = small()
        optimizer = make(list(model.parameters()), model)
        net = door.train(model, optimizer)
        for _, batch in zip(door.steps(STEPS), batches(STEPS), strict=True):

            def closure(batch: Any = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = class_loss(net, batch)
                loss.backward()
                return loss

            with door:
                loss = class_loss(net, batch)
                loss.backward(create_graph=name in OF_GRAPHS)
                if name in OF_CLOSURES:
                    optimizer.step(closure)  # type: ignore[arg-type]
                elif name == "AliG":
                    optimizer.step(lambda loss=loss: float(loss.detach()))  # type: ignore[misc]
                else:
                    optimizer.step()
                optimizer.zero_grad()
            door.note(loss)

    run.__name__, run.__module__ = name, __name__
    has_job = name not in (*OF_GRAPHS, *OF_CLOSURES, "AliG", "AdamMini")
    loop(job=job(lambda parameters: make(parameters, None), model=small, steps=STEPS) if has_job else None)(run)


for _name, _class in classes().items():
    register(_name, _class)
