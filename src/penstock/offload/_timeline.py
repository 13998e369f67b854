"""What pages take of the device in the course of one step, for reports."""

import time
from collections.abc import Iterable

from penstock.offload._order import Order
from penstock.offload._page import Kind, Page

_MOST_SAMPLES = 300
Sample = tuple[float, dict[Kind, int]]


class Timeline:
    """Records the first step that follows an order which was measured, and no other of its kind."""

    def __init__(self) -> None:
        self.samples: tuple[Sample, ...] = ()
        """Of the last step that was recorded: seconds since it began, and bytes by what the pages are."""
        self._under_way: list[Sample] | None = None
        self._start_s, self._every, self._count = 0.0, 1, 0

    def begin(self, order: Order | None, *, is_measured: bool) -> None:
        """A step begins, which follows ``order``."""
        self._under_way, self._start_s, self._count = None, time.perf_counter(), 0
        if order is not None and is_measured and not order.was_recorded:
            order.was_recorded = True
            self._under_way, self._every = [], 1 + len(order.needs) // _MOST_SAMPLES

    def sample(self, pages: Iterable[Page]) -> None:
        """An operator comes."""
        if self._under_way is None:
            return
        self._count += 1
        if self._count % self._every == 0:
            held = dict.fromkeys(Kind, 0)
            for page in pages:
                held[page.kind] += page.held_bytes()
            self._under_way.append((time.perf_counter() - self._start_s, held))

    def end(self, *, is_whole: bool) -> None:
        """The step has ended."""
        if self._under_way and is_whole:
            self.samples = tuple(self._under_way)
        self._under_way = None
