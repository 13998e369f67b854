"""Which pages leave the device first: those that are asked for last."""

import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterable

from penstock.offload._order import Order
from penstock.offload._page import Page

_DYING_NEEDS = 16
"""For so many operators one stays that no operator asks for again: most are gone by then, with nothing to copy."""
_MAX_OLD_ENTRIES = 4096


class Ranks:
    """Pages on the device by rank, with entries of old ranks among them."""

    def __init__(self) -> None:
        self.order: Order | None = None
        """By which all were ranked."""
        self._heap: list[tuple[float, int, Page]] = []
        self._entry = itertools.count()

    def is_full_of_old(self, num_pages: int) -> bool:
        """Whether it is time to rank all anew."""
        return len(self._heap) > 4 * num_pages + _MAX_OLD_ENTRIES

    def rank(self, page: Page, order: Order | None, at: int, *, is_new: bool = False) -> None:
        """Gives it its place, at an operator of the order of the step; by its last use where that is none."""
        page.rank = page.last_use if order is None else -order.next_use(page.key, at, is_new=is_new)
        heapq.heappush(self._heap, (page.rank, next(self._entry), page))

    def rank_all(self, pages: Iterable[Page], order: Order | None, at: int) -> None:
        """The same of all that are on the device, of which there are no others."""
        self.order = order
        self._heap.clear()
        for page in pages:
            if page.held_bytes():
                self.rank(page, order, at)

    def first(
        self,
        stays: Callable[[Page], bool],
        leaving: Collection[Page],
        drop: Callable[[Page], None],
        *,
        now: int,
        later_than: int | None = None,
        is_urgent: bool = False,
    ) -> Page | None:
        """The page that leaves next, if it is asked for after that place. Dead ones are given to ``drop`` on the way.

        Unless it is urgent, one that is not asked for again has some time to die; ``now``: operators so far.
        """
        put_back, found = [], None
        while self._heap and found is None:
            entry = heapq.heappop(self._heap)
            rank, _, page = entry
            if rank != page.rank or not page.held_bytes() or page in leaving:
                continue
            if page.wide is not None and page.wide.is_dead:
                drop(page.wide)  # who alone may have kept it
            if page.is_dead:
                drop(page)
            elif later_than is not None and -rank <= later_than:
                put_back.append(entry)
                break
            elif stays(page) or (rank == -math.inf and page.last_use + _DYING_NEEDS > now and not is_urgent):
                put_back.append(entry)
            else:
                found = page
        for entry in put_back:
            heapq.heappush(self._heap, entry)
        return found
