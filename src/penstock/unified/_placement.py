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
"""Where an operator runs if all its operands are unified."""


class Operand(Enum):
    """The kind of an operand, for these rules."""

    DEVICE = "on a device"
    HOST = "in host memory"
    SCALAR = "a CPU scalar"


@checked("penstock.unified.operand_of(tensor)")
def operand_of(tensor: torch.Tensor) -> Operand:
    """Return the kind of a plain tensor."""
    if tensor.device.type != "cpu":
        return Operand.DEVICE
    return Operand.HOST if tensor.dim() else Operand.SCALAR


@checked("penstock.unified.place([Operand.HOST], ['device'])")
def place(others: Iterable[Operand], preferences: Iterable[Preference]) -> Preference:
    """Return where an operator runs, from its operands that are not unified and the preferences of those that are."""
    kinds = set(others)
    if Operand.DEVICE in kinds:
        return "device"
    if Operand.HOST in kinds:
        return "host"
    return "device" if "device" in set(preferences) else "host"
