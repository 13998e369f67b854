"""A meter of the peak of single steps, because code outside of planned graphs uses memory that is in no plan.

A step is measured from its call to the optimizer's step, or to the next call, on one thread.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from penstock.probe import MemoryRecording, can_record, record_memory


class StepMeter:
    """A meter that measures one step at a time."""

    def __init__(self, when_done: Callable[[int], None]):
        self._when_done = when_done
        """A callback with the bytes that the step took at its peak, beyond those at its start."""
        self._open: contextlib.ExitStack | None = None
        self._recording: MemoryRecording | None = None
        self._thread = 0
        """The thread whose step is measured."""

    def begin(self, device: torch.device) -> bool:
        """Start to measure. Return ``False`` where that is not possible, on a CPU without compiled libraries."""
        self.cancel()
        if not can_record(device):
            return False
        held = weakref.ref(self)  # what is registered below must not keep the step alive
        self._thread, self._open = threading.get_ident(), contextlib.ExitStack()
        self._recording = self._open.enter_context(record_memory(device))
        self._open.callback(register_optimizer_step_pre_hook(lambda *_: _of(held, StepMeter.end)).remove)
        return True

    def end(self) -> None:
        """End the measurement, if it belongs to this thread."""
        recording = self._recording
        if self.cancel() and recording is not None:
            self._when_done(recording.report.activation_bytes)

    def cancel(self) -> bool:
        """Cancel the measurement, if it belongs to this thread, and return whether it did."""
        opened = self._open
        if opened is None or self._thread != threading.get_ident():
            return False
        self._open = self._recording = None
        opened.close()
        return True

    def __del__(self) -> None:
        self.cancel()


def _of(held: "weakref.ref[StepMeter]", what: Callable[[StepMeter], object]) -> None:
    meter = held()
    if meter is not None:
        what(meter)
