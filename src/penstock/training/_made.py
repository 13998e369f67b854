"""The beginning of a training: tiers, device, model and optimizer, from the arguments of `training`."""

import warnings
from collections.abc import Callable, Iterator

import torch
from torch import nn

from penstock.arguments import must_be
from penstock.devices import backend_of, used_device
from penstock.errors import BudgetError, PenstockWarning
from penstock.state import UpdatedBy, account_of, nbytes_of
from penstock.stepping import own_class, refuse_inseparable, state_bytes, why_whole
from penstock.tiers import Budget, DiskSpec, Size, Waterfall
from penstock.units import format_bytes

CALL = "penstock.offload.training(model, optimizer, budget='22GiB', host='96GiB', disk='/nvme')"


def places(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: torch.optim.Optimizer | Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
    budget: Size | Budget | None,
    host: Size | None,
    disk: DiskSpec,
    device: str | torch.device | None,
    update: UpdatedBy,
) -> tuple[Budget, torch.device]:
    """Return the tiers and the device. Raises what `training` raises for arguments that cannot be used."""
    account = account_of(budget, host, disk, CALL)
    if account.device_bytes is None:
        raise ValueError(f"`budget` is required: the bytes of the device that a step may use: {CALL}")
    if isinstance(optimizer, nn.Module) or (
        isinstance(optimizer, type) and not issubclass(optimizer, torch.optim.Optimizer)
    ):
        raise must_be("optimizer", "a torch.optim.Optimizer, or a function that makes one", optimizer, CALL)
    if isinstance(model, nn.Module):
        where = device_of(model)
        if device is not None:
            where = backend_of(device).device
    else:
        where = used_device() if device is None else backend_of(device).device
    if update != "device" and (where.type == "cpu" or not account.host_bytes):
        raise ValueError(
            f"update={update!r} needs an accelerator and host memory below it, such as host='96GiB'; the device is "
            f"{where}. Otherwise leave out update"
        )
    return account, where


def made(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: torch.optim.Optimizer | Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
    device: torch.device,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and the optimizer, and call those that were given as functions.

    Raises ``TypeError`` or ``ValueError`` for results that cannot be used.
    """
    if not isinstance(model, nn.Module):
        model = model()
        if not isinstance(model, nn.Module):
            raise TypeError(f"`model` must return a torch.nn.Module, got {type(model).__name__}: {CALL}")
        if device_of(model) != device:
            raise ValueError(
                f"`model` must return a model on `device`={device}, got one on {device_of(model)}: "
                "with torch.device('cuda'): return Model()"
            )
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(model.parameters())
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"`optimizer` must return a torch optimizer, got {type(optimizer).__name__}: {CALL}")
    return model, optimizer


def check_optimizer(optimizer: torch.optim.Optimizer, *, separable: bool, asked: str, on_host: bool) -> None:
    """Raise for an optimizer that cannot do what is ``asked`` of it, and say once if its own step has to run whole.

    ``separable`` is the user's word, which is tried. Raises ``TypeError`` if that does not hold, and ``ValueError`` for
    the rest.
    """
    is_own = own_class(optimizer) is not None
    if separable and not is_own:
        refuse_inseparable(optimizer, CALL)
    reason, name = why_whole(optimizer, separable=separable), type(optimizer).__name__
    if asked and (reason or (on_host and not is_own)):
        why = reason or f"{name} is not PyTorch's own"
        raise ValueError(
            f"{asked} is for optimizers of PyTorch that update each parameter by itself, such as AdamW: {why}. Leave "
            f"it out: {CALL}"
        )
    if on_host and any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups):
        raise ValueError(
            "fused and capturable optimizers keep numbers on the device, which an update on the host cannot "
            f"use: make one without these options, as AdamW(parameters, lr=1e-4), or leave out update=: {CALL}"
        )
    if reason and not is_own:
        warnings.warn(
            f"{reason}. Its own step runs whole, and fetches what it reads; results are those without Penstock. If it "
            f"updates each parameter from that parameter, its gradient, state and group alone, separable=True moves "
            "less",
            PenstockWarning,
            stacklevel=6,
        )


def move(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move parameters, buffers, gradients and states that are elsewhere to the device."""
    tensors = [*model.parameters(), *model.buffers()]
    if all(tensor.device == device for tensor in tensors):
        return
    for tensor in tensors:
        tensor.data = tensor.data.to(device)
        if tensor.grad is not None:
            tensor.grad = tensor.grad.to(device)
    for state in optimizer.state.values():
        for field, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                state[field] = value.to(device)


def refuse_too_much(
    model: nn.Module, optimizer: torch.optim.Optimizer, device_bytes: int, waterfall: Waterfall, *, separable: bool
) -> None:
    """Raise ``BudgetError`` if parameters, gradients and states do not fit into all tiers together."""
    own = sum(map(nbytes_of, model.parameters()))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trained_bytes = sum(map(nbytes_of, trained))
    states = state_bytes(optimizer, separable=separable)
    below = sum(tier.capacity_bytes - tier.used_bytes for tier in waterfall.tiers)
    if own + trained_bytes + states > device_bytes + below:
        raise BudgetError(
            f"training needs {format_bytes(own)} of parameters, {format_bytes(trained_bytes)} of gradients and "
            f"{format_bytes(states)} of optimizer state, but there are only {format_bytes(device_bytes)} on the "
            f"device and {format_bytes(below)} in the tiers below it. Give more room: {CALL}"
        )


def device_of(model: nn.Module) -> torch.device:
    """Return the one device of all its parameters. Raises ``ValueError`` if there is none, or they are sharded."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        raise ValueError(
            "the model's parameters must be on one device that is not 'meta', got "
            f"{sorted(map(str, devices)) or 'none'}: model.to('cuda'), or penstock.offload.load(model, path) for a "
            "model on 'meta'"
        )
    wrapped = next((name for name, parameter in model.named_parameters() if _is_sharded(parameter)), None)
    if wrapped is not None:
        raise ValueError(
            f"{wrapped} is sharded over several processes (a DTensor); give the model as it was before fully_shard"
        )
    (device,) = devices
    return device


def _is_sharded(tensor: torch.Tensor) -> bool:
    return type(tensor.data).__name__ == "DTensor"
