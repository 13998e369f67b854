"""Steps that train a compiled model without calling it: by another of its methods, a part of it, or the original."""

import torch

from penstock.probe import PeakReport
from penstock.remat._measured import is_due
from penstock.remat._meter import StepMeter
from penstock.remat._session import Session


class Aside:
    """A watch on such steps, in which nothing is planned. Some are measured, from one optimizer's step to the next."""

    def __init__(self, session: Session):
        self._session = session
        self._meter = StepMeter(self._was_measured)
        self._nums_calls: dict[int, int] = {}
        """The number of calls of the model when an optimizer last stepped, by its identity."""
        self._num_steps = 0
        """Number of steps without a call so far."""
        self._num_calls = 0
        """The number of calls when the step began that is being measured."""

    def before_step(self) -> None:
        """Note that an optimizer of the model's parameters is about to step."""
        self._meter.end()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer of the model's parameters has stepped."""
        session, before = self._session, self._nums_calls.get(id(optimizer))
        self._nums_calls[id(optimizer)] = session.num_calls
        if before == session.num_calls and session.has_budget:
            self._num_steps += 1
            if is_due(self._num_steps) and self._meter.begin(session.device):
                self._num_calls = session.num_calls

    def close(self) -> None:
        """Measure nothing any more."""
        self._meter.cancel()

    def _was_measured(self, report: PeakReport) -> None:
        if self._num_calls == self._session.num_calls:
            self._session.ran_aside(report.peak_bytes)
