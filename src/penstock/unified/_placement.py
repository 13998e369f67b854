"""Where an operator with unified operands runs: PyTorch-Direct's rules (arXiv 2101.07956, section 4), as one function.

| other operands | where it runs, and where its result is |
|---|---|
| any on a device | on that device |
| none on a device, one in host memory with at least one dimension | on the CPU |
| only CPU scalars (no dimension), or none | as the unified operands prefer; the device where they differ |
"""

from collections.abc import Iterable
from enum import Enum
from typing import Literal

import torch

from penstock.arguments import checked

Preference = Literal["device", "host"]
"""Where operators of unified operands alone run."""


class Operand(Enum):
    """What an operand is to the rules."""

    DEVICE = "on a device"
    HOST = "in host memory"
    SCALAR = "a CPU scalar"


@checked("penstock.unified.operand_of(tensor)")
def operand_of(tensor: torch.Tensor) -> Operand:
    """The kind of a plain tensor."""
    if tensor.device.type != "cpu":
        return Operand.DEVICE
    return Operand.HOST if tensor.dim() else Operand.SCALAR


@checked("penstock.unified.place([Operand.HOST], ['device'])")
def place(others: Iterable[Operand], preferences: Iterable[Preference]) -> Preference:
    """Where an operator runs; ``others`` are its operands that are not unified, ``preferences`` of those that are."""
    kinds = set(others)
    if Operand.DEVICE in kinds:
        return "device"
    if Operand.HOST in kinds:
        return "host"
    return "device" if "device" in set(preferences) else "host"
