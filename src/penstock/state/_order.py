"""The order in which a step uses pages, operator by operator. The next step of its kind uses them in the same order."""

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.errors import BudgetError
from penstock.units import format_bytes

_NUM_PAST = 32
"""Steps that are remembered, to tell which kind comes next: two turns of sixteen micro-batches."""
_NUM_FIRST = 3
"""Steps of a run that are unlike those of an earlier one: one without updates that are due, one that makes states."""
MAX_ORDERS = 8
"""The most kinds of step remembered: with and without an update, first and later micro-batches, evaluation."""


@dataclass(frozen=True, slots=True)
class UpdateOnHost:
    """An update on the host, as it was recorded."""

    reads: tuple[int, ...]
    """Keys of the pages that the host reads, and that nobody uses any more: the gradient, or its parts."""
    writes: tuple[int, ...]
    """Keys of the pages that it writes and that come in later: the weight and its casts."""
    size_bytes: int
    """Bytes of host memory that it reads and writes."""
    after: int
    """Position of the last operator before it was asked for."""


@dataclass(frozen=True, slots=True)
class UpdateOnDevice:
    """An update on the device of pages alone, as it was recorded."""

    weight: int
    """Key of the weight."""
    gradient: int
    """Key of its gradient."""
    states: tuple[int, ...]
    """Keys of the optimizer's states."""
    weight_bytes: int
    """Bytes of the weight."""
    host_bytes: int
    """Bytes of host memory that the host would read and write."""
    asked: int
    """Position of the last operator before it, if it was not `Details.put_off`."""
    first: int
    """Position of its first operator."""
    last: int
    """Position of its last operator."""


