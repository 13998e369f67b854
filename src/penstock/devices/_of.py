"""The devices of this machine, and the backend of each."""

import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch

from penstock.arguments import checked
from penstock.devices._accelerator import Accelerator
from penstock.devices._backend import Backend
from penstock.devices._cpu import Cpu
from penstock.devices._cuda import Cuda

_KINDS: dict[str, type[Backend]] = {"cpu": Cpu, "cuda": Cuda}
"""Backends by kind; every other kind is an `Accelerator`."""
_WITHOUT_STREAMS = ("mps",)
"""Kinds of accelerators that cannot copy while they compute, so that Penstock gains nothing on them."""


def backend_of(device: torch.device | str) -> Backend:
    """Return the backend of ``device``; without an index, that of the kind's current device.

    Raises ``ValueError`` for a kind that is neither the CPU nor this machine's accelerator.
    """
    device = torch.device(device)
    if not has_backend(device):
        raise ValueError(f"the device must be {' or '.join(map(repr, kinds()))} on this machine, got {device.type!r}")
    if device.index is None and device.type != "cpu":
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return _backend_of(device)


@functools.cache
def _backend_of(device: torch.device) -> Backend:
    return _KINDS.get(device.type, Accelerator)(device)


def has_backend(device: torch.device | str) -> bool:
    """Return whether ``device`` is the CPU or one of this machine's accelerators, unlike the meta device."""
    kind = torch.device(device).type
    return kind == "cpu" or kind == accelerator_type()


def is_accelerator(device: torch.device) -> bool:
    """Return whether ``device`` is one of this machine's accelerators."""
    return device.type != "cpu" and has_backend(device)


def accelerator_type() -> str | None:
    """Return the kind of accelerator that PyTorch finds here, such as "cuda"; ``None`` if none has streams."""
    accelerator = torch.accelerator.current_accelerator()  # the one this build of PyTorch supports; cheap to ask
    if accelerator is None or accelerator.type in _WITHOUT_STREAMS or not _is_here(accelerator.type):
        return None
    return accelerator.type


@functools.cache
def _is_here(kind: str) -> bool:
    return bool(torch.get_device_module(kind).is_available())


def kinds() -> tuple[str, ...]:
    """Return the kinds of devices here: ``("cpu",)``, or for example ``("cpu", "cuda")``."""
    kind = accelerator_type()
    return ("cpu",) if kind is None else ("cpu", kind)


def accelerators() -> list[torch.device]:
    """Return all accelerators of this machine."""
    kind = accelerator_type()
    return [] if kind is None else [torch.device(kind, index) for index in range(torch.accelerator.device_count())]


def used_device() -> torch.device:
    """Return the current accelerator if this process has made tensors on one, else the CPU."""
    kind = accelerator_type()
    if kind is None or not torch.accelerator.memory_stats():  # empty until then
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index())


@checked("with penstock.devices.random_forked([model_device])")
def random_forked(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """Restore the generators of the CPU and of ``devices`` after the block, which may draw from them."""
    others = [device for device in devices if is_accelerator(device)]
    kind = others[0].type if others else "cuda"
    return torch.random.fork_rng(sorted({device.index or 0 for device in others}), device_type=kind)
