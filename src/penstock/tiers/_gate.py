"""Tracing beside computing: never at once.

While ``torch.export`` or Dynamo traces it patches modules, switches oneDNN off and sets other flags for the whole
process; what ran in another thread meanwhile would take other paths, and its results would differ in their last bits.
So whoever computes enters the gate together with others, and whoever traces alone.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Gate:
    """Many may be inside ``computing``, or one inside ``tracing``; one who wants to trace goes before new ones."""

    may_trace = False
    """While a planned step is called: Dynamo may trace, although whoever asks PyTorch is told that it does not."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._num_computing = 0
        self._num_waiting = 0
        self._is_tracing = False
        self._mine = _OfThread()
        os.register_at_fork(after_in_child=self._forget)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """May be nested, and entered by a thread that traces or one in which autograd runs backward."""
        mine = self._mine
        if mine.depth or mine.is_tracing:
            mine.depth += 1
            try:
                yield
            finally:
                mine.depth -= 1
            return
        jumps_queue = torch._C._current_graph_task_id() != -1  # whoever called backward computes, and waits for us
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
        """Whether another thread does now."""
        return self._num_computing > bool(self._mine.depth)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Waits for those who compute, but for this thread itself. May be nested."""
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
                finally:  # interrupted, others need not wait
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
        """Inside, this thread does not compute but waits, and lets others trace."""
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
                finally:  # interrupted, it computes all the same
                    self._num_computing += 1
                    mine.depth = depth

    def _change(self, number: int) -> None:
        with self._condition:
            self._num_computing += number
            self._condition.notify_all()

    def _forget(self) -> None:
        """In a forked child, where whoever was inside does not exist."""
        self._condition = threading.Condition()
        self._num_computing = self._num_waiting = 0
        self._is_tracing = False
        self._mine = _OfThread()


class _OfThread(threading.local):
    depth = 0
    """How often this thread entered ``computing``."""
    is_tracing = False


gate = Gate()
"""The gate of this process."""
