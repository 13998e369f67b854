"""Offloading for the parts of a planned step that run eagerly. Only here do the two rooms know each other."""

from torch import nn

from penstock import offload
from penstock.arguments import checked
from penstock.tiers import Budget


@checked("offloading_of_the_rest(module, Budget(disk='/nvme'))")
def offloading_of_the_rest(module: nn.Module, account: Budget) -> offload.Offloader:
    """Return an offloader for what `penstock.remat.compile` leaves eager in ``module``, on the account of its plans.

    It moves as much as the budget requires, however little that saves and however much it stalls, since the plans rely
    on it.
    """
    return offload.activations(module, budget=account, min_saving=0.0, max_stall=1.0)
