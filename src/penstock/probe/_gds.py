"""A test whether a CUDA device and a disk can exchange bytes without main memory between them.

cuFile, under ``torch.cuda.gds``, also "works" where the kernel does not support it: it then copies through main memory
by itself, more slowly than our own staging. So this module first looks for the kernel module, and then compares the
bytes of a round trip.
"""

import functools
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.arguments import checked
from penstock.directio import DeviceFile, SpillFile

_MODULE = Path("/proc/driver/nvidia-fs/version")
_TRIAL_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A feature that a machine may support."""

    name: str
    """Name of the feature."""
    is_supported: bool
    """Whether it works here."""
    reason: str
    """Why it does not work, or how it was tested."""


@checked("penstock.probe.gpu_direct_storage('/nvme')")
def gpu_direct_storage(directory: str | os.PathLike[str]) -> Feature:
    """Return whether GPUDirect Storage works between the current CUDA device and ``directory``.

    Tried once per process.
    """
    return _tried(Path(directory).resolve())


@functools.cache
def _tried(directory: Path) -> Feature:
    trouble = _trouble(directory)
    reason = trouble or f"1 MiB went from the device to {directory} and back unchanged"
    return Feature(name="GPUDirect Storage", is_supported=not trouble, reason=reason)


def _trouble(directory: Path) -> str:
    """Return why it does not work; empty if it does."""
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    if not _MODULE.exists():
        return "the nvidia-fs kernel module is not loaded"
    spill = SpillFile(directory)
    try:
        if spill.memory_kind:
            return f"{directory} is main memory ({spill.memory_kind}), not a disk"
        if not spill.is_direct:
            return f"O_DIRECT is refused by the file system of {directory}"
        spill.grow(_TRIAL_BYTES)
        return _round_trip_trouble(spill)
    except (OSError, RuntimeError) as error:
        return f"torch.cuda.gds: {str(error).splitlines()[0]}"
    finally:
        spill.close()


def _round_trip_trouble(spill: SpillFile) -> str:
    file = DeviceFile(spill)
    try:
        sent = torch.randint(0, 256, (_TRIAL_BYTES,), dtype=torch.uint8, device="cuda")
        back = torch.zeros_like(sent)
        torch.cuda.synchronize()
        file.write(sent.untyped_storage(), 0)
        file.read(back.untyped_storage(), 0)
        return "" if torch.equal(sent, back) else "bytes came back changed"
    finally:
        file.close()
