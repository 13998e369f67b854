"""The steps of a training so far, in numbers."""

import time
from collections.abc import Mapping

from torch import nn

from penstock.state import Copies, PageKind, Replay
from penstock.training._statistics import TrainingStatistics

_Moved = tuple[Mapping[PageKind, int], Mapping[PageKind, int]]
"""Bytes fetched and parked, by kind of page."""


class TrainingProgress:
    """The number of steps, the time from the first to the last, and the bytes that the last one moved."""

    def __init__(self, copies: Copies):
        self.num_steps = 0
        self.peak_bytes: int | None = None
        """Device peak of the last measured step."""
        self._copies = copies
        self._begun_s: float | None = None
        self._ended_s = 0.0
        self._last: _Moved = ({}, {})
        self._before: _Moved = ({}, {})

    def begin_step(self) -> None:
        """Note when the first step begins."""
        if self._begun_s is None:
            self._begun_s = time.perf_counter()

    def end_step(self) -> None:
        """Count a step that ended without an error."""
        self.num_steps += 1
        self._ended_s = time.perf_counter()
        now = dict(self._copies.fetched_bytes), dict(self._copies.parked_bytes)
        fetched, parked = (
            {kind: size - before.get(kind, 0) for kind, size in moved.items()}
            for moved, before in zip(now, self._before, strict=True)
        )
        self._last, self._before = (fetched, parked), now

    def statistics(
        self,
        model: nn.Module,
        replay: Replay,
        *,
        state_bytes: int,
        written_to_disk_bytes: int,
        num_host_updates: int | None,
    ) -> TrainingStatistics:
        """Return what the training of ``model`` has done so far."""
        fetched, parked = self._last
        return TrainingStatistics(
            num_steps=self.num_steps,
            state_bytes=state_bytes,
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            fetched_bytes=sum(self._copies.fetched_bytes.values()),
            parked_bytes=sum(self._copies.parked_bytes.values()),
            step_fetched={kind.value: size for kind, size in fetched.items()},
            step_parked={kind.value: size for kind, size in parked.items()},
            written_to_disk_bytes=written_to_disk_bytes,
            stall_s=self._copies.stall_s,
            wall_s=0.0 if not self.num_steps or self._begun_s is None else self._ended_s - self._begun_s,
            num_host_updates=num_host_updates,
            held_bytes=self._copies.held_bytes,
            measured_peak_bytes=self.peak_bytes,
            num_planned_steps=replay.num_steps,
            predicted_step_s=replay.predicted_step_s,
        )
