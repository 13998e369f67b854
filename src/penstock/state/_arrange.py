"""A plan of a step, arranged: the address of each page while it is on the device, and what each copy waits for.

A page is there from the copy in that brings it, or the operator that makes it, to its last use before it leaves, or to
the end of the copy out. Those times are arcs of the circle of positions, and pages whose arcs meet must not share
bytes. Arcs are laid down from the largest page to the smallest, each at the lowest address that is free all the time.
What comes into a range waits for what was there before: for the operator that used it last, or for its copy out.
Within a lane everything runs in order, so the latest of each kind is enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.state._problem import StateProblem

NEVER = -(2**62)
"""The number that an operator or copy waits for that waits for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCopy:
    """A copy of a page, and what it waits for. Numbers below 0 are of the step before: -1 was its last."""

    page: int
    """Index of the page."""
    use: int
    """Number of the page's use that it comes in for, or after which it leaves."""
    position: int
    """A copy in is issued before the operator at this position, a copy out after it."""
    offset_bytes: int
    """Where in the arena its page is."""
    operator: int = NEVER
    """The operator that it waits for: the last one in its range, or for a copy out the last one on its page."""
    out: int = NEVER
    """(Of a copy in) the copy out that it waits for: the last one from its range, or of its own page."""
    update: int = NEVER
    """(Of a copy in) the host update that it waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlan:
    """All copies of a step, with their places and waits. It is frozen before the step begins."""

    kept: tuple[tuple[bool, ...], ...]
    """For each page and use, whether the page stays until its next use."""
    copies_in: tuple[PageCopy, ...]
    """In the order in which they are issued, which is the order of their lane."""
    copies_out: tuple[PageCopy, ...]
    """In the order in which they are issued, which is the order of their lane."""
    needs_in: tuple[int, ...]
    """For each operator, the copy in that it waits for. It may have been issued in the step before: below 0."""
    needs_out: tuple[int, ...]
    """For each operator, the copy out that it waits for, because a page is born in its range."""
    offsets_bytes: tuple[tuple[int, ...], ...]
    """For each page and use, where in the arena the page is."""
    arena_bytes: int
    """Extent of the arena."""

    def in_bytes(self, problem: StateProblem) -> int:
        """Return the bytes that a step copies in."""
        return sum(problem.pages[copy.page].size_bytes for copy in self.copies_in)

    def out_bytes(self, problem: StateProblem) -> int:
        """Return the bytes that a step copies out."""
        return sum(problem.pages[copy.page].size_bytes for copy in self.copies_out)


Arrival = tuple[int, int, int, int]
"""A copy in: the position at which it is issued (below 0 in the step before), that of its use, its page, the use."""
Departure = tuple[int, int, int]
"""A copy out: the position after which it is issued, its page, and the number of the use."""


@dataclass(slots=True)
class _Arc:
    """A page's time on the device."""

    page: int
    size_bytes: int
    first: int
    """Position at which it begins, in the step."""
    length: int
    """Number of positions; at most the step's."""
    uses: list[int]
    """Numbers of the uses in it."""
    arrival: int
    """Number of the copy in that begins it; -1 if an operator does, or if it never begins."""
    departure: int
    """Number of the copy out that ends it; -1 if its last operator does, or if it never ends."""
    offset_bytes: int = -1

    @property
    def last(self) -> int:
        return self.first + self.length - 1


class Arrangement:
    """The copies of a plan with a range of the arena for each page, before their waits are worked out."""

    def __init__(
        self,
        problem: StateProblem,
        kept: Sequence[Sequence[bool]],
        arrivals: Sequence[Arrival],
        departures: Sequence[Departure],
        lag: int,
    ):
        """A range that a copy out frees is used again ``lag`` operators later."""
        self._problem, self._kept = problem, kept
        size = problem.num_operators
        self._ins = sorted(arrivals, key=lambda arrival: (arrival[0] % size, arrival[0] < 0))
        self._outs = sorted(departures)
        self._arcs = _arcs(problem, kept, self._ins, self._outs)
        self.arena_bytes = _lay_down(self._arcs, size, lag)
        """Bytes that all pages need."""

    def plan(self) -> StatePlan:
        """Return the plan, with what every copy and operator waits for."""
        problem = self._problem
        spaces = _Spaces(self._arcs, problem.num_operators, len(self._outs))
        offsets = [[0] * len(page.uses) for page in problem.pages]
        needs_out = [NEVER] * problem.num_operators
        for arc in self._arcs:
            for use in arc.uses:
                offsets[arc.page][use] = arc.offset_bytes
            if problem.pages[arc.page].is_born and 0 in arc.uses:
                needs_out[arc.first] = max(needs_out[arc.first], spaces.free(arc)[1])
        copies_in, needs_in = self._copies_in(spaces)
        return StatePlan(
            kept=tuple(map(tuple, self._kept)),
            copies_in=copies_in,
            copies_out=tuple(
                PageCopy(page=page, use=use, position=position, offset_bytes=offsets[page][use], operator=position)
                for position, page, use in self._outs
            ),
            needs_in=needs_in,
            needs_out=tuple(needs_out),
            offsets_bytes=tuple(map(tuple, offsets)),
            arena_bytes=self.arena_bytes,
        )

    def _copies_in(self, spaces: "_Spaces") -> tuple[tuple[PageCopy, ...], tuple[int, ...]]:
        problem, num_ins, num_outs = self._problem, len(self._ins), len(self._outs)
        arcs = {arc.arrival: arc for arc in self._arcs}
        updates = {update.writes: number for number, update in enumerate(problem.updates)}
        left: dict[int, list[tuple[int, int]]] = {}
        for number, (position, page, _) in enumerate(self._outs):
            left.setdefault(page, []).append((position, number))
        copies: list[PageCopy] = []
        needs_in = [NEVER] * problem.num_operators
        for number, (issued, used, page, use) in enumerate(self._ins):
            arc, is_for_next = arcs[number], issued < 0
            operator, out = spaces.free(arc)
            own = [other - num_outs * (position >= arc.first) for position, other in left.get(page, ())]
            update = updates[page] - len(problem.updates) * (not is_for_next) if page in updates else NEVER
            copies.append(
                PageCopy(
                    page=page,
                    use=use,
                    position=arc.first,
                    offset_bytes=arc.offset_bytes,
                    operator=operator,
                    out=max([out, *own]),
                    update=update,
                )
            )
            needs_in[used] = max(needs_in[used], number - num_ins * is_for_next)
        return tuple(copies), tuple(needs_in)


