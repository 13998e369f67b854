"""Devices of a fleet, and the account of the tiers below them."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from penstock.devices import accelerators, backend_of
from penstock.fleet._job import Device
from penstock.tiers import Budget, DiskSpec, Size


def devices_of(named: Sequence[str | torch.device | Device] | None) -> list[Device]:
    """Return the given devices, or every accelerator, or else one CPU device.

    CPU devices share PyTorch's threads.
    """
    if isinstance(named, str | torch.device | Device):
        raise TypeError(f"`devices` must be a list, got {str(named)!r}: devices=[{str(named)!r}]")
    if named is None:
        named = [*accelerators()] or ["cpu"]
    if not named:
        raise ValueError(
            "`devices` must name at least one device, got none: devices=['cuda:0'] or devices=['cpu', 'cpu']"
        )
    devices = [device if isinstance(device, Device) else Device(name=str(device)) for device in named]
    for device in devices:
        _check_is_here(device)
    share = max(1, torch.get_num_threads() // len(devices))
    return [
        device if torch.device(device.name).type != "cpu" or device.threads else replace(device, threads=share)
        for device in devices
    ]


def _check_is_here(device: Device) -> None:
    """Raise ``ValueError`` for a device that this machine lacks."""
    wanted = torch.device(device.name)
    if wanted.type != "cpu" and torch.device(wanted.type, wanted.index or 0) not in accelerators():
        raise ValueError(f"`devices` must name devices of this machine, got {device.name!r}; {_here()}")


def _here() -> str:
    here = accelerators()
    if not here:
        return "PyTorch finds no accelerator here: devices=['cpu']"
    return f"there {'is' if len(here) == 1 else 'are'} {', '.join(map(str, here))} and cpu"


def account_of(devices: list[Device], budget: Size | Budget | None, host: Size | None, disk: DiskSpec) -> Budget:
    """Return the account of the tiers below the devices, and fill in the devices' own budgets."""
    if isinstance(budget, Budget):
        if host is not None or disk is not None:
            raise ValueError(
                "`budget` is a Budget, which sets the limits of host memory and disk itself; leave out `host` "
                "and `disk`: Budget(device=..., host=..., disk=...)"
            )
        account, budget = budget.named("fleet"), budget.room_bytes("device")
    else:
        account = Budget(host=host, disk=disk)
    for index, device in enumerate(devices):
        if device.budget is None:
            devices[index] = replace(device, budget=budget if budget is not None else _free_bytes(device, len(devices)))
    are_accelerators = torch.device(devices[0].name).type != "cpu"
    if account.host_bytes is None and (not (account.disk_bytes or account.tiers) or are_accelerators):
        account = account.named("fleet")  # a budget of its own, so that its limit applies to the fleet alone
        account.host_bytes = account.held_bytes("host") + int(0.6 * free_bytes(torch.device("cpu")))
    return account


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of the device's memory."""
    return backend_of(device).memory_bytes()[0]


def _free_bytes(device: Device, num_devices: int) -> int:
    place = torch.device(device.name)
    return int(0.9 * free_bytes(place)) if place.type != "cpu" else int(0.3 * free_bytes(place) / num_devices)
