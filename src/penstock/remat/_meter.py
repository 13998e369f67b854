"""A meter of the peak of single steps, because code outside of planned graphs uses memory that is in no plan.

A step is measured from its call to the optimizer's step, or to the next call, on one thread. On a CPU that needs
PyTorch's profiler, of which only one can run at a time. So a step is not measured while the user's own profiler runs,
and ours gives way to `probe`. (The measurement cannot end with backward: autograd then restores the thread's state,
including a running profiler.)
"""

import contextlib
import threading
import weakref
from collections.abc import Callable

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from penstock.probe import MemoryRecording, can_record, giving_way, record_memory

_one_at_a_time = threading.Lock()


class StepMeter:
    """A meter that measures one step at a time."""

    def __init__(self, when_done: Callable[[int], None]):
        self._when_done = when_done
        """A callback with the bytes that the step took at its peak, beyond those at its start."""
        self._open: contextlib.ExitStack | None = None
        self._recording: MemoryRecording | None = None
        self._thread = 0
        """The thread whose step is measured. A profiler must end in the thread where it began."""

    def begin(self, device: torch.device) -> bool:
        """Start to measure, unless another step is being measured. Return ``False`` while another profiler runs."""
        self.cancel()
        if not can_record(device):
            return False
        if _one_at_a_time.acquire(blocking=False):
            held = weakref.ref(self)  # what is registered below must not keep the step alive
            self._thread, self._open = threading.get_ident(), contextlib.ExitStack()
            self._open.callback(_one_at_a_time.release)
            self._recording = self._open.enter_context(record_memory(device))
            self._open.enter_context(giving_way(lambda: _of(held, StepMeter.cancel)))
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
