"""How pages leave the device and come back: a page is emptied once a tier has its bytes, and filled in place."""

import contextlib
import time
from collections.abc import Callable

import torch
from torch.utils._mode_utils import no_dispatch

from penstock.errors import TierReadError
from penstock.state._guard import allow_access, refuse_access
from penstock.state._page import Page, PageKind, PageState
from penstock.state._register import Register
from penstock.tiers import Handle, HandleState, Waterfall

_TRIES = 4
_LONG_S = 1e-3
"""A copy that takes the host longer to begin has waited for something."""
_STUCK_NEEDS = 256
"""Number of operators for which a page that could not leave stays."""


class Copies:
    """The copies of pages, out and in, and the device bytes that pages take meanwhile.

    It is wide because it is the one place that empties and fills storages, and each may fail or be taken back.
    """

    def __init__(self, waterfall: Waterfall, register: Register):
        self.waterfall, self._register = waterfall, register
        self.fetched_bytes, self.parked_bytes = dict.fromkeys(PageKind, 0), dict.fromkeys(PageKind, 0)
        """Bytes copied so far by kind of page."""
        self.held_bytes = 0
        """Device bytes of all pages, those on their way included."""
        self.leaving_bytes = 0
        """The part of ``held_bytes`` that will be free once all copies out are complete."""
        self._begun_s, self._num_begun = 0.0, 0
        self.stall_s = 0.0
        """Seconds that the computation has waited for copies."""
        self._outdated: dict[Page, Handle] = {}
        """Handles of before a page was changed, whose space its next copy out uses again. So no space has to be found
        in a step, and none is given back.
        """
        self.on_death: Callable[[Page], None] | None = None
        """Called with each page of which it turns out that no tensor uses it any more."""
        self._leaving: dict[Page, None] = {}
        """Pages on the device that are emptied once their copies below are complete, in order of request."""
        self._stuck_until = 0
        self._dying: list[Handle] = []
        """Handles of dropped pages whose copies out were under way, and whose memory is free only when these end."""

    def begun(self, page: Page) -> None:
        """Count a page that has just begun, on the device."""
        self.held_bytes += page.held_bytes()

    # Out

    def leave(self, page: Page) -> None:
        """Empty a page now if a copy is below, else as soon as there is one."""
        storage = page.storage()
        if storage is None:
            self.drop(page)
            return
        if page.state is PageState.COMING:
            self._refuse(page, storage)
        if not page.is_here:
            return
        if not storage.resizable():  # memory shared with something outside of PyTorch
            if page.pending is None and page.scaling is None:
                self.drop(page)
            return
        if page.narrow is not None:
            self._empty(page)
            return
        if page.handle is not None and page.handle.state is HandleState.KEPT:
            page.forget_copy()  # a copy that failed or was taken back
        if page.handle is None:
            allow_access(page, storage)
            with no_dispatch():  # a mode that sees an operator takes as long as the operator
                outdated = self._outdated.pop(page, None)
                start_s = time.perf_counter()
                page.handle = self.waterfall.park(storage, page.label, outdated=outdated, spare=self._spare)
                self._note_begun(time.perf_counter() - start_s)
            self.parked_bytes[page.kind] += page.size_bytes
        if page.state is PageState.HERE:
            self._put(page, PageState.LEAVING)
        if page.is_clean:
            self._empty(page)

    def call(self, page: Page, name: str, kind: PageKind) -> None:
        """Give a page another name and kind, once it turns out what it is. It may have left by then."""
        if page.handle is not None and page.kind is not kind:
            self.parked_bytes[page.kind] -= page.size_bytes
            self.parked_bytes[kind] += page.size_bytes
        page.call(name, kind)

    def is_read(self, page: Page) -> bool:
        """Return whether a copy out may still read a page's memory."""
        is_leaving = page.handle is not None and page.handle.state is HandleState.LEAVING
        return is_leaving or bool(page.stale) or page.state is PageState.LEAVING

    def stay(self, page: Page) -> None:
        """Keep a page that was about to leave."""
        if page.state is PageState.LEAVING:
            self._put(page, PageState.HERE)

    def _put(self, page: Page, state: PageState) -> None:
        """Change a page's state, and what is counted by it."""
        if page.state is PageState.LEAVING:
            del self._leaving[page]
            self.leaving_bytes -= page.size_bytes
        self.held_bytes -= page.held_bytes()
        page.become(state)
        self.held_bytes += page.held_bytes()
        if state is PageState.LEAVING:
            self._leaving[page] = None
            self.leaving_bytes += page.size_bytes

    def settle(self, page: Page, now: int) -> bool:
        """Wait until a page has left; return ``False`` if it cannot.

        A failed copy is tried a few times, since others may free memory meanwhile. A page that cannot leave stays for a
        while, whatever the budget is, so that the step can finish. ``now`` is the number of operators so far.
        """
        for attempt in range(_TRIES if now >= self._stuck_until else 1):
            if page.state is not PageState.LEAVING:
                return True
            assert page.handle is not None
            if self.give_back(page):
                return True
            time.sleep(0.1 * attempt)
            self.waterfall.reap()
            self.leave(page)
        page.forget_copy()  # the tiers below are full or failed; the waterfall has warned
        self.stay(page)
        page.stays_until = self._stuck_until = now + _STUCK_NEEDS
        return False

    def give_back(self, page: Page) -> bool:
        """Empty a page that is leaving, or that has a copy below; return whether that was possible.

        Whoever gets its memory waits for its copy out: on an accelerator the device does, else this thread.
        """
        if page.handle is not None:
            page.handle.let_go()
        if not page.is_clean:
            return False
        self._empty(page)
        return True

    def settle_finished(self) -> None:
        """Empty the pages whose copies out are complete."""
        if self._leaving:
            self.waterfall.reap()
            for page in [page for page in self._leaving if page.is_clean]:
                self._empty(page)

    def leaving(self) -> list[Page]:
        """Return the pages that are leaving, in order of request."""
        return list(self._leaving)

    def _empty(self, page: Page) -> None:
        storage = page.storage()
        if storage is None:
            self.drop(page)
            return
        page.forget_stale()
        self._clear(page, storage)

    def _clear(self, page: Page, storage: torch.UntypedStorage) -> None:
        allow_access(page, storage)  # or it could not be resized
        self.waterfall.give_back(storage)
        storage.resize_(0)
        if page.state is not PageState.AWAY:
            self._put(page, PageState.AWAY)
        refuse_access(page, storage)

    # In

    def arrived(self, page: Page) -> None:
        """Count a page whose storage has its bytes, or at least its memory."""
        self._put(page, PageState.HERE)

    def take_back(self, page: Page, storage: torch.UntypedStorage) -> None:
        """Empty a page whose bytes did not arrive, or are not wanted any more."""
        self._clear(page, storage)

    def fill(self, page: Page, *, is_read: bool) -> None:
        """Fetch a page, or only give it memory if nothing reads its bytes. Raises ``TierReadError``."""
        start_s = time.perf_counter()
        storage = page.storage()
        if storage is None:  # its last tensor was freed while other pages were filled
            self.drop(page)
            return
        assert page.handle is not None or page.narrow is not None
        allow_access(page, storage)
        if page.handle is not None and (is_read or page.state is PageState.COMING):
            try:
                with no_dispatch():
                    page.handle.get(into=storage)
            except BaseException:
                if page.handle.state is not HandleState.ARRIVING:
                    self.take_back(page, storage)
                elif page.state is PageState.AWAY:  # interrupted while the copy is under way
                    self._put(page, PageState.COMING)
                raise
            self.fetched_bytes[page.kind] += page.size_bytes
        else:
            storage.resize_(page.size_bytes)
        self.arrived(page)
        self.stall_s += time.perf_counter() - start_s

    def prefetch(self, page: Page) -> bool:
        """Begin to fetch a page behind the computation; return whether that was possible."""
        storage = page.storage()
        if storage is None or page.handle is None:
            return False
        start_s = time.perf_counter()
        allow_access(page, storage)
        with no_dispatch():
            if not page.handle.prefetch(into=storage, after=page.host_work):
                refuse_access(page, storage)
                return False
        self._put(page, PageState.COMING)
        self._note_begun(time.perf_counter() - start_s)
        return True

    @property
    def begin_s(self) -> float:
        """Seconds that the host takes to begin a copy, on average; 0 before the first."""
        return self._begun_s / max(1, self._num_begun)

    def _note_begun(self, seconds: float) -> None:
        if seconds < _LONG_S:
            self._begun_s += seconds
            self._num_begun += 1

    def _refuse(self, page: Page, storage: torch.UntypedStorage) -> None:
        """Undo a copy in that was begun in vain."""
        assert page.handle is not None
        with contextlib.suppress(TierReadError):  # the next one who needs it gets the error
            page.handle.get(into=storage)
        self.take_back(page, storage)
        self.waterfall.reap()
        self.fetched_bytes[page.kind] += page.size_bytes

    # Changes and ends

    def written(self, page: Page) -> None:
        """Release the copy of a page whose bytes change now. A copy out that still reads them is kept until it ends."""
        page.num_writes += 1
        page.narrow = None
        if page.handle is not None:
            page.handle.before_write()
            if page.handle.state is HandleState.LEAVING:
                page.stale.append(page.handle)
                page.handle = None
            elif page.handle.keeps_room and page not in self._outdated:
                self._outdated[page] = page.handle
                page.handle = None
            page.forget_copy()
        self.stay(page)

    def _spare(self) -> bool:
        """Release the space of copies that are out of date; return whether there were any."""
        outdated, self._outdated = self._outdated, {}
        for handle in outdated.values():
            handle.release()
        return bool(outdated)

    def drop(self, page: Page) -> None:
        """Stop managing a page, wherever its bytes are."""
        if self.on_death is not None and page.is_dead:
            self.on_death(page)
        storage = page.storage() if page.is_here else None  # what is left behind elsewhere stays refused
        if storage is not None:
            allow_access(page, storage)
            self.waterfall.hand_over(storage)
        if page.state is not PageState.DROPPED:
            self._put(page, PageState.DROPPED)
        page.narrow = None
        if page.handle is not None and page.handle.state is HandleState.LEAVING:
            if self.waterfall.is_quiet:  # nobody would notice that the copy has ended
                page.handle.let_go()
                self.waterfall.reap()
            else:
                self._dying.append(page.handle)
        page.forget_copy()
        if page in self._outdated:
            self._outdated.pop(page).release()
        self._register.remove(page)

    def drop_dead(self, key: int) -> None:
        """Drop the page that has a key if it is dead."""
        page = self._register.last_with_key(key)
        if page is not None and page.is_dead:
            self.drop(page)

    def free_dead(self) -> None:
        """Free the memory of dropped pages whose copies out have ended."""
        if self._dying:
            self.waterfall.reap()
            self._dying = [handle for handle in self._dying if handle.device_storage is not None]

    def sweep(self) -> None:
        """Drop the pages of storages that no tensor uses any more."""
        for page in self._register.everything():
            if page.is_dead:
                self.drop(page)

    def drop_all(self) -> None:
        """Stop managing all pages."""
        for page in self._register.everything():
            self.drop(page)
