"""Measurement of one step: for each operator, the device memory that is not in pages, and its time."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from penstock.devices import PeakWatch, backend_of
from penstock.probe import MemoryRecording, record_memory
from penstock.state._pages import Pages

_Number = TypeVar("_Number", int, float)


class OthersMeter:
    """A measurement of the device memory that is not in pages, and of the time, for each operator of one step.

    It is wide because memory, time and places are noted at the same two moments of each operator.
    """

    def __init__(self, pages: Pages, device: torch.device):
        self._pages, self._taken = pages, contextlib.ExitStack()
        self._ready: list[tuple[float, int]] = []
        """For each operator, the time at which its pages were there, and the bytes of all pages then."""
        self._is_noted: list[bool] = []
        """For each operator, whether it has a place in the order; if not, it counts as part of the one before."""
        self._until: list[float] = []
        """For each operator, the time at which it asked for its pages, which ends the span of the one before."""
        self._marks: list[tuple[Any, Any]] = []  # any: times of the host, or events of the device
        """For each operator, the time after its pages were there, and that before the next one's."""
        self._mark: Any = None
        """The first half of the pair to come."""
        self._peaks: list[int] = []
        self.peak_bytes = 0
        self._thread, self._is_disturbed = threading.get_ident(), False
        allocator = backend_of(device).allocator
        self._watch: PeakWatch | None = None
        self._recording: MemoryRecording | None = None
        if allocator is None:
            self._recording = self._taken.enter_context(record_memory(device))
        else:
            self._watch = self._taken.enter_context(allocator.watching())
        self._streams = backend_of(device).streams
        self._details = pages.course.record_details()
        pages.before_need, pages.after_need = self._before, self._after
        pages.copies.on_death = pages.course.died

    def _before(self) -> None:
        if self._recording is not None and threading.get_ident() != self._thread:
            self._is_disturbed = True  # what another thread allocates, as in saving, is not in the recording
        self._until.append(time.time())
        if self._mark is not None:
            self._marks.append((self._mark, self._now()))
        if self._watch is not None:
            self._peaks.append(self._watch.peaks().allocated_bytes)

    def _after(self, is_noted: bool) -> None:
        self._is_noted.append(is_noted)
        self._ready.append((time.time(), self._pages.copies.held_bytes))
        if self._watch is not None:
            self._watch.restart()
        self._mark = self._now()

    def _now(self) -> Any:  # any: see `_marks`
        return time.perf_counter() if self._streams is None else self._streams.record(self._streams.current())

    def _seconds(self) -> list[float]:
        streams = self._streams
        if streams is None:
            return [end - start for start, end in self._marks]
        if self._marks:
            streams.synchronize(self._marks[-1][1])
        return [streams.elapsed_s(start, end) for start, end in self._marks]

    def close(self, *, is_whole: bool) -> list[int]:
        """End the measurement; return, for each operator, the most bytes outside of pages until the next one.

        The list is empty for a step that failed or was disturbed.
        """
        self._before()
        self._pages.before_need = self._pages.after_need = self._pages.copies.on_death = None
        self._taken.close()
        is_complete = len(self._until) == len(self._ready) + 1  # false after an error, also one that was caught
        if not is_whole or self._is_disturbed or not is_complete:
            return []
        self._details.seconds = self._by_place(self._seconds(), sum)
        if self._watch is not None:
            self.peak_bytes = max(self._peaks)
            return self._by_place(
                [peak - held for peak, (_, held) in zip(self._peaks[1:], self._ready, strict=True)], max
            )
        assert self._recording is not None
        report = self._recording.report
        self.peak_bytes = report.peak_bytes
        return self._by_place(_between(report.timeline, report.start_bytes, self._ready, self._until[1:]), max)

    def _by_place(
        self, values: Sequence[_Number], joined: Callable[[tuple[_Number, _Number]], _Number]
    ) -> list[_Number]:
        """Return what is measured for each operator that has a place in the order, with those after it that have none,
        and for the first one also with those before it.
        """
        if not values:
            return []
        by_place, zero = list[_Number](), type(values[0])(0)
        before = zero
        for value, is_noted in zip(values, self._is_noted, strict=True):
            if is_noted:
                by_place.append(joined((before, value)))
                before = zero
            elif by_place:
                by_place[-1] = joined((by_place[-1], value))
            else:
                before = joined((before, value))
        return by_place


def _between(
    timeline: Sequence[tuple[float, int]], start_bytes: int, ready: Sequence[tuple[float, int]], until: Sequence[float]
) -> list[int]:
    """Return the most that a timeline had in each span, minus the bytes of pages."""
    most_beside, place, total = [], 0, start_bytes
    for (from_s, held), to_s in zip(ready, until, strict=True):
        while place < len(timeline) and timeline[place][0] <= from_s:
            total = timeline[place][1]
            place += 1
        most = total
        while place < len(timeline) and timeline[place][0] <= to_s:
            total = timeline[place][1]
            most = max(most, total)
            place += 1
        most_beside.append(max(0, most - held))
    return most_beside
