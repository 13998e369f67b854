"""A gate that keeps tracing and computing apart in time.

While ``torch.export`` or Dynamo traces, it patches modules, switches oneDNN off and sets other flags for the whole
process. Another thread that computes meanwhile would take other code paths, and its results would differ in the last
bits. So computing threads enter the gate together, and a tracing thread enters alone.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from penstock.arguments import must_be
from penstock.forks import renewed_in_child


class Gate:
    """A lock that many computing threads or one tracing thread can hold.

    A waiting tracer goes before new computing threads.
    """

    may_trace = False
    """Whether a planned step is being called: Dynamo may then trace, although PyTorch reports that it does not."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._num_computing = 0
        self._num_waiting = 0
        self._is_tracing = False
        self._mine = _ThreadAtGate()
        self._all.add(self)

    @contextmanager
    def computing(self, *, is_awaited: bool = False) -> Iterator[None]:
        """Hold the gate while computing.

        May be nested, and entered by a tracing thread or a thread of autograd's backward. ``is_awaited`` says that a
        computing thread may wait for this one, which then goes before waiting tracers.
        """
        if not isinstance(is_awaited, bool):
            raise must_be("is_awaited", "True or False", is_awaited, "with penstock.tiers.gate.computing():")
        mine = self._mine
        if mine.depth or mine.is_tracing:
            mine.depth += 1
            try:
                yield
            finally:
                mine.depth -= 1
            return
        is_backward = torch._C._current_graph_task_id() != -1  # backward's caller is computing, and waits for us
        jumps_queue = is_awaited or is_backward
        with self._condition:
            self._condition.wait_for(lambda: not self._is_tracing and (jumps_queue or not self._num_waiting))
            self._num_computing += 1
        mine.depth = 1
        try:
            yield
        finally:
            mine.depth = 0
            self._change(-1)

    @property
    def others_compute(self) -> bool:
        """Whether another thread is computing now."""
        return self._num_computing > bool(self._mine.depth)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Hold the gate while tracing, after waiting for all other threads that compute. May be nested."""
        mine = self._mine
        if mine.is_tracing:
            yield
            return
        with self.released():
            with self._condition:
                self._num_waiting += 1
                try:
                    self._condition.wait_for(lambda: not self._is_tracing and not self._num_computing)
                    self._is_tracing = True
                finally:  # if interrupted, others need not wait
                    self._num_waiting -= 1
                    self._condition.notify_all()
            mine.is_tracing = True
            try:
                yield
            finally:
                mine.is_tracing = False
                with self._condition:
                    self._is_tracing = False
                    self._condition.notify_all()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Leave the gate for a while, so that other threads may trace; on exit, wait until nobody traces."""
        mine = self._mine
        if not mine.depth or mine.is_tracing:
            yield
            return
        depth, mine.depth = mine.depth, 0
        self._change(-1)
        try:
            yield
        finally:
            with self._condition:
                try:
                    self._condition.wait_for(lambda: not self._is_tracing)
                finally:  # if interrupted, it computes all the same
                    self._num_computing += 1
                    mine.depth = depth

    def _change(self, number: int) -> None:
        with self._condition:
            self._num_computing += number
            self._condition.notify_all()

    def _forget(self) -> None:
        """Reset the gate in a forked child, where the threads inside do not exist."""
        self._condition = threading.Condition()
        self._num_computing = self._num_waiting = 0
        self._is_tracing = False
        self._mine = _ThreadAtGate()

    _all = renewed_in_child(_forget)


class _ThreadAtGate(threading.local):
    """The state of the current thread at one gate."""

    depth = 0
    """How many times this thread has entered ``computing``."""
    is_tracing = False


gate = Gate()
"""The gate of this process."""
