"""An offloader for a training loop that others own: it measures anew when needed, sums up, and always ends."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from torch import nn

from penstock import offload
from penstock.arguments import checked
from penstock.tiers import Budget, TierStatistics
from penstock.units import format_bytes

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadSummary:
    """The sums over a whole run of offloaded training. Sizes are bytes, durations seconds."""

    num_cycles: int
    """Number of forwards with backward, usually micro-batches."""
    parked_bytes: int
    """Bytes copied out of the device in total."""
    written_to_disk_bytes: int
    """Bytes of these that were written to disks, which wears an SSD."""
    stall_s: float
    """Seconds that the computation waited for copies."""
    busy_s: float
    """Seconds between the first tensor saved and the last one used, over all cycles."""
    peak_bytes: int | None
    """Highest measured device peak: of all cycles on CUDA, on a CPU while a budget is fitted; else ``None``."""
    planned_peak_bytes: int | None
    """The same for cycles that followed a plan."""
    declined: str
    """The reason why nothing was offloaded in the end; empty if something was."""

    def __str__(self) -> str:
        if self.declined and not self.parked_bytes:
            return f"Penstock offloaded nothing in {self.num_cycles} micro-batches: {self.declined}"
        peak = "" if self.peak_bytes is None else f", highest peak {format_bytes(self.peak_bytes)}"
        if self.planned_peak_bytes is not None:
            peak = f", peak {format_bytes(self.planned_peak_bytes)} since it was planned{peak}"
        then = f". It then offloaded nothing: {self.declined}" if self.declined else ""
        return (
            f"Penstock parked {format_bytes(self.parked_bytes)} in {self.num_cycles} micro-batches, "
            f"{format_bytes(self.written_to_disk_bytes)} of it on disk; stalls took {self.stall_share:.1%}{peak}{then}"
        )

    @property
    def stall_share(self) -> float:
        """Share of the busy time that the computation waited, from 0 to 1."""
        return self.stall_s / self.busy_s if self.busy_s else 0.0

    def figures(self) -> dict[str, float]:
        """Return numbers for a log: ``total_parked_gib``, ``total_written_gib``, ``stall_share`` and peaks."""
        figures = {
            "total_parked_gib": self.parked_bytes / _GIB,
            "total_written_gib": self.written_to_disk_bytes / _GIB,
            "stall_share": self.stall_share,
        }
        return figures | _peaks(self.planned_peak_bytes or self.peak_bytes, self.peak_bytes)


class LoopOffloader:
    """An ``offload.activations`` for a loop of micro-batches and optimizer steps. Enter it around each micro-batch.

    The optimizer's state, if it has any, appears in its first step, which loss scaling may skip. What was learned for a
    budget before then no longer holds, so the offloader is made anew after it.
    """

    @checked("LoopOffloader(model, {'disk': '/nvme'})")
    def __init__(self, model: nn.Module, options: Mapping[str, object]):
        self._model, self._options = model, dict(options)
        budget = options.get("budget")
        self._has_budget = (budget.device_bytes if isinstance(budget, Budget) else budget) is not None
        self._waits_for_optimizer = self._has_budget
        self._sums = _Sums()
        self._last: offload.OffloadStatistics | None = None
        self.offloader = self._make()

    def __enter__(self) -> Self:
        self.offloader.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.offloader.__exit__(kind, error, trace)
        if kind is None:
            self.note()

    @checked("loop.abort(error)")
    def abort(self, error: BaseException) -> None:
        """Give up a cycle that failed outside of the context."""
        self.offloader.__enter__()
        self.offloader.__exit__(type(error), error, error.__traceback__)

    def note(self) -> bool:
        """End the cycle if backward is over, and add it to the sums; return whether it was over."""
        self._last = self.offloader.statistics()
        return self._sums.add(self._last)

    def optimizer_has_state(self) -> None:
        """Note that the optimizer has state. Call it between micro-batches, any number of times.

        It takes effect once no graph waits for backward.
        """
        if self._waits_for_optimizer and not self.offloader.tier_statistics().num_live_handles:
            self._waits_for_optimizer = False
            self.close()
            self._sums.begin_anew(self.offloader.tier_statistics())
            self.offloader = self._make()

    def figures(self) -> dict[str, float]:
        """Return numbers of the last micro-batch for a log: ``parked_gib``, ``stall_share`` (since the last call), and
        peaks.

        ``peak_gib`` is the highest peak measured since there is a plan, else what the plan predicts.
        ``highest_peak_gib`` is the highest of all, recorded micro-batches included. Both are left out if they are not
        known, as on a CPU without a budget.
        """
        did = self._last
        if did is None:
            return {}
        figures = {"parked_gib": did.parked_bytes / _GIB, "stall_share": self._sums.take_stall_share()}
        promised_bytes = did.predicted_peak_bytes if self._has_budget else None
        sums = self._sums
        return figures | _peaks(sums.planned_peak_bytes or promised_bytes or sums.peak_bytes, sums.peak_bytes)

    def summary(self) -> OffloadSummary:
        """Return the sums over the run so far."""
        declined = "" if self._last is None else self._last.declined
        return self._sums.summary(self.offloader.tier_statistics(), declined)

    def close(self) -> None:
        """End the lanes, free the disk space and remove all hooks. May be called again."""
        self.offloader.close()

    def _make(self) -> offload.Offloader:
        return offload.activations(self._model, **self._options)  # type: ignore[arg-type]


class _Sums:
    """The sums over all cycles of a run, of which an offloader may see only the first or the last ones."""

    def __init__(self) -> None:
        self._num_cycles = self._num_seen = 0
        self._stall_s = self._busy_s = 0.0
        self._logged_stall_s = self._logged_busy_s = 0.0
        self._closed_parked_bytes = self._closed_written_bytes = 0
        self.peak_bytes: int | None = None
        """Highest measured peak; ``None`` if none was measured."""
        self.planned_peak_bytes: int | None = None
        """The same for cycles that followed a plan."""

    def add(self, did: offload.OffloadStatistics) -> bool:
        """Add a cycle that has ended since the last call; return whether one has."""
        num_new, self._num_seen = did.num_steps - self._num_seen, did.num_steps
        if num_new:
            self._num_cycles += num_new
            self._stall_s += did.stall_s
            self._busy_s += did.step_s
            self.peak_bytes = max(did.peak_bytes or 0, self.peak_bytes or 0) or None
            if did.is_planned:
                self.planned_peak_bytes = max(did.peak_bytes or 0, self.planned_peak_bytes or 0) or None
        return num_new > 0

    def begin_anew(self, tiers: TierStatistics) -> None:
        """Keep the bytes of an offloader that is closed; the next one counts from 0."""
        self._closed_parked_bytes, self._closed_written_bytes = tiers.parked_bytes, tiers.written_to_disk_bytes
        self._num_seen = 0

    def take_stall_share(self) -> float:
        """Return the share of the busy time since the last call that the computation waited."""
        busy_s, stall_s = self._busy_s - self._logged_busy_s, self._stall_s - self._logged_stall_s
        self._logged_stall_s, self._logged_busy_s = self._stall_s, self._busy_s
        return stall_s / busy_s if busy_s else 0.0

    def summary(self, tiers: TierStatistics, declined: str) -> OffloadSummary:
        """Return all sums; ``tiers`` has the bytes of the present offloader."""
        return OffloadSummary(
            num_cycles=self._num_cycles,
            parked_bytes=self._closed_parked_bytes + tiers.parked_bytes,
            written_to_disk_bytes=self._closed_written_bytes + tiers.written_to_disk_bytes,
            stall_s=self._stall_s,
            busy_s=self._busy_s,
            peak_bytes=self.peak_bytes,
            planned_peak_bytes=self.planned_peak_bytes,
            declined=declined,
        )


def _peaks(planned_bytes: int | None, highest_bytes: int | None) -> dict[str, float]:
    peaks = {"peak_gib": planned_bytes, "highest_peak_gib": highest_bytes}
    return {name: size_bytes / _GIB for name, size_bytes in peaks.items() if size_bytes is not None}


def check_options(function: Any, num_positional: int, options: Mapping[str, object]) -> None:  # any: a callable
    """Raise ``TypeError`` for an option that ``function`` does not take, now and not only when training begins."""
    try:
        inspect.signature(function).bind(*[None] * num_positional, **options)
    except TypeError as error:
        taken = list(inspect.signature(function).parameters)[num_positional:]
        raise TypeError(f"{error}; the options are {', '.join(taken)}") from None
