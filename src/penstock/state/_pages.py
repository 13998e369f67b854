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
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

from penstock.devices import Stream, Streams, backend_of
from penstock.errors import InternalError
from penstock.state._copies import Copies
from penstock.state._course import Course
from penstock.state._guard import allow_access, refuse_access
from penstock.state._pace import Pace
from penstock.state._page import Page, PageKind, PageState
from penstock.state._register import Register
from penstock.state._replay import Replay
from penstock.state._space import PageSpace
from penstock.state._timeline import Timeline
from penstock.storages import id_of
from penstock.tiers import Waterfall

_open: "weakref.WeakSet[Pages]" = weakref.WeakSet()
"""All pages of this process. A storage is a page of one of them."""
_RAW_NEEDS = 64
"""Operators for which a page stays after somebody took its address, since nobody says when that ends."""


class Pages:
    """The pages of one device, within a budget. Only one thread at a time uses it: the one that computes.

    Its parts: ``register`` knows which storages are pages, ``copies`` moves them, ``course`` follows the step's order.
    It is wide because it is the one place where these meet, under one lock.
    """

    def __init__(self, waterfall: Waterfall, budget_bytes: int, device: torch.device):
        self.lock = threading.RLock()
        self.register = Register()
        self.copies = Copies(waterfall, self.register)
        self.course = Course(budget_bytes, self.register, self.copies)
        self.device = device
        self._streams = backend_of(device).streams
        self._space = PageSpace(self.register, self.copies, self.course, Pace(self._streams))
        self.replay = Replay(self.register, self.copies, self.course, is_one_memory=self._streams is None)
        self.follows_plans = True
        """Whether steps are planned."""
        self.find = self.register.find
        """Return the page of a storage, by the storage's identity."""
        self.timeline = Timeline()
        self.before_use: Callable[[Sequence[Page]], None] | None = None
        """A function that refuses some uses of pages, with the pages of an operator."""
        self.before_need: Callable[[], None] | None = None
        self.after_need: Callable[[bool], None] | None = None
        """Callbacks of a measurement before and after pages move for an operator (the latter: whether it is noted)."""
        self._mover: int | None = None
        """The thread whose operators are copies of pages."""
        self._stream: Stream | None = None
        """The stream that worked on pages last."""
        _open.add(self)

    def __iter__(self) -> Iterator[Page]:
        return iter(self.register)

    # What is a page

    def begin(self, storage: torch.UntypedStorage, kind: PageKind, name: Any) -> None:  # any: a text, an operator
        """Make a storage, which has its bytes, a page. Does nothing if it is one already, of any training."""
        with self.lock:
            if self.register.is_left_alone(storage) or self.register.find(id_of(storage)) is not None:
                return
            others = list(_open) if len(_open) > 1 else ()  # to list a weak set takes as long as all the rest
            if any(other.register.find(id_of(storage)) is not None for other in others if other is not self):
                return
            page = self.register.add(storage, kind, name, self.course.place(kind, name))
            self.copies.begun(page)
            self.course.begun(page)

    def claim(self, identity: int) -> None:
        """Take a storage that is a page of another training from there, so that it can become one here."""
        for other in list(_open):
            page = None if other is self else other.register.find(identity)
            if page is not None:
                other.let_go(page)

    def let_go(self, page: Page) -> None:
        """Stop managing a page. It is on the device and stays there."""
        with self._moving():
            self.need([page], [page])
            self.register.leave_alone(page)
            self.copies.drop(page)

    # What a step asks for

    def begin_step(self) -> None:
        """Begin a step."""
        with self._moving():
            for page in self.register:
                if page.is_refused and page.is_here:
                    self.allow(page)
            self.course.begin()
            if self.follows_plans:
                if self._streams is not None:
                    self._follow_stream(self._streams)
                self.replay.begin_step()
            self.timeline.begin(self.course.order, is_measured=self.course.is_measured)

    def end_step(self, others_bytes: Sequence[int], *, is_whole: bool) -> None:
        """End a step; ``others_bytes`` are the bytes outside of pages at each operator, if measured."""
        self.timeline.end(is_whole=is_whole)
        with self._moving():
            self.replay.end_step(is_whole=is_whole)
        self.copies.sweep()
        for page in self.register:  # until the next step, nobody finds bytes of before an update
            storage = page.storage() if page.pending is not None or page.scaling is not None else None
            if storage is not None and page.is_here and not self.copies.is_read(page):
                refuse_access(page, storage)
        self.course.end(others_bytes, is_whole=is_whole)
        if self.follows_plans and is_whole:
            self.replay.prepare()

    def allow(self, page: Page) -> None:
        """Let everybody have the memory of a page on the device, as nothing is due on it any more."""
        storage = page.storage()
        if storage is not None and page.is_here:
            allow_access(page, storage)

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
        with self.lock:
            before, self._mover = self._mover, threading.get_ident()
            try:
                self._need(pages, written, is_overwritten, is_noted, made_bytes)
            finally:
                self._mover = before

    def _need(
        self, pages: Sequence[Page], written: Collection[Page], is_overwritten: bool, is_noted: bool, made_bytes: int
    ) -> None:
        copies, course = self.copies, self.course
        for page in written:
            if page.wide is not None or page.cast is not None:
                self.keep_what_is_made_of(page)
        if self.before_need is not None:
            self.before_need()
        if self._streams is not None:
            self._follow_stream(self._streams)
        position = course.follow(pages, written, is_noted=is_noted)
        for page in pages:
            page.last_use = course.count
            copies.stay(page)
        copies.free_dead()
        limit = course.limit(position)
        is_planned = self.replay.is_on and self.replay.need(
            position, pages, written, is_overwritten=is_overwritten, is_noted=is_noted
        )
        missing = [page for page in pages if not page.is_here]
        if is_planned:
            self._fill_missing(missing, pages, written, limit, is_overwritten=is_overwritten)
            self._after(is_noted=is_noted)
            return
        if course.order is not None and course.order.others_bytes:
            made_bytes = 0  # it is part of what was measured
        self._space.make(made_bytes + sum([page.size_bytes - page.held_bytes() for page in missing]), pages, limit)
        # The next copies in are queued before this operator's are waited for, unless those have not begun yet.
        is_early = is_noted and all(page.state is PageState.COMING for page in missing)
        if is_noted:
            course.rank_used(pages, position)
        if is_early:
            self._space.look_ahead(pages, position, limit)
        self._fill_missing(missing, pages, written, limit, is_overwritten=is_overwritten)
        if not is_noted:
            for page in pages:
                course.rank(page, position + 1)
        elif not is_early:
            self._space.look_ahead(pages, position, limit)
        self._after(is_noted=is_noted)

    def _fill_missing(
        self,
        missing: Sequence[Page],
        pages: Sequence[Page],
        written: Collection[Page],
        limit: int,
        *,
        is_overwritten: bool,
    ) -> None:
        """Fill an operator's pages, or let the device wait for those that have been fetched."""
        for page in missing:
            if not page.is_here:  # by now it may be, as a part of one before
                self._fill(page, pages, limit, is_read=not (is_overwritten and page in written))
        for page in written:
            self.copies.written(page)

    def _after(self, *, is_noted: bool) -> None:
        if self.timeline.is_recording:
            self.timeline.sample(self.register.everything)
        if self.after_need is not None:
            self.copies.sweep()
            self.copies.free_dead()
            self.after_need(is_noted)

    def _fill(self, page: Page, stays: Sequence[Page], limit: int, *, is_read: bool) -> None:
        if page.narrow is not None and is_read:
            self._space.add_up(page, stays, limit)
            return
        self.copies.fill(page, is_read=is_read)
        if not is_read:  # at once, since the page now holds nothing valid
            self.copies.written(page)

    @contextlib.contextmanager
    def quietly(
        self,
        pages: Sequence[Page],
        written: Collection[Page],
        *,
        are_plain: bool,
        is_noted: bool = True,
        made_bytes: int | None = None,
    ) -> Iterator[None]:
        """Run this thread's operators on ``pages`` without looking at each of them, while the block runs.

        What else they make is measured as with any operator. Until then it is assumed to be ``made_bytes``, or as large
        as the pages.
        ``are_plain``: no operator works on a tensor of another class than PyTorch's own, so none needs a mode.
        """
        with self._moving():
            made_bytes = sum(page.size_bytes for page in pages) if made_bytes is None else made_bytes
            self.need(pages, written, is_noted=is_noted, made_bytes=made_bytes)
            with no_dispatch() if are_plain else contextlib.nullcontext():
                yield

    def ask_for_address(self, page: Page) -> None:
        """Fetch a page that somebody is about to read and write by address, and keep it for a while."""
        if page.is_here and page.stays_until - self.course.count > _RAW_NEEDS // 2:
            return  # as for each element of a storage
        self.need([page], [page])
        page.stays_until = self.course.count + _RAW_NEEDS

    def trim(self) -> None:
        """Let pages leave until the limit is kept, after some began without room being made for them."""
        with self._moving():
            self._space.make(0, (), self.course.limit(-1))

    @contextlib.contextmanager
    def room(self, size_bytes: int) -> Iterator[None]:
        """Make pages leave ``size_bytes`` free while the block runs, between two steps."""
        with self.course.leaving_free(size_bytes):
            self.trim()
            yield

    def let_leave(self, page: Page) -> None:
        """Begin to copy a page out, and empty it as soon as the copy is complete."""
        with self._moving():
            self.copies.leave(page)

    def leave_now(self, pages: Sequence[Page]) -> None:
        """Let pages leave, and wait until they have; one that cannot leave stays."""
        with self._moving():
            for page in pages:
                self.copies.leave(page)
            self._space.settle([page for page in self.copies.leaving() if page in pages])

    def outdated(self, pages: Sequence[Page]) -> None:
        """Empty pages whose bytes below were changed by the host, after their copies out."""
        with self._moving():
            for page in pages:
                if page.is_here and not self.copies.give_back(page):
                    raise InternalError(f"{page.label} was updated on the host, and did not leave the device")

    def flush(self) -> None:
        """Move all pages off the device, except pinned ones."""
        with self._moving():
            if self._streams is not None:
                self._follow_stream(self._streams)
            for page in self.register:
                if page not in self.register.pinned:
                    self.copies.leave(page)
            self._space.settle(self.copies.leaving())

    def bring_back(self) -> None:
        """Fetch everything to the device, whatever the budget is, and stop managing it."""
        with self._moving():
            for page in self.register:
                self.copies.stay(page)
                if not page.is_here and page.narrow is not None:
                    self._space.add_up(page, (), None)
                elif not page.is_here:
                    self.copies.fill(page, is_read=True)
            self.copies.drop_all()

    def drop_all(self) -> None:
        """Stop managing all pages, wherever their bytes are."""
        with self._moving():
            self.copies.drop_all()

    def _follow_stream(self, streams: Streams) -> None:
        """Make the current stream wait for the one that worked on pages before, if they differ."""
        current = streams.current()
        if self._stream is not None and current != self._stream:
            streams.wait(current, streams.record(self._stream, is_timed=False))
        self._stream = current

    def keep_what_is_made_of(self, part: Page) -> None:
        """Give the pages that are made from ``part`` bytes of their own, since ``part`` is about to change."""
        for page in (part.wide, part.cast):
            if page is None or page.narrow is None or page.is_dead:
                continue
            if any(other is part for _, other in page.narrow.parts):
                self.need([page], [], is_noted=False)
                page.narrow = None

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        with self.lock:
            before, self._mover = self._mover, threading.get_ident()
            try:
                yield
            finally:
                self._mover = before
