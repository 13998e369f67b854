"""Storages that stay where tensors expect them, but hold bytes on the device only while something works on them.

A page is one storage: of a parameter, a gradient, an optimizer's state or an activation. Tensors, views and autograd's
graph refer to the storage. So a page leaves by being emptied (``resize_(0)``) once a tier has its bytes, and comes back
by filling the same storage. Nothing else notices, and no version counter changes.

Before an operator runs, its pages are announced (`Pages.need`), and afterwards its new storages (`Pages.begin`). This
is recorded, since the next step does the same. From then on, pages that are used last leave first, pages that are used
next are fetched ahead, and pages leave the memory free that operators need for their results. A step that deviates is
still correct, only slower.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.devices import Stream, backend_of
from penstock.errors import TierReadError
from penstock.offload._order import Follower
from penstock.offload._page import Keys, Kind, Page
from penstock.offload._ranks import Ranks
from penstock.offload._timeline import Timeline
from penstock.storages import id_of
from penstock.tiers import HandleState, Waterfall

_TRIES = 4
_RAW_NEEDS = 64
"""Operators for which a page stays after somebody took its address, since nobody says when that ends."""
_NUM_MEASURED = 2
_STUCK_NEEDS = 256
"""Number of operators for which a page that could not leave stays."""
_AHEAD_BYTES = 256 * 2**20
"""The most bytes that are fetched ahead. With small budgets it is an eighth of the budget."""


class Pages:
    """The pages of one device, within a budget. Only one thread at a time uses it: the one that computes."""

    def __init__(self, waterfall: Waterfall, budget_bytes: int, device: torch.device):
        self.waterfall = waterfall
        self.others_bytes = 0
        """Other bytes on the device before the first step. Operators get half of the rest until they are measured."""
        self.budget_bytes = budget_bytes
        self.lock = threading.RLock()
        self.is_in_step = False
        self._mover: int | None = None
        """The thread whose operators are copies of pages."""
        self.fetched_bytes, self.parked_bytes = dict.fromkeys(Kind, 0), dict.fromkeys(Kind, 0)
        """Bytes copied so far by kind of page."""
        self.stall_s = 0.0
        self.before_need: Callable[[], None] | None = None
        self.after_need: Callable[[bool], None] | None = None
        """Callbacks of a measurement before and after pages move for an operator (the latter: whether it is noted)."""
        self.on_poll: Callable[[], None] | None = None
        """Called with every operator while somebody waits for copies out."""
        self.timeline = Timeline()
        self.pinned: set[Page] = set()
        """Pages that stay on the device, whatever the budget is."""
        self._pages: dict[int, Page] = {}
        """Pages by the identity of the storage."""
        self._by_key: dict[int, Page] = {}
        self._last: dict[int, Page] = {}
        """The last page of each key, also if it is dead."""
        self._leaving: dict[Page, None] = {}
        """Pages on the device that are emptied once their copies below are complete, in order of request."""
        self._held_bytes = self._leaving_bytes = 0
        self._left_alone: dict[int, StorageWeakRef] = {}
        self._streams = backend_of(device).streams
        self._stream: Stream | None = None
        """The stream that worked on pages last."""
        self._keys = Keys()
        self._follower = Follower()
        self._ranks = Ranks()
        self._unmeasured_bytes = 0
        self._ahead_bytes = min(_AHEAD_BYTES, budget_bytes // 8)
        self._growth = 1.0
        """The most that a page has grown since the order that the step follows was measured, as a factor."""
        self._ahead = 0
        self._num_begun = 0
        self._count = self._stuck_until = 0
        self.num_changes = 0
        """Counts every time that a storage becomes a page or stops being one."""

    # What is a page

    def begin(self, storage: torch.UntypedStorage, kind: Kind, name: Any) -> None:  # any: a text, an operator
        """Make a storage, which has its bytes, a page. Does nothing if it is one already."""
        with self.lock:
            if self.is_left_alone(storage):
                return
            found = self._pages.get(id_of(storage))
            if found is not None:
                if not found.is_dead:
                    return
                self._drop(found)
            is_made_here = kind is Kind.OTHER
            place = self._num_begun if is_made_here else name
            self._num_begun += is_made_here
            key = self._keys.free(place, self._by_key)
            page = Page(storage, key, kind, name)
            page.last_use = self._count
            self._pages[page.identity] = self._by_key[key] = page
            self.num_changes += 1
            self._last[key] = page
            self._held_bytes += page.size_bytes
            self._ranks.rank(page, self._follower.known, len(self._follower.now.needs), is_new=True)
            if self.is_in_step and (is_made_here or kind is Kind.GRADIENT):
                self._follower.now.begin(key, page.size_bytes if is_made_here else 0)

    def find(self, storage_id: int) -> Page | None:
        """Return the page of a storage, by the storage's identity."""
        page = self._pages.get(storage_id)
        return None if page is None or page.is_dead else page

    def let_go(self, page: Page) -> None:
        """Stop managing a page. It is on the device and stays there."""
        with self._moving():
            self.need([page], [page])
            storage = page.storage()
            if storage is not None:
                self._left_alone[page.identity] = StorageWeakRef(storage)
            self._drop(page)

    def is_left_alone(self, storage: torch.UntypedStorage) -> bool:
        """Whether `let_go` was called for it, since somebody uses it past the dispatcher."""
        weak = self._left_alone.get(id_of(storage))
        return weak is not None and not weak.expired()

    def __iter__(self) -> Iterator[Page]:
        return iter([page for page in self._pages.values() if not page.is_dead])

    def held_bytes(self) -> int:
        """Return the device bytes of all pages, those on their way included."""
        return self._held_bytes

    # What a step asks for

    def begin_step(self) -> None:
        """Begin a step."""
        with self.lock:
            self.is_in_step = True
            self._follower.begin()
            self._growth, self._ahead, self._num_begun = 1.0, 0, 0
            known = self._follower.known
            self.timeline.begin(known, is_measured=known is not None and known.num_measured >= _NUM_MEASURED)
            self._rank_all()

    def end_step(self, others_bytes: Sequence[int], *, is_whole: bool) -> None:
        """End a step; ``others_bytes`` are the bytes outside of pages at each operator, if measured."""
        self.is_in_step = False
        self.timeline.end(is_whole=is_whole)
        self.sweep()
        order = self._follower.end(list(others_bytes)) if is_whole else None
        self._follower.known = None
        if order is not None and others_bytes:
            self._unmeasured_bytes = max(self._unmeasured_bytes, *others_bytes)
            order.refuse_small(self.budget_bytes, lambda key: self._last[key].label)

    @property
    def wants_measure(self) -> bool:
        """Whether the bytes outside of pages in the next step are still unknown."""
        expected = self._follower.expected
        return expected is None or expected.num_measured < _NUM_MEASURED

    @property
    def is_moving(self) -> bool:
        """Whether this thread is copying pages, so that its operators must be ignored."""
        return self._mover == threading.get_ident()

    def need(
        self,
        pages: Sequence[Page],
        written: Collection[Page],
        *,
        is_overwritten: bool = False,
        is_noted: bool = True,
        made_bytes: int = 0,
    ) -> None:
        """Fetch ``pages`` to the device and keep them there for the operator that comes next.

        ``written``: those whose bytes it changes. ``is_overwritten``: it does not read any of these. ``is_noted``:
        whether to record it for the next step; views are not. ``made_bytes``: estimate of what it makes, until that is
        measured. Raises ``TierReadError`` if bytes cannot be read back.
        """
        with self._moving():
            for page in written:
                self._keep_what_is_made_of(page)
            if self.before_need is not None:
                self.before_need()
            self._follow_stream()
            self._count += 1
            at = self._follow(pages) if is_noted else len(self._follower.now.needs) - 1
            if self._ranks.is_full_of_old(len(self._pages)):
                self._rank_all(at + 1)
            missing = [page for page in pages if not page.is_here]
            for page in pages:
                page.last_use = self._count
                self._stay(page)
            stays = set(pages)
            if self._leaving:
                self._settle_all()
            if self.on_poll is not None:
                self.waterfall.reap()
                self.on_poll()
            known = self._follower.known
            wanted_bytes = 0 if known is not None and known.others_bytes else made_bytes
            wanted_bytes += sum(page.size_bytes - page.held_bytes() for page in missing)
            self._make_room(wanted_bytes, stays, self._limit(at))
            for page in missing:
                is_read = not (is_overwritten and page in written)
                if page.narrow is not None and is_read:
                    self._make(page, stays, self._limit(at))
                    continue
                self._fill(page, is_read=is_read)
                if not is_read:  # at once, since the page now holds nothing valid
                    self._written(page)
            for page in written:
                self._written(page)
            for page in pages:
                self._rank(page, at + 1)
            if known is not None and is_noted:
                self._look_ahead(stays, at)
            self.timeline.sample(self._pages.values())
            if self.after_need is not None:
                self.sweep()
                self.after_need(is_noted)

    @contextlib.contextmanager
    def quietly(self, pages: Sequence[Page], written: Collection[Page]) -> Iterator[None]:
        """Run this thread's operators on ``pages`` without looking at each of them, while the block runs.

        What else they make is measured as with any operator. Until then it is assumed to be as large as the pages.
        """
        with self._moving():
            self.need(pages, written, made_bytes=sum(page.size_bytes for page in pages))
            yield

    def ask_for_address(self, page: Page) -> None:
        """Fetch a page that somebody is about to read and write by address, and keep it for a while."""
        self.need([page], [page])
        page.stays_until = self._count + _RAW_NEEDS

    def trim(self) -> None:
        """Let pages leave until the limit is kept, after some began without room being made for them."""
        with self._moving():
            self._make_room(0, (), self._limit(-1))

    @contextlib.contextmanager
    def room(self, size_bytes: int) -> Iterator[None]:
        """Make pages leave ``size_bytes`` free while the block runs, between two steps."""
        before, half = self._unmeasured_bytes, (self.budget_bytes + self.others_bytes) // 2
        self._unmeasured_bytes = max(before or half, self.others_bytes + size_bytes)
        try:
            self.trim()
            yield
        finally:
            self._unmeasured_bytes = before

    def may_leave(self, page: Page) -> bool:
        """Return whether nobody relies on the page being on the device."""
        return page not in self.pinned and page.stays_until <= self._count

    def let_leave(self, page: Page) -> None:
        """Begin to copy a page out, and empty it as soon as the copy is complete."""
        with self._moving():
            self._leave(page)

    def settle(self, pages: Sequence[Page]) -> None:
        """Wait until the pages have left or turn out to be unable to."""
        with self._moving():
            for page in pages:
                self._settle(page)

    def flush(self) -> None:
        """Move all pages off the device, except pinned ones."""
        with self._moving():
            self._follow_stream()
            for page in [page for page in self if page not in self.pinned]:
                self._leave(page)
            for page in list(self._leaving):
                self._settle(page)

    def bring_back(self) -> None:
        """Fetch everything to the device, whatever the budget is, and stop managing it."""
        with self._moving():
            for page in list(self):
                self._stay(page)
                if not page.is_here and page.narrow is not None:
                    self._make(page, (), None)
                elif not page.is_here:
                    self._fill(page, is_read=True)
            self.drop_all()

    def drop_all(self) -> None:
        """Stop managing all pages, wherever their bytes are."""
        with self._moving():
            for page in list(self._pages.values()):
                self._drop(page)

    def sweep(self) -> None:
        """Drop the pages of storages that no tensor uses any more."""
        for page in [page for page in self._pages.values() if page.is_dead]:
            self._drop(page)

    def _follow_stream(self) -> None:
        """Make the current stream wait for the one that worked on pages before, if they differ."""
        if self._streams is None:
            return
        current = self._streams.current()
        if self._stream is not None and current != self._stream:
            self._streams.wait(current, self._streams.record(self._stream, is_timed=False))
        self._stream = current

    def _follow(self, pages: Sequence[Page]) -> int:
        """Record an operator's pages; return its position in the order that the step follows."""
        if not self.is_in_step:
            return -1
        follower = self._follower
        at = follower.follow(tuple(page.key for page in pages), tuple(page.size_bytes for page in pages))
        known = follower.known
        if known is not self._ranks.order:
            self._ahead = at
            self._rank_all(at)
        if known is not None:
            for page in pages:
                self._growth = max(self._growth, page.size_bytes / known.sizes.get(page.key, page.size_bytes))
        return at

    def _limit(self, at: int) -> int:
        """Return the bytes that pages may take while the operator at that position runs, and until the next one."""
        order = self._follower.known
        if order is not None and 0 <= at < len(order.others_bytes):
            return self.budget_bytes - int(order.others_bytes[at] * self._growth)
        return self.budget_bytes - (self._unmeasured_bytes or (self.budget_bytes + self.others_bytes) // 2)

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        with self.lock:
            before, self._mover = self._mover, threading.get_ident()
            try:
                yield
            finally:
                self._mover = before

    # Which pages go first

    def _rank(self, page: Page, at: int | None = None) -> None:
        """Rank a page among those on the device: the one that is used last leaves first."""
        self._ranks.rank(page, self._follower.known, len(self._follower.now.needs) if at is None else at)

    def _rank_all(self, at: int = 0) -> None:
        self._ranks.rank_all(self._pages.values(), self._follower.known, at)

    def _victim(
        self, stays: Collection[Page], *, later_than: int | None = None, is_urgent: bool = False
    ) -> Page | None:
        """Return the page that leaves next, if its next use comes after position ``later_than``."""
        return self._ranks.first(
            lambda page: page in stays or not self.may_leave(page),
            self._leaving,
            self._drop,
            now=self._count,
            later_than=later_than,
            is_urgent=is_urgent,
        )

    # How pages come and go

    def _make_room(self, size_bytes: int, stays: Collection[Page], limit: int) -> None:
        """Wait until pages may take ``size_bytes`` more. Pages of the operator itself (``stays``) never leave."""
        if self._held_bytes + size_bytes <= limit:
            return
        start_s = time.perf_counter()
        if self._follower.known is None:
            self.sweep()
        while self._held_bytes - self._leaving_bytes + size_bytes > limit:
            victim = self._victim(stays) or self._victim(stays, is_urgent=True)
            if victim is None:
                break
            self._leave(victim)
        while self._held_bytes + size_bytes > limit and self._leaving:
            self._settle(next(iter(self._leaving)))
        self.stall_s += time.perf_counter() - start_s

    def _look_ahead(self, stays: Collection[Page], at: int) -> None:
        """Begin to move out what is used last and to fetch what is used next, operator by operator.

        Neither moves out pages that are used before the position under consideration, nor takes memory that new pages
        need.
        """
        order = self._follower.known
        assert order is not None
        if not order.others_bytes:
            return
        self._ahead = max(self._ahead, at + 1)
        now, begun = self._limit(at), order.begun_between(at, self._ahead)
        moved = 0
        while self._ahead < len(order.needs) and moved + begun < self._ahead_bytes:
            limit = min(now, self._limit(self._ahead))
            missing = []
            for key in order.needs[self._ahead]:
                page = self._by_key.get(key)
                if page is None or page.is_dead or order.begun.get(key, -1) > at:  # its next page does not exist yet
                    continue
                parts = [page] if page.narrow is None or page.is_here else [one for _, one in page.narrow.parts[:1]]
                for page in [one for one in parts if not one.held_bytes()]:
                    if page.on_host is not None and not page.on_host.is_done:
                        return
                    missing.append(page)
            wanted = begun + order.begun_bytes[self._ahead] + sum(page.size_bytes for page in missing)
            while self._held_bytes - self._leaving_bytes + wanted > limit:
                victim = self._victim(stays, later_than=self._ahead)
                if victim is None:
                    return
                self._leave(victim)
            for page in missing:
                storage = page.storage()
                if self._held_bytes + page.size_bytes > now or storage is None or page.handle is None:
                    return  # not before the leaving pages are gone
                if not page.handle.prefetch(into=storage):
                    return
                page.is_coming = True
                self._held_bytes += page.size_bytes
                moved += page.size_bytes
                self._rank(page, at + 1)
            begun += order.begun_bytes[self._ahead]
            self._ahead += 1

    def _leave(self, page: Page) -> None:
        """Empty a page now if a copy is below, else as soon as there is one."""
        storage = page.storage()
        if storage is None:
            self._drop(page)
            return
        if page.is_coming:
            self._refuse(page, storage)
        if not page.is_here:
            return
        if not storage.resizable():  # memory shared with something outside of PyTorch
            if page.pending is None and page.scaling is None:
                self._drop(page)
            return
        if page.narrow is not None:
            self._empty(page)
            return
        if page.handle is not None and page.handle.state is HandleState.KEPT:
            page.forget_copy()  # a copy that failed or was taken back
        if page.handle is None:
            page.handle = self.waterfall.park(storage, page.label)
            self.parked_bytes[page.kind] += page.size_bytes
        if page not in self._leaving:
            self._leaving[page] = None
            self._leaving_bytes += page.size_bytes
        if page.is_clean:
            self._empty(page)

    def _stay(self, page: Page) -> None:
        """Keep a page that was about to leave."""
        if page in self._leaving:
            del self._leaving[page]
            self._leaving_bytes -= page.size_bytes

    def _settle(self, page: Page) -> None:
        """Wait until a page has left. A failed copy is tried a few times, since others may free memory meanwhile.

        A page that cannot leave stays for a while, whatever the budget is, so that the step can finish.
        """
        for attempt in range(_TRIES if self._count >= self._stuck_until else 1):
            if page not in self._leaving:
                return
            assert page.handle is not None
            if page.handle.state is HandleState.LEAVING:
                page.handle.finish_out()
            if page.is_clean:
                self._empty(page)
                return
            time.sleep(0.1 * attempt)
            self.waterfall.reap()
            self._leave(page)
        page.forget_copy()  # the tiers below are full or failed; the waterfall has warned
        self._stay(page)
        page.stays_until = self._stuck_until = self._count + _STUCK_NEEDS
        self._rank(page)

    def _settle_all(self) -> None:
        """Empty the pages whose copies out are complete."""
        self.waterfall.reap()
        for page in [page for page in self._leaving if page.is_clean]:
            self._empty(page)

    def _empty(self, page: Page) -> None:
        storage = page.storage()
        if storage is None:
            self._drop(page)
            return
        page.forget_stale()
        storage.resize_(0)
        self._gone(page)

    def _gone(self, page: Page) -> None:
        self._stay(page)
        self._held_bytes -= page.held_bytes()
        page.is_here = page.is_coming = False

    def _drop(self, page: Page) -> None:
        """Stop managing a page."""
        self.num_changes += 1
        self._gone(page)
        page.narrow = None
        page.forget_copy()
        if self._pages.get(page.identity) is page:
            del self._pages[page.identity]
        if self._by_key.get(page.key) is page:
            del self._by_key[page.key]

    def _fill(self, page: Page, *, is_read: bool) -> None:
        start_s = time.perf_counter()
        storage = page.storage()
        if storage is None:  # its last tensor was freed while other pages were filled
            self._drop(page)
            return
        assert page.handle is not None or page.narrow is not None
        if page.handle is not None and (is_read or page.is_coming):
            try:
                page.handle.get(into=storage)
            except BaseException:
                if page.handle.state is not HandleState.ARRIVING:
                    storage.resize_(0)
                    self._gone(page)
                elif not page.is_coming:  # interrupted while the copy is under way
                    page.is_coming = True
                    self._held_bytes += page.size_bytes
                raise
            self.waterfall.reap()
            self.fetched_bytes[page.kind] += page.size_bytes
        else:
            storage.resize_(page.size_bytes)
        self._held_bytes += page.size_bytes - page.held_bytes()
        page.is_here, page.is_coming = True, False
        self.stall_s += time.perf_counter() - start_s

    def _make(self, page: Page, stays: Collection[Page], limit: int | None) -> None:
        """Fill a page with the sum of its parts, one after the other; ``limit`` of the bytes in pages, if any."""
        storage = page.storage()
        assert page.narrow is not None
        if storage is None:
            self._drop(page)
            return
        storage.resize_(page.size_bytes)
        self._held_bytes += page.size_bytes
        page.is_here = True
        try:
            for number, (_, part) in enumerate(page.narrow.parts):
                part.last_use = self._count
                self._stay(part)
                if not part.is_here:
                    if limit is not None:
                        self._make_room(part.size_bytes - part.held_bytes(), {*stays, part}, limit)
                    self._fill(part, is_read=True)
                page.narrow.put(number, storage)
                self._rank(part)
        except BaseException:  # it will be made again
            storage.resize_(0)
            self._gone(page)
            raise

    def _keep_what_is_made_of(self, part: Page) -> None:
        """Give the page that is made from ``part`` bytes of its own, since ``part`` is about to change."""
        page = part.wide
        if page is None or page.narrow is None or page.is_dead:
            return
        if any(one is part for _, one in page.narrow.parts):
            self.need([page], [], is_noted=False)
            page.narrow = None

    def _refuse(self, page: Page, storage: torch.UntypedStorage) -> None:
        """Undo a copy in that was begun in vain."""
        assert page.handle is not None
        with contextlib.suppress(TierReadError):  # the next one who needs it gets the error
            page.handle.get(into=storage)
        storage.resize_(0)
        self.waterfall.reap()
        self._gone(page)
        self.fetched_bytes[page.kind] += page.size_bytes

    def _written(self, page: Page) -> None:
        page.num_writes += 1
        page.narrow = None
        if page.handle is not None:
            page.handle.before_write()
            if page.handle.state is HandleState.LEAVING:
                page.stale.append(page.handle)
                page.handle = None
            page.forget_copy()
        self._stay(page)
