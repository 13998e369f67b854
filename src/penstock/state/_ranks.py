"""The order in which pages leave the device: the one that is needed last leaves first."""

import heapq
import itertools
import math
from collections.abc import Callable, Iterable

from penstock.state._copies import Copies
from penstock.state._order import StepOrder
from penstock.state._page import Page, PageState

_DYING_NEEDS = 16
"""Operators for which a page that nobody needs again stays. Most such pages are freed by then, without a copy."""
_MAX_OLD_ENTRIES = 4096


class Ranks:
    """Pages on the device by rank, in a heap that also has entries with outdated ranks."""

    def __init__(self) -> None:
        self.order: StepOrder | None = None
        """The order that all pages were ranked by."""
        self._heap: list[tuple[float, int, Page]] = []
        self._entry = itertools.count()

    def is_full_of_old(self, num_pages: int) -> bool:
        """Return whether there are so many outdated entries that all pages should be ranked anew."""
        return len(self._heap) > 4 * num_pages + _MAX_OLD_ENTRIES

    def rank(self, page: Page, order: StepOrder | None, position: int, *, is_new: bool = False) -> None:
        """Rank a page at ``position`` in the step's order; without an order, rank it by its last use."""
        self.put(page, page.last_use if order is None else -order.next_use(page.key, position, is_new=is_new))

    def put(self, page: Page, rank: float) -> None:
        """Give a page its rank."""
        page.rank = rank
        heapq.heappush(self._heap, (rank, next(self._entry), page))

    def rank_all(self, pages: Iterable[Page], order: StepOrder | None, position: int) -> None:
        """Rank all pages that are on the device anew, and drop outdated entries."""
        self.order = order
        self._heap.clear()
        for page in pages:
            if page.held_bytes():
                self.rank(page, order, position)

    def first(
        self,
        stays: Callable[[Page], bool],
        copies: Copies,
        *,
        now: int,
        later_than: int | None = None,
        is_urgent: bool = False,
    ) -> Page | None:
        """Return the page that leaves next, if its next use comes after ``later_than``. Dead pages are dropped.

        A page that is not needed again gets some time to be freed, unless ``is_urgent``. ``now`` is the number of
        operators so far.
        """
        put_back, victim = [], None
        while self._heap and victim is None:
            entry = heapq.heappop(self._heap)
            rank, _, page = entry
            if rank != page.rank or not page.held_bytes() or page.state is PageState.LEAVING:
                continue
            if page.wide is not None and page.wide.is_dead:
                copies.drop(page.wide)  # only this page may have kept that one
                page.wide = None
            if page.is_dead:
                copies.drop(page)
            elif later_than is not None and -rank <= later_than:
                put_back.append(entry)
                break
            elif stays(page) or (rank == -math.inf and page.last_use + _DYING_NEEDS > now and not is_urgent):
                put_back.append(entry)
            else:
                victim = page
        for entry in put_back:
            heapq.heappush(self._heap, entry)
        return victim
