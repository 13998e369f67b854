"""The peak of single steps, measured: what runs outside of planned graphs works with memory that is in no plan.

A step is measured from its call to the optimizer's step, or to the next call, on one thread. On a CPU that takes
PyTorch's profiler, of which there can be one at a time, so a step is let go by while the user's own runs, and ours
gives way to `probe`. (Ending it where backward ends is no way: autograd puts the thread's state back then, a running
profiler included.)
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
    """Measures one step at a time."""

    def __init__(self, when_done: Callable[[int], None]):
        self._when_done = when_done
        """Given the bytes that the step took at its peak beside what stood before."""
        self._open: contextlib.ExitStack | None = None
        self._recording: MemoryRecording | None = None
        self._thread = 0
        """Whose step is measured. A profiler ends where it began."""

    def begin(self, device: torch.device) -> bool:
        """Starts to measure, if no other step is being measured; ``False`` while somebody else profiles."""
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
        """The step is over, if it is this thread's."""
        recording = self._recording
        if self.cancel() and recording is not None:
            self._when_done(recording.report.activation_bytes)

    def cancel(self) -> bool:
        """Forgets the step that is being measured, if it is this thread's."""
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