@dataclass(slots=True, eq=False)
class Details:
    """More about a step, recorded in the steps that are measured, for a plan of it."""

    writes: list[tuple[bool, ...]] = field(default_factory=list)
    """For each operator, whether it changes each of its pages."""
    born_bytes: dict[int, int] = field(default_factory=dict)
    """Bytes of the pages that began in this step, by key."""
    died: dict[int, int] = field(default_factory=dict)
    """Keys of pages that died in this step, and the last operator before that; -1 before the first one."""
    made_of: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Keys of pages that are emptied without a copy and made from others when somebody uses them, and their keys."""
    hollow: set[int] = field(default_factory=set)
    """Keys of pages that begin without bytes, as sums of others."""
    updates: list[UpdateOnHost] = field(default_factory=list)
    """Updates on the host, in the order in which they were asked for."""
    updates_on_device: list[UpdateOnDevice] = field(default_factory=list)
    """Updates on the device, in their order."""
    put_off: dict[int, int] = field(default_factory=dict)
    """Keys of weights whose updates were put off, and the last operator before that."""
    seconds: list[float] = field(default_factory=list)
    """For each operator, the seconds until the next one asked for its pages."""


@dataclass(slots=True, eq=False)
class StepOrder:
    """The order of one kind of step. It is wide because all that is known of the kind is here, and answers from it."""

    needs: list[tuple[int, ...]] = field(default_factory=list)
    """For each operator that works on pages, the keys of those pages."""
    sizes: list[tuple[int, ...]] = field(default_factory=list)
    """The bytes of those pages."""
    begun_bytes: list[int] = field(default_factory=list)
    """For each operator, the bytes of the pages that began with it or after it, before the next one."""
    begun: dict[int, int] = field(default_factory=dict)
    """Keys of pages that began in this step, and where. A page that had the key before is dead by then."""
    details: "Details | None" = None
    """More of it, for a plan; ``None`` if it was not recorded."""
    others_bytes: list[int] = field(default_factory=list)
    """For each operator, the most bytes outside of pages until the next one; empty if not measured."""
    num_measured: int = 0
    """Number of times this was measured. The second time includes small states that the first step made."""
    is_recalled: bool = False
    """Whether an earlier run has measured this, and this one has not yet."""
    was_recorded: bool = False
    """Whether a timeline was recorded of a step that followed this order."""
    _begun_until: list[int] = field(default_factory=list)
    _uses: dict[int, list[int]] = field(default_factory=dict)
    """Positions in ``needs`` by key, for the first ``_num_indexed`` operators."""
    _num_indexed: int = 0
    _nexts: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """The answers of `next_uses` so far."""
    then: "StepOrder | None" = None
    """The kind of step that came after it last time."""

    def add(self, keys: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        """Add an operator, with the keys and bytes of its pages."""
        self.needs.append(keys)
        self.sizes.append(sizes)
        self.begun_bytes.append(0)

    def begin(self, key: int, size_bytes: int) -> None:
        """Add a page that begins here."""
        self.begun[key] = len(self.needs)
        if self.needs:
            self.begun_bytes[-1] += size_bytes

    def measured(self, others_bytes: list[int], as_seen: "StepOrder") -> None:
        """Add a measurement of the bytes outside of pages, from a step of this kind."""
        before = self.others_bytes or others_bytes
        self.others_bytes = [max(pair) for pair in zip(before, others_bytes, strict=True)]
        self.num_measured += 1
        self.is_recalled = False
        self.sizes, self.begun_bytes, self.begun = as_seen.sizes, as_seen.begun_bytes, as_seen.begun
        self.details = as_seen.details
        self._begun_until = [0, *itertools.accumulate(self.begun_bytes)]
        self._nexts.clear()

    def is_mostly(self, other: "StepOrder") -> bool:
        """Whether it uses most of the pages of another kind: the first step of a run lacks states, not gradients."""
        mine, theirs = ({key for needed in each.needs for key in needed} for each in (self, other))
        return 2 * len(mine & theirs) > len(theirs)

    def recalled(self) -> None:
        """Take what is in it as an earlier run's, which has measured it often enough."""
        self.measured(self.others_bytes, self)
        self.num_measured, self.is_recalled = 2, True

    def precede(self, then: "StepOrder") -> None:
        """Note the kind of step that came after it."""
        if self.then is not then:
            self.then = then
            self._nexts.clear()

    def refuse_small(self, budget_bytes: int, label: Callable[[int], str]) -> None:
        """Raise ``BudgetError`` if an operator's pages and everything else exceed the budget; ``label`` names a key's
        page.
        """
        most, place = 0, 0
        for position, (sizes, others) in enumerate(zip(self.sizes, self.others_bytes, strict=False)):
            most, place = max((most, place), (others + sum(sizes), position))
        if most > budget_bytes:
            names = [label(key) for key in self.needs[place]]
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} others" if len(names) > 3 else "")
            raise BudgetError(
                f"`budget` must be at least {most} ({format_bytes(most)}), got {format_bytes(budget_bytes)}: an "
                f"operator on {shown} needs that much, with everything else that must be on the device at that time. "
                "Smaller micro-batches or checkpointed blocks need less"
            )

    def begun_between(self, start: int, end: int) -> int:
        """Return the bytes of the pages that began between two positions."""
        return self._begun_until[end] - self._begun_until[start]

    def next_use(self, key: int, position: int, *, is_new: bool = False) -> float:
        """Return the first use from ``position`` on of the key's present page; past the end, the next step counts.

        Returns infinity if another page begins with its key before that. ``is_new``: the present page is the one that
        begins at ``position``.
        """
        place = self._use_from(key, position, position + is_new)
        if place is None:
            place = (self.then or self)._use_from(key, 0, 0)
            return math.inf if place is None else len(self.needs) + place
        return place

    def next_uses(self, position: int) -> tuple[float, ...]:
        """Return for each page of the operator at ``position`` its `next_use` after it."""
        known = self._nexts.get(position)
        if known is None:
            known = tuple([self.next_use(key, position + 1) for key in self.needs[position]])
            self._nexts[position] = known
        return known

    def _use_from(self, key: int, position: int, births_from: int) -> float | None:
        """Return the next use; infinity if the page dies before; ``None`` if it lives on unused."""
        if self._num_indexed < len(self.needs):
            self._index()
        places, birth = self._uses.get(key, ()), self.begun.get(key, -1)
        index = bisect.bisect_left(places, position)
        place = places[index] if index < len(places) else None
        if birth >= births_from and (place is None or place >= birth):
            return math.inf
        return place

    def _index(self) -> None:
        for position in range(self._num_indexed, len(self.needs)):
            for key in self.needs[position]:
                self._uses.setdefault(key, []).append(position)
        self._num_indexed = len(self.needs)


