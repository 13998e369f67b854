"""Room on the device for pages: which ones leave, and which ones are fetched before anybody asks for them."""

import time
from collections.abc import Collection

from penstock.state._copies import Copies
from penstock.state._course import Course
from penstock.state._guard import allow_access
from penstock.state._pace import Pace
from penstock.state._page import Page
from penstock.state._register import Register

_AHEAD_BYTES = 256 * 2**20
"""The most bytes that are fetched ahead, or four pages. With small budgets it is an eighth of the budget."""


class PageSpace:
    """The device memory for pages. Pages of the operator that comes next (``stays``) never leave."""

    def __init__(self, register: Register, copies: Copies, course: Course, pace: Pace):
        self._register, self._copies, self._course = register, copies, course
        self._pace = pace
        self._largest_bytes = 0
        """The size of the largest page that was waited for."""

    def make(self, size_bytes: int, stays: Collection[Page], limit: int) -> None:
        """Wait until pages may take ``size_bytes`` more within the ``limit``, as far as others can leave."""
        copies, course = self._copies, self._course
        if copies.held_bytes + size_bytes <= limit:
            return
        copies.settle_finished()
        if copies.held_bytes + size_bytes <= limit:
            return
        start_s = time.perf_counter()
        if course.order is None:
            copies.sweep()
        while copies.held_bytes - copies.leaving_bytes + size_bytes > limit:
            victim = course.victim(stays) or course.victim(stays, is_urgent=True)
            if victim is None:
                break
            copies.leave(victim)
        while copies.held_bytes + size_bytes > limit and (leaving := copies.leaving()):
            self.settle(leaving[:1])
        copies.stall_s += time.perf_counter() - start_s

    def settle(self, pages: Collection[Page]) -> None:
        """Wait until the pages have left or turn out to be unable to."""
        for page in pages:
            if not self._copies.settle(page, self._course.count):
                self._course.rank(page)

    def look_ahead(self, stays: Collection[Page], position: int, now: int) -> None:
        """Begin to move out what is used last and to fetch what is used next, operator by operator.

        Neither moves out pages that are used before the position under consideration, nor takes memory that new pages
        need. ``now`` is the limit at ``position``. While pages that leave still take the room of those to be fetched,
        more leave: otherwise copies out and in would take turns.
        """
        copies, course = self._copies, self._course
        order = course.order
        if order is None or not order.others_bytes:
            return
        place = course.ahead = max(course.ahead, position + 1)
        begun = order.begun_between(position, place)
        waiting: dict[Page, None] = {}
        moved, waiting_bytes = 0, 0
        most_bytes = min(max(_AHEAD_BYTES, 4 * self._largest_bytes), course.budget_bytes // 8)
        while place < len(order.needs) and moved + begun + waiting_bytes < most_bytes:
            missing = self._missing(place, position)
            if missing is None:
                return
            begun += order.begun_bytes[place]
            for page in missing:
                self._largest_bytes = max(self._largest_bytes, page.size_bytes)
                if page not in waiting:
                    waiting[page] = None
                    waiting_bytes += page.size_bytes
            limit = min(now, course.limit(place))
            while copies.held_bytes - copies.leaving_bytes + begun + waiting_bytes > limit:
                victim = course.victim(stays, later_than=place)
                if victim is None:
                    return
                copies.leave(victim)
            if place == course.ahead:
                for page in missing:
                    if not self._has_room(page.size_bytes, now):
                        break
                    if not copies.prefetch(page):
                        return
                    moved += page.size_bytes
                    waiting_bytes -= page.size_bytes
                    del waiting[page]
                    course.rank(page, position + 1)
                else:
                    course.ahead += 1
            place += 1

    def _has_room(self, size_bytes: int, limit: int) -> bool:
        """Return whether leaving pages have left enough room by now."""
        copies = self._copies
        if copies.held_bytes + size_bytes > limit:
            self._pace.hold()
            copies.settle_finished()
        return copies.held_bytes + size_bytes <= limit

    def _missing(self, place: int, position: int) -> list[Page] | None:
        """Return the pages to be fetched for the operator at ``place``; ``None`` while the host works on one."""
        order = self._course.order
        assert order is not None
        missing: dict[Page, None] = {}
        for key in order.needs[place]:
            page = self._register.with_key(key)
            if page is None or order.begun.get(key, -1) > position:  # its next page does not exist yet
                continue
            parts = [page] if page.narrow is None or page.is_here else [part for _, part in page.narrow.parts[:1]]
            for part in parts:
                if part.held_bytes():
                    continue
                work = part.host_work
                if work is not None and not work.is_done:
                    return None
                missing[part] = None
        return [*missing]

    def add_up(self, page: Page, stays: Collection[Page], limit: int | None) -> None:
        """Fill a page with the sum of its parts, one after the other; ``limit`` of the bytes in pages, if any."""
        copies, course = self._copies, self._course
        storage = page.storage()
        assert page.narrow is not None
        if storage is None:
            copies.drop(page)
            return
        allow_access(page, storage)
        storage.resize_(page.size_bytes)
        copies.arrived(page)
        try:
            for number, (_, part) in enumerate(page.narrow.parts):
                part.last_use = course.count
                copies.stay(part)
                if not part.is_here:
                    if limit is not None:
                        self.make(part.size_bytes - part.held_bytes(), {*stays, part}, limit)
                    copies.fill(part, is_read=True)
                page.narrow.put(number, storage)
                course.rank(part)
        except BaseException:  # it will be made again
            copies.take_back(page, storage)
            raise
