"""Bytes of an optimizer's state, also before its first step."""

import torch

from penstock.arguments import checked
from penstock.stepping import state_bytes


@checked("penstock.remat.optimizer_state_bytes(optimizer)")
def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the device bytes of the state of ``optimizer``, as it is, or as it will be after its next step.

    What a step will make is known of PyTorch's own optimizers. Of others, only what exists counts.
    """
    return state_bytes(optimizer)
