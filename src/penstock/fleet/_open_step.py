"""The optimizer step to which a job's mini-batches are adding."""

from dataclasses import dataclass

import torch

from penstock.fleet._groups import Group
from penstock.fleet._job import Job
from penstock.fleet._memory import Item
from penstock.fleet._packed import Packed


@dataclass(slots=True)
class Scale:
    """Loss scaling for float16, as ``torch.amp.GradScaler`` does it."""

    value: float = 65536.0
    num_good: int = 0

    def update(self, is_finite: bool) -> None:
        """Update the scale after a step, or after one that had to be skipped."""
        if not is_finite:
            self.value, self.num_good = self.value * 0.5, 0
        else:
            self.num_good += 1
            if self.num_good == 2000:
                self.value, self.num_good = self.value * 2.0, 0


class OpenStep:
    """Gradients and losses of the mini-batches since the last step."""

    def __init__(self, job: Job):
        self.gradients: dict[Group, Packed] = {}
        self.scale = Scale() if job.precision == "float16" else None
        self.norms: dict[str, torch.Tensor] = {}
        """Norms of the gradients, on the devices that measured them."""
        self.is_finite = True
        """Whether all gradients are finite."""
        self._accumulate = job.accumulate
        self._losses: list[float] = []

    def add_loss(self, loss: float) -> None:
        """Add the loss of a mini-batch."""
        self._losses.append(loss / self._accumulate)

    def end(self) -> float:
        """Begin another step after this one, and return the loss of this one. Its gradients were used up before."""
        loss = sum(self._losses)
        self._losses, self.norms = [], {}
        if self.scale is not None:
            self.scale.update(self.is_finite)
        self.is_finite = True
        return loss

    def drop(self) -> list[Item]:
        """Forget the mini-batches. Return the items of their gradients, so that the caller can free them."""
        items = [packed.item for packed in self.gradients.values()]
        self.gradients, self.norms, self._losses, self.is_finite = {}, {}, [], True
        return items
