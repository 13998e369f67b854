"""Checkpoints of optimizers that step whole: their own ``state_dict``, if that tells all of them."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from penstock.checkpoints import decode, encode
from penstock.errors import PenstockWarning
from penstock.stepping import own_class

Json = Any  # any: what JSON holds


def stored(master: torch.optim.Optimizer, *, warns: bool) -> tuple[Json, dict[str, torch.Tensor]]:
    """Return the optimizer's state as JSON and tensors; or why there is none, which is also told if ``warns``."""
    tensors: dict[str, torch.Tensor] = {}
    try:
        return {"state": encode(_state_of(master), _keeping(tensors))}, tensors
    except Exception as error:  # state_dict() is the user's
        reason = f"{type(master).__name__}: {error}"
    if warns:
        warnings.warn(
            f"checkpoints hold the weights of a job, but not all that its optimizer keeps ({reason}). A fleet that is "
            "resumed cannot continue the job",
            PenstockWarning,
            stacklevel=2,
        )
    return {"refused": reason}, {}


def load(master: torch.optim.Optimizer, known: Json, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give an optimizer the state that was stored. Raise ``ValueError`` if it does not have it afterwards."""
    if "refused" in known:
        raise ValueError(f"it holds the weights, but not all that the optimizer kept ({known['refused']})")
    master.load_state_dict(decode(known["state"], tensors))
    again: dict[str, torch.Tensor] = {}
    is_same = encode(master.state_dict(), _keeping(again)) == known["state"]
    if not is_same or not all(torch.equal(again[name], tensors[name]) for name in again):
        raise ValueError(f"{type(master).__name__}.load_state_dict() does not restore what its state_dict() said")


def _state_of(master: torch.optim.Optimizer) -> Json:
    """Return the optimizer's ``state_dict``. Raise ``TypeError`` if it keeps more than that."""
    if own_class(master) is None and type(master).state_dict is torch.optim.Optimizer.state_dict:
        usual = vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
        for key, value in vars(master).items():
            if key not in usual and key not in ("step", "_opt_called"):  # what schedulers add
                raise TypeError(f"it keeps {key} = {value!r:.60}, which its state_dict() does not have")
    return master.state_dict()


def _keeping(tensors: dict[str, torch.Tensor]) -> Any:  # any: the function that `encode` takes
    """Return a function that puts strided tensors into ``tensors`` and names them."""

    def keep(tensor: torch.Tensor) -> str | None:
        if tensor.layout is not torch.strided or type(tensor.data) is not torch.Tensor:
            raise TypeError(f"it keeps a {type(tensor).__name__} of {tensor.layout}")
        tensors[str(len(tensors))] = tensor.detach().cpu().contiguous().clone()
        return str(len(tensors) - 1)

    return keep
