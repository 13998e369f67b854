"""What all but pages takes of a device, from operator to operator of one step."""

import contextlib
import threading
import time
from collections.abc import Sequence

import torch

from penstock.devices import PeakWatch, backend_of
from penstock.offload._pages import Pages
from penstock.probe import MemoryRecording, record_memory


class Meter:
    """What all but pages takes of a device, from operator to operator of one step."""

    def __init__(self, pages: Pages, device: torch.device):
        self._pages, self._taken = pages, contextlib.ExitStack()
        self._ready: list[tuple[float, int]] = []
        """When pages were there for an operator, and what they took."""
        self._is_noted: list[bool] = []
        """Whether that operator has a place in the order; else it belongs to the one before."""
        self._until: list[float] = []
        """When the next one asked."""
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
        pages.before_need, pages.after_need = self._before, self._after

    def _before(self) -> None:
        if self._recording is not None and threading.get_ident() != self._thread:
            self._is_disturbed = True  # the profiler does not see what another thread frees, which saves, say
        self._until.append(time.time())
        if self._watch is not None:
            self._peaks.append(self._watch.peaks().allocated_bytes)

    def _after(self, is_noted: bool) -> None:
        self._is_noted.append(is_noted)
        self._ready.append((time.time(), self._pages.held_bytes()))
        if self._watch is not None:
            self._watch.restart()

    def close(self, *, is_whole: bool) -> list[int]:
        """The bytes of all else at each operator and up to the next; none of a step that failed or was disturbed."""
        self._before()
        self._pages.before_need = self._pages.after_need = None
        self._taken.close()
        is_complete = len(self._until) == len(self._ready) + 1  # not after an error, or one that was caught
        if not is_whole or self._is_disturbed or not is_complete:
            return []
        if self._watch is not None:
            self.peak_bytes = max(self._peaks)
            return self._by_place([peak - held for peak, (_, held) in zip(self._peaks[1:], self._ready, strict=True)])
        assert self._recording is not None
        report = self._recording.report
        self.peak_bytes = report.peak_bytes
        return self._by_place(_between(report.timeline, report.start_bytes, self._ready, self._until[1:]))

    def _by_place(self, sizes: list[int]) -> list[int]:
        found, before = list[int](), 0
        for size_bytes, is_noted in zip(sizes, self._is_noted, strict=True):
            if is_noted:
                found.append(max(before, size_bytes, 0))
                before = 0
            elif found:
                found[-1] = max(found[-1], size_bytes)
            else:
                before = max(before, size_bytes)
        return found


def _between(
    timeline: Sequence[tuple[float, int]], start_bytes: int, ready: Sequence[tuple[float, int]], until: Sequence[float]
) -> list[int]:
    """The most that a timeline had in each span, less what pages took."""
    found, place, total = [], 0, start_bytes
    for (from_s, held), to_s in zip(ready, until, strict=True):
        while place < len(timeline) and timeline[place][0] <= from_s:
            total = timeline[place][1]
            place += 1
        most = total
        while place < len(timeline) and timeline[place][0] <= to_s:
            total = timeline[place][1]
            most = max(most, total)
            place += 1
        found.append(max(0, most - held))
    return found
