"""A report of this machine: devices, tiers, bandwidths, and which features work or why not."""

import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.arguments import checked
from penstock.devices import Backend, accelerator_type, accelerators, backend_of
from penstock.directio import SpillFile, memory_file_system
from penstock.native import describe_compiler, find_compiler
from penstock.probe._bandwidth import LaneBandwidth, bandwidths
from penstock.probe._gds import Feature, gpu_direct_storage


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPlace:
    """A device or a tier."""

    name: str
    """``"device"``, ``"host"`` or ``"disk"``."""
    description: str
    """Description of the device or tier on this machine."""
    capacity_bytes: int
    """Total bytes."""
    free_bytes: int
    """Bytes free now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReport:
    """The result of ``machine``."""

    places: tuple[MeasuredPlace, ...]
    """Devices first, then tiers."""
    lanes: tuple[LaneBandwidth, ...]
    """Bandwidths per link and direction."""
    features: tuple[Feature, ...]
    """Features that work, and those that do not with the reason."""


@checked("penstock.probe.machine('/nvme')")
def machine(
    directory: str | os.PathLike[str] = ".",
    *,
    refresh: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> MachineReport:
    """Examine this machine, with ``directory`` as the place for the disk tier.

    See ``bandwidths`` for cost and errors.
    """
    lanes = bandwidths(
        directory, refresh=refresh, progress=progress
    )  # first, since its error best says what is wrong with a directory
    return MachineReport(places=_devices() + _tiers(Path(directory)), lanes=lanes, features=_features(directory))


def _devices() -> tuple[MeasuredPlace, ...]:
    described = [(backend_of(device), _described(backend_of(device))) for device in accelerators()]
    described = described or [(backend_of("cpu"), f"main memory, {os.cpu_count()} cores (no accelerator)")]
    return tuple(_place("device", description, backend) for backend, description in described)


def _described(backend: Backend) -> str:
    node = "" if backend.numa_node is None else f", NUMA node {backend.numa_node}"
    return f"{backend.device} {backend.name}{node}"


def _place(name: str, description: str, backend: Backend) -> MeasuredPlace:
    free_bytes, capacity_bytes = backend.memory_bytes()
    return MeasuredPlace(name=name, description=description, capacity_bytes=capacity_bytes, free_bytes=free_bytes)


def _tiers(directory: Path) -> tuple[MeasuredPlace, ...]:
    disk = shutil.disk_usage(directory)
    kind, shown = memory_file_system(directory), str(directory.resolve())
    description = f"{shown}: memory ({kind}), not a disk" if kind else shown
    places = [MeasuredPlace(name="disk", description=description, capacity_bytes=disk.total, free_bytes=disk.free)]
    if accelerators():
        places.insert(0, _place("host", "main memory", backend_of("cpu")))
    return tuple(places)


def _features(directory: str | os.PathLike[str]) -> tuple[Feature, ...]:
    kind = accelerator_type()
    reason = "PyTorch finds none" if kind is None else kind
    return (
        _direct_io(directory),
        Feature(name="accelerator", is_supported=kind is not None, reason=reason),
        gpu_direct_storage(directory),
        _module("triton", "device reads host memory in place (unified), relational kernels"),
        _compiler(),
    )


def _direct_io(directory: str | os.PathLike[str]) -> Feature:
    spill = SpillFile(directory)
    spill.close()
    if kind := memory_file_system(directory):
        where = f"{directory} is main memory ({kind}), not a disk; give a directory on an SSD"
        return Feature(name="direct I/O", is_supported=False, reason=where)
    reason = "O_DIRECT opens in" if spill.is_direct else "O_DIRECT is refused by the file system of"
    return Feature(name="direct I/O", is_supported=spill.is_direct, reason=f"{reason} {directory}")


def _module(name: str, purpose: str) -> Feature:
    is_installed = importlib.util.find_spec(name) is not None
    return Feature(
        name=name, is_supported=is_installed, reason=purpose if is_installed else f"not installed ({purpose})"
    )


def _compiler() -> Feature:
    return Feature(name="C compiler", is_supported=find_compiler() is not None, reason=describe_compiler())
