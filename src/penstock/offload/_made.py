"""The tiers and the device of a training, from the arguments of `training`."""

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import nn

from penstock.arguments import must_be
from penstock.devices import backend_of, used_device
from penstock.offload._account import account_of
from penstock.tiers import Budget, DiskSpec, Size

Update = Literal["device", "host", "auto"]
CALL = "penstock.offload.training(model, optimizer, budget='22GiB', host='96GiB', disk='/nvme')"


def places(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: torch.optim.Optimizer | Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
    budget: Size | Budget | None,
    host: Size | None,
    disk: DiskSpec,
    device: str | torch.device | None,
    update: Update,
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


def device_of(model: nn.Module) -> torch.device:
    """Return the one device of all its parameters. Raises ``ValueError`` if there is none, or they are sharded."""
    devices = {one.device for one in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        raise ValueError(
            "the model's parameters must be on one device that is not 'meta', got "
            f"{sorted(map(str, devices)) or 'none'}: model.to('cuda'), or penstock.offload.load(model, path) for a "
            "model on 'meta'"
        )
    wrapped = next((name for name, one in model.named_parameters() if _is_sharded(one)), None)
    if wrapped is not None:
        raise ValueError(
            f"{wrapped} is sharded over several processes (a DTensor); give the model as it was before fully_shard"
        )
    (device,) = devices
    return device


def _is_sharded(tensor: torch.Tensor) -> bool:
    return type(tensor.data).__name__ == "DTensor"
