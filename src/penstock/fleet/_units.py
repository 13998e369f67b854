"""The units of mini-batches as whoever runs them sees them."""

from typing import Protocol

import torch

from penstock.fleet._memory import Item
from penstock.fleet._problem import Task
from penstock.fleet._work import Work


class Between(Protocol):
    """Whoever runs mini-batches, as it is told of their tasks."""

    def begin(self, index: int) -> int:
        """Task ``index`` comes next: what it needs is brought in. Returns the bytes that it takes beside that."""

    def compute(self, index: int) -> None:
        """Lets the mini-batch `run` task ``index``; not called for tasks that are a part of one long call."""

    def end(self, index: int) -> None:
        """Task ``index`` has ended."""


class MiniBatch(Protocol):
    """A mini-batch on its way through the model, or several that go together."""

    work: Work
    """What it works on; of several, the last one's."""
    tasks: list[Task]
    """Its units, in the order in which they are expected."""

    @property
    def results(self) -> list[list[torch.Tensor]]:
        """What the model returned for each of them, without gradients."""

    def needs(self, index: int) -> list[Item]:
        """Items that task ``index`` works on, as far as they exist."""

    def plan_uses(self, index: int) -> None:
        """Tells items when they are used next, as seen before task ``index``, in units from now."""

    def run_all(self, between: Between) -> None:
        """Runs all tasks in order, and tells ``between`` where one begins and ends."""
        self._run_from(0, between)

    def run(self, index: int) -> None:
        """Runs task ``index``; what it needs is on the device."""

    def abandon(self) -> None:
        """Gives back whatever is under way."""

    def _run_from(self, first: int, between: Between) -> None:
        for index in range(first, len(self.tasks)):
            between.begin(index)
            between.compute(index)
            between.end(index)
