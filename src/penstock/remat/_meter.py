"""A meter of the peak of single steps, because code outside of planned graphs uses memory that is in no plan.

A step is measured from its first call to the step of one of its optimizers, or to the first call of the next step, on
one thread. Optimizers that step in backward do not end it.
"""

import contextlib
import sys
import threading
from collections.abc import Callable

import torch

from penstock.probe import MemoryRecording, PeakReport, can_record, record_memory
from penstock.remat._capture import is_in_backward


class StepMeter:
    """A meter that measures one step at a time."""

    def __init__(self, when_done: Callable[[PeakReport], None]):
        self._when_done = when_done
        """A callback with what the step took."""
        self._open: contextlib.ExitStack | None = None
        self._recording: MemoryRecording | None = None
        self._thread = 0
        """The thread whose step is measured."""
        self._lock = threading.Lock()

    def begin(self, device: torch.device) -> bool:
        """Start to measure. Return ``False`` where that is not possible, on a CPU without compiled libraries."""
        self.cancel()
        if not can_record(device):
            return False
        with self._lock:
            if self._open is None:  # else another thread's step is being measured
                opened = contextlib.ExitStack()
                self._recording = opened.enter_context(record_memory(device))
                self._thread, self._open = threading.get_ident(), opened
        return True

    def end(self) -> None:
        """End the measurement, if it belongs to this thread and no backward is running."""
        recording = self._recording if self._thread == threading.get_ident() else None
        if recording is not None and not is_in_backward() and self.cancel():
            self._when_done(recording.report)

    def cancel(self) -> bool:
        """Cancel the measurement, if it belongs to this thread, and return whether it did."""
        opened = self._open
        if opened is None or self._thread != threading.get_ident():
            return False
        self._open = self._recording = None
        opened.close()
        return True

    def __del__(self) -> None:
        if not sys.is_finalizing():  # then the modules that a recording uses are going too
            self.cancel()
