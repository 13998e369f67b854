"""What a fleet runs on: its devices, and the account below them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from penstock.fleet._job import Device
from penstock.tiers import Budget, DiskSpec, Size


def devices_of(given: Sequence[str | torch.device | Device] | None) -> list[Device]:
    """What was given, or every CUDA device there is, else one CPU device; CPU devices share PyTorch's threads."""
    if isinstance(given, str | torch.device | Device):
        raise TypeError(f"devices is a list: devices=[{str(given)!r}]")
    if given is None:
        given = [f"cuda:{at}" for at in range(torch.cuda.device_count())] or ["cpu"]
    if not given:
        raise ValueError("a fleet needs a device: devices=['cuda:0'] or devices=['cpu', 'cpu']")
    devices = [one if isinstance(one, Device) else Device(name=str(one)) for one in given]
    for device in devices:
        _check_is_here(device)
    share = max(1, torch.get_num_threads() // len(devices))
    return [
        one if torch.device(one.name).type != "cpu" or one.threads else replace(one, threads=share) for one in devices
    ]


def _check_is_here(device: Device) -> None:
    """Raise ``ValueError`` for a CUDA device that this machine lacks."""
    wanted = torch.device(device.name)
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"`devices` must name devices of this machine, got {device.name!r}; {_here()}")


def _here() -> str:
    count = torch.cuda.device_count()
    if not count:
        return "there is no CUDA device here (torch.cuda.is_available() is False): devices=['cpu']"
    return f"there {'is' if count == 1 else 'are'} {', '.join(f'cuda:{index}' for index in range(count))} and cpu"


def account_of(devices: list[Device], budget: Size | Budget | None, host: Size | None, disk: DiskSpec) -> Budget:
    """The account below the devices; fills in the devices' own budgets."""
    if isinstance(budget, Budget):
        if host is not None or disk is not None:
            raise ValueError("Budget(device=..., host=..., disk=...) says it all; leave out host_budget and disk")
        account, budget = budget.named("fleet"), budget.room_bytes("device")
    else:
        account = Budget(host=host, disk=disk)
    for at, one in enumerate(devices):
        if one.budget is None:
            devices[at] = replace(one, budget=budget if budget is not None else _free_bytes(one, len(devices)))
    on_cuda = torch.device(devices[0].name).type == "cuda"
    if account.host_bytes is None and (not account.disk_bytes or on_cuda):
        account = account.named("fleet")  # whose limit is the fleet's alone
        account.host_bytes = account.held_bytes("host") + int(0.6 * _free_main_memory())
    return account


def free_bytes(device: torch.device) -> int:
    """Bytes of its memory that nobody has."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else _free_main_memory()


def _free_bytes(device: Device, num_devices: int) -> int:
    place = torch.device(device.name)
    return int(0.9 * free_bytes(place)) if place.type == "cuda" else int(0.3 * free_bytes(place) / num_devices)


def _free_main_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 8 * 2**30
