"""Whether a CUDA device and a disk move bytes without main memory between them, found out by doing it.

cuFile, under ``torch.cuda.gds``, also "works" where the kernel cannot do it: it then copies through main memory by
itself, more slowly than our own staging. So the kernel module is asked for first, and a round trip is compared.
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
    """Something that a machine may support."""

    name: str
    """What it is."""
    is_supported: bool
    """Whether it works here."""
    reason: str
    """Why not, or how it was found out."""


@checked("penstock.probe.gpu_direct_storage('/nvme')")
def gpu_direct_storage(directory: str | os.PathLike[str]) -> Feature:
    """Whether GPUDirect Storage works between the current CUDA device and ``directory``. Tried once a process."""
    return _tried(Path(directory).resolve())


@functools.cache
def _tried(directory: Path) -> Feature:
    trouble = _trouble(directory)
    reason = trouble or f"1 MiB went from the device to {directory} and back unchanged"
    return Feature(name="GPUDirect Storage", is_supported=not trouble, reason=reason)


def _trouble(directory: Path) -> str:
    """Why it does not work; empty if it does."""
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
