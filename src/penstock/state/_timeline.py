"""The device memory of pages in the course of one step, for reports."""

import time
from collections.abc import Callable, Iterable

from penstock.state._order import StepOrder
from penstock.state._page import Page, PageKind

_MOST_SAMPLES = 300
Sample = tuple[float, dict[PageKind, int]]


class Timeline:
    """A recording of the first step that follows a measured order. Later steps of that kind are not recorded."""

    def __init__(self) -> None:
        self.samples: tuple[Sample, ...] = ()
        """Samples of the last recorded step: seconds since it began, and bytes by the kind of pages."""
        self._under_way: list[Sample] | None = None
        self._start_s, self._every, self._count = 0.0, 1, 0

    @property
    def is_recording(self) -> bool:
        """Whether the step under way is recorded."""
        return self._under_way is not None

    def begin(self, order: StepOrder | None, *, is_measured: bool) -> None:
        """Begin a step that is expected to follow ``order``."""
        self._under_way, self._start_s, self._count = None, time.perf_counter(), 0
        if order is not None and is_measured and not order.was_recorded:
            order.was_recorded = True
            self._under_way, self._every = [], 1 + len(order.needs) // _MOST_SAMPLES

    def sample(self, pages: Callable[[], Iterable[Page]]) -> None:
        """Record a sample of all ``pages()`` at an operator, if this step is recorded and it is time for one."""
        if self._under_way is None:
            return
        self._count += 1
        if self._count % self._every == 0:
            held = dict.fromkeys(PageKind, 0)
            for page in pages():
                held[page.kind] += page.held_bytes()
            self._under_way.append((time.perf_counter() - self._start_s, held))

    def end(self, *, is_whole: bool) -> None:
        """End the step."""
        if self._under_way and is_whole:
            self.samples = tuple(self._under_way)
        self._under_way = None