class Follower:
    """A record of the step under way, and of the known order that it seems to follow."""

    def __init__(self) -> None:
        self.orders: list[StepOrder] = []
        self.now = StepOrder()
        self.known: StepOrder | None = None
        """The order that the step has followed so far; ``None`` if there is none."""
        self.past: list[StepOrder] = []
        """The orders of the last steps, the latest one last."""
        self.expected: StepOrder | None = None
        """The order of the next step, as far as is known."""
        self._num_first = 0
        """The most steps that may still be a run's first ones, which are like no others as they make the states."""

    def recall(self, orders: Sequence[StepOrder]) -> None:
        """Expect a turn of an earlier run."""
        self.orders, self.past, self.expected = [*orders], [*orders, *orders], orders[0]
        self._num_first = _NUM_FIRST
        for order, then in itertools.pairwise([*orders, orders[0]]):
            order.recalled()
            order.precede(then)

    @property
    def last(self) -> StepOrder | None:
        """The order of the step that ended last."""
        return self.past[-1] if self.past else None

    @property
    def turn(self) -> tuple[StepOrder, ...]:
        """The kinds of the next steps, if they repeat as the last ones did; empty before the first step."""
        past = self.past
        lengths = range(1, len(past) // 2 + 1)
        length = next((length for length in lengths if past[-length:] == past[-2 * length : -length]), 0)
        return tuple(past[-length:]) if length else tuple(past[-1:])

    def begin(self) -> None:
        """Begin a step, and expect the kind that came next when steps like the last ones came before."""
        self.now = StepOrder()
        self.known = self.expected

    def _after(self, past: list[StepOrder]) -> StepOrder:
        """Return what came next when the most of the last steps were as they are now: micro-batches come in turns."""
        for length in range(len(past) - 1, 0, -1):
            for start in range(len(past) - length - 1, -1, -1):
                if past[start : start + length] == past[-length:] and past[start + length] in self.orders:
                    return past[start + length]
        return past[-1]

    def follow(self, keys: tuple[int, ...], sizes: tuple[int, ...]) -> int:
        """Add an operator; return its position in the order."""
        position = len(self.now.needs)
        self.now.add(keys, sizes)
        if self.known is not None and (position >= len(self.known.needs) or self.known.needs[position] != keys):
            self.known = next((order for order in self.orders if order.needs[: position + 1] == self.now.needs), None)
        return position

    def end(self, others_bytes: list[int]) -> StepOrder | None:
        """End the step; return its order, with the measurement, or ``None`` if it used no pages."""
        if not self.now.needs:
            return None
        same = next((order for order in self.orders if order.needs == self.now.needs), None)
        order = same or self.now
        if others_bytes:
            order.measured(others_bytes, self.now)
        if same is not None:
            self.orders.remove(same)
        self.orders = [*self.orders, order][-MAX_ORDERS:]
        self._num_first = self._num_first - 1 if same is None and self._num_first else 0
        came = order
        if self._num_first and self.expected is not None and order.is_mostly(self.expected):
            came = self.expected
        if self.last is not None:
            self.last.precede(came)
        self.past = [*self.past, came][-_NUM_PAST:]
        self.expected = self._after(self.past)
        self.expected.precede(self._after([*self.past, self.expected]))
        return order
