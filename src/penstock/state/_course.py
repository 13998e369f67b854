"""The course of a step: where it is in the order that it follows, and what pages may take there."""

import contextlib
from collections.abc import Collection, Iterator, Sequence

from penstock.state._copies import Copies
from penstock.state._order import Details, Follower, StepOrder, UpdateOnDevice, UpdateOnHost
from penstock.state._page import Page, PageKind
from penstock.state._ranks import Ranks
from penstock.state._register import Register

_NUM_MEASURED = 2
_UNEVEN_BYTES = 2**16
"""Bytes that are left free for small tensors that one step frees a moment later than another: up to 12 KiB were seen.
It is less with budgets of a few MiB.
"""


class Course:
    """The step under way, its position, the bytes that pages may take, and the ranks of the pages on the device.

    It is wide because each of these changes with every operator.
    """

    def __init__(self, budget_bytes: int, register: Register, copies: Copies):
        self.budget_bytes = budget_bytes
        self.even_bytes = budget_bytes - min(_UNEVEN_BYTES, budget_bytes // 128)
        """The part of the budget that a measured step may take."""
        self.others_bytes = 0
        """Other bytes on the device before the first step. Operators get half of the rest until they are measured."""
        self.is_in_step = False
        self.count = 0
        """Number of operators on pages so far, over all steps."""
        self.ahead = 0
        """Position in the order before which all pages have been requested."""
        self._register, self._copies = register, copies
        self._follower = Follower()
        self._ranks = Ranks()
        self._unmeasured_bytes = 0
        self._num_without_pages = 0
        """Number of whole steps that used no page at all."""
        self._growth = 1.0
        """The most that a page has grown since the order that the step follows was measured, as a factor."""
        self._num_begun = 0
        self._is_noted = False
        """Whether the operator that asked for its pages last has a place in the order."""

    @property
    def order(self) -> StepOrder | None:
        """The order that the step has followed so far; ``None`` if there is none."""
        return self._follower.known

    @property
    def wants_measure(self) -> bool:
        """Whether the bytes outside of pages in the next step are still unknown."""
        expected = self._follower.expected
        if expected is None:
            return self._num_without_pages < _NUM_MEASURED
        return expected.num_measured < _NUM_MEASURED or expected.is_recalled

    @property
    def is_measured(self) -> bool:
        """Whether all bytes outside of pages are known for the order that the step follows."""
        return self.order is not None and self.order.num_measured >= _NUM_MEASURED

    @property
    def position(self) -> int:
        """Position in the step's order of the operator that came last; -1 before the first one."""
        return len(self._follower.now.needs) - 1

    @property
    def last(self) -> StepOrder | None:
        """The order of the step that ended last."""
        return self._follower.last

    @property
    def turn(self) -> tuple[StepOrder, ...]:
        """The kinds of the next steps, if they repeat as the last ones did."""
        return self._follower.turn

    @property
    def past(self) -> Sequence[StepOrder]:
        """The kinds of the last steps, the latest one last."""
        return self._follower.past

    @property
    def orders(self) -> list[StepOrder]:
        """The orders of all kinds of step that are remembered."""
        return self._follower.orders

    def recall(self, orders: Sequence[StepOrder]) -> None:
        """Expect steps of these kinds, of which an earlier run knew everything, in turns."""
        self._follower.recall(orders)

    def has_details(self, order: StepOrder) -> bool:
        """Whether enough was measured of an order to plan it."""
        return order.num_measured >= _NUM_MEASURED and order.details is not None

    def begin(self) -> None:
        """Begin a step."""
        self.is_in_step = True
        self._follower.begin()
        self._growth, self.ahead, self._num_begun = 1.0, 0, 0
        self._rank_all(0)

    def end(self, others_bytes: Sequence[int], *, is_whole: bool) -> None:
        """End a step; ``others_bytes`` are the bytes outside of pages at each operator, if measured.

        Raises ``BudgetError`` if an operator of it needs more than the budget.
        """
        self.is_in_step = False
        order = self._follower.end(list(others_bytes)) if is_whole else None
        self._follower.known = None
        self._num_without_pages += is_whole and order is None
        if order is not None and others_bytes:
            self._unmeasured_bytes = max(self._unmeasured_bytes, *others_bytes)
            order.refuse_small(self.budget_bytes, self._register.label)

    def place(self, kind: PageKind, name: object) -> object:
        """Return what identifies a new page in every step of this kind: its name, or its number among the results."""
        if kind is not PageKind.OTHER:
            return name
        self._num_begun += 1
        return self._num_begun - 1

    def begun(self, page: Page) -> None:
        """Record and rank a page that has just begun."""
        page.last_use = self.count
        self._ranks.rank(page, self.order, self.position + 1, is_new=True)
        if self.is_in_step and page.kind in (PageKind.OTHER, PageKind.GRADIENT):
            self._follower.now.begin(page.key, page.size_bytes if page.kind is PageKind.OTHER else 0)
            if self._follower.now.details is not None:
                self._follower.now.details.born_bytes[page.key] = page.size_bytes

    def call(self, page: Page, name: str, kind: PageKind) -> None:
        """Give a page the name and kind that it turns out to have, and the key that it has by this name in every step.

        Else its key would be its number among the results, and change with what comes before.
        """
        self._copies.call(page, name, kind)
        now, before = self._follower.now, page.key
        begun = now.begun.get(before) if self.is_in_step else None
        is_new = begun is not None and not any(before in needed for needed in now.needs[begun:])
        if kind is PageKind.GRADIENT and not is_new:
            return
        if self._register.rekey(page, name, is_new=is_new) and is_new:
            now.begun[page.key] = now.begun.pop(before)
            if now.details is not None:
                now.details.born_bytes[page.key] = now.details.born_bytes.pop(before)
            self._ranks.rank(page, self.order, self.position + 1, is_new=True)

    def record_details(self) -> Details:
        """Record what a plan needs of the step that has just begun."""
        details = self._follower.now.details = Details()
        return details

    def died(self, page: Page) -> None:
        """Record the end of a page, which came before the operator that asks for its pages now."""
        details = self._follower.now.details
        if self.is_in_step and details is not None:
            details.died[page.key] = self.position - self._is_noted

    def has_no_bytes(self, page: Page) -> None:
        """Record that a page that began in this step is a sum of others, and has no bytes."""
        details = self._follower.now.details
        if self.is_in_step and details is not None:
            details.hollow.add(page.key)

    def put_off(self, weight: Page) -> None:
        """Record that the update of a weight may begin from here on, and is put off."""
        details = self._follower.now.details
        if self.is_in_step and details is not None:
            details.put_off[weight.key] = self.position

    def updated_on_device(self, weight: Page, gradient: Page, states: Sequence[Page], first: int) -> None:
        """Record an update that began at position ``first`` and has just ended."""
        details = self._follower.now.details
        if not self.is_in_step or details is None or first > self.position:
            return
        written_bytes = weight.size_bytes + sum(state.size_bytes for state in states)
        details.updates_on_device.append(
            UpdateOnDevice(
                weight=weight.key,
                gradient=gradient.key,
                states=tuple([state.key for state in states]),
                weight_bytes=weight.size_bytes,
                host_bytes=2 * written_bytes + gradient.size_bytes,
                asked=first - 1,
                first=first,
                last=self.position,
            )
        )

    def updated_on_host(self, reads: Sequence[int], writes: Sequence[int], size_bytes: int) -> None:
        """Record an update on the host, by the keys of the pages that it reads and writes."""
        details = self._follower.now.details
        if self.is_in_step and details is not None:
            details.updates.append(UpdateOnHost(tuple(reads), tuple(writes), size_bytes, self.position))

    def follow(self, pages: Sequence[Page], written: Collection[Page], *, is_noted: bool) -> int:
        """Record an operator's pages if it ``is_noted``; return its position in the order that the step follows."""
        self.count += 1
        self._is_noted = is_noted
        position = self.position
        if is_noted:
            position = self._note(pages, written) if self.is_in_step else -1
        if self._ranks.is_full_of_old(len(self._register)):
            self._rank_all(position + 1)
        return position

    def _note(self, pages: Sequence[Page], written: Collection[Page]) -> int:
        keys, sizes = tuple([page.key for page in pages]), tuple([page.size_bytes for page in pages])
        position = self._follower.follow(keys, sizes)
        details = self._follower.now.details
        if details is not None:
            details.writes.append(tuple([page in written for page in pages]))
            for page in pages:
                if page.narrow is not None:
                    details.made_of[page.key] = tuple([part.key for _, part in page.narrow.parts])
        order = self._follower.known
        if order is not self._ranks.order:
            self.ahead = position
            self._rank_all(position)
        if order is not None and order.sizes[position] != sizes:
            for size_bytes, before in zip(sizes, order.sizes[position], strict=True):
                self._growth = max(self._growth, size_bytes / before)
        return position

    def limit(self, position: int) -> int:
        """Return the bytes that pages may take while the operator at that position runs, and until the next one."""
        order = self._follower.known
        if order is not None and 0 <= position < len(order.others_bytes):
            return self.even_bytes - int(order.others_bytes[position] * self._growth)
        return self.budget_bytes - (self._unmeasured_bytes or (self.budget_bytes + self.others_bytes) // 2)

    @contextlib.contextmanager
    def leaving_free(self, size_bytes: int) -> Iterator[None]:
        """Lower the limit by ``size_bytes`` while the block runs, between two steps."""
        before, half = self._unmeasured_bytes, (self.budget_bytes + self.others_bytes) // 2
        self._unmeasured_bytes = max(before or half, self.others_bytes + size_bytes)
        try:
            yield
        finally:
            self._unmeasured_bytes = before

    def rank(self, page: Page, position: int | None = None) -> None:
        """Rank a page among those on the device: the one that is used last after ``position`` leaves first."""
        self._ranks.rank(page, self.order, self.position + 1 if position is None else position)

    def rank_used(self, pages: Sequence[Page], position: int) -> None:
        """Rank the pages of the operator at that position by what comes after it."""
        order = self._follower.known
        if order is None or position < 0:
            for page in pages:
                self.rank(page, position + 1)
            return
        for page, next_use in zip(pages, order.next_uses(position), strict=True):
            self._ranks.put(page, -next_use)

    def rank_again(self) -> None:
        """Rank all pages, after operators for which nobody did."""
        self.ahead = self.position + 1
        self._rank_all(self.position + 1)

    def _rank_all(self, position: int) -> None:
        self._ranks.rank_all(self._register.everything(), self.order, position)

    def victim(self, stays: Collection[Page], *, later_than: int | None = None, is_urgent: bool = False) -> Page | None:
        """Return the page that leaves next, if its next use comes after position ``later_than`` (`Ranks.first`)."""
        return self._ranks.first(
            lambda page: page in stays or not self.may_leave(page),
            self._copies,
            now=self.count,
            later_than=later_than,
            is_urgent=is_urgent,
        )

    def may_leave(self, page: Page) -> bool:
        """Return whether nobody relies on the page being on the device."""
        return page not in self._register.pinned and page.stays_until <= self.count
