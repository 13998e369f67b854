"""Kinds of step that come in turns, as one order that a plan can be made from.

With a context around each micro-batch, a first one, some more and one with an update follow each other again and again.
Plans of each kind alone would begin with what that kind left behind, and not with what the one before it leaves. So the
orders of a whole turn are joined, as if it were one long step.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from penstock.state._order import Details, StepOrder, UpdateOnHost

STANDS = -1
"""In place of the step in which a page began: it stands from step to step."""


@dataclass(slots=True)
class StepTurn:
    """The orders of a turn, joined."""

    orders: tuple[StepOrder, ...]
    """The kinds of step, in their order."""
    order: StepOrder = field(default_factory=StepOrder)
    """All of them as one, in which pages that begin with the same key in several steps have keys of their own."""
    keys: list[int] = field(default_factory=list)
    """The key that each of these has in its step."""

    @property
    def starts(self) -> list[int]:
        """Positions at which the steps begin, and the end of the last one."""
        return [0, *itertools.accumulate(len(order.needs) for order in self.orders)]


def joined(orders: Sequence[StepOrder]) -> StepTurn | None:
    """Return a turn of these kinds of step; ``None`` if too little was recorded of one."""
    if any(order.details is None or len(order.others_bytes) != len(order.needs) for order in orders):
        return None
    return _Joiner(tuple(orders)).joined()


class _Joiner:
    """Gives every page of a turn a key of its own."""

    def __init__(self, orders: tuple[StepOrder, ...]):
        self._orders = orders
        self._turn = StepTurn(orders)
        self._known: dict[tuple[int, int], int] = {}

    def joined(self) -> StepTurn:
        """Return the turn."""
        order = self._turn.order
        details = order.details = Details()
        for step, (kind, start) in enumerate(zip(self._orders, self._turn.starts, strict=False)):
            assert kind.details is not None
            for position, (needed, sizes) in enumerate(zip(kind.needs, kind.sizes, strict=True)):
                order.add(tuple([self._key(step, key, position) for key in needed]), sizes)
            order.others_bytes += kind.others_bytes
            order.begun |= {self._key(step, key): start + begun for key, begun in kind.begun.items()}
            self._add_details(details, kind.details, step, start)
        order.num_measured = min(kind.num_measured for kind in self._orders)
        self._end_what_nobody_uses()
        return self._turn

    def _add_details(self, details: Details, own: Details, step: int, start: int) -> None:
        details.writes += own.writes
        details.seconds += own.seconds
        details.born_bytes |= {self._key(step, key): size for key, size in own.born_bytes.items()}
        details.hollow |= {self._key(step, key) for key in own.hollow}
        for key, parts in own.made_of.items():
            details.made_of[self._key(step, key)] = tuple([self._key(step, part) for part in parts])
        for key, position in own.died.items():
            begun = self._orders[step].begun.get(key)
            is_own = begun is not None and position >= begun - 1
            details.died[self._key(step, key, None if is_own else -1)] = start + position
        for update in own.updates:
            details.updates.append(
                UpdateOnHost(
                    reads=tuple([self._key(step, key, update.after) for key in update.reads]),
                    writes=tuple([self._key(step, key, update.after) for key in update.writes]),
                    size_bytes=update.size_bytes,
                    after=start + update.after,
                )
            )

    def _key(self, step: int, key: int, position: int | None = None) -> int:
        """Return the turn's key of the page that has a key in a step, at a position or at the step's end."""
        owner = step, key
        begun = self._orders[step].begun.get(key)
        if begun is None or (position is not None and position < begun):
            owner = self._before(step, key), key
        if owner not in self._known:
            self._known[owner] = len(self._turn.keys)
            self._turn.keys.append(key)
        return self._known[owner]

    def _before(self, step: int, key: int) -> int:
        """Return the step before this one, or in the turn before, in which a page with that key began last."""
        for back in range(1, len(self._orders) + 1):
            other = (step - back) % len(self._orders)
            if key in self._orders[other].begun:
                return other
        return STANDS

    def _end_what_nobody_uses(self) -> None:
        """Let a page whose end was not seen die with the last step that uses it: nobody looks after a step."""
        order, starts = self._turn.order, self._turn.starts
        assert order.details is not None
        for key, step in self._steps_of_last_uses():
            if key in order.begun and key not in order.details.died:
                order.details.died[key] = starts[step + 1] - 1

    def _steps_of_last_uses(self) -> Iterator[tuple[int, int]]:
        """Yield each page that begins, and the step of the turn that uses it last; uses before its birth come last."""
        starts, uses = self._turn.starts, dict[int, list[int]]()
        for step, (start, end) in enumerate(itertools.pairwise(starts)):
            for key in set(itertools.chain.from_iterable(self._turn.order.needs[start:end])):
                uses.setdefault(key, []).append(step)
        for (born, _), key in self._known.items():
            if born != STANDS:
                yield key, max(uses.get(key, [born]), key=lambda step: (step - born) % len(self._orders))
