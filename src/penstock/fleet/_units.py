"""Interfaces between mini-batches and the code that runs their units."""

from typing import Protocol

import torch

from penstock.fleet._memory import Item
from penstock.fleet._problem import Task
from penstock.fleet._work import Work


class Between(Protocol):
    """A runner of mini-batches, which is notified of their tasks."""

    def begin(self, index: int) -> int:
        """Prepare task ``index``, which comes next: bring in what it needs.

        Returns the bytes that it takes in addition.
        """

    def compute(self, index: int) -> None:
        """Let the mini-batch `run` task ``index``. Not called for tasks that are part of one long call."""

    def end(self, index: int) -> None:
        """Learn that task ``index`` has ended."""


class MiniBatch(Protocol):
    """A mini-batch on its way through the model, or several that go together."""

    work: Work
    """The tensors and items that it works on; for several mini-batches, those of the last."""
    tasks: list[Task]
    """Its units, in the order in which they are expected."""

    @property
    def results(self) -> list[list[torch.Tensor]]:
        """The model's results for each mini-batch, without gradients."""

    def needs(self, index: int) -> list[Item]:
        """Return the items that task ``index`` works on, as far as they exist."""

    def plan_uses(self, index: int) -> None:
        """Set the next use of each item, counted in units from task ``index``."""

    def run_all(self, between: Between) -> None:
        """Run all tasks in order, and notify ``between`` of their begins and ends."""
        self._run_from(0, between)

    def run(self, index: int) -> None:
        """Run task ``index``. What it needs must be on the device."""

    def abandon(self) -> None:
        """Give back everything that is under way."""

    def _run_from(self, first: int, between: Between) -> None:
        for index in range(first, len(self.tasks)):
            between.begin(index)
            between.compute(index)
            between.end(index)
