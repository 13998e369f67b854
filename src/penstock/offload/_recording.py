"""A recording of what the hooks saw in one cycle, from the first tensor saved to the last one used.

A cycle is a training step, a micro-batch, or a whole pipeline schedule. It lies between two moments at which no saved
tensor waits for backward, or ends with its context, if backward has come by then.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.offload._problem import OffloadProblem, SavedStorage

Signature = tuple[tuple[int, str], ...]
"""Bytes and module of each storage that a cycle saved, in order. A plan fits cycles with an equal signature."""
LEFT = "parked: nobody has asked for it"
"""The reason for storages that no plan concerns: they leave at once, and no backward of their cycle needs them."""


@dataclass(slots=True)
class _Use:
    size_bytes: int
    label: str
    must_keep: str
    pack_event: int
    need_event: int = -1
    last_event: int = -1
    is_parked: bool = False

    @property
    def is_left(self) -> bool:
        """Whether it was parked, nobody has asked for it, and parking it frees memory."""
        return self.is_parked and self.need_event < 0 and not self.must_keep


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleTimes:
    """The times of a cycle's events."""

    computed_s: Sequence[float]
    """Seconds from the first event to each event, without waits."""
    clock_s: Sequence[float]
    """The same moments in seconds of ``time.time()`` with waits, to be matched with a memory timeline."""
    step_s: float
    """Seconds of the cycle, without waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """Device memory during a cycle, with times in seconds of ``time.time()``."""

    timeline: Sequence[tuple[float, int]]
    """Time of each change, and the bytes held after it."""
    parked_changes: Sequence[tuple[float, int]]
    """Changes in what handles held of it: parked storages until they left, and their fetched copies."""


class Recording:
    """The events of a cycle, numbered as they come. ``mark`` is called at each event if times are needed."""

    def __init__(self, mark: Callable[[], None] | None):
        self.num_events = 0
        self.uses: list[_Use] = []
        self._mark = mark

    def pack(self, size_bytes: int, label: str, must_keep: str) -> int:
        """Record that a storage was saved; return its index."""
        self.uses.append(_Use(size_bytes, label, must_keep, self._event()))
        return len(self.uses) - 1

    def need(self, index: int) -> None:
        """Record that backward asked for a storage, for the first time or again."""
        use, event = self.uses[index], self._event()
        if use.need_event < 0:
            use.need_event = event
        use.last_event = event

    @property
    def signature(self) -> Signature:
        """Sizes and labels so far, in order."""
        return tuple((use.size_bytes, use.label) for use in self.uses)

    def problem(
        self,
        times: CycleTimes,
        rates: tuple[float, float],
        memory: MeasuredMemory | None,
        settings: dict[str, Any],  # any: fields of several types
    ) -> OffloadProblem:
        """Return the planning problem, with ``memory`` also the device bytes outside of saved storages.

        ``settings`` are further fields of ``OffloadProblem``, which are passed on.
        """
        times_s, base = tuple(times.computed_s), self._base(times.clock_s, memory) if memory else ()
        if any(use.pack_event == self.num_events - 1 for use in self.uses):  # what is saved last has to end, too
            times_s, base = (*times_s, times_s[-1]), (*base, *base[-1:])
        return OffloadProblem(
            storages=tuple(self._storage(use, len(times_s), is_measured=bool(base)) for use in self.uses),
            event_times_s=times_s,
            step_s=times.step_s,
            out_bandwidth_bytes_per_s=rates[0],
            in_bandwidth_bytes_per_s=rates[1],
            base_bytes=base,
            **settings,
        )

    def _event(self) -> int:
        if self._mark is not None:
            self._mark()
        self.num_events += 1
        return self.num_events - 1

    def _storage(self, use: _Use, num_events: int, *, is_measured: bool) -> SavedStorage:
        never_needed = use.need_event < 0
        # what parking does not free is in the measured memory outside of saved storages
        is_beside = is_measured and use.is_parked and bool(use.must_keep)
        return SavedStorage(
            size_bytes=0 if use.is_left or is_beside else use.size_bytes,
            label=use.label,
            pack_event=use.pack_event,
            need_event=num_events - 1 if never_needed else use.need_event,
            free_event=num_events if never_needed else use.last_event + 1,
            must_keep=use.must_keep or (LEFT if use.is_left else ""),
        )

    def _base(self, clock_s: Sequence[float], memory: MeasuredMemory) -> tuple[int, ...]:
        """Return, for each event, the most device bytes outside of saved storages until the next event."""
        saved = list(memory.parked_changes)
        for use in self.uses:
            if not use.is_parked:
                saved.append((clock_s[use.pack_event], use.size_bytes))
            if 0 <= use.last_event < self.num_events - 1:
                saved.append((clock_s[use.last_event + 1], -use.size_bytes))
        changes = [(time_s, -size_bytes) for time_s, size_bytes in saved]
        before = 0
        for time_s, held_bytes in memory.timeline:
            changes.append((time_s, held_bytes - before))
            before = held_bytes
        changes.sort(key=lambda change: change[0])
        peaks = _peaks_between(clock_s, changes)
        for use in self.uses:
            if use.is_parked and (use.is_left or use.must_keep):  # its copy out was waited for
                peaks[use.pack_event] += use.size_bytes
        return tuple(peaks)


def _peaks_between(clock_s: Sequence[float], changes: Sequence[tuple[float, int]]) -> list[int]:
    """Return the highest running sum of ``changes`` between each event and the next (for the last one: to the end)."""
    peaks, position, held = [], 0, 0
    while position < len(changes) and changes[position][0] < clock_s[0]:
        held += changes[position][1]
        position += 1
    for event in range(len(clock_s)):
        end_s = clock_s[event + 1] if event + 1 < len(clock_s) else float("inf")
        peak = max(0, held)
        while position < len(changes) and changes[position][0] < end_s:
            held += changes[position][1]
            peak = max(peak, held)
            position += 1
        peaks.append(peak)
    return peaks
