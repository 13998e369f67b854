"""The peak of single steps with an eager rest, measured: what eager operators work with is in no plan.

A step is measured from its call to the optimizer's step, or to the next call. On a CPU that takes PyTorch's profiler,
of which there can be one at a time, so a step is let go by while the user's own runs, and ours gives way to `probe`.
(Ending it where backward ends is no way: autograd puts the thread's state back then, a running profiler included.)
"""

import contextlib
from collections.abc import Callable

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from penstock.probe import MemoryRecording, can_record, giving_way, record_memory


class StepMeter:
    """Measures one step at a time."""

    def __init__(self, when_done: Callable[[int], None]):
        self._when_done = when_done
        """Given the bytes that the step took at its peak beside what stood before."""
        self._open: contextlib.ExitStack | None = None
        self._recording: MemoryRecording | None = None

    def begin(self, device: torch.device) -> bool:
        """Starts to measure; ``False`` while somebody else profiles."""
        self.cancel()
        if not can_record(device):
            return False
        self._open = contextlib.ExitStack()
        self._recording = self._open.enter_context(record_memory(device))
        self._open.enter_context(giving_way(self.cancel))
        hook = register_optimizer_step_pre_hook(lambda *_: self.end())
        self._open.callback(hook.remove)
        return True

    def end(self) -> None:
        """The step is over."""
        recording = self._recording
        self.cancel()
        if recording is not None:
            self._when_done(recording.report.activation_bytes)

    def cancel(self) -> None:
        """Forgets the step that is being measured."""
        opened, self._open, self._recording = self._open, None, None
        if opened is not None:
            opened.close()