def _arcs(
    problem: StateProblem, kept: Sequence[Sequence[bool]], ins: Sequence[Arrival], outs: Sequence[Departure]
) -> list[_Arc]:
    size = problem.num_operators
    brought: dict[int, list[tuple[int, int, int, int]]] = {}
    for number, (issued, used, index, use) in enumerate(ins):
        brought.setdefault(index, []).append((use, issued, used, number))
    departed = {(page, use): number for number, (_, page, use) in enumerate(outs)}
    arcs: list[_Arc] = []
    for index, page in enumerate(problem.pages):
        starts = brought.get(index, [])
        if page.is_born:
            starts = [*starts, (0, page.uses[0], page.uses[0], -1)]
        for use, begun, now, number in starts:
            uses = [use]
            while kept[index][uses[-1]] and len(uses) < len(page.uses):
                before, following = uses[-1], (uses[-1] + 1) % len(page.uses)
                now += (page.uses[following] - page.uses[before]) % size or size
                uses.append(following)
            departure = departed.get((index, uses[-1]), -1)
            arcs.append(_Arc(index, page.size_bytes, begun % size, now - begun + 1, uses, number, departure))
        if not starts:
            arcs.append(_Arc(index, page.size_bytes, 0, size, list(range(len(page.uses))), -1, -1))
    return arcs


def _lay_down(arcs: Sequence[_Arc], size: int, lag: int) -> int:
    """Give each arc its range; return the bytes that all of them need."""
    order = sorted(range(len(arcs)), key=lambda index: (-arcs[index].length // size, -arcs[index].size_bytes, index))
    first = np.array([arc.first for arc in arcs], dtype=np.int64)
    length = np.array([min(size, arc.length + lag * (arc.departure >= 0)) for arc in arcs], dtype=np.int64)
    start = np.zeros(len(arcs), dtype=np.int64)
    end = np.zeros(len(arcs), dtype=np.int64)
    is_laid = np.zeros(len(arcs), dtype=bool)
    for index in order:
        arc = arcs[index]
        meets = is_laid & (((first - arc.first) % size < length[index]) | ((arc.first - first) % size < length))
        others = np.flatnonzero(meets)
        others = others[np.argsort(start[others], kind="stable")]
        # the lowest gap: where the next range begins that far above everything before it
        tops = np.maximum.accumulate(np.concatenate([[0], end[others]]))
        gaps = np.flatnonzero(start[others] - tops[:-1] >= arc.size_bytes)
        arc.offset_bytes = int(tops[gaps[0]] if len(gaps) else tops[-1])
        start[index], end[index], is_laid[index] = arc.offset_bytes, arc.offset_bytes + arc.size_bytes, True
    return int(end.max(initial=0))


class _Spaces:
    """The ranges of the arena, and what used each before."""

    def __init__(self, arcs: Sequence[_Arc], size: int, num_outs: int):
        self._size, self._num_outs = size, num_outs
        self._start = np.array([arc.offset_bytes for arc in arcs], dtype=np.int64)
        self._end = self._start + np.array([arc.size_bytes for arc in arcs], dtype=np.int64)
        self._last = np.array([arc.last % size for arc in arcs], dtype=np.int64)
        self._departure = np.array([arc.departure for arc in arcs], dtype=np.int64)

    def free(self, arc: _Arc) -> tuple[int, int]:
        """Return the operator and the copy out after which the range of an arc is free, both counted from the step in
        which the arc begins.
        """
        others = np.flatnonzero((self._start < arc.offset_bytes + arc.size_bytes) & (self._end > arc.offset_bytes))
        steps_before = self._last[others] >= arc.first
        is_out = self._departure[others] >= 0
        operators = self._last[others] - self._size * steps_before
        outs = self._departure[others] - self._num_outs * steps_before
        return int(operators.max(initial=NEVER)), int(outs[is_out].max(initial=NEVER))
